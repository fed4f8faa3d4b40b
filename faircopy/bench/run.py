"""Measure strategies against each other: the same prompts, interleaved repeats, every text compared with plain."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from faircopy.bench.phases import PHASES, profiled
from faircopy.bench.record import origin
from faircopy.bench.workloads import Workload
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.heads import Head
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.errors import ConfigError
from faircopy.layout.base import kv_bytes_per_token
from faircopy.model.base import Model
from faircopy.strategy import STRATEGIES
from faircopy.types import Request, SamplingParams

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # the latter for one thread on a busy machine
DRAFTERS = ("none", "ngram", "model")
EAGER, PADDED = "eager", "padded inputs"  # steps that are not captured; captured ones whose rows are not packed
STEPS = ("", EAGER, PADDED)
COUNTERS = (
    "steps", "grouped_steps", "sequence_steps", "tokens_fed", "tokens_padded", "rows_moved", "drafted", "accepted",
    "emitted", "preemptions",
)  # fmt: skip
Progress = Callable[[str, int, int], None]  # what runs, how many runs are done, of how many


@dataclass(frozen=True, slots=True)
class Case:
    """One way of decoding."""

    strategy: str
    drafter: str
    batch: int
    k: int
    refill: bool | None = None  # None: as the strategy was published
    steps: str = ""  # how they are run: one of STEPS, for comparisons on a GPU

    @property
    def name(self) -> str:
        """What a table calls it, batch and k aside."""
        if self.drafter == "none" and self.strategy == "ragged":
            return "plain"
        published = self.refill is None or self.refill == STRATEGIES[self.strategy].refills
        parts = [self.strategy, "" if published else "refilled" if self.refill else "whole batches", self.steps]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Bench:
    """The models, and how often everything is run."""

    target: Model
    draft: Model | Head | None = None
    repeats: int = 3
    warmup: int = 1
    profile: bool = True
    budget: float = float("inf")  # seconds per batch size: repeats stop once they are spent
    options: dict[str, Any] = field(default_factory=dict)  # of EngineConfig
    settings: dict[str, Any] = field(default_factory=dict)  # written to the result file, not used
    clock: str = "wall"

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise ConfigError("clock", self.clock, "unknown", f"use one of {', '.join(CLOCKS)}")
        for name, least in (("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"below {least}", f"pass {least} or more")


@dataclass(slots=True)
class Pass:
    """What one run over a workload gave. Steps that read prompts are not counted as decoding."""

    texts: list[list[int]]
    seconds: float
    decode_seconds: float
    decoded: int
    counters: dict[str, float]
    peak: int  # bytes of the target's keys and values at most
    device_peak: int  # bytes of everything on a GPU at most


@dataclass(slots=True)
class _Entry:
    """A case, its engine, and what was measured so far."""

    case: Case
    engine: Engine
    passes: list[Pass] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)


def run(
    bench: Bench, workload: Workload, cases: list[Case], prompts: int, progress: Progress, waves: int = 1
) -> Iterator[dict[str, Any]]:
    """One record per case. Each answers this many prompts, or more: whole batches of them, at least `waves`.

    Plain decoding is measured beside them at every batch size.
    """
    cases = [case for case in cases if checked(bench, case).name != "plain"]
    for batch in sorted({case.batch for case in cases}):
        group = [Case("ragged", "none", batch, 0), *(case for case in cases if case.batch == batch)]
        yield from _together(bench, workload.first(max(-(-prompts // batch), waves) * batch), group, progress)


def _together(bench: Bench, workload: Workload, cases: list[Case], progress: Progress) -> list[dict[str, Any]]:
    """Records of cases with one batch size, the first of them plain decoding."""
    entries = [_Entry(case, make_engine(bench, case, workload)) for case in cases]
    _measure(bench, entries, workload, progress)
    texts = entries[0].passes[0].texts
    return [origin() | _record(bench, workload, entry, texts) for entry in entries]


def checked(bench: Bench, case: Case) -> Case:
    """The case, if it can be run; refused before anything has run if not."""
    if case.drafter not in DRAFTERS:
        raise ConfigError("drafter", case.drafter, "unknown", f"use one of {', '.join(DRAFTERS)}")
    if case.drafter == "model" and bench.draft is None:
        raise ConfigError("drafter", "model", "there is no draft model", "pass --draft")
    EngineConfig(strategy=case.strategy, max_batch=case.batch, k=case.k, refill=case.refill)
    return case


def make_engine(bench: Bench, case: Case, workload: Workload) -> Engine:
    """An engine with room for the whole batch; known prefixes would make repeats free, so they are not kept."""
    config = EngineConfig(
        **{
            "strategy": case.strategy,
            "k": case.k,
            "max_batch": case.batch,
            "refill": case.refill,
            "prefix_reuse": False,
            "chunk": 1 << 20,
            "cache_memory": _memory(bench, case, workload),
            "device": bench.target.device.type,
            "graphs": case.steps != EAGER,
            "pack_rows": case.steps != PADDED,
            **bench.options,
        }
    )
    drafter = NgramDrafter(config.lookup_min, config.lookup_max) if case.drafter == "ngram" else None
    draft = bench.draft if case.drafter == "model" else None
    return build_engine(bench.target, drafter, draft=draft, config=config)


def _memory(bench: Bench, case: Case, workload: Workload) -> int:
    """Bytes for twice the longest row of a shared length, so that no sequence is preempted."""
    longest = max(map(len, workload.prompts)) + workload.tokens * (case.k + 1) + 64
    rows = case.batch if case.strategy != "pool" else EngineConfig(max_batch=case.batch).window()
    models = [bench.target, *([bench.draft] if bench.draft is not None else [])]
    return 2 * rows * longest * sum(map(kv_bytes_per_token, models))


def _measure(bench: Bench, entries: list[_Entry], workload: Workload, progress: Progress) -> None:
    """Warm all cases up, then repeat them in turns, so that a busy minute slows all of them equally."""
    total, done = len(entries) * (bench.warmup + bench.repeats + bench.profile), 0
    begin = time.perf_counter()
    for turn in range(bench.warmup + bench.repeats + bench.profile):
        if bench.warmup < turn < bench.warmup + bench.repeats and time.perf_counter() - begin > bench.budget:
            done += len(entries)
            continue
        for entry in entries:
            progress(f"batch {entry.case.batch}, {entry.case.drafter}, {entry.case.name}", done, total)
            _turn(bench, entry, workload, turn)
            done += 1
    progress("", done, total)


def _turn(bench: Bench, entry: _Entry, workload: Workload, turn: int) -> None:
    if turn < bench.warmup:
        one_pass(entry.engine, _warming(bench, workload))
    elif turn < bench.warmup + bench.repeats:
        entry.passes.append(one_pass(entry.engine, workload, CLOCKS[bench.clock]))
    else:
        with profiled(entry.engine) as watch:
            one_pass(entry.engine, workload)
        entry.phases = {phase: watch.seconds.get(phase, 0.0) for phase in PHASES}


def _warming(bench: Bench, workload: Workload) -> Workload:
    """The warm-up: a few tokens per prompt; on a GPU all, because graphs and kernels are made where first needed."""
    return workload if bench.target.device.type == "cuda" else replace(workload, tokens=min(8, workload.tokens))


def one_pass(engine: Engine, workload: Workload, clock: Callable[[], float] = time.perf_counter) -> Pass:
    """All prompts at once, to the end."""
    device, before = engine.target.model.device, engine.meter.snapshot()
    engine.meter.pages_peak = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    params = SamplingParams(max_tokens=workload.tokens, ignore_eos=True)
    seqs = [engine.add(Request(tuple(prompt), params)) for prompt in workload.prompts]
    _synchronise(device)
    begin, decode, decoded = clock(), 0.0, 0
    known: set[int] = set()  # sequences that have written something
    while engine.busy:
        start = clock()
        outputs = engine.step()
        begun = {output.id for output in outputs}
        if begun <= known:  # no sequence's first tokens
            decode += clock() - start
            decoded += sum(len(output.tokens) for output in outputs)
        known |= begun
    _synchronise(device)
    seconds = clock() - begin
    now = engine.meter.snapshot()
    counters = {name: now[name] - before[name] for name in COUNTERS}
    peak = engine.meter.pages_peak * engine.tables.page * kv_bytes_per_token(engine.target.model)
    whole = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Pass([seq.output for seq in seqs], seconds, decode, decoded, counters, peak, whole)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(bench: Bench, workload: Workload, entry: _Entry, texts: list[list[int]]) -> dict[str, Any]:
    passes, case = entry.passes, entry.case
    counters = passes[-1].counters
    return {
        "settings": {
            **bench.settings,
            **bench.options,
            "target": _short(bench.target.name),
            "draft": _short(bench.draft.name) if bench.draft is not None else None,
            "dtype": str(bench.target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "clock": bench.clock,
            "warmup": bench.warmup,
            "repeats": len(passes),
            "max_tokens": workload.tokens,
            "prompts": len(workload.prompts),
            "prompt_tokens": sum(map(len, workload.prompts)),
        },
        "workload": workload.name,
        "name": case.name,
        **asdict(case),
        "tokens_per_second": rate([counters["emitted"] / one.seconds for one in passes]),
        "decode_tokens_per_second": rate([one.decoded / one.decode_seconds for one in passes if one.decoded]),
        "accepted_per_step": round(counters["emitted"] / counters["sequence_steps"], 3),
        "grouping_rate": round(counters["grouped_steps"] / counters["steps"], 3),
        "counters": {name: int(value) for name, value in counters.items()},
        "peak_bytes": max(one.peak for one in passes),
        "device_peak_bytes": max(one.device_peak for one in passes),
        "phases": {phase: round(seconds, 4) for phase, seconds in entry.phases.items()},
        "identical": sum(a == b for a, b in zip(passes[-1].texts, texts, strict=True)),
        "of": len(texts),
    }


def spread(values: dict[str, Any], label: str = "") -> str:
    """(largest - smallest) / median of the repeats, behind a label; "one run" if there are no repeats."""
    return f"{label}{values['spread']:.0%}" if len(values["values"]) > 1 else "one run"


def _short(name: str) -> str:
    """A model's name without the folder we are in."""
    return name.replace(f"{Path.cwd()}{os.sep}", "")


def rate(values: list[float]) -> dict[str, Any]:
    """The median, how far the values lie apart in parts of it, and the values."""
    if not values:
        return {"median": 0.0, "spread": 0.0, "values": []}
    median = statistics.median(values)
    return {
        "median": round(median, 2),
        "spread": round((max(values) - min(values)) / median, 3),
        "values": [round(value, 2) for value in values],
    }
