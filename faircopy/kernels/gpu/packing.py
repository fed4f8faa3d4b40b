"""A step's rows end to end: where drafts vary in length, only the nodes that were found are fed to the target.

How many they are is known on the device alone; the host reads one number and chooses a pass of that size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu.attention import END, END_, PagePlan, block_length
from faircopy.kernels.gpu.launch import begin, options, power
from faircopy.kernels.gpu.step import LIMIT, WIDTH, Feed, Slots


@dataclass(frozen=True, slots=True)
class Bale:
    """The rows of a feed, seat by seat: the last token and its nodes, without gaps; behind them rows for nobody."""

    ids: Tensor  # [B W] int32
    positions: Tensor  # [B W] int32
    slots: Tensor  # [B W] int64
    keys: Tensor  # [B W] int64
    heat: Tensor  # [B W] float32
    starts: Tensor  # [B + 1] int32: the first row of each seat, then how many there are in all
    rows: Tensor  # [B, W] int32: the row of each query; -1: none
    ranges: Tensor  # [B, 2] int32: key blocks that a seat's queries look at, all or none

    @classmethod
    def empty(cls, size: int, width: int, device: torch.device) -> Bale:
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
        """One tile a seat, whose rows are wherever they were packed: a plan that can be captured."""
        seqs = torch.arange(self.rows.shape[0], dtype=torch.int32, device=tables.device)
        return PagePlan(self.rows, self.ranges, seqs, tables, page, -(-context // block_length(dim, itemsize)))


@triton.jit(do_not_specialize=["size"])
def _pack(
    control, lengths, ids, positions, slots, keys, heat,
    to_ids, to_positions, to_slots, to_keys, to_heat, starts, rows, ranges, columns, trash, size,
    SP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b counts everybody's rows and moves its own; those it does not need go behind everybody's."""
    b = tl.program_id(0)
    begin(PDL)
    seat, at = tl.arange(0, SP), tl.arange(0, WP)
    here = seat < size
    n = tl.load(lengths + seat, mask=here, other=0)
    limit = tl.load(control + seat.to(tl.int64) * columns + 2, mask=here, other=0)
    width = tl.load(control + seat.to(tl.int64) * columns + 3, mask=here, other=0)
    room = tl.maximum(tl.minimum(width, limit - n - 1), 0)
    found = here[:, None] & (at[None, :] < W - 1)
    guess = tl.load(ids + seat[:, None] * W + 1 + at[None, :], mask=found, other=-1)
    nodes = tl.min(tl.where((guess < 0) | (at[None, :] >= room[:, None]), at[None, :], W - 1), 1)
    counts = tl.where(n < limit, 1 + nodes, 0)  # a text of full length feeds nothing; nor does an empty seat
    start = tl.sum(tl.where(seat < b, counts, 0), 0)
    mine = tl.sum(tl.where(seat == b, counts, 0), 0)
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
    tl.store(to_slots + place, tl.where(live, tl.load(slots + source, mask=real, other=0), trash), mask=inside)
    tl.store(to_keys + place, tl.load(keys + source, mask=real, other=0), mask=inside)
    tl.store(to_heat + place, tl.load(heat + source, mask=real, other=0.0), mask=inside)


def pack(slots: Slots, feed: Feed, bale: Bale, trash: int) -> None:
    """Move the rows that count to the front of the bale; a node counts before the first -1 and within its room."""
    size, width = feed.ids.shape
    _pack[(size,)](
        slots.control, slots.lengths, feed.ids, feed.positions, feed.slots, feed.keys, feed.heat,
        bale.ids, bale.positions, bale.slots, bale.keys, bale.heat, bale.starts, bale.rows, bale.ranges,
        slots.control.stride(0), trash, size,
        SP=power(size, 2), W=width, WP=power(width, 2), num_warps=4, **options(feed.ids.device),
    )  # fmt: skip


def pack_twin(slots: Slots, feed: Feed, bale: Bale, trash: int) -> None:
    for whole in (bale.ids, bale.positions, bale.keys, bale.heat, bale.ranges):
        whole.zero_()
    bale.slots.fill_(trash)
    bale.rows.fill_(-1)
    bale.starts[0] = start = 0
    for b, row in enumerate(slots.control.tolist()):
        count = _count_twin(row, int(slots.lengths[b]), feed.ids[b, 1:].tolist())
        stop = start + count
        for name in ("ids", "positions", "slots", "keys", "heat"):
            getattr(bale, name)[start:stop] = getattr(feed, name)[b, :count]
        bale.rows[b, :count] = torch.arange(start, stop)
        bale.ranges[b, 1] = END if count else 0
        bale.starts[b + 1] = start = stop


def _count_twin(row: list[int], n: int, nodes: list[int]) -> int:
    """How many rows a seat feeds."""
    room = max(min(row[WIDTH], row[LIMIT] - n - 1, len(nodes)), 0)
    found = next((place for place, token in enumerate(nodes[:room]) if token < 0), room)
    return 1 + found if n < row[LIMIT] else 0


__all__ = ["Bale", "pack", "pack_twin"]
