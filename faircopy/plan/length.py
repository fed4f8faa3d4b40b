"""How many nodes each sequence's next draft should have."""

from __future__ import annotations

from faircopy.types import Sequence


class FixedLength:
    """The same number for everybody, unless a request asked for its own."""

    def __init__(self, k: int) -> None:
        self._k = k

    def __call__(self, seq: Sequence) -> int:
        return self._k if seq.request.k is None else seq.request.k
