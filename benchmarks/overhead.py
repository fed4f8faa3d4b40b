"""What the engine itself costs per step: a model that costs nothing, plain and with a scripted drafter.

python benchmarks/overhead.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from faircopy.bench.record import write
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.ngram import NgramDrafter
from faircopy.testing import ScriptedDrafter, TableModel
from faircopy.types import Request, SamplingParams, Sequence


def step_times(batch: int, drafter: str, k: int = 4, steps: int = 60) -> list[float]:
    model = TableModel(vocab=1024, context=4096)
    kinds = {
        "none": lambda: None,
        "ngram": lambda: NgramDrafter(),
        "scripted": lambda: ScriptedDrafter({}, half_right, model.vocab),
    }
    engine = build_engine(model, kinds[drafter](), config=EngineConfig(k=k, max_batch=batch, cache_memory="1GiB"))
    for n in range(batch):
        engine.add(Request(tuple((7 * n + i) % 1024 for i in range(128)), SamplingParams(max_tokens=2000)))
    while engine.scheduler.waiting or any(len(s.output) < 3 for s in engine.scheduler.running):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


def half_right(seq: Sequence, max_nodes: int) -> tuple[int, int]:
    return max_nodes, max_nodes // 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    rows = []
    for drafter in ("none", "ngram", "scripted"):
        for batch in (1, 8, 16, 32, 64):
            median = statistics.median(step_times(batch, drafter)) * 1e3
            rows.append({"drafter": drafter, "batch": batch, "ms_per_step": round(median, 3)})
            print(f"{drafter:9s} batch {batch:3d}  {median:6.2f} ms a step  {median / batch * 1e3:6.1f} us a sequence")
    if out:
        write(out, {"k": 4, "context": 128, "vocab": 1024, "threads": 1}, rows)


if __name__ == "__main__":
    main()
