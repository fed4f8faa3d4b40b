"""Reductions of a row in one fixed order: the result for a row does not depend on how many rows there are.

torch chooses how a CUDA reduction is split by the number of rows, so `x.pow(2).mean(-1)` of one row has other bits
alone than in a batch. Here every sum is a fixed binary tree over the row (`tree_sum`), or, on a GPU, one Triton program
per row (`kernels/gpu/reduce.py`). Everything else is built from that sum and pointwise operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy.kernels.available import gpu_module

LANES = 4096  # partial sums kept side by side; wider rows are added to them chunk by chunk

Dims = int | Sequence[int] | None


def tree_sum(x: Tensor) -> Tensor:
    """[..., N] -> [...]: neighbours are added pairwise until one number is left. Only pointwise additions are used."""
    width = min(LANES, 1 << max(0, x.shape[-1] - 1).bit_length())
    parts = F.pad(x, (0, -x.shape[-1] % width)).view(*x.shape[:-1], -1, width).unbind(-2)
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


def row_sum(x: Tensor, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over some dimensions, added up in float32 at least."""
    rows, shape = _rows(x, dims, keepdim)
    return _sum(rows).to(dtype or x.dtype).view(shape)


def row_mean(x: Tensor, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    rows, shape = _rows(x, dims, keepdim)
    return (_sum(rows) / rows.shape[-1]).to(dtype or x.dtype).view(shape)


def row_var(x: Tensor, dims: Dims = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    """The variance in two passes: the mean first, then squared distances from it."""
    rows, shape = _rows(x, dims, keepdim)
    rows = _accumulated(rows)
    count = rows.shape[-1]
    centred = rows - (_sum(rows) / count)[:, None]
    return (_sum(centred * centred) / max(0, count - correction)).to(x.dtype).view(shape)


def row_norm(x: Tensor, order: float = 2, dims: Dims = None, keepdim: bool = False) -> Tensor:
    """The vector norm of a finite order above 0."""
    rows, shape = _rows(x, dims, keepdim)
    powers = _accumulated(rows).abs().pow(order)
    return _sum(powers).pow(1 / order).to(x.dtype).view(shape)


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    powers = _powers(x, dim)
    return (powers / row_sum(powers, dim, True)).to(dtype or x.dtype)


def log_softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    wide = _accumulated(x)
    return (wide - wide.amax(dim, True) - row_sum(_powers(x, dim), dim, True).log()).to(dtype or x.dtype)


def logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    wide = _accumulated(x)
    top = wide.amax(dim, True)
    top = torch.where(top.isfinite(), top, 0.0)  # infinities come through the sum
    total = row_sum(torch.exp(wide - top), dim, True).log() + top
    return (total if keepdim else total.squeeze(dim)).to(x.dtype)


def layer_norm(x: Tensor, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Over the last `size` numbers: minus their mean, over their standard deviation, times weight, plus bias."""
    if (kernels := gpu_module("reduce", x.device)) is not None:
        return kernels.norm(x, size, weight, bias, eps, centred=True)  # type: ignore[no-any-return]
    rows = _accumulated(x).reshape(-1, size)
    rows = rows - (tree_sum(rows) / size)[:, None]
    return _scaled(rows, weight, bias, eps).to(x.dtype).view(x.shape)


def rms_norm(x: Tensor, size: int, weight: Tensor | None, eps: float) -> Tensor:
    """Over the last `size` numbers of each row: over their root mean square, times weight."""
    if (kernels := gpu_module("reduce", x.device)) is not None:
        return kernels.norm(x, size, weight, None, eps, centred=False)  # type: ignore[no-any-return]
    return _scaled(_accumulated(x).reshape(-1, size), weight, None, eps).to(x.dtype).view(x.shape)


def cumsum(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Running sums by doubling distances: each result is added up in one fixed order."""
    if not (dtype or x.dtype).is_floating_point:
        return torch.cumsum(x, dim, dtype=dtype)  # integers have one sum in any order
    total, distance = _accumulated(x).movedim(dim, -1), 1
    while distance < total.shape[-1]:
        total = total + F.pad(total[..., :-distance], (distance, 0))
        distance *= 2
    return total.movedim(-1, dim).to(dtype or x.dtype)


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Values and indices; of equal values the lowest index comes first, whatever the algorithm."""
    values, indices = torch.sort(x, dim=dim, descending=descending, stable=True)
    return values, indices


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) in order; of equal values the lowest index is taken first."""
    values, indices = sort(x, dim, descending=largest)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _sum(rows: Tensor) -> Tensor:
    """[R, N] -> [R] in float32 at least."""
    kernels = gpu_module("reduce", rows.device)
    if kernels is None or rows.dtype == torch.float64:
        return tree_sum(_accumulated(rows))
    return kernels.row_sum(rows)  # type: ignore[no-any-return]


def _accumulated(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def reduced_dims(x: Tensor, dims: Dims) -> list[int]:
    """The dimensions that a reduction over `dims` removes, ascending; None and [] mean all."""
    chosen = range(x.dim()) if dims is None or dims == [] or dims == () else [dims] if isinstance(dims, int) else dims
    return sorted({dim % x.dim() for dim in chosen})


def _rows(x: Tensor, dims: Dims, keepdim: bool) -> tuple[Tensor, list[int]]:
    """x as [R, N] with the reduced dimensions last, and the shape of the result."""
    reduced = reduced_dims(x, dims)
    kept = [dim for dim in range(x.dim()) if dim not in reduced]
    shape = [1 if dim in reduced else x.shape[dim] for dim in range(x.dim()) if keepdim or dim not in reduced]
    count = math.prod(x.shape[dim] for dim in reduced)
    return x.permute(*kept, *reduced).reshape(-1, count), shape


def _powers(x: Tensor, dim: int) -> Tensor:
    wide = _accumulated(x)
    return torch.exp(wide - wide.amax(dim, True))


def _scaled(rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = rows * torch.rsqrt(tree_sum(rows * rows) / rows.shape[-1] + eps)[:, None]
    y = y if weight is None else y * weight.flatten().to(y.dtype)
    return y if bias is None else y + bias.flatten().to(y.dtype)
