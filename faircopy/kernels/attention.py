"""Attention of ragged queries over paged keys, in tiles whose shape depends on positions alone.

Queries are cut into tiles at fixed positions, keys at fixed multiples of STEP: the row at position p is always computed
as the same row of a tile of the same shape over the same number of keys, whoever else is in the batch. Keys beyond a
row's own position are masked to minus infinity, so they add exact zeros.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

STEP = 32  # keys are rounded up to a multiple of this
TILE = 8  # queries times heads per key head in a tile; below four rows products take another path
LONG = 512  # from here on keys are read in place where they lie in one run; below, gathering many at once is faster
MERGE = 2  # at most this many tiles of one sequence are gathered together with other sequences'

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Lane:
    """Consecutive queries of one sequence and the slots of all keys on their path, from position 0 on."""

    first: int  # position of the first query
    rows: Ints  # packed row of each query
    slots: Ints  # slot of each position on the path
    run: tuple[int, int] = (0, 0)  # first slot and length, where the sequence's pages lie in one run


@dataclass(slots=True)
class TileGroup:
    """Tiles of equal shape, run by one call."""

    queries: Tensor  # [n, R] packed rows; unused places repeat a used one
    mask: Tensor  # [n, 1, R * group, L]
    keys: Tensor | None  # [n or 1, L] slots to gather, or None:
    run: tuple[int, int] = (0, 0)  # first slot and number of keys, read in place


@dataclass(slots=True)
class AttentionPlan:
    """All tiles of a step, and where each packed row's result is among them."""

    groups: list[TileGroup]
    order: Tensor  # [T]


@dataclass(slots=True)
class _KeySet:
    """The tiles of one lane that see the same keys."""

    lane: Lane
    low: int
    high: int
    height: int  # positions per tile
    tiles: list[int] = field(default_factory=list)


def plan_attention(
    lanes: list[Lane], size: int, window: int, group: int, trash: int, device: torch.device, exact: bool = True
) -> AttentionPlan:
    """Cut the lanes of a step into tiles: `size` packed rows, `trash` a slot that is always zero."""
    order = np.empty(size, np.int64)
    groups, used = [], 0
    for sets in _buckets(lanes, window, group, exact):
        tiles = [(s, tile) for s in sets for tile in s.tiles]
        queries = np.empty((len(tiles), sets[0].height), np.int64)
        for n, (s, tile) in enumerate(tiles):
            rows, at = _tile_rows(s, tile)
            queries[n] = rows[0]
            queries[n, at] = rows
            order[rows] = used + n * s.height + at
        groups.append(_group(tiles, queries, window, group, trash, device))
        used += queries.size
    return AttentionPlan(groups, torch.from_numpy(order).to(device))


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, D] against pools [S, Hkv, D] -> [T, H, D], in the pools' type."""
    heads, kv_heads, dim = q.shape[1], keys.shape[1], keys.shape[2]
    q = q.to(keys.dtype)
    results = []
    for g in plan.groups:
        n, height = g.queries.shape
        tile = q.index_select(0, g.queries.reshape(-1)).view(n, height, kv_heads, -1, dim)
        tile = tile.permute(0, 2, 1, 3, 4).reshape(n, kv_heads, -1, dim)
        k, v = _read(keys, g), _read(values, g)
        out = _capped(tile, k, v, g.mask, scale, softcap) if softcap else _flash(tile, k, v, g.mask, scale, sinks)
        out = out.view(n, kv_heads, height, -1, dim).permute(0, 2, 1, 3, 4)
        results.append(out.reshape(n * height, heads, dim))
    return (results[0] if len(results) == 1 else torch.cat(results)).index_select(0, plan.order)


def _buckets(lanes: list[Lane], window: int, group: int, exact: bool) -> list[list[_KeySet]]:
    """Key sets that run in one call: short ones of equal shape together, long ones and whole prompts by themselves."""
    together: dict[tuple[int, int], list[_KeySet]] = defaultdict(list)
    alone = []
    for lane in lanes:
        for s in _key_sets(lane, window, group) if exact else [_one_tile(lane)]:
            if s.high - s.low < LONG and len(s.tiles) <= MERGE:
                together[s.height, s.high - s.low].append(s)
            else:
                alone.append([s])
    return [*together.values(), *alone]


def _key_sets(lane: Lane, window: int, group: int) -> list[_KeySet]:
    height = -(-TILE // group)
    sets: list[_KeySet] = []
    for tile in range(lane.first // height, (lane.first + len(lane.rows) - 1) // height + 1):
        high = _up((tile + 1) * height)
        low = max(0, tile * height - window + 1) // STEP * STEP if window else 0
        if not sets or (sets[-1].low, sets[-1].high) != (low, high):
            sets.append(_KeySet(lane, low, high, height))
        sets[-1].tiles.append(tile)
    return sets


def _one_tile(lane: Lane) -> _KeySet:
    """Without exactness: all queries of a lane at once, and no more keys than there are."""
    return _KeySet(lane, 0, lane.first + len(lane.rows), len(lane.rows), [-1])


def _tile_rows(s: _KeySet, tile: int) -> tuple[Ints, Ints]:
    """The packed rows in a tile and their places in it."""
    if tile < 0:
        return s.lane.rows, np.arange(s.height)
    begin = max(tile * s.height, s.lane.first)
    end = min((tile + 1) * s.height, s.lane.first + len(s.lane.rows))
    return s.lane.rows[begin - s.lane.first : end - s.lane.first], np.arange(begin, end) - tile * s.height


def _group(
    tiles: list[tuple[_KeySet, int]], queries: Ints, window: int, group: int, trash: int, device: torch.device
) -> TileGroup:
    height, length = queries.shape[1], tiles[0][0].high - tiles[0][0].low
    begins = np.array([tile * height if tile >= 0 else s.lane.first for s, tile in tiles])
    lows = np.array([s.low for s, _ in tiles])
    # [n, height, L]: how far each key lies behind each query
    behind = (begins[:, None] + np.arange(height))[:, :, None] - (lows[:, None] + np.arange(length))[:, None, :]
    hidden = behind < 0 if not window else (behind < 0) | (behind >= window)
    mask = np.where(hidden, np.float32(-np.inf), np.float32(0)).repeat(group, axis=1)[:, None]
    first = tiles[0][0]
    start, covered = first.lane.run
    in_place = length >= LONG and first.high <= covered
    return TileGroup(
        torch.from_numpy(queries).to(device),
        torch.from_numpy(mask).to(device),
        None if in_place else torch.from_numpy(_gathered(tiles, length, trash)).to(device),
        (start + first.low, length) if in_place else (0, 0),
    )


def _gathered(tiles: list[tuple[_KeySet, int]], length: int, trash: int) -> Ints:
    """Slots per tile, or once if all tiles see the same keys."""
    sets = [s for s, _ in tiles]
    if all(s is sets[0] for s in sets):
        sets = sets[:1]
    keys = np.full((len(sets), length), trash, np.int64)
    for n, s in enumerate(sets):
        slots = s.lane.slots[s.low : s.high]
        keys[n, : len(slots)] = slots
    return keys


def _read(pool: Tensor, g: TileGroup) -> Tensor:
    """[n, Hkv, L, D]: a view of the pool, or a gathered copy with the same inner strides."""
    n = g.queries.shape[0]
    if g.keys is None:
        start, length = g.run
        return pool[start : start + length].permute(1, 0, 2).expand(n, -1, -1, -1)
    sets, length = g.keys.shape
    rows = pool.index_select(0, g.keys.reshape(-1)).view(sets, length, *pool.shape[1:])
    return rows.permute(0, 2, 1, 3).expand(n, -1, -1, -1)


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


def _up(length: int) -> int:
    return -(-length // STEP) * STEP
