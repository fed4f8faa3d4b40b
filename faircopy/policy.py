"""Which sequences run together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

from faircopy.types import Sequence

SMALL_STEP_ROWS = 48  # rows of prompts that the smallest captured step that reads prompts has room for, about
ONE_MORE = 32  # places of a batch from which on one more sequence is waited for, if such a step has room for it
MOST_HELD = 16  # choices for which new sequences are held back at most
Cached = Callable[[Sequence], int]  # how many of a sequence's tokens have keys


class Policy(Protocol):
    """Chooses the sequences of a step; the scheduler checks memory and prompt chunks."""

    grouped: int  # how often the choice was a full batch of one length, made on purpose

    def choose(self, running: list[Sequence], waiting: list[Sequence], cached: Cached) -> list[Sequence]:
        """Running sequences first, then those that may join, each in the order in which they get memory."""


class FirstCome:
    """All running sequences, oldest first, and new ones as soon as the batch has a place."""

    def __init__(
        self, batch: int, together: int = 1, interrupts: Callable[[Sequence], bool] | None = None, few: int = 1
    ) -> None:
        """together: while more wait than there are places, new ones join when this many places are free.

        interrupts: whether captured steps stop for a new sequence; for those that they need not stop for, `few` free
        places are enough, or one more in a large batch if a small step has room for their prompts.
        """
        self._batch, self._together, self._interrupts, self._few = batch, together, interrupts, few
        self._held = 0  # choices in which the first of the waiting ones was held back
        self._first: Sequence | None = None  # of those that wait
        self.grouped = 0

    def choose(self, running: list[Sequence], waiting: list[Sequence], cached: Cached) -> list[Sequence]:
        free, first = max(0, self._batch - len(running)), waiting[0] if waiting else None
        if first is not self._first:
            self._first, self._held = first, 0
        if len(waiting) > free < self._needed(waiting) and not any(reading(seq, cached) for seq in running):
            self._held += free > 0
            free = 0 if self._held <= MOST_HELD else free
        return [*_oldest_first(running), *waiting[:free]]

    def _needed(self, waiting: list[Sequence]) -> int:
        """Free places with which the first of these new sequences joins, and those behind it."""
        if self._interrupts is None or self._interrupts(waiting[0]):
            return self._together
        more = waiting[: self._few + 1] if self._batch >= ONE_MORE else []
        return max(self._few, sum(count <= SMALL_STEP_ROWS for count in accumulate(len(seq.tokens) for seq in more)))


def reading(seq: Sequence, cached: Cached) -> bool:
    """Whether there is more to feed than its latest token."""
    return len(seq.tokens) - cached(seq) > 1


def _oldest_first(seqs: list[Sequence]) -> list[Sequence]:
    return sorted(seqs, key=lambda seq: seq.id)
