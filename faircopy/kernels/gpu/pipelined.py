"""Products of many rows on Hopper: one warp copies tiles into shared memory, two groups of four warps multiply them.

Each group has 64 of a tile's 128 rows. Copying goes on over the ends of tiles and of groups of K, and one group of
warps multiplies while the other stores. The order of every sum is that of `kernels/gpu/linear.py`, and so are the bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from faircopy.kernels.gpu.activation import activated
from faircopy.kernels.gpu.launch import launched, processors
from faircopy.kernels.gpu.stream import descriptor
from faircopy.kernels.gpu.tables import Tile

ROWS = 64  # of a tile, for each of the two groups of warps
ABREAST = 8  # tiles of rows that share weights, one after the other
_activated = gluon.jit(activated.fn)


@gluon.jit
def _place(tile, tiles_m, tiles_n, BN: gl.constexpr, ROWS: gl.constexpr, ABREAST: gl.constexpr):
    """First row and column of a tile; neighbours in time share weights."""
    per_band = ABREAST * tiles_n
    band = tile // per_band
    height = gl.minimum(tiles_m - band * ABREAST, ABREAST)
    return (band * ABREAST + (tile % per_band) % height) * 2 * ROWS, (tile % per_band) // height * BN


@gluon.jit
def _copy_tiles(source, row, k, height: gl.constexpr, full, tiles, stage):
    """Both halves of a stage's tile."""
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(source, [row + half * height, k], full, tiles.index(2 * stage + half))


@gluon.jit
def _copy(
    w, x, full, empty, w_tiles, x_tiles, tiles_m, tiles_n, units, steps,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, ABREAST: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp: stage after stage, as they become free; the first weights before the kernel ahead ends."""
    per: gl.constexpr = (BN + 2 * ROWS) * BK * 2
    tiles = tiles_m * tiles_n
    row, col = _place(gl.program_id(0) % tiles, tiles_m, tiles_n, BN, ROWS, ABREAST)
    first = gl.program_id(0) // tiles * steps
    ahead = gl.minimum(steps, STAGES)
    for i in range(ahead):
        mbarrier.expect(full.index(i), per)
        _copy_tiles(w, col, (first + i) * BK, BN // 2, full.index(i), w_tiles, i)
    if PDL:
        gdc_wait()
    for i in range(ahead):
        _copy_tiles(x, row, (first + i) * BK, ROWS, full.index(i), x_tiles, i)
    i = ahead
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col = _place(unit % tiles, tiles_m, tiles_n, BN, ROWS, ABREAST)
        first = unit // tiles * steps
        for k in range(gl.where(unit == gl.program_id(0), ahead, 0), steps):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
            mbarrier.expect(full.index(stage), per)
            _copy_tiles(w, col, (first + k) * BK, BN // 2, full.index(stage), w_tiles, stage)
            _copy_tiles(x, row, (first + k) * BK, ROWS, full.index(stage), x_tiles, stage)
            i += 1


@gluon.jit
def _sum(
    i, steps, full, empty, w_tiles, x_tiles,
    PART: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Both halves of a tile's columns, summed over stages i to i + steps."""
    left = gl.zeros([ROWS, BN // 2], gl.float32, LAYOUT)
    right = gl.zeros([ROWS, BN // 2], gl.float32, LAYOUT)
    for k in range(i, i + steps):
        stage = k % STAGES
        mbarrier.wait(full.index(stage), (k // STAGES) & 1)
        rows = x_tiles.index(2 * stage + PART)
        left = warpgroup_mma(rows, w_tiles.index(2 * stage).permute((1, 0)), left, is_async=True)
        right = warpgroup_mma(rows, w_tiles.index(2 * stage + 1).permute((1, 0)), right, is_async=True)
        left, right = warpgroup_mma_wait(2, deps=(left, right))  # the stage before has been read
        mbarrier.arrive(empty.index((k + STAGES - 1) % STAGES), count=1, pred=k > i)
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    mbarrier.arrive(empty.index((i + steps - 1) % STAGES), count=1)
    return left, right


@gluon.jit
def _biased(y, bias, col, N):
    cols = col + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    return y + gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _put(
    out, staged, y, row, col, GATE: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Store half of a tile's columns, or its gated half, by the copy engine; what lies outside is left out."""
    kind: gl.constexpr = out.dtype
    if GATE != "none":
        gate, value = gl.split(gl.reshape(y.to(kind), [ROWS, BN // 4, 2]))
        z = (_activated(gate.to(gl.float32), GATE).to(kind).to(gl.float32) * value.to(gl.float32)).to(kind)
        at = col // 2
    else:
        z = y.to(kind)
        at = col
    tma.store_wait(0)
    gl.thread_barrier()  # what was staged before has been stored
    staged.store(z)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [row, at], staged)


@gluon.jit
def _put_part(out, y, row, col, M, N):
    """Store half of a tile's columns of one group's sums."""
    rows = row + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    cols = col + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    where = out + rows[:, None].to(gl.int64) * N + cols[None, :]
    gl.store(where, y, mask=(rows[:, None] < M) & (cols[None, :] < N))


@gluon.jit
def _aside(stash, half: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where half of a tile's columns waits in memory; each thread reads what it has written."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, BN // 2, gl.SliceLayout(0, LAYOUT))
    return stash + half * ROWS * (BN // 2) + rows[:, None] * (BN // 2) + cols[None, :]


@gluon.jit
def _multiply(
    out, bias, stash, full, empty, w_tiles, x_tiles, staged, tiles_m, tiles_n, units, M, N, steps, PART: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, APART: gl.constexpr, GATE: gl.constexpr,
    BIASED: gl.constexpr, ROWS: gl.constexpr, ABREAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Four multiplying warps: one tile after the other, and within it one group of K after the other, unless they are
    units of their own."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    size: gl.constexpr = ROWS * BN
    stash += (gl.program_id(0) * 2 + PART).to(gl.int64) * (2 * size)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col = _place(unit % (tiles_m * tiles_n), tiles_m, tiles_n, BN, ROWS, ABREAST)
        row += PART * ROWS
        if APART:
            left, right = _sum(i, steps, full, empty, w_tiles, x_tiles, PART, BN, STAGES, ROWS, layout)
            i += steps
            group = unit // (tiles_m * tiles_n)
            if BIASED:  # noqa: SIM102
                if group == 0:
                    left, right = _biased(left, bias, col, N), _biased(right, bias, col + BN // 2, N)
            _put_part(out + group.to(gl.int64) * M * N, left, row, col, M, N)
            _put_part(out + group.to(gl.int64) * M * N, right, row, col + BN // 2, M, N)
        else:
            for group in gl.static_range(GROUPS):
                left, right = _sum(i, steps, full, empty, w_tiles, x_tiles, PART, BN, STAGES, ROWS, layout)
                i += steps
                if BIASED and group == 0:
                    left, right = _biased(left, bias, col, N), _biased(right, bias, col + BN // 2, N)
                if group % 2 == 1:
                    left = gl.load(_aside(stash + group // 2 * size, 0, BN, ROWS, layout)) + left
                    right = gl.load(_aside(stash + group // 2 * size, 1, BN, ROWS, layout)) + right
                if group == 3:
                    left = gl.load(_aside(stash, 0, BN, ROWS, layout)) + left
                    right = gl.load(_aside(stash, 1, BN, ROWS, layout)) + right
                if group + 1 < GROUPS:  # groups 0 and 1 wait in the first place, group 2 in the second
                    gl.store(_aside(stash + group // 2 * size, 0, BN, ROWS, layout), left)
                    gl.store(_aside(stash + group // 2 * size, 1, BN, ROWS, layout), right)
                else:
                    _put(out, staged, left, row, col, GATE, BN, ROWS)
                    _put(out, staged, right, row, col + BN // 2, GATE, BN, ROWS)
    tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize=["M"])
def _pipelined(
    w, x, bias, out, stash, M, N, steps,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, APART: gl.constexpr,
    GATE: gl.constexpr, BIASED: gl.constexpr, ROWS: gl.constexpr, ABREAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A persistent grid over tiles [128, BN]. steps: of BK inputs in a group of K. APART: out [G, M, N] takes the sums
    of each group; else it is a descriptor."""
    w_tiles = gl.allocate_shared_memory(w.dtype, [2 * STAGES, BN // 2, BK], w.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, BK], x.layout)
    width: gl.constexpr = 16 if APART else BN // 2 if GATE == "none" else BN // 4
    staging: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, width], x.dtype)
    staged = gl.allocate_shared_memory(x.dtype, [2, ROWS, width], staging)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    tiles_m, tiles_n = (M + 2 * ROWS - 1) // (2 * ROWS), (N + BN - 1) // BN
    units = tiles_m * tiles_n * (GROUPS if APART else 1)
    gl.warp_specialize(
        [
            (_multiply, (
                out, bias, stash, full, empty, w_tiles, x_tiles, staged.index(0), tiles_m, tiles_n, units, M, N,
                steps, 0, BN, STAGES, GROUPS, APART, GATE, BIASED, ROWS, ABREAST, PDL,
            )),
            (_multiply, (
                out, bias, stash, full, empty, w_tiles, x_tiles, staged.index(1), tiles_m, tiles_n, units, M, N,
                steps, 1, BN, STAGES, GROUPS, APART, GATE, BIASED, ROWS, ABREAST, PDL,
            )),
            (_copy, (
                w, x, full, empty, w_tiles, x_tiles, tiles_m, tiles_n, units, steps * (1 if APART else GROUPS),
                BN, BK, STAGES, ROWS, ABREAST, PDL,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def pipelined(
    weights: TensorDescriptor, bias: Tensor | None, x: Tensor, out: Tensor, tile: Tile, groups: int, gate: str,
    more: dict[str, Any],
) -> None:  # fmt: skip
    """out [P, M, N or N / 2] = x [M, K] @ weights [N, K].T; a descriptor's tiles are half as wide as the tile."""
    (outputs, inner), rows = weights.shape, x.shape[0]
    tiles = -(-rows // (2 * ROWS)) * -(-outputs // tile.bn) * (groups if tile.apart else 1)
    grid = min(processors(x.device), tiles)
    waits = groups > 1 and not tile.apart
    stash = torch.empty(grid * 4 * ROWS * tile.bn if waits else 1, dtype=torch.float32, device=x.device)
    width = tile.bn // 2 if gate == "none" else tile.bn // 4
    _pipelined[(grid,)](
        weights, descriptor(x, ROWS, tile.bk), bias, out if tile.apart else descriptor(out[0], ROWS, width), stash,
        rows, outputs, inner // (groups * tile.bk), BN=tile.bn, BK=tile.bk, STAGES=tile.stages, GROUPS=groups,
        APART=tile.apart, GATE=gate, BIASED=bias is not None, ROWS=ROWS, ABREAST=ABREAST, num_warps=4, **more,
    )  # fmt: skip
