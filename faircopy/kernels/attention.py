"""Attention of ragged queries over paged keys; where there is no kernel for rows, in tiles of fixed shapes.

Queries are cut into tiles at fixed positions, keys at fixed multiples of STEP: the row at position p is always computed
as the same row of a tile of the same shape over the same number of keys, whatever else is in the batch. Keys beyond a
row's own position are masked to minus infinity, so they add exact zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from faircopy.kernels.cpu.attention import RowPlan, attend_rows

STEP = 64  # keys are rounded up to a multiple of this,
LEAST = 128  # and to this: where texts are short, one call for all of them is worth more than fewer keys
TILE = 8  # queries times heads per key head in a tile, at least; below four rows products take another path
LONG = 512  # from here on each sequence has a call of its own; below, gathering the keys of many is faster
MERGE = 4  # at most this many tiles of one sequence are gathered together with other sequences'

Ints = NDArray[np.int64]
_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class Lane:
    """Consecutive queries of one sequence and the slots of all keys on their path, from position 0 on."""

    first: int  # position of the first query
    rows: Seq[int]  # packed row of each query
    slots: Ints  # slot of each position on the path
    run: tuple[int, int] = (0, 0)  # first slot, and how many can be read from there, if the pages lie in one run


@dataclass(slots=True)
class TileGroup:
    """Tiles of equal shape, run by one call. All its places are rows of what the whole plan gathers."""

    queries: slice  # its places, n * R of them
    mask: Tensor  # [n, 1, R * group, L]
    keys: slice  # its keys, n * L of them, or L if all tiles see the same;
    run: slice | None  # or where they lie in the pool


@dataclass(slots=True)
class AttentionPlan:
    """All tiles of a step, and where each packed row's result is among them. Made once, used by every layer."""

    groups: list[TileGroup]
    group: int  # query heads per key head
    rows: Tensor  # [P] the packed row at each place; unused places repeat a used one
    order: Tensor  # [T] the place of each packed row
    slots: Tensor  # keys to gather, of all groups
    _lines: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def lines(self, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Rows and order for single heads: [P * H] and [T * H]. At a place, heads that share keys lie apart."""
        if kv_heads not in self._lines:
            heads, (there, back) = kv_heads * self.group, _turned(kv_heads, self.group, self.rows.device)
            self._lines[kv_heads] = (
                (self.rows[:, None] * heads + there).view(-1),
                (self.order[:, None] * heads + back).view(-1),
            )
        return self._lines[kv_heads]


@dataclass(slots=True)
class _KeySet:
    """The tiles of one lane that see the same keys."""

    lane: Lane
    low: int
    high: int
    height: int  # positions per tile
    begins: list[int] = field(default_factory=list)  # the first position of each tile


def plan_attention(
    lanes: list[Lane], size: int, window: int, group: int, scratch: int, device: torch.device, exact: bool = True
) -> AttentionPlan:
    """Cut the lanes of a step into tiles: `size` packed rows, `scratch` a slot that is always zero."""
    buckets = _buckets(lanes, window, group, exact)
    groups, slots, places, keys = [], [_NONE], 0, 0
    for sets in buckets:
        count, length = sum(len(s.begins) for s in sets), sets[0].high - sets[0].low
        run = _in_place(sets)
        read = [_NONE] if run else _gathered(sets, length, scratch)
        queries, many = slice(places, places + count * sets[0].height), sum(map(len, read))
        mask = torch.from_numpy(_mask(sets, length, window, group)).to(device)
        groups.append(TileGroup(queries, mask, slice(keys, keys + many), run))
        slots += read
        places, keys = queries.stop, keys + many
    rows, order = _places(buckets, size)
    parts = [torch.from_numpy(part).to(device) for part in (rows, order, np.concatenate(slots))]
    return AttentionPlan(groups, group, parts[0], parts[1], parts[2])


@dataclass(slots=True)
class LanePlan:
    """The lanes of a step for one window and group; tiles are planned where a layer's attention is made of them."""

    lanes: list[Lane]
    size: int  # packed rows
    window: int
    group: int
    scratch: int
    device: torch.device
    exact: bool
    rows: RowPlan | None  # where this CPU has a kernel that takes rows one by one
    _tiles: AttentionPlan | None = None

    @property
    def tiles(self) -> AttentionPlan:
        if self._tiles is None:
            self._tiles = plan_attention(
                self.lanes, self.size, self.window, self.group, self.scratch, self.device, self.exact
            )
        return self._tiles


def attend(
    q: Tensor, pool: Tensor, plan: LanePlan, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """q [T, H, D] against keys and values in a pool [S, 2, Hkv, D] -> [T, H, D], in the pool's type."""
    if plan.rows is not None and not softcap and sinks is None:
        return attend_rows(q.to(pool.dtype), pool, plan.rows, scale, plan.window)
    return attend_tiles(q, pool, plan.tiles, scale, softcap, sinks).to(pool.dtype)


def attend_tiles(
    q: Tensor, pool: Tensor, plan: AttentionPlan, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """The same by torch's own attention; in float32 on a CPU, whatever the pool's type."""
    kind = torch.float32 if pool.device.type == "cpu" else pool.dtype
    kv_heads, dim = pool.shape[2:]
    rows, order = plan.lines(kv_heads)
    tiles = q.to(kind).reshape(-1, dim).index_select(0, rows).view(-1, plan.group, kv_heads, dim)
    read = pool.index_select(0, plan.slots).to(kind)
    results = []
    for g in plan.groups:
        n, _, lines, length = g.mask.shape
        tile = tiles[g.queries].view(n, lines, kv_heads, dim).transpose(1, 2)
        k, v = _keys_and_values(*_source(read, pool, g), n, length)
        out = _capped(tile, k, v, g.mask, scale, softcap) if softcap else _flash(tile, k, v, g.mask, scale, sinks)
        results.append(out.transpose(1, 2).reshape(-1, dim))
    whole = results[0] if len(results) == 1 else torch.cat(results)
    return whole.index_select(0, order).view(q.shape[0], -1, dim)


def _source(read: Tensor, pool: Tensor, tiles: TileGroup) -> tuple[Tensor, slice]:
    """Where a group's keys and values lie: among what was gathered, or in the pool if that has the same type."""
    if tiles.run is None:
        return read, tiles.keys
    if pool.dtype == read.dtype:
        return pool, tiles.run
    return pool[tiles.run].to(read.dtype), slice(0, tiles.run.stop - tiles.run.start)


def _keys_and_values(source: Tensor, rows: slice, n: int, length: int) -> list[Tensor]:
    """[n, Hkv, L, D] each: views of these rows of a whole [.., 2, Hkv, D], repeated if there are only L of them."""
    _, kv_heads, dim = source.shape[1:]
    width, each = 2 * kv_heads * dim, length if rows.stop - rows.start > length else 0
    shape, strides = (n, kv_heads, length, dim), (each * width, dim, width, 1)
    return [source.as_strided(shape, strides, rows.start * width + half * kv_heads * dim) for half in (0, 1)]


@cache
def _turned(kv_heads: int, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The head in each line of a place, heads of one group apart, and the line of each head."""
    heads = torch.arange(kv_heads * group, device=device)
    return heads.view(kv_heads, group).t().reshape(-1), heads.view(group, kv_heads).t().reshape(-1)


def _buckets(lanes: list[Lane], window: int, group: int, exact: bool) -> list[list[_KeySet]]:
    """Key sets that run in one call: short ones of equal shape together, long ones and whole prompts by themselves."""
    together: dict[tuple[int, int], list[_KeySet]] = defaultdict(list)
    alone = []
    for lane in lanes:
        for s in _key_sets(lane, window, group) if exact else [_one_tile(lane)]:
            if s.high - s.low < LONG and len(s.begins) <= MERGE:
                together[s.height, s.high - s.low].append(s)
            else:
                alone.append([s])
    return [*together.values(), *alone]


def _key_sets(lane: Lane, window: int, group: int) -> list[_KeySet]:
    height = _height(group)
    sets: list[_KeySet] = []
    for begin in range(lane.first // height * height, lane.first + len(lane.rows), height):
        high = _up(begin + height)
        low = max(0, begin - window + 1) // STEP * STEP if window else 0
        if not sets or (sets[-1].low, sets[-1].high) != (low, high):
            sets.append(_KeySet(lane, low, high, height))
        sets[-1].begins.append(begin)
    return sets


def _one_tile(lane: Lane) -> _KeySet:
    """Without exactness: all queries of a lane at once, and no more keys than there are."""
    return _KeySet(lane, 0, lane.first + len(lane.rows), len(lane.rows), [lane.first])


def _places(buckets: list[list[_KeySet]], size: int) -> tuple[Ints, Ints]:
    """The packed row at each place of all tiles, and the place of each packed row."""
    rows: list[int] = []
    order = [0] * size
    for s in (s for sets in buckets for s in sets):
        for begin in s.begins:
            start = begin - s.lane.first
            mine = s.lane.rows[max(start, 0) : start + s.height]
            unused = max(-start, 0)
            for place, row in enumerate(mine, len(rows) + unused):
                order[row] = place
            rows += [mine[0]] * unused + [*mine] + [mine[0]] * (s.height - unused - len(mine))
    return np.array(rows), np.array(order)


def _mask(sets: list[_KeySet], length: int, window: int, group: int) -> NDArray[np.float32]:
    """[n, 1, R * group, L]: minus infinity at keys that lie behind a query, or too far before it."""
    begins = np.array([begin - s.low for s in sets for begin in s.begins])
    at = (begins[:, None] + np.arange(sets[0].height).repeat(group))[:, None, :, None]
    keys = np.arange(length)
    hidden = keys > at if not window else (keys > at) | (keys <= at - window)
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _in_place(sets: list[_KeySet]) -> slice | None:
    """Where the keys of a call for one sequence lie, if in one run; what follows the sequence's own is masked."""
    start, readable = sets[0].lane.run
    alone = len(sets) == 1 and sets[0].high <= readable
    return slice(start + sets[0].low, start + sets[0].high) if alone else None


def _gathered(sets: list[_KeySet], length: int, scratch: int) -> list[Ints]:
    """Slots per tile, or once if all tiles see the same keys."""
    read = []
    for s in sets:
        slots = s.lane.slots[s.low : s.high]
        missing = [np.full(length - len(slots), scratch)] if len(slots) < length else []
        read += [slots, *missing] * (len(s.begins) if len(sets) > 1 else 1)
    return read


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    if q.device.type != "cpu":
        if sinks is not None:
            return _with_sinks(*_scores_and_output(q, k, v, mask, scale), sinks)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), scale=scale)
    single = q.shape[0] * q.shape[1] == 1
    if single:  # one unit of work would let the product inside use several threads, and another order
        q, k, v, mask = (x.expand(2, -1, -1, -1) for x in (q, k, v, mask))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    out = out if sinks is None else _with_sinks(out, lse, sinks)
    return out[:1] if single else out


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Share the softmax with one more score per head that has no value."""
    n, kv_heads, rows, _ = out.shape
    sink = sinks.to(lse.dtype).view(1, kv_heads, 1, -1)
    share = 1 / (1 + torch.exp(sink - lse.view(n, kv_heads, -1, sink.shape[-1])))
    return out * share.reshape(n, kv_heads, rows, 1).to(out.dtype)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Scores squashed by tanh. One tile at a time: a batched product may split its work by the batch."""
    tiles = []
    for i in range(q.shape[0]):
        scores = softcap * torch.tanh((q[i] @ k[i].transpose(-1, -2)) * (scale / softcap)) + mask[i].to(q.dtype)
        tiles.append(torch.softmax(scores, -1) @ v[i])
    return torch.stack(tiles)


def _scores_and_output(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-1, -2)).float() * scale + mask
    return (torch.softmax(scores, -1).to(v.dtype) @ v), torch.logsumexp(scores, -1)


def _height(group: int) -> int:
    """Positions per tile. One more where that makes whole fours of rows: 12 cost what 9 do."""
    height = -(-TILE // group)
    return height if height * group % 4 == 0 or (height + 1) * group % 4 else height + 1


def _up(length: int) -> int:
    return max(LEAST, -(-length // STEP) * STEP)
