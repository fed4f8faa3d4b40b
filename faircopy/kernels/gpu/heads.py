"""From the fused projection to attention in one pass: normalise heads, rotate them, store keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu.launch import call_next, launched, options, power, wait
from faircopy.kernels.gpu.linear import add_parts_twin, added
from faircopy.kernels.rope import rotate


@triton.jit
def _read(
    parts, row, rows, heads, dims, inside, WIDTH: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, kind: tl.constexpr
):
    """Some heads of one row, parts added, as the product's type has them."""
    where = parts + row * WIDTH + heads[:, None] * D + dims[None, :]
    total = added(where, rows.to(tl.int64) * WIDTH, inside, PARTS)
    return total.to(kind).to(tl.float32)


@triton.jit
def _finite(x):
    """A masked NaN still spreads: the cache holds zeros instead."""
    return tl.where((x == x) & (tl.abs(x) != float("inf")), x, 0.0)


@launched
@triton.jit(do_not_specialize=["rows"])
def _place(
    parts, norm, table, positions, slots, q, keys, values, rows, eps, context,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
    NORMED: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    HB: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Block (row, HB heads): query heads first, then key heads, then value heads."""
    WIDTH: tl.constexpr = (HEADS + 2 * KV) * D
    kind = q.dtype.element_ty
    call_next(PDL)  # attention finds its share of the keys meanwhile
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HB + tl.arange(0, HB)
    dims = tl.arange(0, DP)
    inside = (heads[:, None] < HEADS + 2 * KV) & (dims[None, :] < D)
    turns = heads < HEADS + KV
    turning = inside & turns[:, None]
    # all but the product was there before it began: it is read while the product still runs
    slot = tl.load(slots + row).to(tl.int64)
    if NORMED:
        weight = tl.load(norm + heads[:, None] * D + dims[None, :], mask=turning, other=1.0).to(tl.float32)
    if ROTARY:
        # each dimension's partner: half a rotation away, or its neighbour
        if INTERLEAVED:
            partner = dims ^ 1
            angle = dims // 2
            sign = tl.where(dims % 2 == 0, -1.0, 1.0)
        else:
            partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
            angle = tl.where(dims < HALF, dims, dims - HALF)
            sign = tl.where(dims < HALF, -1.0, 1.0)
        rotated = dims < 2 * HALF
        partner = tl.where(rotated, partner, dims)
        angle = tl.where(rotated, angle, 0)
        position = tl.minimum(tl.maximum(tl.load(positions + row), 0), context - 1).to(tl.int64)
        cos = tl.load(table + position * 2 * HALF + angle).to(tl.float32)[None, :]
        sin = tl.load(table + position * 2 * HALF + HALF + angle).to(tl.float32)[None, :]
        if NORMED:
            other_weight = tl.load(norm + heads[:, None] * D + partner[None, :], mask=turning, other=1.0)
    wait(PDL)
    x = _read(parts, row, rows, heads, dims, inside, WIDTH, D, PARTS, kind)
    scale = tl.full((HB,), 1.0, tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        scale = tl.where(turns, scale, 1.0)
        x = (x * scale[:, None] * weight).to(kind).to(tl.float32)
    if ROTARY:
        other = _read(parts, row, rows, heads, partner, inside, WIDTH, D, PARTS, kind)
        if NORMED:
            other = (other * scale[:, None] * other_weight.to(tl.float32)).to(kind).to(tl.float32)
        turned = tl.fma(other, sin * sign[None, :], x * cos)
        x = tl.where(rotated[None, :] & turns[:, None], turned, x)
    tl.store(q + (row * HEADS + heads[:, None]) * D + dims[None, :], x.to(kind), mask=inside & (heads[:, None] < HEADS))
    stored = _finite(x.to(kind).to(tl.float32)).to(keys.dtype.element_ty)
    key, value = heads - HEADS, heads - HEADS - KV
    is_key, is_value = (key >= 0) & (key < KV), value >= 0
    tl.store(keys + (slot * KV + key[:, None]) * D + dims[None, :], stored, mask=inside & is_key[:, None])
    tl.store(values + (slot * KV + value[:, None]) * D + dims[None, :], stored, mask=inside & is_value[:, None])


def place(
    parts: Tensor,
    norm: Tensor | None,
    table: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Queries [T, H, D] out of the fused projection [P, T, (H + 2 Hkv) D]; keys and values go to their slots.

    norm [H + Hkv, D] or None; table [positions, 2, rotary / 2] or None: heads are not rotated.
    """
    rows, (kv, d) = parts.shape[1], keys.shape[1:]
    q = torch.empty(rows, heads, d, dtype=keys.dtype, device=keys.device)
    hb = 8
    _place[(rows, -(-(heads + 2 * kv) // hb))](
        parts, norm, table, positions, slots, q, keys, values, rows, eps, 1 if table is None else table.shape[0],
        HEADS=heads, KV=kv, D=d, HALF=0 if table is None else table.shape[2], PARTS=parts.shape[0],
        NORMED=norm is not None, ROTARY=table is not None, INTERLEAVED=interleaved, HB=hb, DP=power(d), num_warps=4,
        **options(keys.device),
    )  # fmt: skip
    return q


def place_twin(
    parts: Tensor,
    norm: Tensor | None,
    table: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    eps: float,
    interleaved: bool,
) -> Tensor:
    kv, d = keys.shape[1:]
    qkv = add_parts_twin(parts, keys.dtype).view(-1, heads + 2 * kv, d)
    qk, v = qkv[:, : heads + kv], qkv[:, heads + kv :]
    if norm is not None:
        qk = (torch.nn.functional.rms_norm(qk.float(), (d,), None, eps) * norm.float()).to(keys.dtype)
    if table is not None:
        angles = table[positions.clamp(0, table.shape[0] - 1).long()].float()
        qk = rotate(qk.float(), angles, interleaved).to(keys.dtype)
    keys[slots.long()] = torch.nan_to_num(qk[:, heads:], 0.0, 0.0, 0.0)
    values[slots.long()] = torch.nan_to_num(v, 0.0, 0.0, 0.0)
    return qk[:, :heads].contiguous()
