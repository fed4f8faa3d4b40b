"""What a step with rejection sampling costs the host, in the code that serves GPUs, with models that cost nothing.

Runs on a CPU.

python -m benchmarks.rejection_host [--out FILE.json]

Operators and waits: torch operators, and reads or sends that wait for a device, of one step outside of its passes and
of what a GPU does in a few kernels (noise, thresholds of filters). Between passes: milliseconds of the process from a
read's end to the start of the next pass, in which a device waits for the host; of the fastest step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from faircopy.bench.record import write
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters import model as model_drafter
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.kernels.gpu.suite import TWINS
from faircopy.replay.passes import _PassGraph
from faircopy.testing.operators import HostCost
from faircopy.testing.simulated_device import FreeModel
from faircopy.types import Request, SamplingParams
from faircopy.verify import rejection

VOCAB, CONTEXT, PROMPT, STEPS = 64, 4096, 64, 100
SAMPLING = {
    "T 0.8": SamplingParams(temperature=0.8, max_tokens=3000),
    "T 0.8, top-k, top-p": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=3000),
    "greedy": SamplingParams(max_tokens=3000),
}


class Waiting:
    """Adds up the time between the end of a read and the start of the next pass."""

    def __init__(self) -> None:
        self.seconds, self._since = 0.0, time.process_time()
        self._read_since = False

    def read(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = inner(*args)
            self._since, self._read_since = time.process_time(), True
            return result

        return call

    def started(self) -> None:
        if self._read_since:
            self.seconds += time.process_time() - self._since
        self._read_since = False


def an_engine(drafter: str, batch: int, k: int, params: SamplingParams) -> Engine:
    """All prompts are read, and every text has begun."""
    target, draft = FreeModel(VOCAB, CONTEXT), FreeModel(VOCAB, CONTEXT, right=0.8)
    for free in (target, draft):
        free._table /= 3
    config = EngineConfig(k=k, max_batch=batch, verifier="rejection", cache_memory="64MiB")
    own, small = (None, draft) if drafter == "model" else (NgramDrafter(1, 3), None)
    engine = build_engine(target, own, draft=small, config=config, suite=TWINS)
    for n in range(batch):
        engine.add(Request(tuple((7 * n + i) % 16 for i in range(PROMPT)), params, n))
    while engine.scheduler.waiting or any(len(seq.output) < 3 for seq in engine.scheduler.running):
        engine.step()
    return engine


def between_passes(engine: Engine) -> float:
    """Milliseconds of the fastest step."""
    waiting, inner, found = Waiting(), _PassGraph.run, []

    def run(self: _PassGraph, *args: Any) -> Any:
        replay = self._replay
        with patch.object(self, "_replay", lambda: (waiting.started(), replay())):
            return inner(self, *args)

    reads = [patch.object(where, "received", waiting.read(where.received)) for where in (model_drafter, rejection)]
    with reads[0], reads[1], patch.object(_PassGraph, "run", run):
        for _ in range(STEPS):
            before = waiting.seconds
            engine.step()
            found.append(waiting.seconds - before)
    return min(found[1:]) * 1e3  # the first has no read before it


def measure(drafter: str, batch: int, k: int, sampling: str) -> dict[str, Any]:
    engine = an_engine(drafter, batch, k, SAMPLING[sampling])
    taken = between_passes(engine)
    with HostCost(engine) as cost:
        for _ in range(STEPS):
            engine.step()
    return {
        "drafter": drafter,
        "batch": batch,
        "k": k,
        "sampling": sampling,
        "operators": round(sum(cost.operators.values()) / STEPS, 1),
        "waits": round(sum(cost.waits.values()) / STEPS, 1),
        "ms_between_passes": round(taken, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    cases = [(drafter, 8, 4, sampling) for drafter in ("model", "ngram") for sampling in SAMPLING]
    cases += [("model", 2, 4, "T 0.8"), ("model", 32, 4, "T 0.8"), ("model", 8, 1, "T 0.8"), ("model", 8, 8, "T 0.8")]
    rows = []
    for case in cases:
        rows.append(measure(*case))
        print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ")
    if out:
        write(out, {"vocab": VOCAB, "prompt": PROMPT, "steps": STEPS, "threads": 1}, rows)


if __name__ == "__main__":
    main()
