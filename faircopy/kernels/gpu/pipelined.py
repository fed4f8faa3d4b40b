"""Products of many rows on Hopper: one warp copies tiles into shared memory, two groups of four warps multiply them.

Each group has 64 of a tile's 128 rows. Copying goes on over the ends of tiles and of groups of K, and one group of
warps multiplies while the other stores. The order of every sum is that of `kernels/gpu/linear.py`, and so are the bits:
sums of groups of K wait in registers, which hold three tiles of 128 columns, or one of 256 where K is not grouped.
Rows that would end behind the last one begin earlier (`stream.inside`), so that nothing outside is copied.
"""

from __future__ import annotations

from typing import Any

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
from faircopy.kernels.gpu.stream import barriers, descriptor, inside
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
def _copy_rows(x, row, k, M, full, x_tiles, stage, ROWS: gl.constexpr):
    """Both groups' rows of a stage."""
    for part in gl.static_range(2):
        at = inside(row + part * ROWS, M, ROWS)
        tma.async_copy_global_to_shared(x, [at, k], full, x_tiles.index(2 * stage + part))


@gluon.jit
def _copy(
    w, x, full, empty, w_tiles, x_tiles, tiles_m, tiles_n, M, steps,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, ABREAST: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp: stage after stage, as they become free; the first weights before the kernel ahead ends."""
    per: gl.constexpr = (BN + 2 * ROWS) * BK * 2
    row, col = _place(gl.program_id(0), tiles_m, tiles_n, BN, ROWS, ABREAST)
    ahead = gl.minimum(steps, STAGES)
    for i in range(ahead):
        mbarrier.expect(full.index(i), per)
        tma.async_copy_global_to_shared(w, [col, i * BK], full.index(i), w_tiles.index(i))
    if PDL:
        gdc_wait()
    for i in range(ahead):
        _copy_rows(x, row, i * BK, M, full.index(i), x_tiles, i, ROWS)
    i = ahead
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = _place(tile, tiles_m, tiles_n, BN, ROWS, ABREAST)
        for k in range(gl.where(tile == gl.program_id(0), ahead, 0), steps):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
            mbarrier.expect(full.index(stage), per)
            tma.async_copy_global_to_shared(w, [col, k * BK], full.index(stage), w_tiles.index(stage))
            _copy_rows(x, row, k * BK, M, full.index(stage), x_tiles, stage, ROWS)
            i += 1


@gluon.jit
def _sum(
    i, steps, full, empty, w_tiles, x_tiles,
    PART: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A group of warps' rows of a tile, summed over stages i to i + steps."""
    total = gl.zeros([ROWS, BN], gl.float32, LAYOUT)
    for k in range(i, i + steps):
        stage = k % STAGES
        mbarrier.wait(full.index(stage), (k // STAGES) & 1)
        rows = x_tiles.index(2 * stage + PART)
        total = warpgroup_mma(rows, w_tiles.index(stage).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))  # the stage before has been read
        mbarrier.arrive(empty.index((k + STAGES - 1) % STAGES), count=1, pred=k > i)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index((i + steps - 1) % STAGES), count=1)
    return total


@gluon.jit
def _biased(y, bias, col, N):
    cols = col + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    return y + gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _store(out, staged, z, row, col):
    """Store a tile by the copy engine; what lies outside is left out."""
    tma.store_wait(0)
    gl.thread_barrier()  # what was staged before has been stored
    staged.store(z)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [row, col], staged)


@gluon.jit
def _put(
    out, staged, y, row, col, GATE: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Store sums, or what their gates let through, WIDTH columns at a time."""
    kind: gl.constexpr = out.dtype
    if GATE != "none":
        gate, value = gl.split(gl.reshape(y.to(kind), [ROWS, BN // 2, 2]))
        z = (_activated(gate.to(gl.float32), GATE).to(kind).to(gl.float32) * value.to(gl.float32)).to(kind)
        _store(out, staged, z, row, col // 2)
    elif WIDTH < BN:
        left, right = gl.split(gl.permute(gl.reshape(y.to(kind), [ROWS, 2, BN // 2]), (0, 2, 1)))
        _store(out, staged, left, row, col)
        _store(out, staged, right, row, col + BN // 2)
    else:
        _store(out, staged, y.to(kind), row, col)


@gluon.jit
def _multiply(
    out, bias, full, empty, w_tiles, x_tiles, staged, tiles_m, tiles_n, M, N, steps, PART: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, GATE: gl.constexpr, BIASED: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, ABREAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Four multiplying warps: one tile after the other, and within it one group of K after the other."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = _place(tile, tiles_m, tiles_n, BN, ROWS, ABREAST)
        total = _sum(i, steps, full, empty, w_tiles, x_tiles, PART, BN, STAGES, ROWS, layout)
        i += steps
        if BIASED:
            total = _biased(total, bias, col, N)
        third = total
        for group in range(1, GROUPS):  # not unrolled: with one loop over K three tiles stay in registers
            y = _sum(i, steps, full, empty, w_tiles, x_tiles, PART, BN, STAGES, ROWS, layout)
            i += steps
            if group == 1:
                total = total + y
            elif group == 2:
                third = y
            else:
                total = total + (third + y)
        _put(out, staged, total, inside(row + PART * ROWS, M, ROWS), col, GATE, BN, ROWS, WIDTH)
    tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize=["M"])
def _pipelined(
    w, x, bias, out, M, N, steps,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, GATE: gl.constexpr,
    BIASED: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, ABREAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A persistent grid over tiles [128, BN]. steps: of BK inputs in a group of K."""
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, BK], x.layout)
    staged = gl.allocate_shared_memory(x.dtype, [2, ROWS, WIDTH], out.layout)
    full, empty = barriers(STAGES, 2)
    tiles_m, tiles_n = (M + 2 * ROWS - 1) // (2 * ROWS), (N + BN - 1) // BN
    gl.warp_specialize(
        [
            (_multiply, (
                out, bias, full, empty, w_tiles, x_tiles, staged.index(0), tiles_m, tiles_n, M, N, steps, 0, BN,
                STAGES, GROUPS, GATE, BIASED, ROWS, WIDTH, ABREAST, PDL,
            )),
            (_multiply, (
                out, bias, full, empty, w_tiles, x_tiles, staged.index(1), tiles_m, tiles_n, M, N, steps, 1, BN,
                STAGES, GROUPS, GATE, BIASED, ROWS, WIDTH, ABREAST, PDL,
            )),
            (_copy, (
                w, x, full, empty, w_tiles, x_tiles, tiles_m, tiles_n, M, steps * GROUPS, BN, BK, STAGES, ROWS,
                ABREAST, PDL,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def pipelined(
    weights: TensorDescriptor, bias: Tensor | None, x: Tensor, out: Tensor, tile: Tile, groups: int, gate: str,
    more: dict[str, Any],
) -> None:  # fmt: skip
    """out [M, N or N / 2] = x [M, K] @ weights [N, K].T"""
    (outputs, inner), rows = weights.shape, x.shape[0]
    tiles = -(-rows // (2 * ROWS)) * -(-outputs // tile.bn)
    width = min(tile.bn, 128) if gate == "none" else tile.bn // 2
    _pipelined[(min(processors(x.device), tiles),)](
        weights, descriptor(x, ROWS, tile.bk), bias, descriptor(out, ROWS, width), rows, outputs,
        inner // (groups * tile.bk), BN=tile.bn, BK=tile.bk, STAGES=tile.stages, GROUPS=groups, GATE=gate,
        BIASED=bias is not None, ROWS=ROWS, WIDTH=width, ABREAST=ABREAST, num_warps=4, **more,
    )  # fmt: skip
