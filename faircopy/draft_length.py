"""How many nodes each sequence's next draft should have."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from faircopy.types import Sequence


class DraftLengths(Protocol):
    """Chooses the draft lengths of a step; memory and the sequence's limit may cut them."""

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        """A number of nodes for each of these sequences, which are the candidates for one step."""


class NoLength:
    """No nodes: plain decoding, whatever number a request asked for."""

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [0] * len(seqs)


class FixedLength:
    """k nodes for every sequence, unless its request asked for a number of its own."""

    def __init__(self, k: int) -> None:
        self._k = k

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [self._k if seq.request.k is None else seq.request.k for seq in seqs]
