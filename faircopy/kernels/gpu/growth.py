"""How draft trees grow inside captured steps, a program per tree: the functions of `kernels/tree_growth.py`, and where
the rows of the next level stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu.launch import begin, launched, options, power
from faircopy.kernels.gpu.pages import PATH, PagePlan, set_base
from faircopy.kernels.gpu.records import LIMIT, PAGES, Control
from faircopy.kernels.gpu.state import BatchSlots
from faircopy.kernels.tree_growth import Budget, Candidates, Front, Nodes, TreeRules

LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _ordered(values, places):
    """64-bit numbers in the order of 32-bit values; of equal values the first place has the highest."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & LAST)
    return (bits.to(tl.int64) << 32) | (places ^ LAST).to(tl.int64)


@triton.jit
def _place(ordered):
    return (ordered & 0xFFFFFFFF).to(tl.int32) ^ LAST


@triton.jit
def _value(ordered):
    bits = (ordered >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & LAST)).to(tl.float32, bitcast=True)


@triton.jit
def _best(ordered, COUNT: tl.constexpr, CP: tl.constexpr):
    """The highest COUNT of them, one after the other."""
    lane = tl.arange(0, CP)
    found = tl.full((CP,), LOWEST, tl.int64)
    for rank in range(COUNT):
        top = tl.max(ordered, 0)
        found = tl.where(lane == rank, top, found)
        ordered = tl.where(ordered == top, LOWEST, ordered)
    return found


@launched
@triton.jit(do_not_specialize=["first", "apart"])
def _expand(
    ids, scores, front_nodes, front_values, found_tokens, found_parents, found_values, tokens, above, nodes, values,
    first, apart,
    F: tl.constexpr, OFFERED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, CP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    at = tl.arange(0, BLOCK)
    inside = at < F * OFFERED
    mine, row, place = b * F * OFFERED + at, b * F + at // OFFERED, b * apart + first + at
    value = tl.load(scores + mine, mask=inside, other=0.0) + tl.load(front_values + row, mask=inside, other=0.0)
    tl.store(found_values + place, value, mask=inside)
    tl.store(found_tokens + place, tl.load(ids + mine, mask=inside), mask=inside)
    tl.store(found_parents + place, tl.load(front_nodes + row, mask=inside), mask=inside)
    chosen = _best(tl.where(inside, _ordered(value, at), LOWEST), COUNT, CP)
    lane = tl.arange(0, CP)
    kept, to, which = lane < COUNT, b * COUNT + lane, _place(chosen)
    tl.store(tokens + to, tl.load(ids + b * F * OFFERED + which, mask=kept), mask=kept)
    tl.store(above + to, (which // OFFERED).to(tl.int64), mask=kept)
    tl.store(nodes + to, (first + which).to(tl.int64), mask=kept)
    tl.store(values + to, _value(chosen), mask=kept)


@launched
@triton.jit(do_not_specialize=["apart", "token_stride", "parent_stride"])
def _rerank(
    found_tokens, found_parents, found_values, places, tokens, parents, values, apart, token_stride, parent_stride,
    COUNT: tl.constexpr, NODES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, NP: tl.constexpr,
    VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    at = tl.arange(0, BLOCK)
    inside = at < COUNT
    value = tl.load(found_values + b * apart + at, mask=inside, other=0.0)
    ordered = tl.where(inside, _ordered(value, at), LOWEST)
    least = tl.max(ordered, 0)
    for _ in range(NODES - 1):
        least = tl.max(tl.where(ordered < least, ordered, LOWEST), 0)
    chosen = ordered >= least
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(places + b * COUNT + at, tl.where(chosen, rank, -1), mask=inside)
    tl.debug_barrier()
    parent = tl.load(found_parents + b * apart + at, mask=inside, other=-1)
    above = tl.load(places + b * COUNT + parent, mask=inside & (parent >= 0), other=-1)
    token = tl.load(found_tokens + b * apart + at, mask=inside, other=-1).to(tl.int32)
    there = value > float("-inf")
    tl.store(tokens + b * token_stride + rank, tl.where(there, token, -1), mask=chosen)
    tl.store(parents + b * parent_stride + rank, tl.where(there, above, -1) + 1, mask=chosen)
    spare = tl.arange(0, NP)
    missing = (spare >= NODES) & (spare < WIDE)
    tl.store(tokens + b * token_stride + spare, tl.full((NP,), -1, tl.int32), mask=missing)
    tl.store(parents + b * parent_stride + spare, tl.zeros((NP,), tl.int32), mask=missing)
    if VALUES:
        tl.store(values + b * WIDE + rank, value, mask=chosen)
        tl.store(values + b * WIDE + spare, tl.full((NP,), float("-inf"), tl.float32), mask=missing)


@launched
@triton.jit(do_not_specialize=["token_stride", "parent_stride"])
def _spend(
    ids, scores, front_nodes, front_values, used, node_tokens, node_parents, node_values, tokens, above, nodes, values,
    top_p, floor, token_stride, parent_stride,
    F: tl.constexpr, OFFERED: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, BEGIN: tl.constexpr,
    FP: tl.constexpr, OP: tl.constexpr, CP: tl.constexpr, NP: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    f, o = tl.arange(0, FP)[:, None], tl.arange(0, OP)[None, :]
    inside, place = (f < F) & (o < OFFERED), f * OFFERED + o
    score = tl.load(scores + b * F * OFFERED + place, mask=inside, other=float("-inf"))
    highest = tl.load(scores + b * F * OFFERED + f * OFFERED, mask=f < F, other=float("-inf"))
    chance = tl.exp(score)
    likely = (tl.cumsum(chance, 1) - chance < top_p) & (score >= highest + floor)
    value = tl.where(likely, score + tl.load(front_values + b * F + f, mask=f < F, other=0.0), float("-inf"))
    ordered = tl.where(inside, _ordered(value, place), LOWEST)
    chosen = _best(tl.reshape(ordered, (FP * OP,)), COUNT, CP)
    which, path = _place(chosen), _value(chosen)
    before = 0
    if not BEGIN:
        before = tl.load(used + b).to(tl.int32)
    lane = tl.arange(0, CP)
    wanted = lane < COUNT
    kept = wanted & (path > float("-inf")) & (lane < WIDE - before)
    count = tl.sum(kept.to(tl.int32), 0)
    row, node, to = which // OFFERED, before + lane, b * COUNT + lane
    token = tl.load(ids + b * F * OFFERED + which, mask=wanted, other=0)
    parent = tl.load(front_nodes + b * F + row, mask=kept, other=-1)
    tl.store(node_tokens + b * token_stride + node, token.to(tl.int32), mask=kept)
    tl.store(node_parents + b * parent_stride + node, (parent + 1).to(tl.int32), mask=kept)
    if VALUES:
        tl.store(node_values + b * WIDE + node, path, mask=kept)
    tl.store(tokens + to, token, mask=wanted)
    tl.store(above + to, row.to(tl.int64), mask=wanted)
    tl.store(nodes + to, tl.where(kept, node, WIDE).to(tl.int64), mask=wanted)
    tl.store(values + to, tl.where(kept, path, float("-inf")), mask=wanted)
    tl.store(used + b, (before + count).to(tl.int64))
    if BEGIN:
        spare = tl.arange(0, NP)
        missing = (spare >= count) & (spare < WIDE)
        tl.store(node_tokens + b * token_stride + spare, tl.full((NP,), -1, tl.int32), mask=missing)
        tl.store(node_parents + b * parent_stride + spare, tl.zeros((NP,), tl.int32), mask=missing)
        if VALUES:
            tl.store(node_values + b * WIDE + spare, tl.full((NP,), float("-inf"), tl.float32), mask=missing)


@launched
@triton.jit(do_not_specialize=["stride"])
def _limit(values, allowed, stride, WIDE: tl.constexpr, NP: tl.constexpr, PDL: tl.constexpr):
    """Program b: all but the likeliest `allowed` nodes of tree b count as missing."""
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    at = tl.arange(0, NP)
    value = tl.load(values + b * WIDE + at, mask=at < WIDE, other=float("-inf"))
    same = (value[None, :] == value[:, None]) & (at[None, :] < at[:, None])
    before = tl.sum(((value[None, :] > value[:, None]) | same).to(tl.int32), 1)
    excess = (at < WIDE) & (before >= tl.load(allowed + b * stride))
    tl.store(values + b * WIDE + at, tl.full((NP,), float("-inf"), tl.float32), mask=excess)


@launched
@triton.jit(do_not_specialize=["size", "count", "token_stride", "parent_stride"])
def _share(
    tokens, parents, values, size, count, token_stride, parent_stride,
    WIDE: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b: how many nodes of all trees come before each of tree b's; those with few before them stay."""
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    at = tl.arange(0, NP)
    mine = b.to(tl.int32) * WIDE + at
    own = tl.load(values + mine, mask=at < WIDE, other=float("-inf"))
    before = tl.zeros((NP,), tl.int32)
    for first in range(0, size * WIDE, BLOCK):
        other = first + tl.arange(0, BLOCK)
        value = tl.load(values + other, mask=other < size * WIDE, other=float("-inf"))
        same = (value[None, :] == own[:, None]) & (other[None, :] < mine[:, None])
        before += tl.sum(((value[None, :] > own[:, None]) | same).to(tl.int32), 1)
    kept = (at < WIDE) & (own > float("-inf")) & (before < count)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    token = tl.load(tokens + b * token_stride + at, mask=kept, other=-1)
    parent = tl.load(parents + b * parent_stride + at, mask=kept, other=0)
    above = tl.sum(tl.where(parent[:, None] - 1 == at[None, :], place[None, :] + 1, 0), 1)
    total = tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    tl.store(tokens + b * token_stride + place, token, mask=kept)
    tl.store(parents + b * parent_stride + place, above, mask=kept)
    missing = (at < WIDE) & (at >= total)
    tl.store(tokens + b * token_stride + at, tl.full((NP,), -1, tl.int32), mask=missing)
    tl.store(parents + b * parent_stride + at, tl.zeros((NP,), tl.int32), mask=missing)


def expand(ids: Tensor, scores: Tensor, front: Front, found: Candidates, first: int, breadth: int) -> Front:
    (size, rows, offered), new = ids.shape, _front(ids, breadth)
    _expand[(size,)](
        ids.contiguous(), scores.contiguous(), front.nodes, front.values, found.tokens, found.parents, found.values,
        *new, first, found.tokens.stride(0), F=rows, OFFERED=offered, COUNT=breadth, BLOCK=power(rows * offered),
        CP=power(breadth), num_warps=_warps(rows * offered), **options(ids.device),
    )  # fmt: skip
    return new


def rerank(found: Candidates, count: int, out: Nodes) -> None:
    size, width = out.tokens.shape
    places = torch.empty(size, count, dtype=torch.int32, device=out.tokens.device)
    _rerank[(size,)](
        found.tokens, found.parents, found.values, places, out.tokens, out.parents, out.values,
        found.tokens.stride(0), out.tokens.stride(0), out.parents.stride(0), COUNT=count, NODES=min(width, count),
        WIDE=width, BLOCK=power(count), NP=power(width), VALUES=out.values is not None, num_warps=_warps(count),
        **options(out.tokens.device),
    )  # fmt: skip


def spend(ids: Tensor, scores: Tensor, front: Front, budget: Budget, out: Nodes, begin: bool) -> Front:
    (size, rows, offered), width = ids.shape, out.tokens.shape[1]
    count = min(width, rows * offered)
    new = _front(ids, count)
    _spend[(size,)](
        ids.contiguous(), scores.contiguous(), front.nodes, front.values, budget.used, out.tokens, out.parents,
        out.values, *new, budget.top_p, budget.floor, out.tokens.stride(0), out.parents.stride(0), F=rows,
        OFFERED=offered, COUNT=count, WIDE=width, BEGIN=begin, FP=power(rows), OP=power(offered), CP=power(count),
        NP=power(width), VALUES=out.values is not None, num_warps=_warps(rows * offered), **options(ids.device),
    )  # fmt: skip
    return new


def share(nodes: Nodes, count: int, allowed: Tensor) -> None:
    (size, width), more = nodes.tokens.shape, options(nodes.tokens.device)
    sizes = {"WIDE": width, "NP": power(width), "num_warps": 4}
    _limit[(size,)](nodes.values, allowed, allowed.stride(0), **sizes, **more)
    _share[(size,)](
        nodes.tokens, nodes.parents, nodes.values, size, count, nodes.tokens.stride(0), nodes.parents.stride(0),
        BLOCK=256, **sizes, **more,
    )  # fmt: skip


def _front(ids: Tensor, count: int) -> Front:
    shape, device = (ids.shape[0], count), ids.device
    tokens, above, nodes = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(3))
    return Front(tokens, above, nodes, torch.empty(shape, device=device))


@dataclass(frozen=True, slots=True)
class FrontRows:
    """Where the rows of one level stand, in tensors that keep their addresses; see place_front."""

    positions: Tensor  # [B, F] int64
    slots: Tensor  # [B, F] int64: KV slots
    paths: Tensor  # [B, F, PATH] int32: the rows down to each one, counted from the end of the text

    @classmethod
    def over(cls, paths: Tensor) -> FrontRows:
        positions, slots = (torch.zeros(paths.shape[:2], dtype=torch.int64, device=paths.device) for _ in range(2))
        return cls(positions, slots, paths)


@dataclass(frozen=True, slots=True)
class UnreadRows:
    """Rows that a head reads in a step: the text from the first one on that it has not read."""

    read: Tensor  # [B] int64: tokens that it has read
    ids: Tensor  # [B, R] int64
    positions: Tensor  # [B, R] int64
    slots: Tensor  # [B, R] int64: KV slots
    last: Tensor  # [B] int64: which row is the text's last, counted over the batch

    @classmethod
    def over(cls, read: Tensor, rows: int) -> UnreadRows:
        shape, device = (read.shape[0], rows), read.device
        ids, positions, slots = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(3))
        return cls(read, ids, positions, slots, torch.zeros_like(read))


@triton.jit
def _kv_slots(line, positions, inside, limit, scratch, pages, PAGE: tl.constexpr):
    """KV slots of positions; the scratch slot at or behind the limit."""
    page = tl.load(line + PAGES + tl.minimum(positions // PAGE, pages - 1), mask=inside, other=0).to(tl.int64)
    return tl.where(positions < limit, page * PAGE + positions % PAGE, scratch)


@launched
@triton.jit(do_not_specialize=["level", "expanded", "scratch", "pages"])
def _place_front(
    control, lengths, above, before, positions, slots, paths, ranges, tail_ranges, bases,
    stride, level, expanded, scratch, pages,
    F: tl.constexpr, ABOVE: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr,
    FP: tl.constexpr, TP: tl.constexpr, PATH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    line = control + b * stride
    n, limit = tl.load(lengths + b), tl.load(line + LIMIT)
    row = tl.arange(0, FP)
    inside, mine, own = row < F, b * F + row, expanded + row
    tl.store(positions + mine, (tl.minimum(n + level, limit) - 1 + row * 0).to(tl.int64), mask=inside)
    tl.store(slots + mine, _kv_slots(line, n + own, inside, limit, scratch, pages, PAGE), mask=inside)
    up = b * ABOVE + tl.load(above + mine, mask=inside, other=0)
    place = tl.arange(0, PATH)[None, :]
    path = tl.load(before + up[:, None] * PATH + place, mask=inside[:, None] & (place < level - 1), other=0)
    path = tl.minimum(tl.where(place == level - 1, own[:, None], path), limit - 1 - n)
    tl.store(paths + mine[:, None] * PATH + place, path, mask=inside[:, None] & (place < level))
    tile, block = tl.arange(0, TP), n // STEP
    tl.store(ranges + (b * TILES + tile) * 2 + 1, block + tile * 0, mask=tile < TILES)
    tl.store(tail_ranges + mine * 2, block + row * 0, mask=inside)
    tl.store(bases + mine, n + row * 0, mask=inside)


@launched
@triton.jit(do_not_specialize=["scratch", "pages", "reach"])
def _place_unread(
    control, lengths, history, read, ids, positions, slots, last, stride, reach, scratch, pages,
    R: tl.constexpr, PAGE: tl.constexpr, RP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    line = control + b * stride
    first, limit = tl.load(read + b).to(tl.int32), tl.load(line + LIMIT)
    row = tl.arange(0, RP)
    inside, mine, at = row < R, b * R + row, first + row
    token = tl.load(history + b * reach + tl.minimum(at, reach - 1), mask=inside, other=0)
    tl.store(ids + mine, token.to(tl.int64), mask=inside)
    tl.store(positions + mine, tl.where(at < limit, at, 0).to(tl.int64), mask=inside)
    tl.store(slots + mine, _kv_slots(line, at, inside, limit, scratch, pages, PAGE), mask=inside)
    end = tl.minimum(tl.maximum(tl.load(lengths + b) - 1 - first, 0), R - 1)
    tl.store(last + b, b * R + end)


def place_front(
    batch: BatchSlots, above: Tensor, rows: FrontRows, before: Tensor | None, plan: PagePlan, block: int,
    level: int, expanded: int, page: int, scratch: int,
) -> None:  # fmt: skip
    """Rows [B, F] at depth `level`, one behind each row `above` of the front before, whose paths are `before`.

    Their KV slots lie behind the text and the `expanded` rows of the levels before. Rows at or behind the limit are
    never accepted: their keys are written to the scratch slot and not read. block: keys that tiles share, see set_base.
    """
    assert plan.tails is not None and plan.tails.bases is not None, "only a plan for trees has a base"
    size, count = above.shape
    before = rows.paths if before is None else before
    tiles = plan.ranges.shape[0] // size
    _place_front[(size,)](
        batch.control, batch.lengths, above, before, rows.positions, rows.slots, rows.paths, plan.ranges,
        plan.tails.ranges, plan.tails.bases, batch.control.stride(0), level, expanded, scratch, _pages(batch),
        F=count, ABOVE=before.shape[1], TILES=tiles, PAGE=page, STEP=block, FP=power(count), TP=power(tiles), PATH=PATH,
        num_warps=4, **options(above.device),
    )  # fmt: skip


def place_front_twin(
    batch: BatchSlots, above: Tensor, rows: FrontRows, before: Tensor | None, plan: PagePlan, block: int,
    level: int, expanded: int, page: int, scratch: int,
) -> None:  # fmt: skip
    base, limit = batch.lengths.long()[:, None], batch.control[:, Control.LIMIT, None].long()
    own = expanded + torch.arange(above.shape[1], device=above.device).expand_as(above)
    path = own[..., None]
    if before is not None:
        path = torch.cat([before.gather(1, above[..., None].expand(-1, -1, PATH))[..., : level - 1], path], -1)
    rows.paths[..., :level] = torch.minimum(path, (limit - 1 - base)[..., None]).int()
    rows.positions.copy_(torch.minimum(base + level, limit) - 1)
    rows.slots.copy_(_kv_slots_twin(batch, base + own, page, scratch))
    set_base(plan, batch.lengths, block)


def place_unread(batch: BatchSlots, rows: UnreadRows, page: int, scratch: int) -> None:
    """Tokens, positions and KV slots of the rows from the first unread one on; those behind the text are computed too,
    and the next step overwrites them."""
    size, count = rows.ids.shape
    _place_unread[(size,)](
        batch.control, batch.lengths, batch.history, rows.read, rows.ids, rows.positions, rows.slots, rows.last,
        batch.control.stride(0), batch.history.stride(0), scratch, _pages(batch),
        R=count, PAGE=page, RP=power(count), num_warps=1, **options(rows.ids.device),
    )  # fmt: skip


def place_unread_twin(batch: BatchSlots, rows: UnreadRows, page: int, scratch: int) -> None:
    (size, count), device = rows.ids.shape, rows.ids.device
    positions = rows.read[:, None] + torch.arange(count, device=device)
    rows.ids.copy_(batch.history.gather(1, positions.clamp(max=batch.history.shape[1] - 1)))
    rows.slots.copy_(_kv_slots_twin(batch, positions, page, scratch))
    rows.positions.copy_(torch.where(positions < batch.control[:, Control.LIMIT, None], positions, 0))
    rows.last.copy_(torch.arange(size, device=device) * count + (batch.lengths - 1 - rows.read).clamp(0, count - 1))


def _kv_slots_twin(batch: BatchSlots, positions: Tensor, page: int, scratch: int) -> Tensor:
    pages = batch.control[:, Control.PAGES :].gather(1, (positions // page).clamp(max=_pages(batch) - 1)).long()
    return torch.where(positions < batch.control[:, Control.LIMIT, None], pages * page + positions % page, scratch)


def _pages(batch: BatchSlots) -> int:
    """Pages that a sequence can have."""
    return batch.control.shape[1] - Control.PAGES


def _warps(count: int) -> int:
    """One warp has no need of shared memory to find the best of few."""
    return 1 if count <= 256 else 4


RULES = TreeRules(expand, rerank, spend, share)
