"""How many nodes each sequence's next draft should have."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from faircopy.types import FinishedStep, Sequence


class DraftLengths(Protocol):
    """Chooses the draft lengths of a step; memory and the sequence's limit may cut them."""

    @property
    def reason(self) -> str:
        """What is chosen at present, and why, in words for people."""

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        """A number of nodes for each of these sequences, which are the candidates for one step."""

    def observe(self, step: FinishedStep, seconds: float | None) -> None:
        """A step has finished. seconds: how long it took; None if that says nothing of decoding."""

    def forget(self, seq: Sequence) -> None:
        """The sequence finished or was preempted."""


class _Unlearning:
    """Lengths that do not depend on what steps gave."""

    def observe(self, step: FinishedStep, seconds: float | None) -> None:
        """Nothing is learned."""

    def forget(self, seq: Sequence) -> None:
        """Nothing is known."""


class NoLength(_Unlearning):
    """No nodes: plain decoding, whatever number a request asked for."""

    reason = "no drafter"

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [0] * len(seqs)


class FixedLength(_Unlearning):
    """k nodes for every sequence, unless its request asked for a number of its own."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.reason = f"{k} for every sequence"

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [self._k if seq.request.k is None else seq.request.k for seq in seqs]
