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
from faircopy.layout.rows import finite, logit_rows, node_depths, pad_last
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
class Feed:
    """What one sequence brings to a pass: uncached tokens, then nodes, of which the first may be cached already."""

    row: int
    first: int  # its first column
    fed: int
    live: range  # nodes to be computed
    ids: list[int]
    where: Ints  # [fed + nodes] positions
    sees: NDArray[np.bool_]  # [fed + nodes, fed + nodes] which of these each may look at

    @property
    def asks(self) -> Ints:
        """Which of its places are queries."""
        return np.concatenate([np.arange(self.fed), self.fed + np.arange(self.live.start, self.live.stop)])

    @property
    def size(self) -> int:
        return self.fed + len(self.live)

    @property
    def end(self) -> int:
        return self.first + len(self.where)


class DenseLayout:
    """One model's cache as a rectangle whose rows each go on where their own tokens end: EMS-SD's unpadded cache.

    A row stays until somebody takes it over or all are gone.
    """

    def __init__(
        self, tables: RowTables, layers: list[LayerShape], dtype: torch.dtype, device: torch.device, packs: bool = False
    ) -> None:
        self.tables, self.layers, self.device, self.packs = tables, layers, device, packs
        self.moved = 0
        self.healthy: Tensor | None = None
        self._dtype = cache_dtype(dtype, device)
        self._kinds = {(layer.window, layer.group) for layer in layers}
        self._seats: dict[Sequence, int] = {}  # the row of each sequence
        self._vacant: list[int] = []  # rows whose sequence is gone
        self._cached: dict[Sequence, int] = {}
        self._nodes: dict[Sequence, tuple[int, int]] = {}  # first column and number of the nodes behind the tokens
        self._firsts: dict[Sequence, int] = {}  # first column of the pass
        self._place = np.empty((0, 0), np.int32)  # [rows, width] the position each column holds
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
        self._seat(batch)
        feeds = [self._feed(batch, draft, i, done) for i in range(len(batch))]
        self._widen(max(feed.end for feed in feeds))
        for seq, feed in zip(batch.seqs, feeds, strict=True):
            feed.row = self._seats[seq]  # a wider rectangle may have other rows
            self._firsts[seq] = feed.first
            self._nodes[seq] = (feed.first + feed.fed, feed.live.stop)
        return self._packed(batch, feeds)

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
        """Store k, v [T, Hkv, D] and let q [T, H, D] look along its row at everything before and at itself."""
        assert isinstance(packed, DensePacked)
        shape, width, kinds = self.layers[layer], v.shape[-1], self._keys[layer].dtype
        keys, values = self._keys[layer], self._values[layer]
        for pool, new in ((keys, k), (values, v)):
            new = pad_last(packed.unpadded(new), shape.head_dim).to(kinds)
            pool.flatten(0, 1).index_copy_(0, packed.slots, finite(new))
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
            self._hold(seq, self._firsts[seq], upto)

    def commit(self, batch: Batch, verdict: Verdict) -> Verdict:
        """Keep the accepted nodes that have keys here; those off the straight line move into place."""
        for seq, upto, decision in zip(batch.seqs, batch.upto, verdict.decisions, strict=True):
            first, held = self._nodes.pop(seq, (0, 0))
            kept = [node for node in decision.nodes if node < held]
            self._move(self._seats[seq], first, kept)
            self._hold(seq, first, upto + len(kept))
        return verdict

    def publish(self, batch: Batch, verdict: Verdict) -> None:
        """Nothing is shared between rows."""

    def forget(self, seq: Sequence) -> None:
        row = self._seats.pop(seq, None)
        for memory in (self._cached, self._nodes, self._firsts):
            memory.pop(seq, None)
        if row is not None:
            self._vacant.append(row)
        if not self._seats:
            self._vacant.clear()
            self._place.fill(PAD)
            self._ends.fill(0)

    @property
    def _rows(self) -> int:
        return len(self._seats) + len(self._vacant)

    def _first(self, row: int) -> int:
        """The column at which this row goes on."""
        return int(self._ends[row])

    def _seat(self, batch: Batch) -> None:
        """A row for everybody, those of the departed first."""
        newcomers = [seq for seq in batch.seqs if seq not in self._seats]
        more = len(newcomers) - len(self._vacant)
        if self._rows + more > len(self._ends):
            self._rebuild(self._rows + more, self._place.shape[1], range(self._rows))
        self._vacant += range(self._rows, self._rows + more)
        for seq in newcomers:
            row = self._seats[seq] = self._vacant.pop(0)
            self._place[row], self._ends[row] = PAD, 0

    def _feed(self, batch: Batch, draft: Draft, i: int, done: int) -> Feed:
        seq, upto = batch.seqs[i], batch.upto[i]
        start, tokens = self.cached(seq), draft.tokens[i] if batch.complete(i) else []
        live, fed = range(min(done, len(tokens)), len(tokens)), upto - start
        depths = node_depths(draft.parents[i][: len(tokens)])
        return Feed(
            row=self._seats[seq],
            first=self._first(self._seats[seq]),
            fed=fed,
            live=live,
            ids=[*seq.tokens[start:upto], *tokens[live.start :]],
            where=np.concatenate([np.arange(start, upto), upto - 1 + depths]),
            sees=ancestry(fed, draft.parents[i][: len(tokens)]),
        )

    def _hold(self, seq: Sequence, first: int, length: int) -> None:
        """Columns from `first` on hold the sequence's tokens up to this length."""
        row, start = self._seats[seq], self.cached(seq)
        if length > start:
            self._place[row, first : first + length - start] = np.arange(start, length)
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
        """Make room, half as much again so that it is not needed often; vacant rows go if memory is short."""
        if width <= self._place.shape[1]:
            return
        rows, capacity = self._rows, self.tables.capacity
        if rows * width > capacity:
            self._vacant.clear()
            rows = self._rows
        kept = [*self._seats.values(), *self._vacant]
        self._rebuild(rows, max(width, min(width + width // 2, capacity // max(rows, 1))), kept)
        self._seats = {seq: row for row, seq in enumerate(self._seats)}
        self._vacant = list(range(len(self._seats), rows))

    def _rebuild(self, rows: int, width: int, kept: Iterable[int] = ()) -> None:
        """A new rectangle that begins with these rows of the old one."""
        old = list(kept)
        place, ends = np.full((rows, width), PAD, np.int32), np.zeros(rows, np.int64)
        if old:
            place[: len(old), : self._place.shape[1]] = self._place[old]
            ends[: len(old)] = self._ends[old]
        self._keys = [_resized(pool, rows, width, old) for pool in self._keys]
        self._values = [_resized(pool, rows, width, old) for pool in self._values]
        self._place, self._ends = place, ends

    def _packed(self, batch: Batch, feeds: list[Feed]) -> DensePacked:
        rows, queries = self._rows, max(feed.size for feed in feeds)
        real = np.concatenate([feed.row * queries + np.arange(feed.size) for feed in feeds])  # their places in the grid
        ids, where, grid = (np.zeros(rows * queries, np.int64) for _ in range(3))
        ids[real], grid[real] = np.concatenate([feed.ids for feed in feeds]), np.arange(len(real))
        where[real] = np.concatenate([feed.where[feed.asks] for feed in feeds])
        slots = [feed.row * self._place.shape[1] + feed.first + feed.asks for feed in feeds]
        wanted = self._wanted(batch, feeds, queries)
        shape = (rows, queries, max(feed.end for feed in feeds))
        return DensePacked(
            ids=self._tensor(ids[real] if self.packs else ids),
            positions=self._tensor(where[real] if self.packs else where),
            slots=self._tensor(np.concatenate(slots)),
            plans={},
            wanted=self._tensor(np.concatenate(wanted)),
            fed=[feed.fed for feed in feeds],
            nodes=[feed.live for feed in feeds],
            rows=[range(start, stop) for start, stop in pairwise(accumulate(map(len, wanted), initial=0))],
            shape=shape,
            masks=self._masks(feeds, where.reshape(rows, queries), shape),
            real=None if self.packs else self._tensor(real),
            grid=self._tensor(grid) if self.packs else None,
            order=self._tensor(real) if self.packs else None,
        )

    def _wanted(self, batch: Batch, feeds: list[Feed], queries: int) -> list[Ints]:
        """Per sequence, its rows of the pass whose logits are needed."""
        packed = accumulate((feed.size for feed in feeds), initial=0)
        starts = packed if self.packs else (feed.row * queries for feed in feeds)
        return [
            start + np.array(logit_rows(seq, upto - feed.fed, upto, upto == len(seq.tokens), len(feed.live)), np.int64)
            for start, seq, upto, feed in zip(starts, batch.seqs, batch.upto, feeds, strict=False)
        ]

    def _masks(self, feeds: list[Feed], where: Ints, shape: tuple[int, int, int]) -> dict[tuple[int, int], Tensor]:
        """What each place may look at: its row's cached tokens, and what its own feed says; padding sees everything."""
        rows, queries, columns = shape
        most = max(len(feed.where) for feed in feeds)
        own = np.full((rows, most), columns, np.int64)  # columns of the feeds; one too many is the place to throw away
        their = np.zeros((rows, most), np.int64)
        sees, idle = np.zeros((rows, queries, most), np.bool_), np.ones((rows, queries, 1), np.bool_)
        for feed in feeds:
            n = len(feed.where)
            own[feed.row, :n], their[feed.row, :n] = feed.first + np.arange(n), feed.where
            sees[feed.row, : feed.size, :n] = feed.sees[feed.asks]
            idle[feed.row, : feed.size] = False
        parts = (where, self._place[:rows, :columns], own, their, sees, idle)
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
        lazy: bool = False, keeps_vacant: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(tables, layers, dtype, device)
        self._lazy, self._keeps_vacant = lazy, keeps_vacant
        self._absent: dict[Sequence, list[Tensor]] = {}  # keys and values, layer by layer

    def align(self, seqs: list[Sequence], room: int) -> None:
        """A new rectangle of these rows, and of the vacant ones where those stay until the batch is done."""
        cuts = self._absent | {seq: self._cut(seq) for seq in self._seats}
        width = max(map(self.cached, seqs))
        vacant = self._left_vacant(sum(seq not in cuts for seq in seqs), len(seqs), width + room)
        self._rebuild(len(seqs) + vacant, width + room)
        self._seats = {seq: row for row, seq in enumerate(seqs)}
        self._vacant = list(range(len(seqs), len(seqs) + vacant))
        for seq, row in self._seats.items():
            pads = width - self.cached(seq)
            if pads < width:
                for pool, cut in zip((*self._keys, *self._values), cuts[seq], strict=True):
                    pool[row, pads:width] = cut
            self._place[row, pads:width] = np.arange(width - pads)
        self._ends.fill(width)
        self.moved += sum(map(self.cached, seqs))
        self._absent = {seq: cut for seq, cut in cuts.items() if seq not in self._seats}

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self._absent.pop(seq, None)

    def _seat(self, batch: Batch) -> None:
        """At the beginning of a step rows must end together."""
        feeds = [upto - self.cached(seq) for seq, upto in zip(batch.seqs, batch.upto, strict=True)]
        if any(feeds) and not (self._lazy and self._in_line(batch.seqs)):
            self.align(batch.seqs, max(map(sum, zip(feeds, batch.room, strict=True))))

    def _left_vacant(self, newcomers: int, rows: int, width: int) -> int:
        """How many vacant rows stay: those that no newcomer takes, if they are to stay and memory has room for them."""
        left = max(0, len(self._vacant) - newcomers) if self._keeps_vacant else 0
        return left if (rows + left) * width <= self.tables.capacity else 0

    def _in_line(self, seqs: list[Sequence]) -> bool:
        stay = self._seats.keys() == set(seqs) and (self._keeps_vacant or not self._vacant)
        return stay and len({int(self._ends[self._seats[seq]]) for seq in seqs}) == 1

    def _cut(self, seq: Sequence) -> list[Tensor]:
        """What a row holds, without its pads."""
        row, end = self._seats[seq], int(self._ends[self._seats[seq]])
        return [pool[row, end - self.cached(seq) : end] for pool in (*self._keys, *self._values)]


def _resized(pool: Tensor, rows: int, width: int, kept: list[int]) -> Tensor:
    new = pool.new_zeros(rows, width, *pool.shape[2:])
    if kept:
        new[: len(kept), : pool.shape[1]] = pool[kept]
    return new
