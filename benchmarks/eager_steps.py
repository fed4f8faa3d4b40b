"""Steps that the host launches pass by pass, and where a pass spends its time: prompts, rejection sampling, profiles.

python -m benchmarks.eager_steps --out FILE [--parts prompts steps profile] [--minutes 5] [--small]

The widened Qwen3-8B / 0.6B pair (see benchmarks.gpu), bfloat16.
prompts: milliseconds from a request to its first token, of one prompt of 40 and of 300 tokens and of eight of 300.
steps: milliseconds of a step at batch 8, draft model, k 4, with rejection sampling, eager and captured, and of a
    drafter on the host; the device's busy time beside it, by torch's profiler: what is left is the host's.
profile: microseconds by kernel of a captured pass, prompts' among them, from the end of one kernel to the next one's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu import Session, params, say, synchronize
from benchmarks.planner import Useless
from faircopy import LLM, SamplingParams
from faircopy.bench.record import collect

Rows = Iterator[dict[str, Any]]
PROMPTS = ((1, 40), (1, 300), (8, 300))  # how many, and their tokens
TURNS = 8
BATCH, K, TOKENS, PROFILED = 8, 4, 160, 10
PASSES = (("qwen3-8b", 1, 1), ("qwen3-8b", 8, 6), ("qwen3-8b", 32, 6), ("qwen3-8b", 8, 300), ("qwen3-0.6b", 8, 1),
          ("qwen3-0.6b", 64, 2))  # fmt: skip  # batch, rows of each
PROMPT = 64  # rows of a sequence from which on they are a prompt


def prompts(session: Session) -> Rows:
    small = session.args.small
    cache = "16MiB" if small else "8GiB"
    llm = session.llm("widened", None, k=0, max_batch=BATCH, cache_memory=cache, prefix_reuse=False)
    llm.warm_up()
    for count, length in PROMPTS:
        times = [_first_token_ms(llm, count, 16 if small else length, turn) for turn in range(TURNS)]
        yield {
            "prompts": count, "tokens": length, "first_ms": times[0], "median_ms": statistics.median(times[1:]),
            "most_ms": max(times[1:]),
        }  # fmt: skip


def _first_token_ms(llm: LLM, count: int, length: int, turn: int) -> float:
    asked = [[(7 * i + 13 * n + 31 * turn) % 1000 + 5 for i in range(length)] for n in range(count)]
    synchronize()
    begin = time.perf_counter()
    llm.generate(asked, params(count, 1, 0.0), progress=False)
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


def steps(session: Session) -> Rows:
    filters = {"temperature": 0.8, "top_p": 0.95, "top_k": 20}
    ways: tuple[tuple[str, Any, dict[str, Any], dict[str, Any]], ...] = (
        ("rejection, T .8", "model", {"temperature": 0.8}, {"verifier": "rejection"}),
        ("rejection, T .8, top-k, top-p", "model", filters, {"verifier": "rejection"}),
        ("drafter on the host, greedy", Useless(), {}, {}),
        ("eager, T .8", "model", {"temperature": 0.8}, {"graphs": False}),
        ("captured, T .8", "model", {"temperature": 0.8}, {}),
    )
    for name, drafter, wanted, options in ways:
        if session.late:
            return
        cache = "16MiB" if session.args.small else "8GiB"
        llm = session.llm("widened", drafter, k=K, max_batch=BATCH, cache_memory=cache, **options)
        llm.warm_up()
        times = _step_times(llm, session, wanted)
        yield {
            "way": name, "batch": BATCH, "k": K, "step_ms": statistics.median(times),
            "p90_ms": times[int(0.9 * len(times))], **_busy(llm, session, wanted),
            **{n: llm.metrics()[n] for n in ("acceptance", "tokens_per_step")},
        }  # fmt: skip
        del llm


def _add(llm: LLM, session: Session, wanted: dict[str, Any]) -> None:
    tokens = 24 if session.args.small else TOKENS
    for n, prompt in enumerate(session.prompts(BATCH)):
        llm.engine.add(llm.request(prompt, SamplingParams(max_tokens=tokens, seed=n, ignore_eos=True, **wanted)))


def _step_times(llm: LLM, session: Session, wanted: dict[str, Any]) -> list[float]:
    """Milliseconds of the steps in the middle of eight texts, ascending."""
    _add(llm, session, wanted)
    times = []
    while llm.engine.busy:
        synchronize()
        begin = time.perf_counter()
        llm.engine.step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times[2:-2])


def _busy(llm: LLM, session: Session, wanted: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step in which the device computes, and from its first kernel to its last."""
    if not torch.cuda.is_available():
        return {}
    _add(llm, session, wanted)
    for _ in range(6):
        llm.engine.step()
    found = kernel_times(lambda: [llm.engine.step() for _ in range(PROFILED)])
    while llm.engine.busy:
        llm.engine.step()
    busy, end = 0.0, found[0][0]
    for first, last, _ in found:
        busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
    return {"busy_ms": busy / PROFILED / 1e3, "span_ms": (end - found[0][0]) / PROFILED / 1e3}


def kernel_times(run: Callable[[], object]) -> list[tuple[float, float, str]]:
    """Beginning and end of every kernel, in microseconds, in order."""
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        synchronize()
    kernels = (event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return sorted((event.time_range.start, event.time_range.end, event.name) for event in kernels)


def profile_passes(session: Session) -> Rows:
    if not torch.cuda.is_available():
        return
    from faircopy.bench.shapes import random_model, shape_config
    from faircopy.bench.timing import graph_of, replay_ms
    from faircopy.model.trial import scene

    models: dict[str, Any] = {}
    for name, batch, rows in PASSES:
        if session.late:
            return
        if name not in models:
            models = {name: random_model(shape_config(name), torch.bfloat16, torch.device("cuda"))}
        prompt = rows >= PROMPT
        layout, packed = scene(models[name], batch, rows, rows if prompt else 512, prompt)
        graph = graph_of(lambda model=models[name], packed=packed, layout=layout: model.forward(packed, layout))
        found = kernel_times(graph.replay)
        sums: dict[str, list[float]] = {}
        for before, (_, end, kernel) in pairwise(found):
            sums.setdefault(kernel.split("<")[0][:40], []).append(end - before[1])
        yield {
            "model": name, "batch": batch, "rows": rows, "ms": replay_ms(graph),
            "microseconds": {kernel: [len(times), round(sum(times), 1)] for kernel, times in sums.items()},
        }  # fmt: skip


PARTS = {"prompts": prompts, "steps": steps, "profile": profile_passes}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--minutes", type=float, default=60.0, help="no new measurement is begun after this")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on any device")
    args = parser.parse_args(arguments)
    session = Session(args)
    rows = (row for part in args.parts for row in PARTS[part](session))
    for row in collect(args.out, vars(args), rows):
        say(row)


if __name__ == "__main__":
    main()
