"""SpecMemo's order of giving things up, so that a budget holds: later rungs cost more speed.

The keys and values of the planned dialogue are never given up. First the draft as asked for, with shorter prompt chunks
where that is enough; then trees of fewer nodes; then fewer levels, or a shorter chain; then the next smaller drafter,
in the same order; then no drafter. Of the rung where something fits and is faster than plain decoding, the fastest is
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from faircopy.planning.drafts import NO_DRAFT, DraftShape
from faircopy.planning.memory import Setup, memory_items, speculation_bytes, total

AS_ASKED, FEWER_NODES, FEWER_LEVELS, SMALLER, NONE = (
    "as asked for",
    "fewer nodes",
    "fewer levels",
    "smaller drafter",
    "no drafter",
)
LEAST_CHUNK = 64  # prompt tokens per step
SHARES = (0.75, 0.5, 0.375, 0.25, 0.125)  # of the nodes asked for, tried in trees


class Speed(NamedTuple):
    """What a setup gives: tokens per step and sequence, and tokens per second of the whole batch."""

    tokens_per_step: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setup on the ladder."""

    rung: str
    setup: Setup
    bytes: int
    speculation: int  # bytes beyond plain decoding
    speed: Speed


def rungs(drafts: Seq[DraftShape], nodes: int) -> Iterator[tuple[str, list[tuple[DraftShape, int, int]]]]:
    """(rung, its (draft, nodes, levels)), in the order in which they are tried. drafts: the largest first."""
    for place, draft in enumerate(drafts):
        if draft.kind == "none" or not nodes:
            continue
        levels = min(nodes, draft.levels or nodes)
        first = AS_ASKED if place == 0 else SMALLER
        yield first, [(draft, nodes, levels)]
        sizes = sorted({max(levels, int(nodes * share)) for share in SHARES} - {nodes}, reverse=True)
        if draft.tree and sizes:
            yield FEWER_NODES if place == 0 else SMALLER, [(draft, size, levels) for size in sizes]
        for fewer in range(levels - 1, 0, -1):
            trees = [size for size in (nodes, *sizes, fewer) if size >= fewer] if draft.tree else [fewer]
            yield FEWER_LEVELS if place == 0 else SMALLER, [(draft, size, fewer) for size in sorted(set(trees))]
    yield NONE, [(NO_DRAFT, 0, 0)]


def climb(
    base: Setup, drafts: Seq[DraftShape], nodes: int, budget: int, speed: Callable[[Setup], Speed]
) -> list[Candidate]:
    """All candidates down to the chosen one, which is the last; its bytes exceed the budget if nothing fits."""
    plain = speed(replace(base, draft=NO_DRAFT, nodes=0, levels=0)).tokens_per_second
    tried: list[Candidate] = []
    for rung, shapes in rungs(drafts, nodes):
        group = [
            _candidate(rung, replace(base, draft=draft, nodes=count, levels=levels), budget, speed)
            for draft, count, levels in shapes
        ]
        pays = [c for c in group if c.bytes <= budget and (c.speed.tokens_per_second > plain or rung == NONE)]
        best = max(pays or group, key=lambda c: c.speed.tokens_per_second)
        tried += [c for c in group if c is not best] + [best]
        if pays:
            break
    return tried


def with_shorter_chunks(setup: Setup, crowds: Callable[[Setup], bool]) -> Setup:
    """Prompt chunks short enough that their pass leaves memory for the rest, if the shortest do."""
    while setup.chunk > LEAST_CHUNK and crowds(setup):
        setup = replace(setup, chunk=max(LEAST_CHUNK, setup.chunk // 2))
    return setup


def _candidate(rung: str, setup: Setup, budget: int, speed: Callable[[Setup], Speed]) -> Candidate:
    """Shorter prompt chunks come before giving up anything of a draft."""
    setup = with_shorter_chunks(setup, lambda shorter: total(memory_items(shorter)) > budget)
    return Candidate(rung, setup, total(memory_items(setup)), speculation_bytes(setup), speed(setup))
