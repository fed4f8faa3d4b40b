"""Between the fused projection and attention on Hopper: normalise heads, rotate them, store keys and values.

Many rows: a kernel of its own. Few rows: Hopper's attention does it for itself, see flash.py. One function has the
arithmetic, so both have the same bits: a head is always summed by the same number of lanes, eight numbers of a lane at
a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from faircopy.kernels.gpu.launch import TRY_NEW, hopper, launched, options
from faircopy.kernels.gpu.pending_norm import added_parts

HEADS_PER_BLOCK = 1024  # divided by the size of a head: one head for each group of lanes of four warps


@gluon.jit
def finite(x):
    """A masked NaN still spreads: the cache holds zeros instead."""
    return gl.where((x == x) & (gl.abs(x) != float("inf")), x, 0.0)


@gluon.jit
def _partner(dims, HALF: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Each dimension's partner in its rotation, which angle turns the two, and the sign of the partner's sine."""
    if INTERLEAVED:
        low = dims % 2 == 0
        partner, angle = gl.where(low, dims + 1, dims - 1), dims // 2
    else:
        low = dims < HALF
        partner, angle = gl.where(low, dims + HALF, dims - HALF), gl.where(low, dims, dims - HALF)
    turned = dims < 2 * HALF
    return gl.where(turned, partner, dims), gl.where(turned, angle, 0), gl.where(low, -1.0, 1.0), turned


@gluon.jit
def turned_heads(
    parts, norm, table, row, head, turns, position, rows, eps, context, kind: gl.constexpr,
    WIDTH: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, NORMED: gl.constexpr,
    ROTARY: gl.constexpr, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One head of the projection per line: of `row` (-1: none), normalised and rotated where it `turns`."""
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    live, turning = (row >= 0)[:, None], ((row >= 0) & turns)[:, None]
    line, size = row.to(gl.int64)[:, None] * WIDTH + head[:, None] * D, rows.to(gl.int64) * WIDTH
    # all but the product was there before it began: it is read while the product still runs
    if NORMED:
        weight = gl.load(norm + head[:, None] * D + dims[None, :], mask=turning, other=1.0).to(gl.float32)
    if ROTARY:
        partner, angle, sign, rotated = _partner(dims, HALF, INTERLEAVED)
        place = gl.minimum(gl.maximum(position, 0), context - 1).to(gl.int64)[:, None] * (2 * HALF) + angle[None, :]
        cos, sin = gl.load(table + place).to(gl.float32), gl.load(table + place + HALF).to(gl.float32)
        if NORMED:
            where = norm + head[:, None] * D + partner[None, :]
            other_weight = gl.load(where, mask=turning, other=1.0).to(gl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = added_parts(parts, line + dims[None, :], size, live, PARTS).to(kind).to(gl.float32)
    if NORMED:
        scale = gl.where(turns, gl.rsqrt(gl.sum(x * x, 1) / D + eps), 1.0)[:, None]
        x = (x * scale * weight).to(kind).to(gl.float32)
    if ROTARY:
        other = added_parts(parts, line + partner[None, :], size, live, PARTS).to(kind).to(gl.float32)
        if NORMED:
            other = (other * scale * other_weight).to(kind).to(gl.float32)
        x = gl.where(rotated[None, :] & turns[:, None], gl.fma(other, sin * sign[None, :], x * cos), x)
    return x.to(kind)


@launched
@gluon.jit(do_not_specialize=["rows"])
def _place(
    parts, norm, table, positions, slots, q, keys, values, rows, eps, context,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
    NORMED: gl.constexpr, ROTARY: gl.constexpr, INTERLEAVED: gl.constexpr, HB: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Block (row, HB heads): query heads first, then key heads, then value heads."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    blocks: gl.constexpr = (HEADS + 2 * KV + HB - 1) // HB
    at, first = gl.program_id(0) // blocks, gl.program_id(0) % blocks * HB
    head = first + gl.arange(0, HB, gl.SliceLayout(1, layout))
    here = head < HEADS + 2 * KV
    row, position = gl.where(here, at, -1), gl.load(positions + at) + gl.zeros_like(head)
    slot = gl.load(slots + at).to(gl.int64)
    kind: gl.constexpr = q.dtype.element_ty
    x = turned_heads(
        parts, norm, table, row, head, head < HEADS + KV, position, rows, eps, context, kind,
        (HEADS + 2 * KV) * D, D, HALF, PARTS, NORMED, ROTARY, INTERLEAVED, layout, PDL,
    )  # fmt: skip
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    gl.store(q + (at.to(gl.int64) * HEADS + head)[:, None] * D + dims, x, mask=(head < HEADS)[:, None])
    stored, key, value = finite(x.to(gl.float32)).to(kind), head - HEADS, head - HEADS - KV
    gl.store(keys + (slot * KV + key)[:, None] * D + dims, stored, mask=((key >= 0) & (key < KV))[:, None])
    gl.store(values + (slot * KV + value)[:, None] * D + dims, stored, mask=((value >= 0) & here)[:, None])


@dataclass(frozen=True, slots=True)
class PendingHeads:
    """A fused projection whose heads are still to be normalised, rotated and stored, by whoever attends."""

    parts: Tensor  # [P, T, (H + 2 Hkv) D]
    norm: Tensor | None  # [H + Hkv, D]
    table: Tensor | None  # [positions, 2, rotary / 2]
    positions: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor
    heads: int
    eps: float
    interleaved: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the queries."""
        return self.parts.shape[1], self.heads, self.keys.shape[2]

    @property
    def context(self) -> int:
        return 1 if self.table is None else self.table.shape[0]

    def constants(self) -> dict[str, int | bool]:
        """What kernels are compiled for."""
        return {
            "HALF": 0 if self.table is None else self.table.shape[2], "PARTS": self.parts.shape[0],
            "NORMED": self.norm is not None, "ROTARY": self.table is not None, "INTERLEAVED": self.interleaved,
        }  # fmt: skip

    def queries(self) -> Tensor:
        """Queries [T, H, D], keys and values stored, by a kernel of its own."""
        rows, (kv, d) = self.parts.shape[1], self.keys.shape[1:]
        q = torch.empty(rows, self.heads, d, dtype=self.keys.dtype, device=self.keys.device)
        hb = HEADS_PER_BLOCK // d
        _place[(rows * -(-(self.heads + 2 * kv) // hb),)](
            self.parts, self.norm, self.table, self.positions, self.slots, q, self.keys, self.values, rows, self.eps,
            self.context, HEADS=self.heads, KV=kv, D=d, **self.constants(), HB=hb, num_warps=4,
            **options(self.keys.device),
        )  # fmt: skip
        return q


def known(keys: Tensor) -> bool:
    """Whether these kernels store to such a pool."""
    return TRY_NEW and hopper(keys.device) and keys.element_size() == 2 and keys.shape[2] in (64, 128)
