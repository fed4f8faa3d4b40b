"""A grid's best head in the engine: tokens per second over plain decoding by task and batch, beside n-gram and EAGLE-3.

python -m benchmarks.laws_speed --target DIR --given carry/laws.npz --grid $OUT/laws-smollm2 --work /tmp/laws-smollm2 \
    --device cuda --minutes 5 --out $OUT/laws-speed.json

GRID (one, or those of a grid's parts) and WORK are the folders of benchmarks.laws. EAGLE-3 is trained on the same text
for as many seconds as the best head was, its target's passes included (kept in WORK/eagle3). Every drafted text is
compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.heads import cycle, decode, tidy
from faircopy.bench.record import collect
from faircopy.build import build_engine, load_target
from faircopy.config import EngineConfig
from faircopy.drafters.folder import load_head, new_head, save_head
from faircopy.drafters.networks.eagle3 import Eagle3
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.laws.points import TREE, Result, measure_name, read_results
from faircopy.model.base import Model
from faircopy.model.hidden import stock_token_weights
from faircopy.model.loader import load_stock
from faircopy.train.data import Windows
from faircopy.train.heads import HeadTask, Teacher
from faircopy.train.loop import Settings, train

NODES = {1: (4, 12), 4: (3, 8), 8: (3, 8), 16: (2, 5), 32: (2, 5), 64: (1, 3)}  # of a head's trees, by batch
CHAIN = 4  # draft tokens of n-gram
QUEUE = 4  # prompts of a task for each place of a batch: a text that ends is replaced


def best_of(folder: Path) -> Result:
    """The head that benchmarks.laws kept in this folder."""
    return max(read_results([folder / "results.jsonl"]), key=_accepted)


def best_folder(folders: list[Path]) -> Path:
    return max(folders, key=lambda folder: _accepted(best_of(folder)))


def _accepted(result: Result) -> float:
    return result.accepted(measure_name("tree", TREE, 0.0))


def train_eagle3(args: argparse.Namespace) -> None:
    """On raw text and answers in the ratio of the best head's stages, one schedule by the clock."""
    best = best_of(best_folder(args.grid))
    texts = torch.load(args.work / "texts.pt", weights_only=True)
    parts = [texts["text"][: best.tokens], *([texts["answers"]] if "answers" in texts else [])]
    text = torch.cat(parts).to(args.device)
    cuda = args.device == "cuda"
    teacher = Teacher(load_stock(args.target, torch.bfloat16 if cuda else torch.float32, torch.device(args.device)))
    head = new_head("eagle3", args.target, stock_token_weights(teacher.stock), seed=0)
    assert isinstance(head, Eagle3)
    head.keep_frequent(torch.bincount(parts[-1].long(), minlength=head.vocab))
    seconds = args.train_seconds or best.train_seconds
    settings = Settings(seconds=seconds, lr=1e-3, warmup=0.05, weight_decay=0.01, bf16=cuda, log_every=20)
    task = HeadTask(head.to(args.device), teacher)
    done = train(task, Windows(text, args.length, args.rows, 0), settings, args.work / "eagle3.jsonl")
    save_head(head, args.work / "eagle3")
    print(f"EAGLE-3: {done.tokens} tokens in {done.seconds:.1f} s, loss {done.loss:.3f}", flush=True)


def prompts_by_task(file: Path) -> dict[str, list[list[int]]]:
    given = np.load(file)
    parts = np.split(given["prompts"].astype(np.int64), np.cumsum(given["lengths"])[:-1])
    found: dict[str, list[list[int]]] = {}
    for task, prompt in zip(given["tasks"].tolist(), parts, strict=True):
        found.setdefault(task, []).append(prompt.tolist())
    return found


def ways(batch: int) -> Iterator[tuple[str, int]]:
    """Drafters and their numbers of nodes; plain decoding first."""
    yield "plain", 0
    yield from ((head, nodes) for head in ("scylla", "eagle3") for nodes in NODES[batch])
    yield "n-gram", CHAIN


def engine_for(args: argparse.Namespace, target: Model, drafter: str, nodes: int, batch: int) -> Engine:
    tidy(target.device)
    options: dict[str, Any] = {"cache_memory": args.memory, "device": args.device, "prefix_reuse": False}
    config = EngineConfig(k=nodes, max_batch=batch, **options)
    if drafter == "n-gram":
        return build_engine(target, NgramDrafter(config.lookup_min, config.lookup_max), config=config)
    if drafter == "plain":
        return build_engine(target, config=config)
    folder = args.work / "eagle3" if drafter == "eagle3" else best_folder(args.grid) / "best"
    return build_engine(target, draft=load_head(str(folder), target), config=config)


def measured(args: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    tasks, plain = prompts_by_task(args.given), dict[tuple[str, int], Any]()
    target = load_target(args.target, EngineConfig(device=args.device))
    for batch in args.batches:
        for drafter, nodes in ways(batch):
            if time.time() > deadline:
                return
            engine = engine_for(args, target, drafter, nodes, batch)
            queues = {task: cycle(prompts, max(QUEUE * batch, args.prompts)) for task, prompts in tasks.items()}
            engine.warm_up()
            decode(engine, [prompt for queue in queues.values() for prompt in queue[:batch]], args.new)
            for task, prompts in queues.items():
                done = decode(engine, prompts, args.new)
                before = plain.setdefault((task, batch), done)
                same = sum(a == b for a, b in zip(done.texts, before.texts, strict=True))
                yield {
                    "drafter": drafter, "nodes": nodes, "batch": batch, "task": task, "rate": round(done.rate, 1),
                    "speed_up": round(done.rate / before.rate, 3), "per_step": round(done.per_step, 3),
                    "identical": same, "of": len(done.texts),
                }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--given", type=Path, required=True)
    parser.add_argument("--grid", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", default="laws-speed.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--train-seconds", type=float, help="of EAGLE-3; the best head's if left out")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=511)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64], choices=[*NODES])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16, help="of each task, if a batch is not larger")
    parser.add_argument("--memory", default="8GiB")
    args = parser.parse_args(argv)
    deadline = time.time() + 60 * args.minutes
    if not (args.work / "eagle3" / "config.json").exists():
        train_eagle3(args)
    settings = {name: str(value) for name, value in vars(args).items()}
    for row in collect(args.out, settings, measured(args, deadline)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
