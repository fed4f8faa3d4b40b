"""Step 4: the draft, distilled from the target on stories and on text the target itself writes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch
from tokenizers import Tokenizer
from torch import Tensor

from faircopy.train.acceptance import measure_acceptance
from faircopy.train.data import Windows, load_tokens, unseen
from faircopy.train.language import Distil, speed_up
from faircopy.train.llama import Llama, fresh, load_llama
from faircopy.train.loop import Settings, train
from faircopy.train.sampler import own_text
from faircopy.train.tokenizer import end_id
from runs.bundled.common import K, note, on_gpu, prepare, talker, time_left, training_arguments
from runs.bundled.train_target import save, shape_of


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    prepare(args)
    target = load_llama(args.work / "target", torch.bfloat16 if on_gpu(args) else torch.float32, args.device)
    tokenizer = Tokenizer.from_file(str(args.work / "target" / "tokenizer.json"))
    end = end_id(tokenizer)
    own = own_text(target, end, (end,), args.own_rows, args.own_length, args.own_seconds, args.seed * 100_003)
    own = own.to(args.device)
    corpus = mixed(own, args)
    draft = fresh(shape_of(args, target.shape.vocab), args.seed).to(args.device)
    learned = fit(draft, target, corpus, args)
    save(draft, tokenizer, args.work / "draft")
    prompts = unseen(json.loads((args.work / "prompts.json").read_text()), corpus)
    (args.work / "prompts.json").write_text(json.dumps(prompts))
    pair = [load_llama(args.work / name, torch.float32, args.device) for name in ("target", "draft")]
    reached = measure_acceptance(pair[0], pair[1], prompts, K, 128, end, chunk=256)
    sizes = {"parameters": draft.size, "times_smaller": target.size / draft.size}
    texts = {"own_tokens": len(own), "distinct_tokens": len(corpus), "prompts": len(prompts)}
    note(args.work, "draft", **sizes, **texts, **learned, **asdict(reached), k=K)
    print(f"tokens per verify at k = {K}: {reached.tokens_per_verify:.3f} (wanted: 2.5 or more)", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = training_arguments(__doc__ or "", seconds=130.0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--intermediate", type=int, default=384)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--hard", type=float, default=0.5, help="weight of the target's favourite against the KL")
    own_arguments(parser)
    return parser.parse_args(argv)


def own_arguments(parser: argparse.ArgumentParser) -> None:
    """What `own_text` needs to know."""
    parser.add_argument("--own-seconds", type=float, default=40.0, help="time for the target to write")
    parser.add_argument("--own-rows", type=int, default=8192)
    parser.add_argument("--own-length", type=int, default=320)


def mixed(own: Tensor, args: argparse.Namespace) -> Tensor:
    """Own text, and at most as much of the stories: on a new machine they may be gone, and own text is enough."""
    path = args.work / "train.bin"
    return torch.cat((own, load_tokens(path, args.device)[: len(own)])) if path.exists() else own


def fit(draft: Llama, target: Llama, corpus: Tensor, args: argparse.Namespace) -> dict[str, float | bool | int]:
    """Train; returns what the card says about it."""
    task, batches = Distil(draft, target, args.hard), Windows(corpus, args.length, args.rows, args.seed)
    wanted = on_gpu(args) if args.compile is None else args.compile
    compiled = wanted and speed_up(task, batches.batch(0), on_gpu(args))
    seconds = time_left(args)
    settings = Settings(
        steps=args.steps,
        seconds=seconds,
        lr=args.lr,
        warmup=0.03,
        weight_decay=0.01,
        bf16=on_gpu(args),
        log_every=20,
        seed=args.seed,
    )
    done = train(task, batches, settings, args.work / "logs" / "draft.jsonl", watch=talker("draft"))
    return {
        "steps": done.step,
        "tokens": done.tokens,
        "train_seconds": round(done.seconds, 1),
        "last_loss": done.loss,
        "compiled": compiled,
        "hard": args.hard,
        "lr": args.lr,
        "rows": args.rows,
        "length": args.length,
        "seed": args.seed,
    }


if __name__ == "__main__":
    main()
