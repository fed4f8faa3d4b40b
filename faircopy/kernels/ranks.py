"""What arithmetic needs to know of the processes that share a model: how many there are, and how to gather from all."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """The processes that hold a share of a model each, as one of them sees them."""

    rank: int  # this process
    size: int  # how many there are

    def gather(self, x: Tensor) -> Tensor:
        """[...] of every rank -> [size, ...] in the order of the ranks, on every rank."""


class OneRank:
    """A model that is not shared; its sums are made in the order that shared ones have."""

    rank, size = 0, 1

    def gather(self, x: Tensor) -> Tensor:
        return x[None]
