"""Between products: add a product's parts to the residual stream and normalise what comes out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu import pending_norm
from faircopy.kernels.gpu.launch import begin, launched, options, power
from faircopy.kernels.gpu.linear import add_parts_twin, added


@triton.jit
def _normalised(x, weight, at, inside, eps, N: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    return x * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)


@launched
@triton.jit(do_not_specialize=["apart"])
def _embed(
    ids, table, weight, x, y, multiplier, eps, vocab, apart,
    N: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < N
    begin(PDL)
    token = row.to(tl.int64)
    if not ALL:
        token = tl.minimum(tl.maximum(tl.load(ids + row * apart), 0), vocab - 1).to(tl.int64)
    value = tl.load(table + token * N + at, mask=inside, other=0.0).to(tl.float32) * multiplier
    value = value.to(x.dtype.element_ty)
    tl.store(x + row * N + at, value, mask=inside)
    tl.store(
        y + row * N + at, _normalised(value.to(tl.float32), weight, at, inside, eps, N).to(y.dtype.element_ty), inside
    )


@launched
@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x, parts, after, weight, y, healthy, rows, multiplier, eps,
    N: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr, WATCH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    kind = x.dtype.element_ty
    value = tl.load(x + row * N + at, mask=inside, other=0.0).to(tl.float32)  # written before the product began
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    begin(PDL)
    total = added(parts + row * N + at, rows.to(tl.int64) * N, inside, PARTS)
    total = total.to(kind).to(tl.float32)
    if AFTER:
        total = _normalised(total, after, at, inside, eps, N).to(kind).to(tl.float32)
    value = tl.fma(total, multiplier, value).to(kind)
    tl.store(x + row * N + at, value, mask=inside)
    value = value.to(tl.float32)
    if WATCH:
        wrong = tl.sum(((value != value) | (tl.abs(value) == float("inf"))).to(tl.int32), 0)
        tl.store(healthy + row, wrong == 0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / N + eps)
    tl.store(y + row * N + at, (value * scale).to(kind), mask=inside)


def embed_norm(
    ids: Tensor | None, table: Tensor, weight: Tensor, multiplier: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Embedded tokens [T, N], and the same normalised. An id outside the table counts as its last row.

    ids: None for all rows of the table, in their order.
    """
    rows, n = table.shape[0] if ids is None else ids.shape[0], table.shape[1]
    x = torch.empty(rows, n, dtype=table.dtype, device=table.device)
    y = torch.empty_like(x)
    _embed[(rows,)](
        ids, table, weight, x, y, multiplier, eps, table.shape[0], 1 if ids is None else ids.stride(0),
        N=n, BLOCK=power(n), ALL=ids is None, num_warps=_warps(n), **options(x.device),
    )  # fmt: skip
    return x, y


def embed_norm_twin(
    ids: Tensor | None, table: Tensor, weight: Tensor, multiplier: float, eps: float
) -> tuple[Tensor, Tensor]:
    rows = table if ids is None else table[ids.clamp(0, table.shape[0] - 1)]
    x = (rows.float() * multiplier).to(table.dtype)
    return x, _norm_twin(x, weight, eps)


@launched
@triton.jit(do_not_specialize=["apart"])
def _pair(
    ids, table, state, token_weight, state_weight, tokens, states, eps, vocab, apart,
    N: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    begin(PDL)
    if tl.program_id(1) == 0:
        token = tl.minimum(tl.maximum(tl.load(ids + row * apart), 0), vocab - 1).to(tl.int64)
        value = tl.load(table + token * N + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            value = _normalised(value, token_weight, at, inside, eps, N)
        tl.store(tokens + row * STRIDE + at, value.to(tokens.dtype.element_ty), mask=inside)
    else:
        value = tl.load(state + row * N + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            value = _normalised(value, state_weight, at, inside, eps, N)
        tl.store(states + row * STRIDE + at, value.to(states.dtype.element_ty), mask=inside)


def pair(
    ids: Tensor, table: Tensor, state: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float, apart: bool = False
) -> Tensor:
    """Embedded tokens and states [T, N] side by side [T, 2 N], or apart [2, T, N], in the states' type.

    weights: both are normalised, by these.
    """
    (rows, n), (first, second) = state.shape, weights or (None, None)
    out = torch.empty((2, rows, n) if apart else (rows, 2 * n), dtype=state.dtype, device=state.device)
    tokens, states = out if apart else (out[:, :n], out[:, n:])
    _pair[(rows, 2)](
        ids, table, state, first, second, tokens, states, eps, table.shape[0], ids.stride(0),
        N=n, STRIDE=tokens.stride(0), BLOCK=power(n), NORMED=weights is not None, num_warps=_warps(n),
        **options(state.device),
    )  # fmt: skip
    return out


def pair_twin(
    ids: Tensor, table: Tensor, state: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float, apart: bool = False
) -> Tensor:
    both = table[ids.clamp(0, table.shape[0] - 1)].to(state.dtype), state
    if weights is not None:
        both = _norm_twin(both[0], weights[0], eps), _norm_twin(both[1], weights[1], eps)
    return torch.stack(both) if apart else torch.cat(both, -1)


def add_norm(
    x: Tensor,
    parts: Tensor,
    weight: Tensor,
    eps: float,
    after: Tensor | None = None,
    multiplier: float = 1.0,
    healthy: Tensor | None = None,
) -> Tensor:
    """x [T, N] += a product's parts [P, T, N], normalised by themselves if `after`; returns the sum, normalised.

    healthy [T], if given, is set to whether the row is finite.
    """
    if pending_norm.known(x):
        return pending_norm.add_norm(x, parts, weight, eps, after, multiplier, healthy)
    y = torch.empty_like(x)
    rows, n = x.shape
    _add_norm[(rows,)](
        x, parts, after, weight, y, healthy, rows, multiplier, eps,
        N=n, PARTS=parts.shape[0], AFTER=after is not None, WATCH=healthy is not None, BLOCK=power(n),
        num_warps=_warps(n), **options(x.device),
    )  # fmt: skip
    return y


def add_norm_twin(
    x: Tensor,
    parts: Tensor,
    weight: Tensor,
    eps: float,
    after: Tensor | None = None,
    multiplier: float = 1.0,
    healthy: Tensor | None = None,
) -> Tensor:
    total = add_parts_twin(parts, x.dtype)
    if after is not None:
        total = _norm_twin(total, after, eps)
    x.copy_(x.float() + total.float() * multiplier)
    if healthy is not None:
        healthy.copy_(torch.isfinite(x).all(-1))
    return _norm_twin(x, weight, eps)


def _norm_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def _warps(n: int) -> int:
    return 4 if n <= 2048 else 8
