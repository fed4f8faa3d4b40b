"""A step's rows end to end: where drafts vary in length, only the nodes that were found are fed to the target.

The number of rows is known on the device alone; the host reads it and chooses a pass of that size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.acceptance import nodes_that_fit
from faircopy.kernels.gpu.attention import END_
from faircopy.kernels.gpu.launch import begin, launched, options, power
from faircopy.kernels.gpu.pages import END, PATH, PagePlan, block_length
from faircopy.kernels.gpu.records import LIMIT, MAX_NODES, Control
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.gpu.step import fitting_nodes
from faircopy.kernels.gpu.tree import TreeNodes


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a step by batch slot: the last token and its nodes, without gaps; behind them padding rows."""

    ids: Tensor  # [B W] int32
    positions: Tensor  # [B W] int32
    slots: Tensor  # [B W] int64
    keys: Tensor  # [B W] int64
    temperatures: Tensor  # [B W] float32
    starts: Tensor  # [B + 1] int32: the first row of each batch slot, then the number of rows
    rows: Tensor  # [B, W] int32: the row of each query; -1: none
    ranges: Tensor  # [B, 2] int32: the key blocks that a batch slot's queries attend to, all or none

    @classmethod
    def empty(cls, size: int, width: int, device: torch.device) -> PackedRows:
        def table(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        ints, longs, all_rows = torch.int32, torch.int64, size * width
        return cls(
            table(ints, all_rows), table(ints, all_rows), table(longs, all_rows), table(longs, all_rows),
            table(torch.float32, all_rows), table(ints, size + 1), table(ints, size, width), table(ints, size, 2),
        )  # fmt: skip

    @property
    def total(self) -> Tensor:
        return self.starts[-1:]

    def plan(self, tables: Tensor, page: int, context: int, dim: int, itemsize: int = 2) -> PagePlan:
        """One tile per batch slot, whose rows are where they were packed: a plan that can be captured."""
        seqs = torch.arange(self.rows.shape[0], dtype=torch.int32, device=tables.device)
        blocks = -(-context // block_length(dim, itemsize))
        return PagePlan(self.rows, self.ranges, seqs, tables, page, blocks)


@launched
@triton.jit(do_not_specialize=["size"])
def _pack(
    control, lengths, ids, positions, slots, keys, temperatures,
    to_ids, to_positions, to_slots, to_keys, to_temperatures, starts, rows, ranges, stride, scratch, size,
    SP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b counts the rows of all batch slots and moves those of slot b; its padding rows go to the end."""
    b = tl.program_id(0)
    begin(PDL)
    slot, at = tl.arange(0, SP), tl.arange(0, WP)
    here = slot < size
    n = tl.load(lengths + slot, mask=here, other=0)
    line = control + slot.to(tl.int64) * stride
    limit = tl.load(line + LIMIT, mask=here, other=0)
    fit = fitting_nodes(tl.load(line + MAX_NODES, mask=here, other=0), n, limit)
    found = here[:, None] & (at[None, :] < W - 1)
    guess = tl.load(ids + slot[:, None] * W + 1 + at[None, :], mask=found, other=-1)
    nodes = tl.min(tl.where((guess < 0) | (at[None, :] >= fit[:, None]), at[None, :], W - 1), 1)
    counts = tl.where(n < limit, 1 + nodes, 0)  # a sequence at its limit feeds no row, nor does an empty batch slot
    start = tl.sum(tl.where(slot < b, counts, 0), 0)
    mine = tl.sum(tl.where(slot == b, counts, 0), 0)
    total = tl.sum(counts, 0)
    tl.store(starts + b, start)
    tl.store(starts + size, total, mask=b == size - 1)
    tl.store(ranges + 2 * b, 0)
    tl.store(ranges + 2 * b + 1, tl.where(mine > 0, END_, 0))
    inside, live = at < W, at < mine
    real = inside & live
    tl.store(rows + b * W + at, tl.where(live, start + at, -1), mask=inside)
    place = tl.where(live, start + at, total + b * W - start + at - mine)
    source = b * W + at
    tl.store(to_ids + place, tl.load(ids + source, mask=real, other=0), mask=inside)
    tl.store(to_positions + place, tl.load(positions + source, mask=real, other=0), mask=inside)
    tl.store(to_slots + place, tl.where(live, tl.load(slots + source, mask=real, other=0), scratch), mask=inside)
    tl.store(to_keys + place, tl.load(keys + source, mask=real, other=0), mask=inside)
    tl.store(to_temperatures + place, tl.load(temperatures + source, mask=real, other=0.0), mask=inside)


def pack(batch: BatchSlots, inputs: StepInputs, packed_rows: PackedRows, scratch: int) -> None:
    """Move the rows that count to the front; a node counts if it lies before the first -1 and fits."""
    size, width = inputs.ids.shape
    _pack[(size,)](
        batch.control, batch.lengths, inputs.ids, inputs.positions, inputs.slots, inputs.keys, inputs.temperatures,
        packed_rows.ids, packed_rows.positions, packed_rows.slots, packed_rows.keys, packed_rows.temperatures,
        packed_rows.starts, packed_rows.rows, packed_rows.ranges,
        batch.control.stride(0), scratch, size,
        SP=power(size, 2), W=width, WP=power(width, 2), num_warps=4, **options(inputs.ids.device),
    )  # fmt: skip


def pack_twin(batch: BatchSlots, inputs: StepInputs, packed_rows: PackedRows, scratch: int) -> None:
    for whole in (
        packed_rows.ids,
        packed_rows.positions,
        packed_rows.keys,
        packed_rows.temperatures,
        packed_rows.ranges,
    ):
        whole.zero_()
    packed_rows.slots.fill_(scratch)
    packed_rows.rows.fill_(-1)
    packed_rows.starts[0] = start = 0
    for b, row in enumerate(batch.control.tolist()):
        count = _count_twin(row, int(batch.lengths[b]), inputs.ids[b, 1:].tolist())
        stop = start + count
        for name in ("ids", "positions", "slots", "keys", "temperatures"):
            getattr(packed_rows, name)[start:stop] = getattr(inputs, name)[b, :count]
        packed_rows.rows[b, :count] = torch.arange(start, stop)
        packed_rows.ranges[b, 1] = END if count else 0
        packed_rows.starts[b + 1] = start = stop


def _count_twin(row: list[int], n: int, nodes: list[int]) -> int:
    """How many rows a batch slot feeds."""
    fit = min(nodes_that_fit(row[Control.MAX_NODES], n, row[Control.LIMIT]), len(nodes))
    found = next((place for place, token in enumerate(nodes[:fit]) if token < 0), fit)
    return 1 + found if n < row[Control.LIMIT] else 0


@launched
@triton.jit(do_not_specialize=["size", "count"])
def _pack_paths(
    starts, base, paths, rows, ranges, tail_rows, tail_ranges, seqs, bases, to_paths, size, count,
    W: tl.constexpr, WP: tl.constexpr, TILES: tl.constexpr, HEIGHT: tl.constexpr, TP: tl.constexpr, PP: tl.constexpr,
    STEP: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b: the tiles of batch slot b and the tails of its rows; and of padding rows, which have none."""
    b = tl.program_id(0)
    begin(PDL)
    start, total, n = tl.load(starts + b), tl.load(starts + size), tl.load(base + b)
    mine, block = tl.load(starts + b + 1) - start, n // STEP
    place = tl.arange(0, PP)
    tl.store(rows + b * TILES * HEIGHT + place, tl.where(place < mine, start + place, -1), mask=place < TILES * HEIGHT)
    tile = tl.arange(0, TP)
    tl.store(ranges + (b * TILES + tile) * 2 + 1, block + tile * 0, mask=tile < TILES)
    at = tl.arange(0, WP)
    live = at < mine
    to = tl.where(live, start + at, total + b * W - start + at - mine)  # padding rows are those behind the last one
    inside = (at < W) & (to < count)
    tl.store(tail_rows + to, tl.where(live, to, -1), mask=inside)
    tl.store(tail_ranges + to * 2, tl.where(live, block, 0), mask=inside)
    tl.store(tail_ranges + to * 2 + 1, tl.where(live, END_, 0), mask=inside)
    tl.store(seqs + to, tl.where(live, b, 0), mask=inside)
    tl.store(bases + to, n + at * 0, mask=inside)
    node = tl.arange(0, LAST)[None, :]
    real = (inside & live)[:, None] & (node < LAST)
    path = tl.load(paths + (b * W + at)[:, None] * LAST + node, mask=real, other=0)
    tl.store(to_paths + to[:, None] * LAST + node, path, mask=real)


def pack_paths(packed_rows: PackedRows, trees: TreeNodes, plan: PagePlan, block: int) -> None:
    """Fill a plan for packed rows of trees. block: keys that tiles share, see pages.set_base."""
    tails = _tails(plan)
    (size, width), (tiles, height), count = packed_rows.rows.shape, plan.rows.shape, tails.rows.shape[0]
    tiles //= size
    _pack_paths[(size,)](
        packed_rows.starts, trees.base, trees.paths, plan.rows, plan.ranges, tails.rows, tails.ranges, tails.seqs,
        tails.bases, tails.paths, size, count, W=width, WP=power(width, 2), TILES=tiles, HEIGHT=height,
        TP=power(tiles), PP=power(tiles * height), STEP=block, LAST=PATH, num_warps=4,
        **options(trees.base.device),
    )  # fmt: skip


def pack_paths_twin(packed_rows: PackedRows, trees: TreeNodes, plan: PagePlan, block: int) -> None:
    tails, rows = _tails(plan), packed_rows.rows
    assert tails.bases is not None and tails.paths is not None, "only a plan for trees has paths"
    size, width = rows.shape
    tiles = plan.rows.view(size, -1)
    tiles[:, :width] = rows
    tiles[:, width:] = -1
    plan.ranges.view(size, -1, 2)[..., 1] = (trees.base // block)[:, None]
    tails.rows.fill_(-1)
    tails.ranges.zero_()
    for b, row in enumerate(rows.tolist()):
        for at, place in enumerate(row):
            if place >= 0:
                tails.rows[place], tails.seqs[place], tails.bases[place] = place, b, trees.base[b]
                tails.ranges[place, 0], tails.ranges[place, 1] = int(trees.base[b]) // block, END
                tails.paths[place] = trees.paths[b, at]


def _tails(plan: PagePlan) -> PagePlan:
    assert plan.tails is not None, "only a plan for trees has tails"
    return plan.tails


__all__ = ["PackedRows", "pack", "pack_paths", "pack_paths_twin", "pack_twin"]
