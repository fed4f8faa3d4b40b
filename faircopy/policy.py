"""Which sequences run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from faircopy.types import Sequence

Cached = Callable[[Sequence], int]  # how many of a sequence's tokens have keys


class Policy(Protocol):
    """Chooses the sequences of a step; the scheduler checks memory and prompt chunks."""

    grouped: int  # how often the choice was a full batch of one length, made on purpose

    def choose(self, running: list[Sequence], waiting: list[Sequence], cached: Cached) -> list[Sequence]:
        """Running sequences first, then those that may join, each in the order in which they get memory."""


class FirstCome:
    """All running sequences, oldest first, and new ones as soon as the batch has a place."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.grouped = 0

    def choose(self, running: list[Sequence], waiting: list[Sequence], cached: Cached) -> list[Sequence]:
        return [*_oldest_first(running), *waiting[: max(0, self._batch - len(running))]]


class WholeBatches(FirstCome):
    """As published for rectangles: the next batch begins when all of the last one are done."""

    def choose(self, running: list[Sequence], waiting: list[Sequence], cached: Cached) -> list[Sequence]:
        forming = not running or any(reading(seq, cached) for seq in running)
        return super().choose(running, waiting if forming else [], cached)


class SameLength:
    """EXSPEC: a full batch of equally long sequences from a window larger than the batch, or else the window's first.

    The first length to fill a batch wins; a partial group is never used. Prompts are read by themselves.
    """

    def __init__(self, batch: int, window: int, sort: bool) -> None:
        self._batch, self._window, self._sort = batch, window, sort
        self.grouped = 0

    def choose(self, running: list[Sequence], waiting: list[Sequence], cached: Cached) -> list[Sequence]:
        held = set(running)
        arrivals = sorted(waiting, key=self._order)[: max(0, self._window - len(running))]
        window = sorted([*running, *arrivals], key=self._order)
        chosen = self._group(window, cached) or self._first(window, cached)
        return sorted(chosen, key=lambda seq: seq not in held)

    def _order(self, seq: Sequence) -> tuple[int, int]:
        return (len(seq.prompt) if self._sort else 0, seq.id)

    def _group(self, window: list[Sequence], cached: Cached) -> list[Sequence]:
        groups: dict[tuple[int, int], list[Sequence]] = {}
        for seq in window:
            group = groups.setdefault((len(seq.tokens), cached(seq)), [])
            group.append(seq)
            if len(group) == self._batch > 1:
                self.grouped += 1
                return group
        return []

    def _first(self, window: list[Sequence], cached: Cached) -> list[Sequence]:
        first = window[: self._batch]
        return [seq for seq in first if reading(seq, cached)] or first


def reading(seq: Sequence, cached: Cached) -> bool:
    """Whether there is more to feed than its latest token."""
    return len(seq.tokens) - cached(seq) > 1


def _oldest_first(seqs: list[Sequence]) -> list[Sequence]:
    return sorted(seqs, key=lambda seq: seq.id)
