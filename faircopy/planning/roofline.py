"""Scylla's batch law in closed form, from the roofline of a model and a device.

A pass of n rows reads the weights and every sequence's keys once, and multiplies 2 P + A operations per row (P numbers
of weights, A operations of attention over S tokens). Rows are free until arithmetic takes as long as reading:

    n (2 P + A) / rate = (w P + b S c) / bandwidth

w bytes per number, c bytes of keys and values per token, b sequences. So a sequence may have n / b = n* / b + kappa
rows: a constant number of rows that all sequences share, and what a sequence's own keys pay for. One row is the last
token, the others are draft tokens: k = n* / b + kappa - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from faircopy.layout.base import kv_bytes
from faircopy.model.base import ModelShape
from faircopy.planning.devices import Device


class BatchLaw(NamedTuple):
    """Rows per sequence that cost no time: shared / batch + own."""

    shared: float  # n*
    own: float  # kappa

    def rows(self, batch: int) -> float:
        return self.shared / batch + self.own

    def k(self, batch: int) -> float:
        """Draft tokens per sequence; 0 where not even the last token is free."""
        return max(0.0, self.rows(batch) - 1.0)


@dataclass(frozen=True, slots=True)
class Roofline:
    """How long passes take if nothing but memory and arithmetic does."""

    shape: ModelShape
    device: Device
    context: int  # tokens per sequence

    @property
    def law(self) -> BatchLaw:
        size = self.shape.dtype.itemsize
        rate = self._rate / self.device.bandwidth
        return BatchLaw(
            rate * size * self.shape.read / self._operations, rate * self.context * self._kv / self._operations
        )

    def seconds(self, seqs: int, rows: int) -> float:
        """Of a pass with this many rows of this many sequences."""
        read = self.shape.read * self.shape.dtype.itemsize + seqs * self.context * self._kv
        return max(read / self.device.bandwidth, rows * self._operations / self._rate)

    @property
    def _rate(self) -> float:
        """Products of 32-bit numbers take twice the time of 16-bit ones."""
        return self.device.rate / (2 if self.shape.dtype.itemsize == 4 else 1)

    @property
    def _operations(self) -> float:
        """Per row."""
        attention = 4 * self.context * self.shape.heads * self.shape.head_dim * len(self.shape.layers)
        return 2.0 * self.shape.read + attention

    @property
    def _kv(self) -> int:
        return kv_bytes(self.shape.layers, self.shape.dtype, torch.device(self.device.kind))


def best_k(tokens: Callable[[int], float], seconds: Callable[[int], float], most: int) -> int:
    """The k with the most tokens per second; tokens: per step and sequence."""
    return max(range(most + 1), key=lambda k: (tokens(k) / seconds(k), -k))


def fit(points: Iterable[tuple[int, float]]) -> BatchLaw:
    """The law through measured (batch, rows per sequence) by least squares in 1 / batch."""
    places = [(1.0 / batch, rows) for batch, rows in points]
    count = len(places)
    mean_x, mean_y = (sum(column) / count for column in zip(*places, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in places)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in places) / spread if spread else 0.0
    return BatchLaw(slope, mean_y - slope * mean_x)
