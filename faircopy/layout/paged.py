"""Keys and values in pages, tokens packed end to end: no padding rows, and no keys are moved for a chain.

A rejected node's keys stay where they are: the next write lands on top of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faircopy.kernels.attention import Ints, Lane, LanePlan, attend
from faircopy.kernels.cpu.attention import has_kernel, plan_rows
from faircopy.kernels.transfer import sent, sent_together
from faircopy.layout.base import LayerShape, Packed, cache_dtype
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.rows import finite_or_zero, node_depths, pad_last, page_grid, wanted_rows
from faircopy.types import Batch, Draft, Sequence, Verdict

if TYPE_CHECKING:
    from faircopy.kernels.gpu.pages import PageLane
    from faircopy.kernels.gpu.suite import Suite


@dataclass(slots=True)
class RowList:
    """The rows of a pass on the host; `place` brings them to the device."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[Ints] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)  # without kernels
    pages: list[PageLane] = field(default_factory=list)  # with kernels
    grid: NDArray[np.int32] | None = None  # with kernels: the page tables of the sequences
    fed: list[int] = field(default_factory=list)
    nodes: list[range] = field(default_factory=list)
    rows: list[range] = field(default_factory=list)


class PagedLayout:
    """One model's cache over shared block tables."""

    def __init__(
        self,
        tables: BlockTables,
        layers: list[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = True,
        suite: Suite | None = None,
    ) -> None:
        self.tables, self.layers, self.device, self.exact = tables, layers, device, exact
        self.suite = suite if suite is not None else _suite(device)
        self._arrived = None if self.suite is None else _counters(device)
        self.moved = 0
        self.on_move: Callable[[Tensor, Tensor], None] | None = None  # told of source and target slots
        self.healthy: Tensor | None = None
        # First slot of the scratch page for padding rows; its contents never affect a real sequence.
        self.scratch = tables.pool.pages * tables.page
        self._dtype = cache_dtype(layers, dtype, device)
        shapes = [(self.scratch + tables.page, layer.kv_heads, layer.head_dim) for layer in layers]
        self._pools = [_pool(shape, self._dtype, device, self.suite is not None) for shape in shapes]
        self._by_rows = bool(layers) and all(has_kernel(layer.head_dim, self._dtype, device) for layer in layers)
        self._kinds = {(layer.window, layer.group) for layer in layers}
        self._cached: dict[Sequence, int] = {}
        self._nodes: dict[Sequence, int] = {}  # how many draft nodes lie behind the tokens
        self._full: dict[int, int] = {}  # page -> its birth when this cache had filled it

    def cached(self, seq: Sequence) -> int:
        """How many of the sequence's tokens have keys here; a reused prefix counts as far as this model wrote it."""
        if seq not in self._cached:
            self._cached[seq] = self._known_prefix(seq)
        return self._cached[seq]

    def pack(self, batch: Batch, draft: Draft, done: int | Seq[int] = 0, like_graphs: bool = False) -> Packed:
        """Uncached tokens, then the draft nodes from `done` on (one number, or one per sequence), of each sequence.

        like_graphs: see plan_pages.
        """
        return self.place(self.list_rows(batch, draft, done), like_graphs)

    def list_rows(self, batch: Batch, draft: Draft, done: int | Seq[int] = 0) -> RowList:
        """The rows of a pass, on the host."""
        listed, places = RowList(), list[int]()
        for i, seq in enumerate(batch.seqs):
            start, upto = self.cached(seq), batch.upto[i]
            first_node = min(done if isinstance(done, int) else done[i], len(draft.tokens[i]))
            live = range(first_node, len(draft.tokens[i])) if batch.complete(i) else range(0)
            end, row = upto + live.stop, len(listed.ids)
            if self.suite is None:
                path = self._slots(seq, end)
                listed.lanes += self._lanes(seq, draft, i, row, start, upto, live, path)
                listed.slots += [path[start:upto], path[upto + live.start :]]
            else:
                places += range(start, upto)
                places += range(upto + live.start, end)
            before = len(listed.wanted)
            listed.wanted += [row + place for place in wanted_rows(seq, start, upto, batch.complete(i), len(live))]
            listed.ids += seq.tokens[start:upto]
            listed.ids += draft.tokens[i][live.start : live.stop]
            listed.positions += range(start, upto)
            listed.positions += _node_positions(draft, i, upto, live)
            listed.fed.append(upto - start)
            listed.nodes.append(live)
            listed.rows.append(range(before, len(listed.wanted)))
            self._nodes[seq] = live.stop
        if self.suite is not None:
            listed.grid = page_grid([self.tables.table(seq) for seq in batch.seqs], self.scratch // self.tables.page)
            counts = [fed + len(nodes) for fed, nodes in zip(listed.fed, listed.nodes, strict=True)]
            listed.slots.append(self._slots_in(listed.grid, counts, places))
            listed.pages = self._page_lanes(batch, draft, listed)
        return listed

    def _slots_in(self, grid: NDArray[np.int32], counts: list[int], places: list[int]) -> Ints:
        """The slots of places in texts; counts: how many of each sequence, end to end."""
        page, at = self.tables.page, np.array(places, np.int64)
        return grid[np.repeat(np.arange(len(counts)), counts), at // page].astype(np.int64) * page + at % page

    def place(self, listed: RowList, like_graphs: bool = False) -> Packed:
        """The same rows on the device, with the plans for attention. like_graphs: see plan_pages."""
        kind = np.int64 if self.suite is None else np.int32  # as in graphs: kernels are compiled for one of them
        if self.suite is None:
            plans = self._plans(listed.lanes, len(listed.ids))
        else:
            assert listed.grid is not None, "rows are listed with their pages"
            plans = self._page_plans(listed.pages, listed.grid, like_graphs)
        ids, positions, slots, wanted = sent_together(
            np.array(listed.ids, kind),
            np.array(listed.positions, kind),
            np.concatenate(listed.slots),
            np.array(listed.wanted, np.int64),
            device=self.device,
        )
        return Packed(ids, positions, slots, plans, wanted, listed.fed, listed.nodes, listed.rows)

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
        """Store k, v [T, Hkv, D] and let q [T, H, D] look at everything before and at itself."""
        shape, width = self.layers[layer], v.shape[-1]
        pool = self._pools[layer]
        new = torch.stack([pad_last(k, shape.head_dim), pad_last(v, shape.head_dim)], 1)
        pool.index_copy_(0, packed.slots, finite_or_zero(new.to(pool.dtype)))
        if layer == len(self.layers) - 1:
            self.healthy = torch.isfinite(q.flatten(1).float().sum(-1))
        query = pad_last(q, shape.head_dim)
        if self.suite is not None:
            out = self.attend_cached(packed, layer, query.to(pool.dtype).contiguous(), scale, softcap, sinks)
        else:
            out = attend(query, pool, packed.plans[shape.window, shape.group], scale, softcap, sinks)
        return out[..., :width].to(q.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a stored number."""
        return self._dtype.itemsize

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, Hkv, D] of a layer."""
        keys, values = self._pools[layer].unbind(1)
        return keys, values

    def all_pools(self) -> list[Tensor]:
        """Keys and values of all layers."""
        return [part for pool in self._pools for part in pool.unbind(1)]

    def attend_cached(
        self,
        packed: Packed,
        layer: int,
        q: Tensor,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of q [T, H, D] over what is stored, by the device's kernel."""
        shape, suite = self.layers[layer], self.suite
        assert suite is not None, "attention over stored keys needs the device's kernels"
        plan = packed.plans[shape.window, shape.group]
        return suite.attend(
            q, *self.pools(layer), packed.positions, plan, arrived=self._arrived, scale=scale, window=shape.window,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip

    def watch(self, healthy: Tensor) -> None:
        """Note which rows of the pass are finite; for models that check it themselves."""
        self.healthy = healthy

    def advance(self, batch: Batch) -> None:
        """The step's tokens have keys now, whatever becomes of the nodes."""
        for seq, upto in zip(batch.seqs, batch.upto, strict=True):
            self._reach(seq, upto)

    def commit(self, batch: Batch, verdict: Verdict) -> Verdict:
        """Keep the accepted nodes that have keys here; those off the straight line move into place."""
        for i, (seq, decision) in enumerate(zip(batch.seqs, verdict.decisions, strict=True)):
            base, held = batch.upto[i], self._nodes.pop(seq, 0)
            kept = [node for node in decision.nodes if node < held]
            self._move(seq, base, kept)
            self._reach(seq, base + len(kept))
        return verdict

    def set_cached(self, seq: Sequence, length: int) -> None:
        """The first `length` tokens of the sequence have keys here; a captured step wrote them."""
        self._nodes.pop(seq, None)
        self._reach(seq, length)

    def publish(self, batch: Batch, verdict: Verdict) -> None:
        """Offer the pages that are full for good to later sequences, unless what is in them is not to be trusted."""
        for seq, decision in zip(batch.seqs, verdict.decisions, strict=True):
            if decision.error is None:
                self.tables.publish(seq, min(self.cached(seq), len(seq.tokens)))

    def forget(self, seq: Sequence) -> None:
        self._cached.pop(seq, None)
        self._nodes.pop(seq, None)

    def _plans(self, lanes: list[Lane], size: int) -> dict[tuple[int, int], Any]:
        rows = plan_rows(lanes, size, self.scratch) if self._by_rows and lanes else None
        return {
            (window, group): LanePlan(lanes, size, window, group, self.scratch, self.device, self.exact, rows)
            for window, group in self._kinds
        }

    def _page_plans(
        self, lanes: list[PageLane], grid: NDArray[np.int32], like_graphs: bool
    ) -> dict[tuple[int, int], Any]:
        from faircopy.kernels.gpu.pages import block_length, plan_pages

        if not self.layers:  # some draft heads only read
            return {}
        shortest = min(block_length(layer.head_dim, self.itemsize) for layer in self.layers)
        blocks = -(-grid.shape[1] * self.tables.page // shortest)
        pages = sent(grid, torch.int32, self.device)
        dim = max(layer.head_dim for layer in self.layers)
        plans = {
            group: plan_pages(lanes, group, pages, self.tables.page, blocks, dim, self.itemsize, like_graphs)
            for _, group in self._kinds
        }
        return {(window, group): plans[group] for window, group in self._kinds}

    def _page_lanes(self, batch: Batch, draft: Draft, listed: RowList) -> list[PageLane]:
        """The lanes of all sequences: as _lanes, but blocks before the nodes of a tree are one lane for all of them."""
        from faircopy.kernels.gpu.pages import PageLane

        lanes, row = list[PageLane](), 0
        for i, (fed, live) in enumerate(zip(listed.fed, listed.nodes, strict=True)):
            count = fed + len(live)
            if live and not draft.is_chain(i):
                lanes += self._tree_lanes(draft, i, row, fed, batch.upto[i], live)
            elif count:
                lanes.append(PageLane(i, range(row, row + count)))
            row += count
        return lanes

    def _tree_lanes(self, draft: Draft, i: int, row: int, fed: int, base: int, live: range) -> list[PageLane]:
        from faircopy.kernels.gpu.pages import PageLane, block_length

        block = base // max(block_length(layer.head_dim, self.itemsize) for layer in self.layers)
        nodes = range(row + fed, row + fed + len(live))
        lanes = [PageLane(i, range(row, row + fed))] if fed else []
        lanes += [PageLane(i, nodes, 0, block)] if block else []
        done = set(range(live.start))
        for leaf in sorted(set(live) - set(draft.parents[i])):
            path = draft.path(i, leaf)
            fresh = [nodes[node - live.start] for node in path if node not in done]
            done.update(path)
            lanes.append(PageLane(i, fresh, block, base=base, path=path))
        return lanes

    def _known_prefix(self, seq: Sequence) -> int:
        birth, known = self.tables.pool.birth, 0
        for page in self.tables.table(seq):
            if self._full.get(page) != birth[page]:
                break
            known += self.tables.page
        return min(known, (len(seq.tokens) - 1) // self.tables.page * self.tables.page)

    def _reach(self, seq: Sequence, length: int) -> None:
        table, page = self.tables.table(seq), self.tables.page
        for index in range(self._cached.get(seq, 0) // page, length // page):
            self._full[table[index]] = self.tables.pool.birth[table[index]]
        self._cached[seq] = length

    def _slots(self, seq: Sequence, end: int, start: int = 0) -> Ints:
        """The slot of each position from start to end."""
        page = self.tables.page
        if end - start <= 1:
            table = self.tables.table(seq)
            return np.array([table[at // page] * page + at % page for at in range(start, end)], np.int64)
        skip = start // page
        pages = np.array(self.tables.table(seq)[skip : self.tables.pages_for(end)], np.int64)
        return (pages[:, None] * page + np.arange(page)).reshape(-1)[start - skip * page : end - skip * page]

    def _lanes(
        self, seq: Sequence, draft: Draft, i: int, row: int, start: int, upto: int, live: range, path: Ints
    ) -> list[Lane]:
        """A chain is one lane; a tree has one per leaf, each node computed in the first lane that holds it."""
        fed, base = upto - start, upto
        if draft.is_chain(i) or not live:
            count, first = fed + len(live), start if fed else base + live.start
            return [Lane(first, range(row, row + count), path, self._run(seq))] if count else []
        lanes = []
        if fed:
            lanes.append(Lane(start, range(row, row + fed), path[:base]))
        done = set(range(live.start))
        for leaf in sorted(set(live) - set(draft.parents[i])):
            nodes = draft.path(i, leaf)
            fresh = [node for node in nodes if node not in done]
            done.update(fresh)
            slots = np.concatenate([path[:base], path[base:][nodes]])
            rows = [row + fed + node - live.start for node in fresh]
            lanes.append(Lane(base + len(nodes) - len(fresh), rows, slots))
        return lanes

    def _run(self, seq: Sequence) -> tuple[int, int]:
        """First slot and how many there are from it to the pool's end, if all pages follow each other."""
        table, page = self.tables.table(seq), self.tables.page
        rising = all(b - a == 1 for a, b in pairwise(table))
        return (table[0] * page, self.scratch + page - table[0] * page) if rising else (0, 0)

    def _move(self, seq: Sequence, base: int, nodes: Seq[int]) -> None:
        moves = [(base + node, base + place) for place, node in enumerate(nodes) if node != place]
        if not moves:
            return
        slots = self._slots(seq, base + max(nodes) + 1)
        source, target = (sent(slots[list(side)], torch.int64, self.device) for side in zip(*moves, strict=True))
        self.move(source, target)
        self.moved += len(moves)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy keys and values of all layers from slots to slots."""
        for pool in self._pools:
            pool[target] = pool[source]
        if self.on_move is not None:
            self.on_move(source, target)


def _suite(device: torch.device) -> Suite | None:
    if device.type != "cuda":
        return None
    from faircopy.kernels.gpu.suite import suite_for

    return suite_for(device)


def _counters(device: torch.device) -> Tensor:
    from faircopy.kernels.gpu.attention import counters

    return counters(device)


def _node_positions(draft: Draft, i: int, upto: int, live: range) -> Seq[int]:
    """Behind the tokens, as deep as each node is in its tree."""
    if not live or draft.is_chain(i):
        return range(upto + live.start, upto + live.stop)
    depths: list[int] = (upto - 1 + node_depths(draft.parents[i])[live.start : live.stop]).tolist()
    return depths


def _pool(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, apart: bool) -> Tensor:
    """[slots, 2, Hkv, D]: keys and values side by side, so that one gather reads both; apart, as kernels want them."""
    if apart:
        return lazy_zeros((2, *shape), dtype, device).transpose(0, 1)
    return lazy_zeros((shape[0], 2, *shape[1:]), dtype, device)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system hands out their memory when it is first written, as sequences take pages."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
