"""The target's hidden states that a draft head has not read yet, kept by the host."""

from __future__ import annotations

from torch import Tensor


class SequenceStates:
    """Some of the target's states of one sequence, by position."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Tensor]] = []

    @property
    def end(self) -> int:
        """The position behind the last known state."""
        first, states = self._pieces[-1]
        return first + len(states)

    def add(self, first: int, states: Tensor) -> None:
        self._pieces.append((first, states))

    def take(self, start: int, stop: int, unknown: Tensor) -> list[Tensor]:
        """States of positions start to stop, end to end; `unknown` [1, F] where there are none."""
        found: list[Tensor] = []
        for first, states in self._pieces:
            low, high = max(start, first), min(stop, first + len(states))
            if low < high:
                found += [unknown.expand(low - start, -1), states[low - first : high - first]]
                start = high
        return [*found, unknown.expand(max(0, stop - start), -1)]

    def drop(self, below: int) -> None:
        """Positions below this have been read."""
        self._pieces = [piece for piece in self._pieces[:-1] if piece[0] + len(piece[1]) > below] + self._pieces[-1:]
