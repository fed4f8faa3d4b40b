"""Attention of ragged queries over paged keys, row by row: a row's order of sums is a matter of its position alone.

Scores are made for blocks of as many keys as a register has lanes, at fixed positions; values are added one after the
other, first to last. Keys are read where they lie, by the slots of the row's path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from struct import pack, unpack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from faircopy.kernels.cpu.attention_ir import ARGUMENTS, attention_text
from faircopy.kernels.cpu.jit import Library, has_openmp, processor

if TYPE_CHECKING:
    from faircopy.kernels.attention import Lane


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where each packed row's keys lie. Made once per step, used by every layer."""

    rows: Tensor  # [T, 2] position, and where the slots of its path begin
    slots: Tensor  # the paths of all lanes, each with a block of scratch slots behind
    longest: int  # keys of a path at most


def plan_rows(lanes: Seq[Lane], size: int, scratch: int) -> RowPlan:
    """`size` packed rows, `scratch` a slot that may be read by anyone."""
    rows, parts, begin = np.zeros((size, 2), np.int64), [], 0
    behind = np.full(_lanes(), scratch, np.int64)
    for lane in lanes:
        places = np.asarray(lane.rows)
        rows[places, 0] = np.arange(lane.first, lane.first + len(places))
        rows[places, 1] = begin
        parts += [lane.slots, behind]
        begin += len(lane.slots) + len(behind)
    longest = max((len(lane.slots) for lane in lanes), default=0)
    return RowPlan(torch.from_numpy(rows), torch.from_numpy(np.concatenate(parts)), longest)


def attend_rows(q: Tensor, pool: Tensor, plan: RowPlan, scale: float, window: int) -> Tensor:
    """q [T, H, D] against keys and values in a pool [S, 2, Hkv, D] of the same type -> [T, H, D]."""
    size, heads, dim = q.shape
    kv_heads = pool.shape[2]
    q = q if q.stride()[1:] == (dim, 1) else q.contiguous()
    out = q.new_empty(size, heads, dim)
    threads, width = torch.get_num_threads(), plan.longest + 2 * _lanes()
    scratch = torch.empty(threads * width)
    _kernel(dim, q.dtype)(
        q.data_ptr(), pool.data_ptr(), plan.slots.data_ptr(), plan.rows.data_ptr(), out.data_ptr(), scratch.data_ptr(),
        size * kv_heads, q.stride(0), kv_heads, heads // kv_heads, window, _bits(scale), width, threads,
    )  # fmt: skip
    return out


def has_kernel(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a kernel for heads of this many numbers."""
    known = processor()
    if device.type != "cpu" or known is None or not has_openmp() or dim % known.lanes:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and known.bfloat16)


def _lanes() -> int:
    known = processor()
    assert known is not None, "the caller asks has_kernel() first"
    return known.lanes


def _bits(number: float) -> int:
    return int(unpack("<i", pack("<f", number))[0])


@cache
def _kernel(dim: int, dtype: torch.dtype) -> Any:
    known = processor()
    assert known is not None, "the caller asks has_kernel() first"
    pointers = sum(kind == "ptr" for kind, _ in ARGUMENTS)
    text = attention_text(known, dim, dtype == torch.bfloat16)
    return Library(text).function("attention", pointers, len(ARGUMENTS) - pointers + 1)
