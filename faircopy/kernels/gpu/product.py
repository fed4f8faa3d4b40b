"""Batched products of activations in tiles of one size, so that a result's order of summation depends on K alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu.launch import aligned, begin, launched, options, power

TILE = 32  # rows and columns of a tile
DEEP = 64  # K is walked in steps of this at most


@launched
@triton.jit(do_not_specialize=["M", "N", "K"])
def _batched(a, b, out, M, N, K, BT: tl.constexpr, BK: tl.constexpr, PRECISE: tl.constexpr, PDL: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BT + tl.arange(0, BT)
    cols = tl.program_id(2) * BT + tl.arange(0, BT)
    begin(PDL)
    acc = tl.zeros((BT, BT), tl.float32)
    for start in range(0, K, BK):
        ks = start + tl.arange(0, BK)
        in_a = (rows[:, None] < M) & (ks[None, :] < K)
        in_b = (ks[:, None] < K) & (cols[None, :] < N)
        left = tl.load(a + (batch * M + rows[:, None]) * K + ks[None, :], mask=in_a, other=0.0)
        right = tl.load(b + (batch * K + ks[:, None]) * N + cols[None, :], mask=in_b, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee" if PRECISE else "tf32")
    where = out + (batch * M + rows[:, None]) * N + cols[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K] x [B, K, N] -> [B, M, N]."""
    (count, rows, inner), columns = a.shape, b.shape[2]
    out = torch.empty(count, rows, columns, dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    _batched[(count, -(-rows // TILE), -(-columns // TILE))](
        aligned(a), aligned(b), out, rows, columns, inner,
        BT=TILE, BK=min(DEEP, power(inner, 16)), PRECISE=a.dtype == torch.float32, **options(a.device),
    )  # fmt: skip
    return out
