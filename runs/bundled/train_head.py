"""Step 6: a draft head for the bundled target, trained on text the target itself writes.

python -m runs.bundled.train_head --method clover --out models/clover
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from faircopy import bundled
from faircopy.drafters.folder import METHODS, new_head, save_head
from faircopy.drafters.networks.eagle3 import Eagle3
from faircopy.model.hidden import stock_token_weights
from faircopy.model.loader import load_stock
from faircopy.train.data import Windows
from faircopy.train.heads import HeadTask, Teacher, measure_heads
from faircopy.train.llama import load_llama
from faircopy.train.loop import Settings, train
from faircopy.train.runs import held_out_batches
from faircopy.train.sampler import own_text
from faircopy.train.tokenizer import end_id
from runs.bundled.common import note, on_gpu, prepare, talker, time_left, training_arguments
from runs.bundled.distil_draft import own_arguments

HELD_OUT_BATCHES = 64


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    prepare(args)
    kind = torch.bfloat16 if on_gpu(args) else torch.float32
    text, held_out = kept_text(args, kind)
    teacher = Teacher(load_stock(args.target, kind, torch.device(args.device)))
    head = new_head(args.method, args.target, stock_token_weights(teacher.stock), args.levels, args.seed)
    if isinstance(head, Eagle3):
        head.keep_frequent(torch.bincount(text.long().cpu(), minlength=head.vocab))
    head = head.to(args.device)
    length = min(args.length, head.context - 1)  # a window has one token more
    task = HeadTask(head, teacher)
    settings = Settings(
        steps=args.steps, seconds=time_left(args), lr=args.lr, warmup=0.03, weight_decay=0.01, bf16=on_gpu(args),
        log_every=20, seed=args.seed, **task.objective.clipping,
    )  # fmt: skip
    log = args.work / "logs" / f"{args.method}.jsonl"
    windows = Windows(text, length, args.rows, args.seed)
    done = train(task, windows, settings, log, watch=talker(args.method))
    accuracy = measure_heads(head, teacher, held_out_batches(held_out, length, 8, HELD_OUT_BATCHES), on_gpu(args))
    head.config = replace(head.config, target="the bundled target")
    save_head(head, args.out, **head.learned(accuracy.ranks))
    facts = {"parameters": head.size, "steps": done.step, "tokens": done.tokens, "distinct_tokens": len(text)}
    note(args.work, args.method, **facts, seconds=round(done.seconds, 1), loss=done.loss, **asdict(accuracy))
    (args.out / "report.json").write_text(json.dumps({**facts, **asdict(accuracy)}, indent=1) + "\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = training_arguments(__doc__ or "", seconds=60.0)
    own_arguments(parser)
    parser.add_argument("--target", default=bundled.target())
    parser.add_argument("--out", type=Path, default=Path("models/clover"))
    parser.add_argument("--method", default="clover", choices=list(METHODS))
    parser.add_argument("--levels", type=int)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args(argv)


def kept_text(args: argparse.Namespace, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """The target's own text, and other text of its that is held out; sampled once per work folder."""
    path = args.work / "own.pt"
    if not path.exists():
        network = load_llama(args.target, kind, args.device)
        end = end_id(Tokenizer.from_file(str(Path(args.target) / "tokenizer.json")))
        size, seed = (args.own_rows, args.own_length), args.seed * 100_003
        own = own_text(network, end, (end,), *size, args.own_seconds, seed)
        torch.save([own, own_text(network, end, (end,), max(64, size[0] // 16), size[1], 0.0, seed + 50_000)], path)
    own, held_out = torch.load(path, map_location=args.device, weights_only=True)
    return own, held_out


if __name__ == "__main__":
    main()
