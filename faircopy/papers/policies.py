"""Which sequences run together in the published methods."""

from __future__ import annotations

from faircopy.policy import Cached, FirstCome, reading
from faircopy.types import Sequence


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
