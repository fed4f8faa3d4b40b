"""Attention on Hopper: one warp copies pages into shared memory, the others multiply them on the tensor cores.

The arithmetic and its order are those of `kernels/gpu/attention.py`, and so are the bits. Blocks share the keys by
their number: each takes an equal stretch of (key head, tile, block), so that all of them read the same head's keys at a
time, and only a tile that two blocks share leaves its spans' states in memory. Four more warps merge them (of tall
tiles the multiplying ones): a long text's in all blocks that share it, each some of the rows. A block that has waited
for long leaves its rows to the last one, so that none depends on another that has not begun. What lies in a page behind
a sequence's last position is multiplied by zero: the cache holds finite numbers alone. Keys of earlier passes do not
depend on the kernel before: the first are on their way while that kernel still runs.

Trees (TREE): the rows of a tile lie on several paths, the lanes (`lanes.py`). Blocks before the nodes are as a chain's.
In the block where nodes begin, and in the one behind it where a path reaches that far, the last TAIL columns or fewer,
from a multiple of GRAIN on, are each lane's own: they are gathered into shared memory in the order of the path,
multiplied lane by lane, and each row keeps its lane's numbers. A block is one step of the running softmax as in a
chain, and a row's keys lie in the same GRAIN of it at the same place; what a row sees besides is multiplied by zero,
which changes no bit of its sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from faircopy.kernels.gpu.launch import hopper, launched, options, power, processors
from faircopy.kernels.gpu.pages import (
    END,
    GRAIN,
    GRAPH_ROWS,
    HOPPER_DIMS,
    HOPPER_PAGES,
    HOPPER_TOKENS,
    SPAN,
    TAIL,
    PagePlan,
    block_length,
)
from faircopy.kernels.gpu.stream import barriers

LINE = 64  # numbers of a head that one copy brings: the widest line that shared memory swizzles
PLACES = 64  # queries (rows times heads per key head) of four multiplying warps
SLOTS = 4  # blocks of keys or values in shared memory
MERGED = (4, 16)  # queries whose spans are merged at a time, and spans that are read at once to be merged,
MERGED_TALL = (16, 4)  # and in the registers of warps that multiply tall tiles
PATIENCE = 1 << 12  # looks at a counter, of about a microsecond each, before a block leaves its rows to the last one
DONE = 1 << 16  # what a block adds to a tile's counter of spans when it will not look at it again
TILES = 128  # whose rows a block looks at together when it finds its share
LANES = 4  # of a tree, whose keys and values are in shared memory at once
WHOLE = 5  # key blocks of a tile up to which one block takes all of them: merging its spans would take longer
_WHOLE = gl.constexpr(WHOLE)
_PATIENCE = gl.constexpr(PATIENCE)
_DONE = gl.constexpr(DONE)
_END = gl.constexpr(END)
_LANES = gl.constexpr(LANES)
_TAIL = gl.constexpr(TAIL)
_GRAIN = gl.constexpr(GRAIN)
_NONE = gl.constexpr(float("-inf"))


@gluon.jit
def _tile(
    tile, rows, ranges, seqs, positions, window, blocks, even,
    Q: gl.constexpr, QP: gl.constexpr, BN: gl.constexpr, EVEN: gl.constexpr, WINDOWED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A tile's sequence, its first key block and the one after its last, its last and its lowest position."""
    at = gl.arange(0, QP, gl.BlockedLayout([1], [32], [WARPS], [0]))
    if EVEN:
        row = gl.where(at < even, tile * even + at, -1)
        seq, first, end = tile, 0, _END
    else:
        row = gl.load(rows + tile * Q + at, mask=at < Q, other=-1)
        seq, first, end = gl.load(seqs + tile), gl.load(ranges + 2 * tile), gl.load(ranges + 2 * tile + 1)
    position = gl.load(positions + row, mask=row >= 0, other=-1).to(gl.int32)
    last = gl.max(position, 0)
    lowest = gl.min(gl.where(row >= 0, position, _END), 0)
    if WINDOWED:
        first = gl.maximum(first, gl.maximum(lowest - window + 1, 0) // BN)
    stop = gl.minimum(gl.minimum(end, blocks), (last + BN) // BN)
    return seq, first, gl.maximum(stop, first), last, lowest


@gluon.jit
def _counts(
    begin, rows, ranges, positions, window, blocks, tiles, even,
    Q: gl.constexpr, QP: gl.constexpr, TILES: gl.constexpr, BN: gl.constexpr,
    EVEN: gl.constexpr, WINDOWED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Key blocks of each of TILES tiles from `begin` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, QP], [32, 1], [WARPS, 1], [1, 0])
    tile = begin + gl.arange(0, TILES, gl.SliceLayout(1, layout))
    at = gl.arange(0, QP, gl.SliceLayout(0, layout))
    here = tile < tiles
    if EVEN:
        row = gl.where(here[:, None] & (at[None, :] < even), tile[:, None] * even + at[None, :], -1)
    else:
        row = gl.load(rows + tile[:, None] * Q + at[None, :], mask=here[:, None] & (at[None, :] < Q), other=-1)
    position = gl.load(positions + row, mask=row >= 0, other=-1).to(gl.int32)
    stop = gl.minimum(blocks, (gl.max(position, 1) + BN) // BN)
    first = gl.zeros_like(stop)
    if not EVEN:
        first = gl.load(ranges + 2 * tile, mask=here, other=0)
        stop = gl.minimum(stop, gl.load(ranges + 2 * tile + 1, mask=here, other=0))
    if WINDOWED:
        lowest = gl.min(gl.where(row >= 0, position, _END), 1)
        first = gl.maximum(first, gl.maximum(lowest - window + 1, 0) // BN)
    return gl.convert_layout(gl.maximum(stop - first, 0), gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.jit
def _share(
    rows, ranges, positions, window, blocks, tiles, even,
    KV: gl.constexpr, Q: gl.constexpr, QP: gl.constexpr, TILES: gl.constexpr, BN: gl.constexpr,
    EVEN: gl.constexpr, WINDOWED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """This block's stretch of all key blocks: the key head, the tile and the block of that tile where it begins, how
    many come before it, and where it ends; and how many there are in all, or 0 if no tile is long enough to be shared.
    Tiles are looked at TILES at a time."""
    counts = _counts(0, rows, ranges, positions, window, blocks, tiles, even, Q, QP, TILES, BN, EVEN, WINDOWED, WARPS)
    total, longest = gl.sum(counts, 0), gl.max(counts, 0)
    for begin in range(TILES, tiles, TILES):
        more = _counts(
            begin, rows, ranges, positions, window, blocks, tiles, even, Q, QP, TILES, BN, EVEN, WINDOWED, WARPS
        )
        total += gl.sum(more, 0)
        longest = gl.maximum(longest, gl.max(more, 0))
    at = (gl.program_id(0) * total.to(gl.int64) * KV // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1) * total.to(gl.int64) * KV // gl.num_programs(0)).to(gl.int32)
    head = at // gl.maximum(total, 1)
    within = at - head * total
    passed = gl.associative_scan(counts, 0, _plus) <= within
    tile, before = gl.sum(passed.to(gl.int32), 0), gl.sum(gl.where(passed, counts, 0), 0)
    earlier = gl.sum(counts, 0)
    for begin in range(TILES, tiles, TILES):
        more = _counts(
            begin, rows, ranges, positions, window, blocks, tiles, even, Q, QP, TILES, BN, EVEN, WINDOWED, WARPS
        )
        passed = earlier + gl.associative_scan(more, 0, _plus) <= within
        tile += gl.sum(passed.to(gl.int32), 0)
        before += gl.sum(gl.where(passed, more, 0), 0)
        earlier += gl.sum(more, 0)
    return head, tile, within - before, at, end, gl.where(longest > _WHOLE, total * KV, 0)


@gluon.jit
def _capped(scores, cap):
    turned = 1.0 - 2.0 / (gl.exp2(scores / cap * 2.8853900817779268) + 1.0)
    return cap * turned * 1.4426950408889634


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _unit_blocks(first, stop, BLOCKS: gl.constexpr):
    """Key blocks that are not shared: those of a span, or of a short tile."""
    return gl.where(stop - first <= _WHOLE, _END, BLOCKS)


@gluon.jit
def _begin(offset, first, stop, BLOCKS: gl.constexpr):
    """The key block `offset` blocks into a tile, moved up to where a span begins or the tile ends."""
    blocks = _unit_blocks(first, stop, BLOCKS)
    whole = (first + offset + blocks - 1) // blocks * blocks
    return gl.where(offset == 0, first, gl.minimum(whole, stop))


@gluon.jit
def _unit(block, first, stop, at, end, BLOCKS: gl.constexpr, PARTS: gl.constexpr):
    """The block after the unit that begins here: a span, or the whole tile if all its spans begin in this stretch."""
    if PARTS:
        blocks = _unit_blocks(first, stop, BLOCKS)
        upto = gl.minimum(stop, (block // blocks + 1) * blocks)
        final = gl.maximum((stop - 1) // blocks * blocks, first)
        return gl.where((block == first) & (at + final - first < end), stop, upto)
    else:  # noqa: RET505
        return stop


@gluon.jit
def _block_of(at, in_all):
    """The block in whose stretch a key block lies, of all."""
    return (((at + 1).to(gl.int64) * gl.num_programs(0) - 1) // in_all).to(gl.int32)


@gluon.jit
def _copy_block(
    pool, pages, table, block, last, head, count, full, empty,
    D: gl.constexpr, BN: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Copy a block's keys or values into the next slot, page by page, in lines of LINE numbers."""
    slot = count % SLOTS
    per: gl.constexpr = BN // PAGE
    mbarrier.wait(empty.index(slot), (count // SLOTS + 1) & 1)
    mbarrier.expect(full.index(slot), BN * D * 2)
    for n in gl.static_range(per):
        page = gl.load(table + gl.minimum(block * per + n, last // PAGE))  # past the last page: any that is finite
        for part in gl.static_range(D // LINE):
            tma.async_copy_global_to_shared(
                pool, [page * PAGE, head * D + part * LINE], full.index(slot),
                pages.index((slot * (D // LINE) + part) * per + n),
            )  # fmt: skip


@gluon.jit
def _copy(
    keys, values, pages, full, empty, rows, ranges, seqs, tables, positions, about, window, width, blocks, tiles, even,
    head, tile, offset, at, end,
    D: gl.constexpr, Q: gl.constexpr, QP: gl.constexpr, BN: gl.constexpr, BLOCKS: gl.constexpr,
    PAGE: gl.constexpr, SLOTS: gl.constexpr, LINE: gl.constexpr, EVEN: gl.constexpr, WINDOWED: gl.constexpr,
    PARTS: gl.constexpr, TREE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A copying warp: block after block of a stretch, as slots become free."""
    count = 0
    while at < end:
        seq, first, stop, last, lowest = _tile(
            tile, rows, ranges, seqs, positions, window, blocks, even, Q, QP, BN, EVEN, WINDOWED, 1
        )
        if TREE:
            lowest = gl.load(about + 2 * tile) - 1  # the last token, whichever rows of its tree are in this tile
        table = tables + seq.to(gl.int64) * width
        block = _begin(offset, first, stop, BLOCKS)
        at += block - first - offset
        while (at < end) & (block < stop):
            upto = _unit(block, first, stop, at, end, BLOCKS, PARTS)
            for b in range(block, upto):
                if PDL:  # noqa: SIM102
                    if (not EARLY) | (b >= lowest // BN):  # from here on the kernel before has written
                        gdc_wait()
                _copy_block(keys, pages, table, b, last, head, count, full, empty, D, BN, PAGE, SLOTS, LINE)
                _copy_block(values, pages, table, b, last, head, count + 1, full, empty, D, BN, PAGE, SLOTS, LINE)
                count += 2
            at += upto - block
            block = upto
        tile += 1
        offset = 0
        if tile == tiles:
            tile -= tiles
            head += 1


@gluon.jit
def _merge(m, total, acc, m_new, total_new, acc_new, COLUMN: gl.constexpr):
    """As in attention.py. COLUMN: the layout of a number per row of the output."""
    top = gl.maximum(m, m_new)
    safe = gl.where(top == _NONE, 0.0, top)
    old, new = gl.exp2(m - safe), gl.exp2(m_new - safe)
    acc_new = acc_new * gl.convert_layout(new, COLUMN)[:, None]
    return top, gl.fma(total, old, total_new * new), gl.fma(acc, gl.convert_layout(old, COLUMN)[:, None], acc_new)


@gluon.jit
def _empty(BM: gl.constexpr, D: gl.constexpr, ROW: gl.constexpr, OUT: gl.constexpr):
    """The state of rows that have seen no key."""
    m = gl.full([BM], _NONE, gl.float32, ROW)
    return m, gl.zeros([BM], gl.float32, ROW), gl.zeros([BM, D], gl.float32, OUT)


@gluon.jit
def _extend(
    m, total, acc, query, tiles, ones, full, empty, count, block, position, lowest, scale, cap, window,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, CAPPED: gl.constexpr,
    WINDOWED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As in attention.py: one more block of a span's keys, which lie in the next two slots."""
    kind: gl.constexpr = query.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 16, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    key, value = count % SLOTS, (count + 1) % SLOTS
    mbarrier.wait(full.index(key), (count // SLOTS) & 1)
    scores = gl.zeros([BM, BN], gl.float32, SCORES)
    scores = warpgroup_mma(query, tiles.index(key).permute((1, 0)), scores, use_acc=False)
    mbarrier.arrive(empty.index(key), count=1)
    if CAPPED:
        scores, scale = _capped(scores * scale, cap), 1.0
    if WINDOWED:
        at = block * BN + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
        seen = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window)
        scores = gl.where(seen, scores, _NONE)
    elif (block + 1) * BN > lowest + 1:
        at = block * BN + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
        scores = gl.where(at[None, :] <= position[:, None], scores, _NONE)
    top = gl.maximum(m, gl.max(scores, 1) * scale)
    safe = gl.where(top == _NONE, 0.0, top)
    old = gl.exp2(m - safe)
    p = gl.exp2(gl.fma(scores, scale, -safe[:, None])).to(kind)
    p_out = gl.convert_layout(p, gl.DotOperandLayout(0, OUT, 2))
    p_sum = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
    acc = acc * gl.convert_layout(old, gl.SliceLayout(1, OUT))[:, None]
    mbarrier.wait(full.index(value), ((count + 1) // SLOTS) & 1)
    added = warpgroup_mma(p_sum, ones, gl.zeros([BM, 16], gl.float32, SUMS), use_acc=False, is_async=True)
    acc = warpgroup_mma(p_out, tiles.index(value), acc, is_async=True)
    added, acc = warpgroup_mma_wait(0, deps=(added, acc))
    mbarrier.arrive(empty.index(value), count=1)
    return top, gl.fma(total, old, gl.convert_layout(gl.max(added, 1), ROW)), acc


@gluon.jit
def _lane_slots(slots, tile, lane, D: gl.constexpr, Q: gl.constexpr, WARPS: gl.constexpr):
    """KV slots of the last keys of a lane, as _copy_lane reads them; -1: none."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    column = gl.arange(0, _TAIL, gl.SliceLayout(1, layout))
    return gl.load(slots + (tile * Q + lane) * _TAIL + column, mask=(lane < Q) & (column >= 0), other=-1)


@gluon.jit
def _copy_lane(pool, buffer, slot, head, KV: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    """Begin to bring the last keys or values of a lane into shared memory; zeros behind them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    line = (slot.to(gl.int64) * KV + head) * D
    async_copy.async_copy_global_to_shared(buffer, pool + line[:, None] + dims[None, :], mask=(slot >= 0)[:, None])


@gluon.jit
def _gather(
    pool, buffers, slots, tile, head, first, lanes,
    KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Bring the last keys or values of up to LANES lanes, from `first` on, into shared memory."""
    gl.thread_barrier()  # what was there has been multiplied
    for n in gl.static_range(_LANES):
        slot = _lane_slots(slots, tile, first + n, D, Q, WARPS)
        if first + n < lanes:
            _copy_lane(pool, buffers.index(n), slot, head, KV, D, WARPS)
    async_copy.commit_group()


@gluon.jit
def _gathered():
    """Wait until what all warps have begun to bring is there for the tensor cores."""
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _lane_scores(
    query, tree, tile, head, lane, lanes, first_there, LAYOUT: gl.constexpr,
    BM: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The products of queries with the last keys of their lanes. first_there: the first lanes are on their way."""
    keys, _, slots, _, _, buffers, _ = tree
    scores = gl.zeros([BM, _TAIL], gl.float32, LAYOUT)
    for first in range(0, lanes, _LANES):
        if (first > 0) | (not first_there):
            _gather(keys, buffers, slots, tile, head, first, lanes, KV, D, Q, WARPS)
        _gathered()
        for n in range(first, gl.minimum(first + _LANES, lanes)):
            own = gl.zeros([BM, _TAIL], gl.float32, LAYOUT)
            own = warpgroup_mma(query, buffers.index(n - first).permute((1, 0)), own, use_acc=False)
            scores = gl.where((lane == n)[:, None], own, scores)
    return scores


@gluon.jit
def _lane_values(
    acc, p, tree, tile, head, lane, lanes, first_there, OUT: gl.constexpr,
    KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Add the last values of each row's lane, weighted by p. first_there: the first lanes have arrived."""
    _, values, slots, _, _, _, buffers = tree
    for first in range(0, lanes, _LANES):
        if (first > 0) | (not first_there):
            _gather(values, buffers, slots, tile, head, first, lanes, KV, D, Q, WARPS)
            _gathered()
        for n in range(first, gl.minimum(first + _LANES, lanes)):
            own = gl.where((lane == n)[:, None], p, gl.zeros_like(p))
            own = gl.convert_layout(own, gl.DotOperandLayout(0, OUT, 2))
            acc = warpgroup_mma(own, buffers.index(n - first), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc


@gluon.jit
def _nodes_at(tree, tile, BN: gl.constexpr):
    """The block from which on keys are those of lanes; of a tile without lanes none is."""
    return gl.where(gl.load(tree[4] + 2 * tile + 1) > 0, gl.load(tree[4] + 2 * tile) // BN, _END)


@gluon.jit
def _extend_tree(
    m, total, acc, query, tiles, ones, full, empty, count, block, position, tree, tile, head, first_there,
    scale, cap, window, PART: gl.constexpr, HEADS: gl.constexpr, KV: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, Q: gl.constexpr, SLOTS: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """One more block of a span's keys, as _extend, but its columns from the last multiple of GRAIN before `base` on are
    those of each row's lane. first_there: the first lanes' keys and values are on their way."""
    kind: gl.constexpr = query.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    LAST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _TAIL, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 16, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PLACE: gl.constexpr = gl.SliceLayout(1, LAST)
    token = (PART * BM + gl.arange(0, BM, PLACE)) // (HEADS // KV)
    lane = gl.load(tree[3] + tile * Q + token, mask=token < Q, other=-1)
    base, lanes = gl.load(tree[4] + 2 * tile), gl.load(tree[4] + 2 * tile + 1)
    own = _lane_scores(query, tree, tile, head, lane, lanes, first_there, LAST, BM, KV, D, Q, WARPS)
    key, value = count % SLOTS, (count + 1) % SLOTS
    mbarrier.wait(full.index(key), (count // SLOTS) & 1)
    scores = gl.zeros([BM, BN], gl.float32, SCORES)
    scores = warpgroup_mma(query, tiles.index(key).permute((1, 0)), scores, use_acc=False)
    mbarrier.arrive(empty.index(key), count=1)
    if CAPPED:
        scores, own, scale = _capped(scores * scale, cap), _capped(own * scale, cap), 1.0
    begin = base // _GRAIN * _GRAIN
    at = block * BN + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
    own_at = begin + gl.arange(0, _TAIL, gl.SliceLayout(0, LAST))
    own_position = gl.convert_layout(position, PLACE)
    seen = at[None, :] <= gl.minimum(position, begin - 1)[:, None]
    own_seen = (own_at // BN == block)[None, :] & (own_at[None, :] <= own_position[:, None])
    if WINDOWED:
        seen &= at[None, :] > position[:, None] - window
        own_seen &= own_at[None, :] > own_position[:, None] - window
    scores = gl.where(seen, scores, _NONE)
    own = gl.where(own_seen, own, _NONE)
    top = gl.maximum(m, gl.maximum(gl.max(scores, 1), gl.convert_layout(gl.max(own, 1), ROW)) * scale)
    safe = gl.where(top == _NONE, 0.0, top)
    old = gl.exp2(m - safe)
    p = gl.exp2(gl.fma(scores, scale, -safe[:, None])).to(kind)
    own_p = gl.exp2(gl.fma(own, scale, -gl.convert_layout(safe, PLACE)[:, None])).to(kind)
    p_out = gl.convert_layout(p, gl.DotOperandLayout(0, OUT, 2))
    p_sum = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
    own_sum = gl.convert_layout(own_p, gl.DotOperandLayout(0, SUMS, 2))
    acc = acc * gl.convert_layout(old, gl.SliceLayout(1, OUT))[:, None]
    mbarrier.wait(full.index(value), ((count + 1) // SLOTS) & 1)
    added = warpgroup_mma(p_sum, ones, gl.zeros([BM, 16], gl.float32, SUMS), use_acc=False, is_async=True)
    added = warpgroup_mma(own_sum, ones.slice(0, _TAIL), added, is_async=True)
    acc = warpgroup_mma(p_out, tiles.index(value), acc, is_async=True)
    added, acc = warpgroup_mma_wait(0, deps=(added, acc))
    mbarrier.arrive(empty.index(value), count=1)
    total = gl.fma(total, old, gl.convert_layout(gl.max(added, 1), ROW))
    return top, total, _lane_values(acc, own_p, tree, tile, head, lane, lanes, first_there, OUT, KV, D, Q, WARPS)


@gluon.jit
def _finish(m, total, acc, out, sinks, row, line, heads, D: gl.constexpr, SINKS: gl.constexpr, COLUMN: gl.constexpr):
    """As in attention.py: divide by the sum, and store. `line` has the output's layout, `row` and `heads` the sums'."""
    if SINKS:
        sink = gl.load(sinks + heads, mask=row >= 0, other=0.0).to(gl.float32) * 1.4426950408889634
        one, none = gl.full_like(total, 1.0), gl.zeros_like(acc)
        m, total, acc = _merge(m, total, acc, sink, one, none, COLUMN)
    y = acc / gl.convert_layout(gl.where(total == 0.0, 1.0, total), COLUMN)[:, None]
    dims = gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))
    gl.store(out + line[:, None] * D + dims[None, :], y.to(out.dtype.element_ty), mask=(line >= 0)[:, None])


@gluon.jit
def _put(m, total, acc, parts, stats, line, row_line, spans, span, D: gl.constexpr):
    """Store a span's state."""
    place, dims = line * spans + span, gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))
    gl.store(parts + place[:, None] * D + dims[None, :], acc, mask=(line >= 0)[:, None])
    gl.store(stats + (row_line * spans + span) * 2, m, mask=row_line >= 0)
    gl.store(stats + (row_line * spans + span) * 2 + 1, total, mask=row_line >= 0)


@gluon.jit
def _rows(
    tile, head, rows, part, LAYOUT: gl.constexpr,
    HEADS: gl.constexpr, KV: gl.constexpr, Q: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """The row, the head and the line (row and head) of each of BM places of a tile's part; -1: none."""
    GROUP: gl.constexpr = HEADS // KV
    places = part * BM + gl.arange(0, BM, LAYOUT)
    token, heads = places // GROUP, head * GROUP + places % GROUP
    row = gl.load(rows + tile * Q + token, mask=token < Q, other=-1)
    return row, heads, gl.where(row >= 0, row.to(gl.int64) * HEADS + heads, -1)


@gluon.jit
def _merge_spans(
    parts, stats, out, sinks, tile, head, rows, spans, low, high, begin, end, step,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, CHUNK: gl.constexpr,
    TOGETHER: gl.constexpr, SINKS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Merge the states of a tile's spans in order, TOGETHER at a time, and store the results: of every `step`-th CHUNK
    of places from `begin` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, layout)
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    for chunk in range(begin, end, step):
        row, heads, line = _rows(tile, head, rows, chunk, ROW, HEADS, KV, Q, CHUNK)
        m, total, acc = _empty(CHUNK, D, ROW, layout)
        for start in range(low, high, TOGETHER):
            for n in gl.static_range(TOGETHER):  # the loads do not wait for each other
                live = (row >= 0) & (start + n < high)
                place = line * spans + start + n
                m_new = gl.load(stats + place * 2, mask=live, other=_NONE, cache_modifier=".cg")
                total_new = gl.load(stats + place * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
                where = parts + place[:, None] * D + dims[None, :]
                acc_new = gl.load(where, mask=live[:, None], other=0.0, cache_modifier=".cg")
                m, total, acc = _merge(m, total, acc, m_new, total_new, acc_new, ROW)
        _finish(m, total, acc, out, sinks, row, line, heads, D, SINKS, ROW)


@gluon.jit
def _merge_among_blocks(
    out, parts, stats, counters, rows, ranges, seqs, positions, sinks, window, blocks, spans, even, tile, head, at,
    start, in_all, there,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, QP: gl.constexpr, BN: gl.constexpr,
    SPAN: gl.constexpr, BLOCKS: gl.constexpr, EVEN: gl.constexpr, WINDOWED: gl.constexpr, SINKS: gl.constexpr,
    CHUNK: gl.constexpr, TOGETHER: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Merge some rows of a tile of many spans, as the other blocks that share it do, when all spans are there. If one
    would not wait, the last one to leave merges all rows: the same bits.

    at: the tile's first key block among all; start: this stretch's; there: how many of the tile's spans had been
    counted with those of this stretch, 0 if this stretch has none.
    """
    _, first, stop, _, _ = _tile(
        tile, rows, ranges, seqs, positions, window, blocks, even, Q, QP, BN, EVEN, WINDOWED, WARPS
    )
    low, high = first // SPAN, (stop + SPAN - 1) // SPAN
    unit = _unit_blocks(first, stop, BLOCKS)
    before = gl.maximum((stop - 1) // unit * unit, first) - first  # key blocks before the last span
    first_of, last_of = _block_of(at, in_all), _block_of(at + before, in_all)
    others = gl.minimum(last_of - first_of, before)  # stretches without a key block are none
    if (high - low > TOGETHER) & (others > 0) & (gl.program_id(0) <= last_of):
        chunks: gl.constexpr = -(-Q * (HEADS // KV) // CHUNK)
        counter, looks = counters + 2 * (tile * KV + head), 0
        begin = gl.minimum(gl.program_id(0) - first_of, gl.maximum(start - at, 0))
        if begin < chunks:  # of few rows there are none for some blocks
            while (there < high - low) & (looks < _PATIENCE):
                there = gl.atomic_add(counter, 0, sem="acquire", scope="gpu") % _DONE
                looks += 1
            if there == high - low:
                _merge_spans(
                    parts, stats, out, sinks, tile, head, rows, spans, low, high, begin, chunks, others + 1,
                    HEADS, KV, D, Q, CHUNK, TOGETHER, SINKS, WARPS,
                )  # fmt: skip
            else:
                gl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu")
        if gl.atomic_add(counter, _DONE, sem="acq_rel", scope="gpu") // _DONE == others:
            if gl.atomic_add(counter + 1, 0, sem="acquire", scope="gpu") > 0:
                _merge_spans(
                    parts, stats, out, sinks, tile, head, rows, spans, low, high, 0, chunks, 1,
                    HEADS, KV, D, Q, CHUNK, TOGETHER, SINKS, WARPS,
                )  # fmt: skip
            gl.store(counter, 0)
            gl.store(counter + 1, 0)


@gluon.jit
def _merge_shared(
    out, parts, stats, counters, left_spans, rows, ranges, seqs, positions, sinks, window, blocks, spans, tiles, even,
    head, tile, offset, at, end, in_all,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, QP: gl.constexpr, BN: gl.constexpr,
    SPAN: gl.constexpr, BLOCKS: gl.constexpr, EVEN: gl.constexpr, WINDOWED: gl.constexpr, SINKS: gl.constexpr,
    CHUNK: gl.constexpr, TOGETHER: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Four merging warps: count the spans that this stretch leaves in memory. Those of a tile of few spans, or of few
    rows, are merged by the block that counts the last one, others by all blocks that share the tile: it is where their
    stretches begin or end. in_all: see _share."""
    if (in_all > 0) & (at < end):
        MANY: gl.constexpr = Q * (HEADS // KV) > CHUNK  # rows for more than one block
        if PDL:
            gdc_wait()  # counters are those of the kernel before until then
        first_tile, first_head, first_at, first_there, start = tile, head, at - offset, 0, at
        last_at, last_there = first_at + 0, 0  # a name that is another's value before a loop is not carried through it
        while at < end:
            last_at, last_there = at - offset, 0
            _, first, stop, _, _ = _tile(
                tile, rows, ranges, seqs, positions, window, blocks, even, Q, QP, BN, EVEN, WINDOWED, WARPS
            )
            block, left = _begin(offset, first, stop, BLOCKS), 0
            at += block - first - offset
            while (at < end) & (block < stop):
                upto = _unit(block, first, stop, at, end, BLOCKS, True)
                left += gl.where((block == first) & (upto == stop), 0, 1)
                at += upto - block
                block = upto
            if left > 0:
                low, high = first // SPAN, (stop + SPAN - 1) // SPAN
                counter = counters + 2 * (tile * KV + head)
                mbarrier.wait(left_spans.index(gl.where(offset > 0, 0, 1)), 0)
                last_there = gl.atomic_add(counter, left, sem="acq_rel", scope="gpu") % _DONE + left
                if (last_there == high - low) & ((high - low <= TOGETHER) | (not MANY)):
                    gl.store(counter, 0)
                    _merge_spans(
                        parts, stats, out, sinks, tile, head, rows, spans, low, high, 0,
                        -(-Q * (HEADS // KV) // CHUNK), 1, HEADS, KV, D, Q, CHUNK, TOGETHER, SINKS, WARPS,
                    )  # fmt: skip
            first_there = gl.where(last_at == first_at, last_there, first_there)
            tile += 1
            offset = 0
            if tile == tiles:
                tile -= tiles
                head += 1
        if MANY:
            last_tile, last_head = gl.where(tile == 0, tiles, tile) - 1, gl.where(tile == 0, head - 1, head)
            for n in range(gl.where(last_at == first_at, 1, 2)):
                _merge_among_blocks(
                    out, parts, stats, counters, rows, ranges, seqs, positions, sinks, window, blocks, spans, even,
                    gl.where(n == 0, last_tile, first_tile), gl.where(n == 0, last_head, first_head),
                    gl.where(n == 0, last_at, first_at), start, in_all, gl.where(n == 0, last_there, first_there),
                    HEADS, KV, D, Q, QP, BN, SPAN, BLOCKS, EVEN, WINDOWED, SINKS, CHUNK, TOGETHER, WARPS,
                )  # fmt: skip


@gluon.jit
def _query(
    q, query, tile, head, rows, tree, ahead, PART: gl.constexpr,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    TREE: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Bring the queries of a tile's part into shared memory, once the kernel before has written them. Of trees also
    begin to bring the first lanes' last keys and values, if the block where nodes begin is among those `ahead`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    _, _, line = _rows(tile, head, rows, PART, gl.SliceLayout(1, layout), HEADS, KV, Q, BM)
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    if TREE:
        keys, values, slots, _, about, lane_keys, lane_values = tree
        base, lanes = gl.load(about + 2 * tile), gl.load(about + 2 * tile + 1)
        found = (
            _lane_slots(slots, tile, 0, D, Q, WARPS), _lane_slots(slots, tile, 1, D, Q, WARPS),
            _lane_slots(slots, tile, 2, D, Q, WARPS), _lane_slots(slots, tile, 3, D, Q, WARPS),
        )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lines = gl.load(q + line[:, None] * D + dims[None, :], mask=(line >= 0)[:, None], other=0.0)
    gl.thread_barrier()  # the tile before has been multiplied
    if TREE:
        for n in gl.static_range(_LANES):
            if (n < lanes) & (base // BN < ahead):
                _copy_lane(keys, lane_keys.index(n), found[n], head, KV, D, WARPS)
                _copy_lane(values, lane_values.index(n), found[n], head, KV, D, WARPS)
        async_copy.commit_group()
    query.store(lines)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _multiply(
    q, out, parts, stats, counters, query, slots, ones, full, empty, left_spans, rows, ranges, seqs, positions, sinks,
    tree, scale, cap, window, blocks, spans, tiles, even, head, tile, offset, at, end, PART: gl.constexpr,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, QP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, SPAN: gl.constexpr, BLOCKS: gl.constexpr, SLOTS: gl.constexpr, EVEN: gl.constexpr,
    CAPPED: gl.constexpr, WINDOWED: gl.constexpr, SINKS: gl.constexpr, PARTS: gl.constexpr, TALL: gl.constexpr,
    TREE: gl.constexpr, CHUNK: gl.constexpr, TOGETHER: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Four multiplying warps, for one part of every tile's places: unit after unit of this stretch.

    BLOCKS: of a unit; SPAN: of a span. tree: pools of keys and values, tables of lanes, and shared memory for what
    they hold. left_spans: barriers that tell the merging warps that the spans of a tile are in memory; of tall tiles
    these warps merge them.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(1, OUT)
    count = 0
    while at < end:
        _, first, stop, _, lowest = _tile(
            tile, rows, ranges, seqs, positions, window, blocks, even, Q, QP, BN, EVEN, WINDOWED, WARPS
        )
        block = _begin(offset, first, stop, BLOCKS)
        at += block - first - offset
        if (at < end) & (block < stop):
            row, heads, row_line = _rows(tile, head, rows, PART, ROW, HEADS, KV, Q, BM)
            position = gl.load(positions + row, mask=row >= 0, other=-1).to(gl.int32)
            left = 0  # spans whose states this stretch has left in memory
            begin = block
            # no block from here on is taken in this stretch: a unit that begins in it may end behind it
            ahead = block + end - at + SPAN if PARTS else _END
            _query(q, query, tile, head, rows, tree, ahead, PART, HEADS, KV, D, Q, BM, BN, TREE, WARPS, PDL)
            while (at < end) & (block < stop):
                upto = _unit(block, first, stop, at, end, BLOCKS, PARTS)
                m, total, acc = _empty(BM, D, ROW, OUT)
                m_span, total_span, acc_span = _empty(BM, D, ROW, OUT)
                like_chain = upto
                if TREE:
                    like_chain = gl.minimum(upto, _nodes_at(tree, tile, BN))
                for b in range(block, like_chain):
                    if b % SPAN == 0:
                        m, total, acc = _merge(m, total, acc, m_span, total_span, acc_span, COLUMN)
                        m_span, total_span, acc_span = _empty(BM, D, ROW, OUT)
                    m_span, total_span, acc_span = _extend(
                        m_span, total_span, acc_span, query, slots, ones, full, empty, count, b, position,
                        lowest, scale, cap, window, BM, BN, D, SLOTS, CAPPED, WINDOWED, WARPS,
                    )  # fmt: skip
                    count += 2
                if TREE:
                    nodes_at = _nodes_at(tree, tile, BN)
                    for b in range(gl.maximum(block, gl.minimum(upto, nodes_at)), upto):
                        if b % SPAN == 0:
                            m, total, acc = _merge(m, total, acc, m_span, total_span, acc_span, COLUMN)
                            m_span, total_span, acc_span = _empty(BM, D, ROW, OUT)
                        m_span, total_span, acc_span = _extend_tree(
                            m_span, total_span, acc_span, query, slots, ones, full, empty, count, b, position, tree,
                            tile, head, b == gl.maximum(begin, nodes_at), scale, cap, window, PART, HEADS, KV, BM, BN,
                            D, Q, SLOTS, CAPPED, WINDOWED, WARPS,
                        )  # fmt: skip
                        count += 2
                # found again: what is kept over the loop above takes registers away from it
                row, heads, row_line = _rows(tile, head, rows, PART, ROW, HEADS, KV, Q, BM)
                line = gl.convert_layout(row_line, COLUMN)
                if (block == first) & (upto == stop):
                    m, total, acc = _merge(m, total, acc, m_span, total_span, acc_span, COLUMN)
                    _finish(m, total, acc, out, sinks, row, line, heads, D, SINKS, COLUMN)
                elif PARTS:
                    _put(m_span, total_span, acc_span, parts, stats, line, row_line, spans, block // SPAN, D)
                    left += 1
                at += upto - block
                block = upto
            if PARTS:  # noqa: SIM102
                if left > 0:
                    gl.thread_barrier()
                    if TALL:
                        low, high = first // SPAN, (stop + SPAN - 1) // SPAN
                        counter = counters + 2 * (tile * KV + head) + PART
                        if gl.atomic_add(counter, left, sem="acq_rel", scope="gpu") + left == high - low:
                            gl.store(counter, 0)
                            _merge_spans(
                                parts, stats, out, sinks, tile, head, rows, spans, low, high, PART * (BM // CHUNK),
                                min((PART + 1) * (BM // CHUNK), -(-Q * (HEADS // KV) // CHUNK)), 1,
                                HEADS, KV, D, Q, CHUNK, TOGETHER, SINKS, WARPS,
                            )  # fmt: skip
                    else:
                        mbarrier.arrive(left_spans.index(gl.where(offset > 0, 0, 1)), count=1)
        tile += 1
        offset = 0
        if tile == tiles:
            tile -= tiles
            head += 1
    if PDL:
        gdc_wait()  # a block without work must not end before the kernel ahead


@launched
@gluon.jit(do_not_specialize=["window", "width", "blocks", "spans", "tiles", "even"])
def _flash(
    q, keys, values, out, parts, stats, counters, rows, ranges, seqs, tables, positions, sinks,
    key_pool, value_pool, lane_slots, lanes, about, scale, cap, window, width, blocks, spans, tiles, even,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, Q: gl.constexpr, QP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, SPAN: gl.constexpr, BLOCKS: gl.constexpr, PAGE: gl.constexpr, LINE: gl.constexpr,
    TILES: gl.constexpr, SLOTS: gl.constexpr, EVEN: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
    SINKS: gl.constexpr, PARTS: gl.constexpr, TALL: gl.constexpr, TREE: gl.constexpr, EARLY: gl.constexpr,
    CHUNK: gl.constexpr, TOGETHER: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A block takes an equal stretch of all key blocks: a warp copies them, four multiply. TALL: four more multiply the
    lower half of every tile. TREE: tiles are rows of trees, whose lanes lie in the tables from key_pool to about.
    EARLY: all keys before a tile's rows are of earlier passes, and need not wait for the kernel before; not so in a
    step that reads the prompts of sequences which join."""
    kind: gl.constexpr = keys.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], kind)
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, D], kind)
    ones = gl.allocate_shared_memory(kind, [BN, 16], gl.NVMMASharedLayout.get_default_for([BN, 16], kind))
    ones.store(gl.full([BN, 16], 1.0, kind, gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])))
    fence_async_shared()
    query = gl.allocate_shared_memory(kind, [BM, D], tall)
    pages = gl.allocate_shared_memory(kind, [SLOTS * (D // LINE) * (BN // PAGE), PAGE, LINE], keys.layout)
    slots = pages._reinterpret(kind, [SLOTS, BN, D], wide)
    full, empty = barriers(SLOTS, 2 if TALL else 1)
    # a stretch shares two tiles at most: one that began before it, and one that goes on behind it
    left_spans = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(left_spans.index(0), count=1)
    mbarrier.init(left_spans.index(1), count=1)
    head, tile, offset, at, end, in_all = _share(
        rows, ranges, positions, window, blocks, tiles, even, KV, Q, QP, TILES, BN, EVEN, WINDOWED, WARPS
    )
    tree = ones  # of chains: not used
    if TREE:
        own: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TAIL, D], kind)
        lane_keys = gl.allocate_shared_memory(kind, [_LANES, _TAIL, D], own)
        lane_values = gl.allocate_shared_memory(kind, [_LANES, _TAIL, D], own)
        tree = (key_pool, value_pool, lane_slots, lanes, about, lane_keys, lane_values)
    if TALL:  # arguments are written out: constants in a tuple with a name become numbers at run time
        query_2 = gl.allocate_shared_memory(kind, [BM, D], tall)
        gl.warp_specialize(
            [
                (_multiply, (
                    q, out, parts, stats, counters, query, slots, ones, full, empty, left_spans, rows, ranges, seqs,
                    positions, sinks, tree, scale, cap, window, blocks, spans, tiles, even, head, tile, offset, at, end,
                    0, HEADS, KV, D, Q, QP, BM, BN, SPAN, BLOCKS, SLOTS, EVEN, CAPPED, WINDOWED, SINKS, PARTS, TALL,
                    TREE, CHUNK, TOGETHER, WARPS, PDL,
                )),
                (_multiply, (
                    q, out, parts, stats, counters, query_2, slots, ones, full, empty, left_spans, rows, ranges, seqs,
                    positions, sinks, tree, scale, cap, window, blocks, spans, tiles, even, head, tile, offset, at, end,
                    1, HEADS, KV, D, Q, QP, BM, BN, SPAN, BLOCKS, SLOTS, EVEN, CAPPED, WINDOWED, SINKS, PARTS, TALL,
                    TREE, CHUNK, TOGETHER, WARPS, PDL,
                )),
                (_copy, (
                    keys, values, pages, full, empty, rows, ranges, seqs, tables, positions, about, window, width,
                    blocks, tiles, even, head, tile, offset, at, end, D, Q, QP, BN, BLOCKS, PAGE, SLOTS, LINE, EVEN,
                    WINDOWED, PARTS, TREE, EARLY, PDL,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    elif PARTS:
        gl.warp_specialize(
            [
                (_multiply, (
                    q, out, parts, stats, counters, query, slots, ones, full, empty, left_spans, rows, ranges, seqs,
                    positions, sinks, tree, scale, cap, window, blocks, spans, tiles, even, head, tile, offset, at, end,
                    0, HEADS, KV, D, Q, QP, BM, BN, SPAN, BLOCKS, SLOTS, EVEN, CAPPED, WINDOWED, SINKS, PARTS, TALL,
                    TREE, CHUNK, TOGETHER, WARPS, PDL,
                )),
                (_merge_shared, (
                    out, parts, stats, counters, left_spans, rows, ranges, seqs, positions, sinks, window, blocks,
                    spans, tiles, even, head, tile, offset, at, end, in_all, HEADS, KV, D, Q, QP, BN, SPAN, BLOCKS,
                    EVEN, WINDOWED, SINKS, CHUNK, TOGETHER, WARPS, PDL,
                )),
                (_copy, (
                    keys, values, pages, full, empty, rows, ranges, seqs, tables, positions, about, window, width,
                    blocks, tiles, even, head, tile, offset, at, end, D, Q, QP, BN, BLOCKS, PAGE, SLOTS, LINE, EVEN,
                    WINDOWED, PARTS, TREE, EARLY, PDL,
                )),
            ],
            [4, 1],
            [168, 56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    q, out, parts, stats, counters, query, slots, ones, full, empty, left_spans, rows, ranges, seqs,
                    positions, sinks, tree, scale, cap, window, blocks, spans, tiles, even, head, tile, offset, at, end,
                    0, HEADS, KV, D, Q, QP, BM, BN, SPAN, BLOCKS, SLOTS, EVEN, CAPPED, WINDOWED, SINKS, PARTS, TALL,
                    TREE, CHUNK, TOGETHER, WARPS, PDL,
                )),
                (_copy, (
                    keys, values, pages, full, empty, rows, ranges, seqs, tables, positions, about, window, width,
                    blocks, tiles, even, head, tile, offset, at, end, D, Q, QP, BN, BLOCKS, PAGE, SLOTS, LINE, EVEN,
                    WINDOWED, PARTS, TREE, EARLY, PDL,
                )),
            ],
            [1],
            [56],
        )  # fmt: skip


def fits(keys: Tensor, plan: PagePlan, group: int) -> bool:
    """Whether this kernel takes the pass: 16-bit numbers, heads and pages it can copy, few enough places; chains, and
    trees whose lanes have been found."""
    chains = plan.tails is None and plan.bases is None
    places = HOPPER_TOKENS if chains else 0 if plan.lanes is None else PLACES
    sizes = keys.element_size() == 2 and keys.shape[2] in HOPPER_DIMS and plan.page in HOPPER_PAGES
    return hopper(keys.device) and sizes and plan.rows.shape[1] * group <= places


def attend(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, positions: Tensor, plan: PagePlan,
    arrived: Tensor, limit: int, numbers: tuple[Any, ...], given: dict[str, bool],
) -> None:  # fmt: skip
    """One launch. limit: bytes of spans' states at most; where they would be more, no two blocks share a tile."""
    (rows, heads, d), kv, (tiles, height) = out.shape, keys.shape[1], plan.rows.shape
    bn, sinks, window = block_length(d, keys.element_size()), numbers[0], numbers[3]
    spans, places = -(-plan.blocks * bn // SPAN), height * (heads // kv)
    parted = 1 < spans <= limit // (rows * heads * d * 4) and 2 * tiles * kv <= arrived.numel() and rows <= GRAPH_ROWS
    lines = rows * heads * spans if parted else 0
    parts, stats = (torch.empty(lines, n, dtype=torch.float32, device=out.device) for n in (d, 2))
    units = tiles * kv * (spans if parted else 1)
    found, tall = plan.lanes, places > PLACES
    chunk, together = MERGED_TALL if tall else MERGED
    ranges, even = (plan.ranges, plan.even) if found is None else (found.ranges, found.even)
    trees = (None,) * 5 if found is None else (keys, values, found.slots, found.lanes, found.about)
    _flash[(min(units, processors(out.device)),)](
        q, _pages(keys, plan.page), _pages(values, plan.page), out, parts, stats, arrived, plan.rows, ranges,
        plan.seqs, plan.tables, positions, sinks, *trees, numbers[1], numbers[2], window, plan.tables.stride(0),
        plan.blocks, spans, tiles, even,
        HEADS=heads, KV=kv, D=d, Q=height, QP=power(height, 8 if height > 2 else 1), BM=PLACES, BN=bn, SPAN=SPAN // bn,
        BLOCKS=SPAN // bn if parted else END, PAGE=plan.page, LINE=LINE, TILES=TILES, SLOTS=SLOTS,
        EVEN=even > 0, PARTS=parted, TALL=tall, TREE=found is not None,
        EARLY=(even > 0 or found is not None) and plan.beside is None, CHUNK=chunk, TOGETHER=together, WARPS=4,
        num_warps=4, **given, **options(out.device),
    )  # fmt: skip


def _pages(pool: Tensor, page: int) -> TensorDescriptor:
    """Lines of a pool [S, Hkv, D], a page at a time."""
    kind = gl.bfloat16 if pool.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([page, LINE], kind)
    return TensorDescriptor.from_tensor(pool.view(pool.shape[0], -1), [page, LINE], layout)
