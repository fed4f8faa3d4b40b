"""k="auto" in the engine that runs on GPUs, on a device whose time is computed: against plain decoding and fixed k.

python -m benchmarks.simulated --out FILE [--costs benchmarks/results/costs-h200.json] [--batches 8 32 64]
    [--right 0 0.5 0.7 0.9] [--turn 0.95] [--fixed 1 2 3] [--tokens 128] [--prompt 44] [--queue 6] [--host 0] [--same]
    [--one-by-one]

Captured steps, passes of prompts and of the draft model take what a cost table says; models cost nothing, and a share
--right of the draft's tokens are right, or of --turn until the middle of an average text and none behind it. Prompts
have half to one and a half times --prompt tokens, texts of --tokens (--same: all have --tokens). All wait in a queue;
--one-by-one: one is added when another one ends. --host: milliseconds in which the device waits for the host around a
step that reads prompts. Texts are compared with those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import say
from faircopy.bench.record import collect
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.costs import CostTable
from faircopy.engine import Engine
from faircopy.kernels.gpu.suite import TWINS
from faircopy.planner import AutoLength
from faircopy.testing.simulated_device import FreeModel, SimulatedDevice
from faircopy.types import Request, SamplingParams

COSTS = Path(__file__).parent / "results" / "costs-h200.json"
VOCAB, CONTEXT, MOST_K = 64, 1024, 8


def read_table(file: Path = COSTS) -> CostTable:
    return CostTable.of_json(json.loads(file.read_text())["rows"][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What is written."""

    batch: int
    times: int = 6  # prompts over the batch
    tokens: int = 128
    prompt: int = 44
    same: bool = False
    one_by_one: bool = False

    def requests(self) -> list[Request]:
        source = random.Random(0)
        spread = (self.tokens, self.tokens) if self.same else (self.tokens // 2, self.tokens * 3 // 2)
        return [self._request(source, spread) for _ in range(self.times * self.batch)]

    def _request(self, source: random.Random, spread: tuple[int, int]) -> Request:
        length = source.randint(self.prompt // 2, self.prompt * 3 // 2)
        prompt = tuple(source.randrange(VOCAB) for _ in range(length))
        return Request(prompt, SamplingParams(max_tokens=source.randint(*spread), ignore_eos=True))


@dataclass(frozen=True, slots=True)
class Written:
    """What came of a queue."""

    rate: float  # tokens a second
    texts: list[list[int]]
    engine: Engine
    device: SimulatedDevice


def write(queue: Queue, draft: FreeModel | None, k: int | str, table: CostTable, host: float = 0.0) -> Written:
    """Write all texts with k draft tokens, or "auto"; host: seconds, see SimulatedDevice."""
    auto = k == "auto"
    nodes = MOST_K if isinstance(k, str) else k
    config = EngineConfig(k=nodes, auto=auto, max_batch=queue.batch, cache_memory="64MiB", prefix_reuse=False)
    target, lengths = FreeModel(VOCAB, CONTEXT), AutoLength(MOST_K) if auto else None
    engine = build_engine(target, draft=draft, config=config, suite=TWINS, draft_lengths=lengths)
    device, waiting, seqs = SimulatedDevice(engine, table, host), queue.requests(), []
    with device.running():
        while waiting or engine.busy:
            room = queue.batch - len(engine.scheduler.running) if queue.one_by_one else len(waiting)
            seqs += [engine.add(request) for request in waiting[:room]]
            waiting = waiting[room:]
            engine.step()
    texts = [seq.output for seq in seqs]
    return Written(sum(map(len, texts)) / device.now, texts, engine, device)


def drafts(args: argparse.Namespace) -> dict[str, FreeModel]:
    turn = args.prompt + args.tokens // 2
    known = {f"{right:g} right": FreeModel(VOCAB, CONTEXT, right) for right in args.right}
    turning = {f"{right:g} right, then none": FreeModel(VOCAB, CONTEXT, right, turn) for right in args.turn}
    return known | turning


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    table = read_table(args.costs)
    for batch in args.batches:
        queue = Queue(
            batch=batch, times=args.queue, tokens=args.tokens, prompt=args.prompt, same=args.same,
            one_by_one=args.one_by_one,
        )  # fmt: skip
        plain = write(queue, None, 0, table, args.host / 1e3)
        yield facts(batch, "none", 0, plain, plain)
        for name, draft in drafts(args).items():
            for k in (*args.fixed, "auto"):
                yield facts(batch, name, k, write(queue, draft, k, table, args.host / 1e3), plain)


def facts(batch: int, name: str, k: int | str, found: Written, plain: Written) -> dict[str, Any]:
    meter = found.engine.meter
    return {
        "batch": batch, "drafter": name, "k": k, "tokens_per_s": found.rate, "times_plain": found.rate / plain.rate,
        "identical": found.texts == plain.texts, "tokens_per_step": meter.tokens_per_step, "steps": meter.steps,
        "captured_steps": meter.captured_steps, "drafter_rows": meter.drafter_rows, "busy_s": found.device.busy,
        "why": found.engine.draft_lengths.reason,
    }  # fmt: skip


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32, 64])
    parser.add_argument("--right", nargs="*", type=float, default=[0.0, 0.5, 0.7, 0.9])
    parser.add_argument("--turn", nargs="*", type=float, default=[0.95])
    parser.add_argument("--fixed", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=44)
    parser.add_argument("--queue", type=int, default=6)
    parser.add_argument("--host", type=float, default=0.0)
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--one-by-one", action="store_true")
    args = parser.parse_args(arguments)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    for row in collect(args.out, settings, rows(args)):
        say(row)


if __name__ == "__main__":
    main()
