"""A state takes in what a product says: through an activation, and per head through a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu.activation import activated
from faircopy.kernels.gpu.launch import begin, launched, options, power
from faircopy.kernels.gpu.linear import add_parts_twin, added

WIDTH = 512  # columns of a program without heads


@launched
@triton.jit(do_not_specialize=["rows"])
def _take_in(
    x, said, query, out, rows, scale,
    N: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, QUERY_PARTS: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head): x + silu(gate * value), the gate from query and key."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    col = tl.program_id(1) * WIDTH + at
    inside = (at < WIDTH) & (col < N)
    begin(PDL)
    size = rows.to(tl.int64) * N
    if GATED:
        key = added(said + row * 2 * N + col, 2 * size, inside, PARTS)
        value = added(said + row * 2 * N + N + col, 2 * size, inside, PARTS)
        asked = added(query + row * N + col, size, inside, QUERY_PARTS)
        value *= tl.sum(tl.where(inside, asked * key, 0.0), 0) * scale
    else:
        value = added(said + row * N + col, size, inside, PARTS)
    old = tl.load(x + row * N + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + col, (old + activated(value, "silu")).to(out.dtype.element_ty), mask=inside)


def take_in(x: Tensor, said: Tensor, query: Tensor | None = None, heads: int = 1) -> Tensor:
    """x [T, N] plus silu of a product's parts [P, T, N].

    query: parts [Q, T, N] of another product; then `said` has keys beside values [P, T, 2 N], and per head the product
    of query and key is a gate on the value.
    """
    (rows, n), out = x.shape, torch.empty_like(x)
    width = WIDTH if query is None else n // heads
    _take_in[(rows, -(-n // width))](
        x, said, query, out, rows, width**-0.5, N=n, WIDTH=width, BLOCK=power(width), PARTS=said.shape[0],
        QUERY_PARTS=0 if query is None else query.shape[0], GATED=query is not None, num_warps=2, **options(x.device),
    )  # fmt: skip
    return out


def take_in_twin(x: Tensor, said: Tensor, query: Tensor | None = None, heads: int = 1) -> Tensor:
    value = add_parts_twin(said, torch.float32)
    if query is not None:
        parts = (*value.chunk(2, -1), add_parts_twin(query, torch.float32))
        key, value, asked = (part.unflatten(-1, (heads, -1)) for part in parts)
        value = ((asked * key).sum(-1, keepdim=True) * key.shape[-1] ** -0.5 * value).flatten(-2)
    return (x.float() + F.silu(value)).to(x.dtype)
