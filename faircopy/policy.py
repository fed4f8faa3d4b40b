"""Which sequences run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

from faircopy.types import MOST_JOINING, Sequence

MOST_HELD = 16  # choices for which new sequences are held back at most
FADE = 0.98  # with every choice, of how often sequences have left
Cached = Callable[[Sequence], int]  # how many of a sequence's tokens have keys


class Policy(Protocol):
    """Chooses the sequences of a step; the scheduler checks memory and prompt chunks."""

    grouped: int  # how often the choice was a full batch of one length, made on purpose

    def choose(self, running: list[Sequence], waiting: list[Sequence], cached: Cached) -> list[Sequence]:
        """Running sequences first, then those that may join, each in the order in which they get memory."""


class JoinRule(Protocol):
    """What a policy sees of captured steps."""

    def interrupts(self, seq: Sequence) -> bool:
        """Whether captured steps have to stop for this new sequence: none of them reads its prompt."""

    def joining_price(self, slots: int, rows: int) -> float | None:
        """How much longer a step of this many batch slots takes if it reads this many rows of prompts, in steps; None:
        there is no such step."""


class FirstCome:
    """All running sequences, oldest first, and new ones as soon as the batch has a place."""

    def __init__(self, batch: int, together: int = 1, joins: JoinRule | None = None) -> None:
        """together: while more wait than there are places, new ones join when this many places are free.

        joins: of captured steps. Where those need not stop for a new sequence, as many join at a time as cost least:
        if few do, more steps read prompts; if many do, places stay free for longer.
        """
        self._batch, self._together, self._joins = batch, together, joins
        self._held = 0  # choices in which the first of the waiting ones was held back
        self._first: Sequence | None = None  # of those that wait
        self._running: set[Sequence] = set()  # at the last choice
        self._left, self._choices = 0.0, 0.0  # sequences that have left, and choices so far, old ones fading
        self.grouped = 0

    def choose(self, running: list[Sequence], waiting: list[Sequence], cached: Cached) -> list[Sequence]:
        self._count(running)
        free, first = max(0, self._batch - len(running)), waiting[0] if waiting else None
        if first is not self._first:
            self._first, self._held = first, 0
        more_wait = bool(running) and 0 < free < len(waiting)
        if more_wait and not any(reading(seq, cached) for seq in running) and free < self._needed(waiting):
            self._held += 1
            free = 0 if self._held <= MOST_HELD else free
        return [*_oldest_first(running), *waiting[:free]]

    def _count(self, running: list[Sequence]) -> None:
        """How many have left since the last choice."""
        now = {*running}
        self._left = FADE * self._left + len(self._running - now)
        self._choices, self._running = FADE * self._choices + 1.0, now

    def _needed(self, waiting: list[Sequence]) -> int:
        """Free places with which the first of these new sequences joins, and those behind it."""
        if self._joins is None or self._joins.interrupts(waiting[0]):
            return self._together
        costs = list(self._costs(waiting, self._joins))
        return 1 + costs.index(min(costs)) if costs else 1

    def _costs(self, waiting: list[Sequence], joins: JoinRule) -> Iterator[float]:
        """What each costs, in steps, if one joins at a time, or two, or more: its share of the longer step, and of the
        places that are free until so many have left."""
        apart = self._choices / max(1.0, self._left)  # steps from one that leaves to the next
        for others, rows in enumerate(accumulate(len(seq.tokens) for seq in waiting[: min(MOST_JOINING, self._batch)])):
            price = joins.joining_price(self._batch, rows)
            if price is None:
                return
            yield price / (others + 1) + others / 2 * apart / self._batch


def reading(seq: Sequence, cached: Cached) -> bool:
    """Whether there is more to feed than its latest token."""
    return len(seq.tokens) - cached(seq) > 1


def _oldest_first(seqs: list[Sequence]) -> list[Sequence]:
    return sorted(seqs, key=lambda seq: seq.id)
