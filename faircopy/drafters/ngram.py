"""Drafts by looking up: what followed the last time the latest few tokens stood in the prompt or the output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faircopy.drafters.base import Drafter, chains
from faircopy.types import Batch, Draft, Sequence

if TYPE_CHECKING:
    from faircopy.capture import CapturedDrafter


class NgramDrafter(Drafter):
    """Longest suffix first, its latest occurrence; needs no model."""

    def __init__(self, shortest: int = 1, longest: int = 4) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, batch: Batch) -> Draft:
        return chains(batch, self._lookup)

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq, None)

    def capture(self, num_slots: int) -> CapturedDrafter | None:
        from faircopy.drafters.captured import CapturedNgram

        return CapturedNgram(self._lengths[-1], self._lengths[0])

    def _lookup(self, seq: Sequence, max_nodes: int) -> list[int]:
        index = self._indices.setdefault(seq, _Index(self._lengths))
        after = index.follow(seq.tokens)
        return [] if after is None else seq.tokens[after : after + max_nodes]


class _Index:
    """Where each n-gram last ended, for all but the n-grams that end the text."""

    def __init__(self, lengths: range) -> None:
        self._lengths = lengths
        self._ends: dict[tuple[int, ...], int] = {}
        self._seen = 0  # n-grams ending at or before this many tokens are indexed

    def follow(self, tokens: list[int]) -> int | None:
        """Where the longest known suffix was last continued."""
        for end in range(self._seen + 1, len(tokens)):
            for n in self._lengths:
                if n <= end:
                    self._ends[tuple(tokens[end - n : end])] = end
        self._seen = max(self._seen, len(tokens) - 1)
        for n in self._lengths:
            if n <= len(tokens) and (known := self._ends.get(tuple(tokens[-n:]))) is not None:
                return known
        return None
