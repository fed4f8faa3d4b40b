"""Products of few rows on Hopper: one warp copies tiles into shared memory, one to three warpgroups multiply them.

The weights' tile is the left operand and the rows' tile the right one, since the tensor cores take 64 of the left and
as few as 8 of the right. Tiles are powers of two. For numbers of rows in between, up to three tiles of rows share each
tile of weights, the first BM rows, the SECOND ones after them and the THIRD ones after those, with sums of their own
(tables.ROW_TILES). Weights do not depend on the kernel before: the first tiles are on their way while that kernel still
runs. The order of every sum is that of `kernels/gpu/linear.py`, and so are the bits.

A tile that would end behind the last row begins earlier instead (`inside`): copying rows that do not exist takes longer
than copying rows. Rows that two tiles have in common are computed and stored twice, with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from faircopy.kernels.gpu.activation import activated
from faircopy.kernels.gpu.launch import launched, processors, shared_memory
from faircopy.kernels.gpu.tables import STREAMED, Tile

REGISTERS = {64: 96, 128: 128}  # of a thread, by the tile's columns: what two blocks per processor leave each other,
MANY = {64: 168, 128: 232}  # and the same of more than 64 rows, where a block has a processor to itself
_activated = gluon.jit(activated.fn)


@gluon.jit
def inside(row, M, HEIGHT: gl.constexpr):
    """The row at which a tile begins: no later than leaves it whole, if there are as many rows."""
    return gl.maximum(gl.minimum(row, M - HEIGHT), 0)


@gluon.jit
def _place(unit, parts, tiles, BN: gl.constexpr, HEIGHT: gl.constexpr):
    """A unit's group of K, first row and first column; units that share weights are neighbours."""
    return unit % parts, unit // parts % tiles * HEIGHT, unit // parts // tiles * BN


@gluon.jit
def _copy_weights(w, col, k, full, w_tiles, stage, COLUMNS: gl.constexpr, WARPGROUPS: gl.constexpr):
    """One stage of all warpgroups' weights."""
    for warpgroup in gl.static_range(WARPGROUPS):
        where = w_tiles.index(stage * WARPGROUPS + warpgroup)
        tma.async_copy_global_to_shared(w, [col + warpgroup * COLUMNS, k], full.index(stage), where)


@gluon.jit
def _copy_rows(
    xs, row, k, M, full, x_tiles, x2_tiles, x3_tiles, stage,
    BM: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr,
):  # fmt: skip
    """One stage of all tiles of rows."""
    x, x2, x3 = xs
    tma.async_copy_global_to_shared(x, [inside(row, M, BM), k], full.index(stage), x_tiles.index(stage))
    if SECOND:
        at = inside(row + BM, M, SECOND)
        tma.async_copy_global_to_shared(x2, [at, k], full.index(stage), x2_tiles.index(stage))
    if THIRD:
        at = inside(row + BM + SECOND, M, THIRD)
        tma.async_copy_global_to_shared(x3, [at, k], full.index(stage), x3_tiles.index(stage))


@gluon.jit
def _copy(
    w, xs, shared, share, M,
    BN: gl.constexpr, BM: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp: one stage after the other, as they become free."""
    full, empty, w_tiles, x_tiles, x2_tiles, x3_tiles = shared
    first, stride, count, parts, tiles, steps = share
    height: gl.constexpr = BM + SECOND + THIRD
    columns: gl.constexpr = BN // WARPGROUPS
    size: gl.constexpr = (BN + height) * BK * 2
    total = count * steps
    ahead = gl.minimum(total, STAGES)
    for i in range(ahead):
        part, _, col = _place(first + i // steps * stride, parts, tiles, BN, height)
        mbarrier.expect(full.index(i), size)
        _copy_weights(w, col, (part * steps + i % steps) * BK, full, w_tiles, i, columns, WARPGROUPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in range(ahead):
        part, row, _ = _place(first + i // steps * stride, parts, tiles, BN, height)
        k = (part * steps + i % steps) * BK
        _copy_rows(xs, row, k, M, full, x_tiles, x2_tiles, x3_tiles, i, BM, SECOND, THIRD)
    for i in range(ahead, total):
        part, row, col = _place(first + i // steps * stride, parts, tiles, BN, height)
        k = (part * steps + i % steps) * BK
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), size)
        _copy_weights(w, col, k, full, w_tiles, stage, columns, WARPGROUPS)
        _copy_rows(xs, row, k, M, full, x_tiles, x2_tiles, x3_tiles, stage, BM, SECOND, THIRD)


@gluon.jit
def _sums(
    i, steps, shared, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, COLUMNS: gl.constexpr,
    BM: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's sums of stages i to i + steps, [COLUMNS, BM], [COLUMNS, SECOND] and [COLUMNS, THIRD]; of a tile
    that is not there the first one's again."""
    full, empty, w_tiles, x_tiles, x2_tiles, x3_tiles = shared
    acc = gl.zeros([COLUMNS, BM], gl.float32, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16]))
    acc2, acc3 = acc, acc
    if SECOND:
        layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SECOND, 16])
        acc2 = gl.zeros([COLUMNS, SECOND], gl.float32, layout2)
    if THIRD:
        layout3: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, THIRD, 16])
        acc3 = gl.zeros([COLUMNS, THIRD], gl.float32, layout3)
    for k in range(i, i + steps):
        stage = k % STAGES
        mbarrier.wait(full.index(stage), (k // STAGES) & 1)
        w = w_tiles.index(stage * WARPGROUPS + WARPGROUP)
        acc = warpgroup_mma(w, x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
        if SECOND:
            acc2 = warpgroup_mma(w, x2_tiles.index(stage).permute((1, 0)), acc2, is_async=True)
        if THIRD:
            acc3 = warpgroup_mma(w, x3_tiles.index(stage).permute((1, 0)), acc3, is_async=True)
        # Wait until the stage before has been read.
        if THIRD:
            acc, acc2, acc3 = warpgroup_mma_wait(3, deps=(acc, acc2, acc3))
        elif SECOND:
            acc, acc2 = warpgroup_mma_wait(2, deps=(acc, acc2))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((k + STAGES - 1) % STAGES), count=1, pred=k > i)
    if THIRD:
        acc, acc2, acc3 = warpgroup_mma_wait(0, deps=(acc, acc2, acc3))
    elif SECOND:
        acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((i + steps - 1) % STAGES), count=1)
    return acc, acc2, acc3


@gluon.jit
def put_columns(out, y, row, col, M, N, BN: gl.constexpr, BM: gl.constexpr, GATE: gl.constexpr):
    """Store a tile [BN, BM] of columns and rows, or its gated half."""
    kind: gl.constexpr = out.dtype.element_ty
    if GATE != "none":
        gate, value = gl.split(gl.permute(gl.reshape(y.to(kind), [BN // 2, 2, BM]), [0, 2, 1]))
        z = _activated(gate.to(gl.float32), GATE).to(kind).to(gl.float32) * value.to(gl.float32)
        cols = col // 2 + gl.arange(0, BN // 2, gl.SliceLayout(1, z.type.layout))
        rows = row + gl.arange(0, BM, gl.SliceLayout(0, z.type.layout))
        where = out + rows[None, :].to(gl.int64) * (N // 2) + cols[:, None]
        gl.store(where, z.to(kind), mask=(rows[None, :] < M) & (cols[:, None] < N // 2))
    else:
        cols = col + gl.arange(0, BN, gl.SliceLayout(1, y.type.layout))
        rows = row + gl.arange(0, BM, gl.SliceLayout(0, y.type.layout))
        where = out + rows[None, :].to(gl.int64) * N + cols[:, None]
        gl.store(where, y.to(kind), mask=(rows[None, :] < M) & (cols[:, None] < N))


@gluon.jit
def _finish(
    out, bias, y, part, row, col, M, N,
    COLUMNS: gl.constexpr, BM: gl.constexpr, EACH: gl.constexpr, GATE: gl.constexpr, BIASED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Add the bias to a tile of sums, round it, and store it. EACH: neighbouring columns of a thread, if there are
    rows for all threads."""
    kind: gl.constexpr = out.dtype.element_ty
    if BIASED:  # noqa: SIM102
        if part == 0:
            cols = col + gl.arange(0, COLUMNS, gl.SliceLayout(1, y.type.layout))
            y += gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[:, None]
    each: gl.constexpr = min(EACH, max(2, BM * COLUMNS // (32 * WARPS)))
    across: gl.constexpr = min(32, COLUMNS // each)
    lines: gl.constexpr = gl.BlockedLayout([each, 1], [across, 32 // across], [1, WARPS], [0, 1])
    y = gl.convert_layout(y.to(kind), lines)  # rounded first: half as much goes through shared memory
    put_columns(out + part.to(gl.int64) * M * N, y, inside(row, M, BM), col, M, N, COLUMNS, BM, GATE)


@gluon.jit
def _multiply(
    out, bias, shared, share, M, N, WARPGROUP: gl.constexpr,
    BN: gl.constexpr, BM: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr, EACH: gl.constexpr, GATE: gl.constexpr, BIASED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One multiplying warpgroup: its columns of one unit after the other."""
    first, stride, count, parts, tiles, steps = share
    columns: gl.constexpr = BN // WARPGROUPS
    for n in range(count):
        y, y2, y3 = _sums(n * steps, steps, shared, WARPGROUP, WARPGROUPS, columns, BM, SECOND, THIRD, STAGES, WARPS)
        part, row, col = _place(first + n * stride, parts, tiles, BN, BM + SECOND + THIRD)
        col += WARPGROUP * columns
        _finish(out, bias, y, part, row, col, M, N, columns, BM, EACH, GATE, BIASED, WARPS)
        if SECOND:
            _finish(out, bias, y2, part, row + BM, col, M, N, columns, SECOND, EACH, GATE, BIASED, WARPS)
        if THIRD:
            _finish(out, bias, y3, part, row + BM + SECOND, col, M, N, columns, THIRD, EACH, GATE, BIASED, WARPS)


@gluon.jit
def barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Two for each stage: its copy has arrived, and all that read it are done."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def _allocated(
    w, xs, BM: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Shared memory of all stages: barriers of copies and of products, tiles of weights and of rows."""
    x, x2, x3 = xs
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES * WARPGROUPS, BN // WARPGROUPS, BK], w.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    x2_tiles, x3_tiles = x_tiles, x_tiles
    if SECOND:
        x2_tiles = gl.allocate_shared_memory(x2.dtype, [STAGES, SECOND, BK], x2.layout)
    if THIRD:
        x3_tiles = gl.allocate_shared_memory(x3.dtype, [STAGES, THIRD, BK], x3.layout)
    full, empty = barriers(STAGES, WARPGROUPS)
    return full, empty, w_tiles, x_tiles, x2_tiles, x3_tiles


@gluon.jit
def _share(units, spread, GRID):
    """A block's first unit, the distance from one to the next, and their number.

    spread: blocks take turns, so that tiles of rows that share weights are multiplied at the same time, and weights are
    read from memory once; else each block has neighbouring units.
    """
    block = gl.program_id(0)
    first = (block * units) // GRID
    last = ((block + 1) * units) // GRID
    if spread != 0:
        first = block
        last = block + (units - block + GRID - 1) // GRID
    return first, gl.where(spread != 0, GRID, 1), last - first


@launched
@gluon.jit(do_not_specialize=["M", "GRID", "units", "steps", "spread"])
def _stream(
    w, x, x2, x3, bias, out, M, N, units, parts, tiles, steps, spread, GRID,
    BM: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, EACH: gl.constexpr, GATE: gl.constexpr, BIASED: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Blocks share all units (tile of weights, tile of rows, group of K) evenly.

    x2, x3: the rows again, in tiles of SECOND and THIRD; None if that is 0.
    """
    xs = (x, x2, x3)
    shared = _allocated(w, xs, BM, SECOND, THIRD, BN, BK, STAGES, WARPGROUPS)
    first, stride, count = _share(units, spread, GRID)
    share = (first, stride, count, parts, tiles, steps)
    # Warps and registers of all partitions but the first; together they have a processor's registers.
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    out, bias, shared, share, M, N, 0, BN, BM, SECOND, THIRD, STAGES, 1, EACH, GATE, BIASED, WARPS,
                )),
                (_copy, (w, xs, shared, share, M, BN, BM, SECOND, THIRD, BK, STAGES, 1, PDL)),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    out, bias, shared, share, M, N, 0, BN, BM, SECOND, THIRD, STAGES, 2, EACH, GATE, BIASED, WARPS,
                )),
                (_multiply, (
                    out, bias, shared, share, M, N, 1, BN, BM, SECOND, THIRD, STAGES, 2, EACH, GATE, BIASED, WARPS,
                )),
                (_copy, (w, xs, shared, share, M, BN, BM, SECOND, THIRD, BK, STAGES, 2, PDL)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    out, bias, shared, share, M, N, 0, BN, BM, SECOND, THIRD, STAGES, 3, EACH, GATE, BIASED, WARPS,
                )),
                (_multiply, (
                    out, bias, shared, share, M, N, 1, BN, BM, SECOND, THIRD, STAGES, 3, EACH, GATE, BIASED, WARPS,
                )),
                (_multiply, (
                    out, bias, shared, share, M, N, 2, BN, BM, SECOND, THIRD, STAGES, 3, EACH, GATE, BIASED, WARPS,
                )),
                (_copy, (w, xs, shared, share, M, BN, BM, SECOND, THIRD, BK, STAGES, 3, PDL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip


def stages_that_fit(tile: Tile, kind: int, device: torch.device) -> int:
    """A tile's stages, or fewer where sums of 32 bits are stored: they go through more shared memory.

    kind: bytes of a number that is stored. What a warpgroup needs was found by compiling.
    """
    beside = tile.warpgroups * (2304 if kind == 2 else 11264 if tile.warpgroups == 3 else 8320) + 256
    return min(tile.stages, (shared_memory(device) - beside) // ((tile.height + tile.bn) * tile.bk * 2))


def take_turns(tiles: int) -> bool:
    """Whether blocks take turns: where several tiles of rows share weights."""
    return tiles > 1


def columns_each(tile: Tile, gate: str, kind: int) -> int:
    """Neighbouring columns that a thread stores: of more than 128 rows 16 bytes, as many as one store writes.

    kind: bytes of a number that is stored.
    """
    if tile.height <= STREAMED:
        return 2
    return 16 // kind * (1 if gate == "none" else 2)


def descriptor(tensor: Tensor, height: int, depth: int) -> TensorDescriptor:
    """Tiles [height, depth] of a matrix, as the copying warp asks for them."""
    kind = gl.bfloat16 if tensor.element_size() == 2 else gl.float32
    layout = gl.NVMMASharedLayout.get_default_for([height, depth], kind)
    return TensorDescriptor.from_tensor(tensor, [height, depth], layout)


def stream(
    weights: TensorDescriptor, bias: Tensor | None, x: Tensor, out: Tensor, tile: Tile, gate: str, more: dict[str, Any]
) -> None:
    """out [parts, M, N or N / 2] = x [M, K] @ weights [N, K].T, parts: groups of K. weights: a warpgroup's tiles."""
    (outputs, inner), parts = weights.shape, out.shape[0]
    tiles = -(-x.shape[0] // tile.height)
    units = -(-outputs // tile.bn) * tiles * parts
    grid = min(units, processors(x.device) * tile.resident)
    if tile.warpgroups == 1:
        more = more | {"maxnreg": (REGISTERS if tile.height <= 64 else MANY)[tile.bn]}
    kind = out.element_size()
    x2, x3 = (descriptor(x, height, tile.bk) if height else None for height in (tile.second, tile.third))
    _stream[(grid,)](
        weights, descriptor(x, tile.bm, tile.bk), x2, x3, bias, out, x.shape[0], outputs, units, parts, tiles,
        inner // (parts * tile.bk), int(take_turns(tiles)), grid, BM=tile.bm, SECOND=tile.second, THIRD=tile.third,
        BN=tile.bn, BK=tile.bk, STAGES=stages_that_fit(tile, kind, x.device), WARPGROUPS=tile.warpgroups,
        EACH=columns_each(tile, gate, kind), GATE=gate, BIASED=bias is not None, WARPS=tile.warps,
        num_warps=tile.warps, **more,
    )  # fmt: skip
