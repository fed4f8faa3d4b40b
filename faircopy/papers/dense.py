"""Keys and values as one rectangle: a row per sequence, every row as wide as the widest. No pages, no kernels of ours.

Whatever a row does not use is padding, masked for good. How rows line up is what the published methods differ in:
they have a length each (`DenseLayout`), share one (`SharedLayout`), or are moved until they end together
(`AlignedLayout`). Inputs are padded to the longest as well, or packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faircopy.kernels.attention import Ints
from faircopy.layout.base import LayerShape, Packed, cache_dtype
from faircopy.layout.rows import finite_or_zero, node_depths, pad_last, wanted_rows
from faircopy.papers.attention import PAD, additive, ancestry, attend_rows, visible
from faircopy.papers.row_tables import RowTables
from faircopy.types import Batch, Draft, Sequence, Verdict


@dataclass(frozen=True, slots=True)
class DensePacked(Packed):
    """A step over a rectangle of rows and queries; with packed inputs only attention sees it as one."""

    shape: tuple[int, int, int]  # rows, queries per row, columns read
    masks: dict[tuple[int, int], Tensor]  # by (window, group): [rows, 1, queries * group, columns]
    real: Tensor | None  # [N] which of the T rows are tokens or nodes; None: all
    grid: Tensor | None  # [rows * queries] the packed row of each place, and
    order: Tensor | None  # [T] the place of each packed row; None: they are the same

    def unpadded(self, rows: Tensor) -> Tensor:
        return rows if self.real is None else rows.index_select(0, self.real)


@dataclass(slots=True)
class RowInput:
    """What one sequence inputs in a pass: uncached tokens, then nodes, of which the first may be cached already."""

    row: int
    first: int  # its first column
    fed: int
    nodes: range  # nodes to be computed
    ids: list[int]
    positions: Ints  # [fed + nodes] positions
    mask: NDArray[np.bool_]  # [fed + nodes, fed + nodes] which of these each may attend to

    @property
    def queries(self) -> Ints:
        """Which of its tokens and nodes are computed now."""
        return np.concatenate([np.arange(self.fed), self.fed + np.arange(self.nodes.start, self.nodes.stop)])

    @property
    def size(self) -> int:
        return self.fed + len(self.nodes)

    @property
    def end(self) -> int:
        return self.first + len(self.positions)


class DenseLayout:
    """One model's cache as a rectangle; each row continues where its own tokens end: EMS-SD's unpadded cache.

    The row of a finished sequence stays until a new sequence gets it or no sequence is left.
    """

    def __init__(
        self, tables: RowTables, layers: list[LayerShape], dtype: torch.dtype, device: torch.device, packs: bool = False
    ) -> None:
        self.tables, self.layers, self.device, self.packs = tables, layers, device, packs
        self.moved = 0
        self.healthy: Tensor | None = None
        self._dtype = cache_dtype(layers, dtype, device)
        self._kinds = {(layer.window, layer.group) for layer in layers}
        self._row_of: dict[Sequence, int] = {}  # the row of each sequence
        self._free_rows: list[int] = []  # rows whose sequence has finished
        self._cached: dict[Sequence, int] = {}
        self._nodes: dict[Sequence, tuple[int, int]] = {}  # first column and number of the nodes behind the tokens
        self._firsts: dict[Sequence, int] = {}  # first column of the pass
        self._positions = np.empty((0, 0), np.int32)  # [rows, width] the position each column holds
        self._ends = np.empty(0, np.int64)  # [rows] the first column behind each row's tokens
        self._keys = [
            torch.zeros(0, 0, layer.kv_heads, layer.head_dim, dtype=self._dtype, device=device) for layer in layers
        ]
        self._values = list(self._keys)
        tables.layouts.append(self)

    def cached(self, seq: Sequence) -> int:
        return self._cached.get(seq, 0)

    def width_for(self, seq: Sequence, length: int) -> int:
        """How wide the rectangle must be for this sequence to become this long."""
        return length

    def pack(self, batch: Batch, draft: Draft, done: int = 0) -> DensePacked:
        """Uncached tokens, then the draft nodes from `done` on, of each sequence, in its row."""
        self._assign_rows(batch)
        inputs = [self._row_input(batch, draft, i, done) for i in range(len(batch))]
        self._widen(max(one.end for one in inputs))
        for seq, one in zip(batch.seqs, inputs, strict=True):
            one.row = self._row_of[seq]  # a wider rectangle may have other rows
            self._firsts[seq] = one.first
            self._nodes[seq] = (one.first + one.fed, one.nodes.stop)
        return self._packed(batch, inputs)

    def attend(
        self,
        packed: Packed,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store k, v [T, Hkv, D] and let q [T, H, D] attend along its row to everything before and to itself."""
        assert isinstance(packed, DensePacked)
        shape, width, kinds = self.layers[layer], v.shape[-1], self._keys[layer].dtype
        keys, values = self._keys[layer], self._values[layer]
        for pool, new in ((keys, k), (values, v)):
            new = pad_last(packed.unpadded(new), shape.head_dim).to(kinds)
            pool.flatten(0, 1).index_copy_(0, packed.slots, finite_or_zero(new))
        if layer == len(self.layers) - 1:
            self.healthy = packed.unpadded(torch.isfinite(q.flatten(1).float().sum(-1)))
        rows, queries, columns = packed.shape
        grid = pad_last(q, shape.head_dim).to(kinds)
        grid = grid if packed.grid is None else grid.index_select(0, packed.grid)
        out = attend_rows(
            grid.view(rows, queries, *grid.shape[1:]),
            keys[:rows, :columns],
            values[:rows, :columns],
            packed.masks[shape.window, shape.group],
            scale,
            softcap,
            sinks,
        ).flatten(0, 1)
        out = out if packed.order is None else out.index_select(0, packed.order)
        return out[..., :width].to(q.dtype)

    def advance(self, batch: Batch) -> None:
        """The step's tokens have keys now, whatever becomes of the nodes."""
        for seq, upto in zip(batch.seqs, batch.upto, strict=True):
            self._record(seq, self._firsts[seq], upto)

    def commit(self, batch: Batch, verdict: Verdict) -> Verdict:
        """Keep the accepted nodes that have keys here; those off the straight line move into place."""
        for seq, upto, decision in zip(batch.seqs, batch.upto, verdict.decisions, strict=True):
            first, held = self._nodes.pop(seq, (0, 0))
            kept = [node for node in decision.nodes if node < held]
            self._move(self._row_of[seq], first, kept)
            self._record(seq, first, upto + len(kept))
        return verdict

    def publish(self, batch: Batch, verdict: Verdict) -> None:
        """Nothing is shared between rows."""

    def forget(self, seq: Sequence) -> None:
        row = self._row_of.pop(seq, None)
        for memory in (self._cached, self._nodes, self._firsts):
            memory.pop(seq, None)
        if row is not None:
            self._free_rows.append(row)
        if not self._row_of:
            self._free_rows.clear()
            self._positions.fill(PAD)
            self._ends.fill(0)

    @property
    def _rows(self) -> int:
        return len(self._row_of) + len(self._free_rows)

    def _first(self, row: int) -> int:
        """The column at which this row continues."""
        return int(self._ends[row])

    def _assign_rows(self, batch: Batch) -> None:
        """Give every sequence a row, free rows first."""
        arrivals = [seq for seq in batch.seqs if seq not in self._row_of]
        more = len(arrivals) - len(self._free_rows)
        if self._rows + more > len(self._ends):
            self._rebuild(self._rows + more, self._positions.shape[1], range(self._rows))
        self._free_rows += range(self._rows, self._rows + more)
        for seq in arrivals:
            row = self._row_of[seq] = self._free_rows.pop(0)
            self._positions[row], self._ends[row] = PAD, 0

    def _row_input(self, batch: Batch, draft: Draft, i: int, done: int) -> RowInput:
        seq, upto = batch.seqs[i], batch.upto[i]
        start, tokens = self.cached(seq), draft.tokens[i] if batch.complete(i) else []
        live, fed = range(min(done, len(tokens)), len(tokens)), upto - start
        depths = node_depths(draft.parents[i][: len(tokens)])
        return RowInput(
            row=self._row_of[seq],
            first=self._first(self._row_of[seq]),
            fed=fed,
            nodes=live,
            ids=[*seq.tokens[start:upto], *tokens[live.start :]],
            positions=np.concatenate([np.arange(start, upto), upto - 1 + depths]),
            mask=ancestry(fed, draft.parents[i][: len(tokens)]),
        )

    def _record(self, seq: Sequence, first: int, length: int) -> None:
        """Columns from `first` on now hold the sequence's tokens up to this length."""
        row, start = self._row_of[seq], self.cached(seq)
        if length > start:
            self._positions[row, first : first + length - start] = np.arange(start, length)
            self._ends[row] = first + length - start
            self._cached[seq] = length

    def _move(self, row: int, first: int, nodes: list[int]) -> None:
        moves = [(first + node, first + place) for place, node in enumerate(nodes) if node != place]
        if moves:
            source, target = (list(side) for side in zip(*moves, strict=True))
            for pool in (*self._keys, *self._values):
                pool[row, target] = pool[row, source]
            self.moved += len(moves)

    def _widen(self, width: int) -> None:
        """Widen by half as much again, so that it is needed rarely; free rows are dropped if memory is short."""
        if width <= self._positions.shape[1]:
            return
        rows, capacity = self._rows, self.tables.capacity
        if rows * width > capacity:
            self._free_rows.clear()
            rows = self._rows
        kept = [*self._row_of.values(), *self._free_rows]
        self._rebuild(rows, max(width, min(width + width // 2, capacity // max(rows, 1))), kept)
        self._row_of = {seq: row for row, seq in enumerate(self._row_of)}
        self._free_rows = list(range(len(self._row_of), rows))

    def _rebuild(self, rows: int, width: int, kept: Iterable[int] = ()) -> None:
        """A new rectangle that begins with these rows of the old one."""
        old = list(kept)
        place, ends = np.full((rows, width), PAD, np.int32), np.zeros(rows, np.int64)
        if old:
            place[: len(old), : self._positions.shape[1]] = self._positions[old]
            ends[: len(old)] = self._ends[old]
        self._keys = [_resized(pool, rows, width, old) for pool in self._keys]
        self._values = [_resized(pool, rows, width, old) for pool in self._values]
        self._positions, self._ends = place, ends

    def _packed(self, batch: Batch, inputs: list[RowInput]) -> DensePacked:
        rows, queries = self._rows, max(one.size for one in inputs)
        real = np.concatenate([one.row * queries + np.arange(one.size) for one in inputs])  # their places in the grid
        ids, where, grid = (np.zeros(rows * queries, np.int64) for _ in range(3))
        ids[real], grid[real] = np.concatenate([one.ids for one in inputs]), np.arange(len(real))
        where[real] = np.concatenate([one.positions[one.queries] for one in inputs])
        slots = [one.row * self._positions.shape[1] + one.first + one.queries for one in inputs]
        wanted = self._wanted(batch, inputs, queries)
        shape = (rows, queries, max(one.end for one in inputs))
        return DensePacked(
            ids=self._tensor(ids[real] if self.packs else ids),
            positions=self._tensor(where[real] if self.packs else where),
            slots=self._tensor(np.concatenate(slots)),
            plans={},
            wanted=self._tensor(np.concatenate(wanted)),
            fed=[one.fed for one in inputs],
            nodes=[one.nodes for one in inputs],
            rows=[range(start, stop) for start, stop in pairwise(accumulate(map(len, wanted), initial=0))],
            shape=shape,
            masks=self._masks(inputs, where.reshape(rows, queries), shape),
            real=None if self.packs else self._tensor(real),
            grid=self._tensor(grid) if self.packs else None,
            order=self._tensor(real) if self.packs else None,
        )

    def _wanted(self, batch: Batch, inputs: list[RowInput], queries: int) -> list[Ints]:
        """Per sequence, its rows of the pass whose logits are needed."""
        packed = accumulate((one.size for one in inputs), initial=0)
        starts = packed if self.packs else (one.row * queries for one in inputs)
        return [
            start + np.array(wanted_rows(seq, upto - one.fed, upto, upto == len(seq.tokens), len(one.nodes)), np.int64)
            for start, seq, upto, one in zip(starts, batch.seqs, batch.upto, inputs, strict=False)
        ]

    def _masks(self, inputs: list[RowInput], where: Ints, shape: tuple[int, int, int]) -> dict[tuple[int, int], Tensor]:
        """What each query may attend to: its row's cached tokens and its own input; padding attends to everything."""
        rows, queries, columns = shape
        most = max(len(one.positions) for one in inputs)
        own = np.full((rows, most), columns, np.int64)  # columns of the inputs; the extra last one is dropped
        their = np.zeros((rows, most), np.int64)
        sees, idle = np.zeros((rows, queries, most), np.bool_), np.ones((rows, queries, 1), np.bool_)
        for one in inputs:
            n = len(one.positions)
            own[one.row, :n], their[one.row, :n] = one.first + np.arange(n), one.positions
            sees[one.row, : one.size, :n] = one.mask[one.queries]
            idle[one.row, : one.size] = False
        parts = (where, self._positions[:rows, :columns], own, their, sees, idle)
        on_device = [self._tensor(part) for part in parts]
        windows = {window: visible(window, *on_device) for window, _ in self._kinds}
        return {kind: additive(windows[kind[0]], kind[1], self._dtype) for kind in self._kinds}

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


class SharedLayout(DenseLayout):
    """The vanilla method of EMS-SD and SpecMemo: one length for all; every row advances by the batch's maximum."""

    def width_for(self, seq: Sequence, length: int) -> int:
        return self._first(0) + length - self.cached(seq)

    def _first(self, row: int) -> int:
        return int(self._ends.max(initial=0))


class AlignedLayout(DenseLayout):
    """EQSPEC's rectangle: pads on the left, rows end together. Unpad, append, repad: every step copies every row.

    With `lazy`, as EXSPEC, only if the rows are not those of the last step or do not end together. A sequence that is
    not in the batch keeps its keys as a view of the rectangle it was last in, and so that rectangle in memory.
    """

    def __init__(
        self, tables: RowTables, layers: list[LayerShape], dtype: torch.dtype, device: torch.device,
        lazy: bool = False, keeps_free_rows: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(tables, layers, dtype, device)
        self._lazy, self._keeps_free_rows = lazy, keeps_free_rows
        self._absent: dict[Sequence, list[Tensor]] = {}  # keys and values, layer by layer

    def align(self, seqs: list[Sequence], columns: int) -> None:
        """A new rectangle of these rows, and of the free ones where those stay until the batch is done."""
        cuts = self._absent | {seq: self._cut(seq) for seq in self._row_of}
        width = max(map(self.cached, seqs))
        vacant = self._kept_free_rows(sum(seq not in cuts for seq in seqs), len(seqs), width + columns)
        self._rebuild(len(seqs) + vacant, width + columns)
        self._row_of = {seq: row for row, seq in enumerate(seqs)}
        self._free_rows = list(range(len(seqs), len(seqs) + vacant))
        for seq, row in self._row_of.items():
            pads = width - self.cached(seq)
            if pads < width:
                for pool, cut in zip((*self._keys, *self._values), cuts[seq], strict=True):
                    pool[row, pads:width] = cut
            self._positions[row, pads:width] = np.arange(width - pads)
        self._ends.fill(width)
        self.moved += sum(map(self.cached, seqs))
        self._absent = {seq: cut for seq, cut in cuts.items() if seq not in self._row_of}

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self._absent.pop(seq, None)

    def _assign_rows(self, batch: Batch) -> None:
        """At the beginning of a step rows must end together."""
        feeds = [upto - self.cached(seq) for seq, upto in zip(batch.seqs, batch.upto, strict=True)]
        if any(feeds) and not (self._lazy and self._in_line(batch.seqs)):
            self.align(batch.seqs, max(map(sum, zip(feeds, batch.max_nodes, strict=True))))

    def _kept_free_rows(self, arrivals: int, rows: int, width: int) -> int:
        """How many free rows stay: those that no new sequence takes, if they are to stay and memory suffices."""
        left = max(0, len(self._free_rows) - arrivals) if self._keeps_free_rows else 0
        return left if (rows + left) * width <= self.tables.capacity else 0

    def _in_line(self, seqs: list[Sequence]) -> bool:
        stay = self._row_of.keys() == set(seqs) and (self._keeps_free_rows or not self._free_rows)
        return stay and len({int(self._ends[self._row_of[seq]]) for seq in seqs}) == 1

    def _cut(self, seq: Sequence) -> list[Tensor]:
        """What a row holds, without its pads."""
        row, end = self._row_of[seq], int(self._ends[self._row_of[seq]])
        return [pool[row, end - self.cached(seq) : end] for pool in (*self._keys, *self._values)]


def _resized(pool: Tensor, rows: int, width: int, kept: list[int]) -> Tensor:
    new = pool.new_zeros(rows, width, *pool.shape[2:])
    if kept:
        new[: len(kept), : pool.shape[1]] = pool[kept]
    return new
