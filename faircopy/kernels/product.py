"""Products of two activations, each result summed in one order whatever the shapes around it."""

from __future__ import annotations

import torch
from torch import Tensor

from faircopy.kernels.available import gpu_module
from faircopy.kernels.reduce import row_sum


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K] x [B, K, N] -> [B, M, N], in float32 inside."""
    if a.shape[-1] == 1:  # nothing is summed
        return a * b
    kernels = gpu_module("product", a.device)
    if kernels is not None:
        return kernels.batched_product(a, b)  # type: ignore[no-any-return]
    terms = a.float()[:, :, None, :] * b.float().transpose(1, 2)[:, None, :, :]
    return row_sum(terms, -1).to(a.dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul's shapes: vectors, matrices and batches of them, broadcast against each other."""
    rows = a[None, :] if a.dim() == 1 else a
    columns = b[:, None] if b.dim() == 1 else b
    batch = torch.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])  # type: ignore[no-untyped-call]
    left = rows.expand(*batch, *rows.shape[-2:]).reshape(-1, *rows.shape[-2:])
    right = columns.expand(*batch, *columns.shape[-2:]).reshape(-1, *columns.shape[-2:])
    out = batched_product(left, right).view(*batch, rows.shape[-2], columns.shape[-1])
    out = out.squeeze(-1) if b.dim() == 1 else out
    return out.squeeze(-1 if b.dim() == 1 else -2) if a.dim() == 1 else out
