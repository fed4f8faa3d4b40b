"""The target's hidden states that a draft head has not read yet, kept by the host."""

from __future__ import annotations

from collections import deque

from torch import Tensor


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

    def take(self, start: int, stop: int, unknown: Tensor) -> list[Tensor]:
        """States of positions start to stop, end to end; `unknown` [1, F] where there are none."""
        found: list[Tensor] = []
        for first, end, states, row in self._pieces:
            low, high = max(start, first), min(stop, end)
            if low < high:
                found += [unknown.expand(low - start, -1), states[row + low - first : row + high - first]]
                start = high
        return [*found, unknown.expand(max(0, stop - start), -1)]

    def drop(self, below: int) -> None:
        """Positions below this have been read."""
        while len(self._pieces) > 1 and self._pieces[0][1] <= below:
            self._pieces.popleft()
