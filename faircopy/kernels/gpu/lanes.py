"""Which rows of a tile of trees share a path, and where that path's keys lie: what Hopper's attention reads of trees.

Found once per step, for all layers. A row belongs to the lane of the last row of its tile whose path begins with its
own: that is a leaf, as far as the tile reaches. A tile whose rows lie on one path, node after node as they are stored,
is a chain's: it has no lanes, and its keys are read as a text's are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu.launch import begin, launched, options, power
from faircopy.kernels.gpu.pages import GRAIN, PATH, TAIL, PagePlan, TreeLanes


@launched
@triton.jit(do_not_specialize=["width"])
def _place_lanes(
    rows, seqs, starts, paths, positions, tables, about, lanes, slots, width,
    Q: tl.constexpr, QP: tl.constexpr, DEEP: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program tile. starts: where the nodes of each row's sequence begin."""
    tile = tl.program_id(0)
    begin(PDL)
    place = tl.arange(0, QP)
    row = tl.load(rows + tile * Q + place, mask=place < Q, other=-1)
    live = row >= 0
    base = tl.max(tl.load(starts + row, mask=live, other=0), 0)
    position = tl.load(positions + row, mask=live, other=-1).to(tl.int32)
    depth = position + 1 - base
    path = paths + row.to(tl.int64) * LAST
    # whether the path of the row in front begins with that of the row behind
    begins = live[:, None] & live[None, :] & (depth[:, None] >= depth[None, :])
    away = tl.zeros((QP,), tl.int32)  # nodes of a path that are not stored in its order
    for at in range(DEEP):
        node = tl.load(path + at, mask=live & (at < depth), other=-1)
        begins &= (node[:, None] == node[None, :]) | (at >= depth[None, :])
        away += (live & (at < depth) & (node != at)).to(tl.int32)
    last = tl.max(tl.where(begins, place[:, None], -1), 0)
    leads = live & (last == place)
    number = tl.cumsum(leads.to(tl.int32), 0) - 1
    lane = tl.sum(tl.where(place[:, None] == last[None, :], number[:, None], 0), 0)
    tl.store(about + 2 * tile, base)
    tl.store(about + 2 * tile + 1, tl.where(tl.sum(away, 0) > 0, tl.sum(leads.to(tl.int32), 0), 0))
    tl.store(lanes + tile * Q + place, tl.where(live, lane, -1), mask=place < Q)
    column = tl.arange(0, COLUMNS)[None, :]
    at = base // STEP * STEP + column
    here = leads[:, None] & (at <= position[:, None])
    behind = at - base
    node = tl.load(path[:, None] + tl.maximum(behind, 0), mask=here & (behind >= 0), other=0)
    index = tl.where(behind < 0, at, base + node)
    table = tables + tl.load(seqs + tile).to(tl.int64) * width
    page = tl.load(table + index // PAGE, mask=here, other=0)
    to = slots + (tile * Q + number[:, None]) * COLUMNS + column
    tl.store(to, tl.where(here, page * PAGE + index % PAGE, -1), mask=leads[:, None] & (column >= 0))


def place_lanes(plan: PagePlan, positions: Tensor) -> None:
    """Fill the lanes of a plan for trees. positions: of all its rows."""
    tails, found = _trees(plan)
    tiles, height = plan.rows.shape
    _place_lanes[(tiles,)](
        plan.rows, plan.seqs, tails.bases, tails.paths, positions, plan.tables, found.about, found.lanes, found.slots,
        plan.tables.stride(0), Q=height, QP=power(height, 2), DEEP=found.depth, PAGE=plan.page, COLUMNS=TAIL,
        STEP=GRAIN, LAST=PATH, num_warps=4, **options(positions.device),
    )  # fmt: skip


def place_lanes_twin(plan: PagePlan, positions: Tensor) -> None:
    tails, found = _trees(plan)
    assert tails.bases is not None and tails.paths is not None, "only a plan for trees has paths"
    found.lanes.fill_(-1)
    found.about.zero_()
    for tile, line in enumerate(plan.rows.tolist()):
        rows = [row for row in line if row >= 0]
        if not rows:
            continue
        base, table = int(tails.bases[rows[0]]), plan.tables[int(plan.seqs[tile])].tolist()
        paths = [tails.paths[row, : int(positions[row]) + 1 - base].tolist() for row in rows]
        last = [max(n for n, path in enumerate(paths) if path[: len(own)] == own) for own in paths]
        leaves = sorted(set(last))
        chain = all(path == list(range(len(path))) for path in paths)
        found.about[tile, 0], found.about[tile, 1] = base, 0 if chain else len(leaves)
        found.lanes[tile, : len(rows)] = torch.tensor([leaves.index(leaf) for leaf in last], dtype=torch.int32)
        for lane, leaf in enumerate(leaves):
            indices = [*range(base // GRAIN * GRAIN, base), *(base + node for node in paths[leaf])]
            slots = [table[index // plan.page] * plan.page + index % plan.page for index in indices]
            found.slots[tile, lane] = torch.tensor([*slots, *[-1] * (TAIL - len(slots))], dtype=torch.int32)


def _trees(plan: PagePlan) -> tuple[PagePlan, TreeLanes]:
    assert plan.tails is not None and plan.lanes is not None, "only plans for Hopper's kernel have lanes"
    return plan.tails, plan.lanes


__all__ = ["place_lanes", "place_lanes_twin"]
