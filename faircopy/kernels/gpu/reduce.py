"""Row reductions, one program per row: the same compiled kernel reads a row whatever the number of rows.

A kernel is compiled for each width and type; its inputs are aligned, so that there is one variant of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu.launch import aligned, begin, launched, options, power

CHUNK = 8192  # numbers a program holds at once


@launched
@triton.jit
def _row_sum(x, out, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * N + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


@launched
@triton.jit
def _norm(
    x, weight, bias, out, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    begin(PDL)
    value = tl.load(x + row * N + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / N, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / N + eps)
    if WEIGHTED:
        value = value * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value = value + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, value.to(out.dtype.element_ty), mask=inside)


def row_sum(rows: Tensor) -> Tensor:
    """[R, N] -> [R] in float32."""
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    n = rows.shape[1]
    if rows.numel():
        _row_sum[(rows.shape[0],)](
            aligned(rows), out, N=n, BLOCK=min(power(n), CHUNK), num_warps=_warps(n), **options(rows.device)
        )
    return out if rows.numel() else out.zero_()


def norm(x: Tensor, size: int, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """Layer norm (centred) or RMS norm over the last `size` numbers of every row."""
    source = aligned(x)
    out = torch.empty_like(source)
    _norm[(x.numel() // size,)](
        source, _flat(weight), _flat(bias), out, eps,
        N=size, BLOCK=power(size), CENTRED=centred, WEIGHTED=weight is not None, BIASED=bias is not None,
        num_warps=_warps(size), **options(x.device),
    )  # fmt: skip
    return out


def _flat(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else aligned(vector.flatten())


def _warps(n: int) -> int:
    return 1 if n <= 256 else 4 if n <= 2048 else 8
