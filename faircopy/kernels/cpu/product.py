"""Products with packed weights in one order: each output is summed over K from the first term to the last.

A weight [N, K] lies in panels of two vectors of outputs: [N / columns, K, columns]. A tile is a few rows by one panel;
its sums stay in registers for all of K. Which rows share a tile, and which thread computes a panel, changes nothing in
the order of any sum. 16-bit numbers are multiplied in pairs, so a word of K is one float32 or two bfloat16 numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from faircopy.kernels.cpu.jit import Library, has_openmp, processor
from faircopy.kernels.cpu.product_ir import GATED, product_text
from faircopy.kernels.memory import use_huge_pages


class PackedWeight:
    """A weight's product, x [M, K] -> [M, N]; with an activation: activation(first half) * second half.

    out: float32 for sums that are not rounded yet; None: the weight's type.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str | None = None, out: torch.dtype | None = None
    ) -> None:
        known = processor()
        assert known is not None and fits(weight), "the caller asks fits() first"
        outputs, self._inner = weight.shape
        self._dtype, self._out, self._columns = weight.dtype, out or weight.dtype, 2 * known.lanes
        halves = 1 if activation is None else 2
        self._weight = _panels(weight, self._columns, halves)
        bias = weight.new_zeros(outputs) if bias is None else bias
        self._bias = _panels(bias.float()[:, None], self._columns, halves)
        self._outputs, self._width = outputs // halves, self._weight.shape[0] * self._columns // halves
        self._run = _library(weight.dtype, activation, self._out)
        self._addresses = self._weight.data_ptr(), self._bias.data_ptr()
        self._sizes = self._weight.shape[1], self._weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == self._dtype and x.shape[1] == self._inner, "rows of another type or width"
        x, rows = x.contiguous(), x.shape[0]
        out = x.new_empty(rows, self._width, dtype=self._out)
        if rows:
            self._run(x.data_ptr(), *self._addresses, out.data_ptr(), rows, *self._sizes, torch.get_num_threads())
        return out if self._outputs == self._width else out[:, : self._outputs].contiguous()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [..., K] of a weight without activation, as it was given."""
        return self._weight[ids // self._columns, :, ids % self._columns].view(self._dtype)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + self._bias.nbytes


def packed_bytes(outputs: int, inner: int, itemsize: int) -> int:
    """Memory of a PackedWeight of this shape; of the weight itself where this processor has no kernels."""
    known = processor()
    columns = 1 if known is None else 2 * known.lanes
    return -(-outputs // columns) * columns * (inner * itemsize + (0 if known is None else 4))


def fits(weight: Tensor, activation: str | None = None) -> bool:
    """Whether there is a kernel for this weight, and this activation of gate times up, on this processor."""
    known = processor()
    if known is None or weight.device.type != "cpu" or not has_openmp():
        return False
    if activation is not None and (activation not in GATED or weight.shape[0] % (2 * known.lanes)):
        return False
    pairs = weight.dtype == torch.bfloat16 and known.bfloat16 and weight.shape[1] % 2 == 0
    return pairs or weight.dtype == torch.float32


def _panels(weight: Tensor, columns: int, halves: int) -> Tensor:
    """[N, K] -> words [N / columns, K, columns], missing outputs zero; of two halves, a panel has some of each."""
    words = weight.contiguous().view(torch.int32)
    (outputs, inner), width = words.shape, columns // halves
    whole = outputs // columns
    stored = torch.empty(-(-outputs // columns), inner, columns, dtype=torch.int32)
    use_huge_pages(stored.data_ptr(), stored.nbytes)
    parts = words[: whole * columns].view(halves, whole, width, inner).permute(1, 3, 0, 2)
    stored[:whole].view(whole, inner, halves, width).copy_(parts)
    if whole < stored.shape[0]:
        stored[whole].zero_()[:, : outputs - whole * columns] = words[whole * columns :].t()
    return stored


@cache
def _library(dtype: torch.dtype, activation: str | None, out: torch.dtype) -> Any:
    known = processor()
    assert known is not None, "the caller asks fits() first"
    text = product_text(known, dtype == torch.bfloat16, activation, out.itemsize)
    return Library(text).function("product", 4, 4)
