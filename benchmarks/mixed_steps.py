"""What the host does around a step that reads prompts beside running texts, while the device has nothing to do.

python -m benchmarks.mixed_steps [--out FILE.json] [--drafters none head model] [--batch 64] [--queue 4]
    [--tokens 48] [--profile]

Models cost nothing, and captured steps are run by their torch twins: their time is left out, as is that of a draft
head. A queue of prompts of 22 to 66 tokens waits. A mixed step is eager; captured ones come before and behind it, so
the host's work is in three parts:
front: from the collecting of the captured step before to the first pass that is launched: the device waits.
beside: from there to the tokens that the target has chosen: the device runs.
back: from there to the start of the captured step behind: the device waits, or reads prompts for a draft head.
Mixed steps that follow each other share the parts between captured ones. Each part in microseconds of the processor
per mixed step, the median, with its torch operators (launches on a GPU) and reads or sends that wait for the device.
--profile: which functions take the host's time, of all steps together.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.simulated import Queue, read_table
from faircopy import sampling
from faircopy.bench.record import collect
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.folder import METHODS
from faircopy.drafters.heads import Head, HeadConfig
from faircopy.drafters.networks.blocks import BlockShape
from faircopy.engine import Engine
from faircopy.kernels import filters
from faircopy.kernels.gpu.suite import TWINS
from faircopy.layout.base import Cache, Packed
from faircopy.model.base import Taps
from faircopy.replay.passes import ROWS
from faircopy.replay.steps import OneGraphStep
from faircopy.testing.operators import counted
from faircopy.testing.simulated_device import FreeModel
from faircopy.verify import exact

VOCAB, CONTEXT, K = 64, 1024, 3
PARTS = ("front", "beside", "back")


class TappedModel(FreeModel):
    """Hands over states of every layer that a head wants."""

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> torch.Tensor:
        for layer in () if taps is None else taps.wants:
            taps(layer, self._table[packed.positions % 7, packed.ids])  # type: ignore[misc]
        return super().forward(packed, cache)


def tiny_head() -> Head:
    shape = BlockShape(hidden=VOCAB, heads=2, kv_heads=1, head_dim=16, intermediate=32, context=CONTEXT)
    torch.manual_seed(0)
    config = HeadConfig(method="eagle3", shape=shape, vocab=VOCAB, depth=8, levels=K)
    return METHODS["eagle3"](config).bind(TappedModel(VOCAB, CONTEXT).token_weights())


def an_engine(drafter: str, batch: int) -> Engine:
    drafts: dict[str, Callable[[], FreeModel | Head | None]] = {
        "none": lambda: None,
        "head": tiny_head,
        "model": lambda: TappedModel(VOCAB, CONTEXT, right=0.8),
    }
    config = EngineConfig(k=K, max_batch=batch, cache_memory="64MiB")
    engine = build_engine(TappedModel(VOCAB, CONTEXT), draft=drafts[drafter](), config=config, suite=TWINS)
    assert engine.target.passes is not None and engine.captured is not None, "steps are captured"
    engine.captured.warm(engine.draft_lengths.lengths)
    engine.target.passes.times = {rows: read_table().target(rows) for rows in ROWS}
    return engine


class Parts:
    """The host's seconds, operators and waits between the launches of mixed steps, by part."""

    def __init__(self, profile: cProfile.Profile | None = None) -> None:
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.counts: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
        self._profile, self._part, self._since = profile, "", 0.0
        self._open: dict[str, float] = {}
        self._seen: dict[str, Counter[str]] = {}
        self._depth = 0

    def enter(self, part: str) -> None:
        """What comes now belongs to this part."""
        self._pause()
        self._part = part
        self._resume()

    def end(self, mixed: int) -> None:
        """The round is over; it counts if it had mixed steps."""
        self._pause()
        if mixed:
            for part in PARTS:
                self.seconds[part].append(self._open.get(part, 0.0) / mixed)
                self.counts[part] += self._seen.get(part, Counter())
        self._part, self._open, self._seen = "", {}, {}

    def count(self, name: str) -> None:
        if self._part and not self._depth:
            self._seen.setdefault(self._part, Counter())[name] += 1

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What the device does."""
        self._pause()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._resume()

    def _pause(self) -> None:
        if self._part and not self._depth:
            self._open[self._part] = self._open.get(self._part, 0.0) + time.process_time() - self._since
            if self._profile is not None:
                self._profile.disable()

    def _resume(self) -> None:
        if self._part and not self._depth:
            if self._profile is not None:
                self._profile.enable()
            self._since = time.process_time()


@contextmanager
def watched(engine: Engine, parts: Parts) -> Iterator[None]:
    """Tells the parts what is launched and read."""
    mixed = 0
    captured = engine.captured
    assert captured is not None, "steps are captured"

    def collecting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def collect_step(*args: Any) -> Any:
            parts.enter("front")
            return inner(*args)

        return collect_step

    def passing(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal mixed
            with parts.left_out():
                found = inner(*args)
            if parts._part:
                mixed += args[0] is engine.target.model
                parts.enter("beside")
            return found

        return run

    def choosing(inner: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*args: Any, **named: Any) -> Any:
            found = inner(*args, **named)
            if parts._part:
                parts.enter("back")
            return found

        return choose

    def starting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def start(self: OneGraphStep) -> int:
            nonlocal mixed
            parts.end(mixed)
            mixed = 0
            return inner(self)  # type: ignore[no-any-return]

        return start

    def leaving_out(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            with parts.left_out():
                return inner(*args, **named)

        return run

    heads = [part for part in vars(engine.drafter).values() if isinstance(part, Head)]
    wrapped = [(captured, "collect", collecting), (TappedModel, "forward", passing), (exact, "choose", choosing)]
    wrapped += [(OneGraphStep, "start", starting), (sampling, "gumbel_argmax", leaving_out)]
    wrapped += [(filters, "thresholds", leaving_out), *((head, "read", leaving_out) for head in heads)]
    with ExitStack() as stack:
        for owner, name, wrap in wrapped:
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        yield


def write_texts(engine: Engine, queue: Queue) -> None:
    for request in queue.requests():
        engine.add(request)
    while engine.busy:
        engine.step()


def measure(drafter: str, queue: Queue, profile: cProfile.Profile | None = None) -> dict[str, Any]:
    engine, timed = an_engine(drafter, queue.batch), Parts(profile)
    with watched(engine, timed):
        write_texts(engine, queue)
    timed.end(mixed=0)
    meter = engine.meter
    mixed, counts = meter.steps - meter.captured_steps, Parts()
    engine = an_engine(drafter, queue.batch)
    with watched(engine, counts), counted(counts.count, lambda name: counts.count(f"wait {name}")):
        write_texts(engine, replace(queue, times=2))  # counting is slow
    counted_steps = engine.meter.steps - engine.meter.captured_steps
    found: dict[str, Any] = {"drafter": drafter, "batch": queue.batch, "steps": meter.steps, "mixed_steps": mixed}
    for part in PARTS:
        names = counts.counts[part]
        waits = sum(n for name, n in names.items() if name.startswith("wait "))
        found[f"{part}_us"] = round(1e6 * statistics.median(timed.seconds[part]))
        found[f"{part}_operators"] = round((names.total() - waits) / counted_steps, 1)
        found[f"{part}_waits"] = round(waits / counted_steps, 1)
    found["idle_us"] = found["front_us"] + found["back_us"]
    return found


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    queue = Queue(batch=args.batch, times=args.queue, tokens=args.tokens)
    for drafter in args.drafters:
        profile = cProfile.Profile() if args.profile else None
        yield measure(drafter, queue, profile)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--drafters", nargs="+", choices=("none", "head", "model"), default=["none", "head", "model"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--queue", type=int, default=4, help="prompts over the batch")
    parser.add_argument("--tokens", type=int, default=48, help="of a text; half to one and a half times as many")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for row in collect(args.out, vars(args), rows(args)):
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
