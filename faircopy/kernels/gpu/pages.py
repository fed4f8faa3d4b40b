"""Which queries attend together, and where their keys lie in the pages: plans for `kernels/gpu/attention.py`.

A tile is a few rows of one sequence. A tree's blocks of keys before its nodes are the same for all of them: one set of
tiles attends to those and leaves its state. A second set of tiles, the tails, goes on from there, a lane per path: from
`base` on, keys are found through the path. Where Hopper's kernel takes trees, it needs no tails: a TreeLanes table says
which rows of a tile share a path, and where the keys of that path lie.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faircopy.kernels.gpu.launch import hopper, power
from faircopy.kernels.transfer import sent_together

TOKENS = 64  # query rows (tokens times heads per key head) of a tile at most;
HOPPER_TOKENS = 128  # for the kernel in flash.py
SHARED_ROWS = 16  # rows of a prompt's tile where batch slots share its launch, unless they have more
HOPPER_DIMS, HOPPER_PAGES = (64, 128), (16, 32, 64, 128)  # heads of 16-bit numbers and pages that it copies
WIDE_LINE = 512  # bytes of a query head that a tile of TOKENS rows can hold
PATH = 64  # nodes on one path of a tree at most
END = 1 << 30
GRAPH_ROWS = 1024  # passes of more rows are launched kernel by kernel
TAIL = 32  # keys of a path that Hopper's kernel gathers, from the last multiple of GRAIN that is not behind the text on
GRAIN = 16  # keys that tensor cores add at once: a row's sums follow from which keys lie in which GRAIN of a block
DEEPEST = TAIL - GRAIN + 1  # nodes on a path that it takes at most
SPAN = 512  # keys whose results are merged with those of other spans: part of the numbers' definition


class PageLane(NamedTuple):
    """Packed rows of one sequence that see the same keys, as far as their positions let them."""

    seq: int
    rows: Seq[int]
    first: int = 0  # key block
    stop: int = END  # before END: its state is left for the tails of the same rows
    base: int = END
    path: Seq[int] = ()  # not empty: a tail


@dataclass(frozen=True, slots=True)
class TreeLanes:
    """Paths in the tiles of a plan for trees, see lanes.place_lanes. A lane: rows of a tile that lie on one path."""

    ranges: Tensor  # [tiles, 2] all key blocks
    about: Tensor  # [tiles, 2] position where nodes begin, and number of lanes; 0: the rows are a chain
    lanes: Tensor  # [tiles, Q] lane of each row; -1: no row
    slots: Tensor  # [tiles, Q, TAIL] KV slots of each lane's keys, the first ones of the text; -1: none
    depth: int  # nodes on a path at most
    even: int = 0  # as in PagePlan

    @classmethod
    def empty(cls, tiles: int, height: int, depth: int, device: torch.device, even: int = 0) -> TreeLanes:
        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        ranges = torch.tensor([[0, END]] * tiles, dtype=torch.int32, device=device)
        return cls(ranges, table(tiles, 2), table(tiles, height), table(tiles, height, TAIL), depth, even)


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Which queries run together, and where their keys lie."""

    rows: Tensor  # [tiles, Q] packed row of each query; -1: none
    ranges: Tensor  # [tiles, 2] first key block, and the one after the last
    seqs: Tensor  # [tiles] row of `tables`
    tables: Tensor  # [sequences, pages]
    page: int
    blocks: int  # key blocks of the longest sequence, at most
    bases: Tensor | None = None  # [tiles] from this position on keys are found through `paths`; None: not tails
    paths: Tensor | None = None  # [tiles, PATH] index of each node on the lane's path, counted from base
    even: int = 0  # all sequences have this many rows, one tile each, in order; 0: see the tables above
    tails: PagePlan | None = None  # tiles that go on where others have left their state
    beside: PagePlan | None = None  # tiles of other rows of the same pass, which have nothing to do with these
    lanes: TreeLanes | None = None  # what Hopper's kernel reads instead of `ranges` and `tails`

    def with_tiles(self, more: PagePlan) -> PagePlan:
        """One plan for the tiles of both, if those of `more` are at least as high; of chains."""
        assert self.rows.shape[1] <= more.rows.shape[1], "no row is cut off"
        own = torch.nn.functional.pad(self.rows, (0, more.rows.shape[1] - self.rows.shape[1]), value=-1)
        pairs = (own, more.rows), (self.ranges, more.ranges), (self.seqs, more.seqs)
        rows, ranges, seqs = (torch.cat(pair) for pair in pairs)
        return replace(self, rows=rows, ranges=ranges, seqs=seqs, blocks=max(self.blocks, more.blocks), even=0)


def plan_pages(
    lanes: list[PageLane], group: int, tables: Tensor, page: int, blocks: int, dim: int = 0, itemsize: int = 2,
    like_graphs: bool = False,
) -> PagePlan:  # fmt: skip
    """Cut lanes into tiles of equal height, tails apart from the others. dim: numbers of a query head, at most.

    like_graphs: tiles of one height, which kernels are compiled for ahead: those of graphs of passes, and of trees in
    captured steps a tail per row.
    """
    tails = [lane for lane in lanes if len(lane.path)]
    height = chain_height(group, dim, itemsize, page, tables.device)
    most = tile_height(group, dim * itemsize) if tails else height
    chains = [lane for lane in lanes if not len(lane.path)]
    plan = _cut(chains, most, tables, page, blocks, most if like_graphs else 1)
    if not tails:
        return plan
    after = _cut(tails, 1 if like_graphs else most, tables, page, blocks)
    return replace(plan, tails=replace(after, even=0), even=0)  # their tiles begin and end at other keys


def _cut(lanes: list[PageLane], most: int, tables: Tensor, page: int, blocks: int, least: int = 1) -> PagePlan:
    """Tiles of equal height, at least and at most as high as given."""
    height = min(power(max((len(lane.rows) for lane in lanes), default=1), least), most)
    cuts = [(lane, lane.rows[at : at + height]) for lane in lanes for at in range(0, len(lane.rows), height)]
    rows = np.full((len(cuts), height), -1, np.int32)
    paths = np.zeros((len(cuts), PATH), np.int32)
    for n, (lane, cut) in enumerate(cuts):
        rows[n, : len(cut)] = cut
        paths[n, : len(lane.path)] = lane.path
    even = 0 if least > 1 else _even([(lane.seq, list(cut)) for lane, cut in cuts], tables.shape[0])
    numbers = np.array([[lane.first, lane.stop, lane.seq, lane.base] for lane, _ in cuts], np.int32).reshape(-1, 4)
    tree = any(len(lane.path) for lane in lanes)
    parts = [rows, numbers[:, :2], numbers[:, 2], *((numbers[:, 3], paths) if tree else ())]
    tiles, ranges, seqs, *tails = sent_together(*map(np.ascontiguousarray, parts), device=tables.device)
    bases, through = tails or (None, None)
    return PagePlan(tiles, ranges, seqs, tables, page, blocks, bases, through, even)


def tile_height(group: int, line_bytes: int = 0) -> int:
    """Rows of a tile at most: fewer where a query head takes many bytes, so that keys fit beside the queries."""
    tokens = TOKENS if line_bytes <= WIDE_LINE else TOKENS // 4
    return power(tokens // group + 1) // 2 or 1


def chain_height(group: int, dim: int, itemsize: int, page: int, device: torch.device) -> int:
    """Rows of a tile at most where there are no trees."""
    if _for_hopper(dim, itemsize, page, device):
        return tile_height(group) * HOPPER_TOKENS // TOKENS
    return tile_height(group, dim * itemsize)


def shared_height(rows: int, group: int, dim: int, itemsize: int, page: int, device: torch.device) -> int | None:
    """Rows of a tile where prompts share a launch with batch slots of `rows` rows, chains; None: where they do not.

    Hopper's kernel multiplies 64 queries at a time, however few a tile has: a batch slot's tile may be as high as a
    prompt's.
    """
    height = max(power(rows), min(SHARED_ROWS, tile_height(group)))
    fits = height <= chain_height(group, dim, itemsize, page, device)
    return height if fits and _for_hopper(dim, itemsize, page, device) else None


def _for_hopper(dim: int, itemsize: int, page: int, device: torch.device) -> bool:
    return hopper(device) and itemsize == 2 and dim in HOPPER_DIMS and page in HOPPER_PAGES


def even_plan(size: int, rows: int, tables: Tensor, page: int, context: int, dim: int, itemsize: int = 2) -> PagePlan:
    """The same number of rows for each sequence, whatever their lengths will be: a plan that can be captured."""
    blocks = -(-context // block_length(dim, itemsize))
    height = torch.arange(size * rows, dtype=torch.int32, device=tables.device).view(size, rows)
    ranges = torch.tensor([[0, END]] * size, dtype=torch.int32, device=tables.device)
    seqs = torch.arange(size, dtype=torch.int32, device=tables.device)
    return PagePlan(height, ranges, seqs, tables, page, blocks, even=rows)


def _tree_lanes(
    tiles: int, height: int, tables: Tensor, page: int, dim: int, itemsize: int, depth: int, even: int = 0
) -> TreeLanes | None:
    """Room for the lanes of a plan's tiles, where Hopper's kernel takes its trees."""
    if not _for_hopper(dim, itemsize, page, tables.device) or depth > DEEPEST:
        return None
    return TreeLanes.empty(tiles, height, depth, tables.device, even)


def tree_plan(
    paths: Tensor, tables: Tensor, page: int, context: int, group: int, dim: int, itemsize: int = 2, depth: int = PATH
) -> PagePlan:
    """Rows of every sequence with a path each [B, R, PATH]: a plan that can be captured; see set_base.

    depth: nodes on a path at most. Small enough, the plan has lanes for Hopper's kernel; see lanes.place_lanes.
    """
    (size, rows), device = paths.shape[:2], tables.device
    blocks, height = -(-context // block_length(dim, itemsize)), min(power(rows), tile_height(group, dim * itemsize))
    tiles = -(-rows // height)
    own = torch.arange(size * rows, dtype=torch.int32, device=device).view(size, rows)
    shared = torch.nn.functional.pad(own, (0, tiles * height - rows), value=-1).view(size * tiles, height)
    seqs = torch.arange(size, dtype=torch.int32, device=device)

    def ranges(count: int, stop: int) -> Tensor:
        return torch.tensor([[0, stop]] * (size * count), dtype=torch.int32, device=device)

    tails = PagePlan(
        own.view(-1, 1), ranges(rows, END), seqs.repeat_interleave(rows), tables, page, blocks,
        torch.zeros(size * rows, dtype=torch.int32, device=device), paths.view(-1, PATH),
    )  # fmt: skip
    even = rows if tiles == 1 else 0
    lanes = _tree_lanes(size * tiles, height, tables, page, dim, itemsize, depth, even)
    seqs = seqs.repeat_interleave(tiles)
    return PagePlan(shared, ranges(tiles, 0), seqs, tables, page, blocks, tails=tails, lanes=lanes)


def packed_tree_plan(
    size: int, width: int, rows: int, tables: Tensor, page: int, context: int, group: int, dim: int,
    itemsize: int = 2, depth: int = PATH,
) -> PagePlan:  # fmt: skip
    """`rows` packed rows of trees of up to `width` rows each: a plan that can be captured; see packing.pack_paths.

    depth: see tree_plan.
    """
    blocks, height = -(-context // block_length(dim, itemsize)), min(power(width), tile_height(group, dim * itemsize))
    tiles = -(-width // height)

    def table(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=tables.device)

    tails = PagePlan(
        table(rows, 1), table(rows, 2), table(rows), tables, page, blocks, table(rows), table(rows, PATH)
    )  # fmt: skip
    seqs = torch.arange(size, dtype=torch.int32, device=tables.device).repeat_interleave(tiles)
    lanes = _tree_lanes(size * tiles, height, tables, page, dim, itemsize, depth)
    shared, ranges = table(size * tiles, height), table(size * tiles, 2)
    return PagePlan(shared, ranges, seqs, tables, page, blocks, tails=tails, lanes=lanes)


def set_base(plan: PagePlan, base: Tensor, step: int) -> None:
    """Set the positions base [B] where nodes begin in a plan for trees; blocks of `step` keys before are shared."""
    assert plan.tails is not None and plan.tails.bases is not None, "only a plan for trees has a base"
    block, size = (base // step)[:, None], base.shape[0]
    plan.ranges.view(size, -1, 2)[..., 1] = block
    plan.tails.ranges.view(size, -1, 2)[..., 0] = block
    plan.tails.bases.view(size, -1)[:] = base[:, None]


@dataclass(frozen=True, slots=True)
class TileList:
    """Tiles of one height on the host, for plans whose tensors stay where they are."""

    rows: NDArray[np.int32]  # [tiles, height]
    ranges: NDArray[np.int32]  # [tiles, 2]
    seqs: NDArray[np.int32]  # [tiles]

    @classmethod
    def cut(cls, lanes: list[PageLane], height: int) -> TileList:
        """Chains, whose rows follow each other, cut into tiles; there are no trees among them."""
        begins = [(lane.rows[0], len(lane.rows), lane.first, lane.stop, lane.seq) for lane in lanes]
        table = np.array(begins, np.int32).reshape(-1, 5)
        tiles = -(-table[:, 1] // height)
        numbers = np.repeat(table, tiles, axis=0)
        place = np.arange(len(numbers)) - np.repeat(np.cumsum(tiles) - tiles, tiles)  # of a tile in its lane
        inside = place[:, None] * height + np.arange(height)
        rows = np.where(inside < numbers[:, 1:2], numbers[:, :1] + inside, -1).astype(np.int32)
        return cls(rows, numbers[:, 2:4], numbers[:, 4])


def _even(tiles: list[tuple[int, list[int]]], seqs: int) -> int:
    """Rows per sequence, if all have the same number, one tile each, in order."""
    count = len(tiles[0][1]) if tiles else 0
    regular = [(n, list(range(n * count, (n + 1) * count))) for n in range(seqs)]
    return count if tiles == regular else 0


def block_length(dim: int, itemsize: int = 2) -> int:
    """Keys per block: part of the numbers' definition, so it depends on the head and its type alone.

    32-bit products are made of single multiply-adds: large blocks of them take 10 s to compile and spill registers.
    """
    return 32 if itemsize > 2 or dim > 256 else 128 if dim <= 128 else 64
