"""The target's hidden states that a draft head has not read yet, kept by the host."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from faircopy.kernels.transfer import sent

# states of a step -> the rows that are wanted, and the rows of these states that they are
KnownRows = dict[Tensor, tuple[list[int], list[int]]]


def gather_into(table: Tensor, known: KnownRows) -> Tensor:
    """Fill a table with the known rows in their places and zeros elsewhere, in a few launches."""
    table.zero_()
    for states, places in known.items():
        wanted, found = sent(places, torch.int64, table.device)
        table.index_copy_(0, wanted, states.index_select(0, found).to(table.dtype))
    return table


class SequenceStates:
    """Some of the target's states of one sequence, by position."""

    def __init__(self) -> None:
        # first position, the one behind the last, states of a whole step, the row of the first position in them
        self._pieces: deque[tuple[int, int, Tensor, int]] = deque()

    @property
    def end(self) -> int:
        """The position behind the last known state."""
        return self._pieces[-1][1]

    def add(self, first: int, states: Tensor, rows: range) -> None:
        """Rows of a step's states, for positions from `first` on."""
        self._pieces.append((first, first + len(rows), states, rows.start))

    def find(self, start: int, stop: int, at: int, into: KnownRows) -> None:
        """Where the states of positions start to stop are, those that are known; they are wanted from row `at` on."""
        for first, end, states, row in self._pieces:
            low, high = max(start, first), min(stop, end)
            if low < high:
                wanted, found = into.setdefault(states, ([], []))
                wanted += range(at + low - start, at + high - start)
                found += range(row + low - first, row + high - first)
                at, start = at + high - start, high

    def drop(self, below: int) -> None:
        """Positions below this have been read."""
        while len(self._pieces) > 1 and self._pieces[0][1] <= below:
            self._pieces.popleft()
