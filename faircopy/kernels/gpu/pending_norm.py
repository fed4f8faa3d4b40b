"""Between two products on Hopper: add the first one's parts to the residual stream, normalise, and go on.

Many rows: a kernel of its own. Few rows: every block of the second product does it for itself, while the first tiles of
its weights are on their way; the first block stores the residual stream. One function has the arithmetic, so both have
the same bits: a row is always summed by four warps, eight numbers of a lane at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from faircopy.kernels.gpu.launch import hopper, launched, options, power, processors, shared_memory
from faircopy.kernels.gpu.stream import barriers, put_columns

NUMBERS = 8192  # of all rows that a block normalises for itself, padded, at most
FEW = 2  # rows that a product normalises on its way: of more, each block would read too much
TILE = 8  # rows of a tile of inputs: the least that tensor cores take
BN, BK = 64, 64  # of a tile of weights
STAGES = 16  # tiles of weights on their way, as far as shared memory holds them
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0]))


@gluon.jit
def _scaled(x, eps, N: gl.constexpr):
    """One number per row: what its root mean square is divided out by."""
    return gl.rsqrt(gl.sum(x * x, 1) / N + eps)[:, None]


@gluon.jit
def added_parts(parts, where, size, inside, PARTS: gl.constexpr):
    """One, two or four parts that lie `size` apart, added by the tree."""
    total = gl.load(parts + where, mask=inside, other=0.0).to(gl.float32)
    if PARTS > 1:
        total += gl.load(parts + size + where, mask=inside, other=0.0)
    if PARTS > 2:
        pair = gl.load(parts + 2 * size + where, mask=inside, other=0.0)
        total += pair + gl.load(parts + 3 * size + where, mask=inside, other=0.0)
    return total


@gluon.jit
def _stream_and_norm(
    x, parts, after, weight, first, rows, multiplier, eps,
    R: gl.constexpr, N: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, AFTER: gl.constexpr,
    CALLS_FIRST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """R rows of the residual stream from `first` on with the parts added, the same normalised, and where they are.

    CALLS_FIRST: the next kernel's blocks may come up before this one has waited, see launch.call_next.
    """
    kind: gl.constexpr = x.dtype.element_ty
    if PDL and CALLS_FIRST:
        gdc_launch_dependents()
    row = first + gl.arange(0, R, gl.SliceLayout(1, _ROWS))
    at = gl.arange(0, BLOCK, gl.SliceLayout(0, _ROWS))
    inside = (row < rows)[:, None] & (at < N)[None, :]
    where = row.to(gl.int64)[:, None] * N + at[None, :]
    value = gl.load(x + where, mask=inside, other=0.0).to(gl.float32)  # written before the product began
    scale = gl.load(weight + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
    if AFTER:
        between = gl.load(after + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
    if PDL:
        gdc_wait()
        if not CALLS_FIRST:
            gdc_launch_dependents()
    total = added_parts(parts, where, rows.to(gl.int64) * N, inside, PARTS).to(kind).to(gl.float32)
    if AFTER:
        total = (total * _scaled(total, eps, N) * between).to(kind).to(gl.float32)
    value = gl.fma(total, multiplier, value).to(kind)
    wide = value.to(gl.float32)
    return value, (wide * _scaled(wide, eps, N) * scale).to(kind), row, where, inside


@gluon.jit
def _keep(value, x, healthy, row, rows, where, inside, WATCH: gl.constexpr):
    """Store the residual stream, and whether its rows are finite."""
    gl.store(x + where, value, mask=inside)
    if WATCH:
        wide = value.to(gl.float32)
        wrong = gl.sum(((wide != wide) | (gl.abs(wide) == float("inf"))).to(gl.int32), 1)
        gl.store(healthy + row, wrong == 0, mask=row < rows)


@launched
@gluon.jit(do_not_specialize=["rows"])
def _add_norm(
    x, parts, after, weight, y, healthy, rows, multiplier, eps,
    N: gl.constexpr, PARTS: gl.constexpr, AFTER: gl.constexpr, WATCH: gl.constexpr, BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A row per block."""
    value, normed, row, where, inside = _stream_and_norm(
        x, parts, after, weight, gl.program_id(0), rows, multiplier, eps, 1, N, BLOCK, PARTS, AFTER, True, PDL
    )
    _keep(value, x, healthy, row, rows, where, inside, WATCH)
    gl.store(y + where, normed, mask=inside)


@gluon.jit
def _copy(w, full, empty, w_tiles, first, last, steps, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """The copying warp: weights alone, which depend on no kernel."""
    for i in range((last - first) * steps):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BN * BK * 2)
        tma.async_copy_global_to_shared(
            w, [(first + i // steps) * BN, i % steps * BK], full.index(stage), w_tiles.index(stage)
        )


@gluon.jit
def _multiply(
    x, parts, after, weight, kept, healthy, out, bias, full, empty, w_tiles, inputs, first, last, rows, multiplier, eps,
    outputs, steps,
    R: gl.constexpr, N: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, AFTER: gl.constexpr,
    WATCH: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    GATE: gl.constexpr, BIASED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Four warps: all rows, normalised into shared memory, then one tile of weights after the other."""
    value, normed, row, where, inside = _stream_and_norm(
        x, parts, after, weight, 0, rows, multiplier, eps, R, N, BLOCK, PARTS, AFTER, False, PDL
    )
    if gl.program_id(0) == 0:
        _keep(value, kept, healthy, row, rows, where, inside, WATCH)
    tiles = gl.permute(gl.reshape(normed, [R, BLOCK // BK, BK]), [1, 0, 2])
    if R < TILE:  # the rows of a tile that are not there repeat those that are
        more = gl.reshape(tiles, [BLOCK // BK, 1, R, BK])
        more, _ = gl.broadcast(more, gl.full([BLOCK // BK, TILE // R, R, BK], 0, normed.dtype, more.type.layout))
        tiles = gl.reshape(more, [BLOCK // BK, TILE, BK])
    inputs._reinterpret(normed.dtype, [BLOCK // BK, TILE, BK], gl.NVMMASharedLayout(128, 16, 3)).store(tiles)
    fence_async_shared()
    gl.thread_barrier()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    pairs: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    i = 0
    for unit in range(first, last):
        acc = gl.zeros([BN, TILE], gl.float32, layout)
        for k in range(steps):
            stage = (i + k) % STAGES
            mbarrier.wait(full.index(stage), ((i + k) // STAGES) & 1)
            acc = warpgroup_mma(w_tiles.index(stage), inputs.index(k).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the stage before has been read
            mbarrier.arrive(empty.index((i + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        i += steps
        mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
        y, col = gl.convert_layout(acc, pairs), unit * BN
        if BIASED:
            cols = col + gl.arange(0, BN, gl.SliceLayout(1, pairs))
            y += gl.load(bias + cols, mask=cols < outputs, other=0.0).to(gl.float32)[:, None]
        put_columns(out, y, 0, col, rows, outputs, BN, TILE, GATE)


@launched
@gluon.jit(do_not_specialize=["rows"])
def _normed_stream(
    w, x, parts, after, weight, kept, healthy, out, bias, rows, multiplier, eps, outputs, units, steps,
    R: gl.constexpr, N: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, AFTER: gl.constexpr,
    WATCH: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    GATE: gl.constexpr, BIASED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each block takes the same share of all tiles of weights."""
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BK], w.dtype)
    inputs = gl.allocate_shared_memory(w.dtype, [BLOCK // BK, TILE, BK], narrow)
    full, empty = barriers(STAGES, 1)
    first = (gl.program_id(0) * units) // gl.num_programs(0)
    last = ((gl.program_id(0) + 1) * units) // gl.num_programs(0)
    gl.warp_specialize(
        [
            (_multiply, (
                x, parts, after, weight, kept, healthy, out, bias, full, empty, w_tiles, inputs, first, last, rows,
                multiplier, eps, outputs, steps,
                R, N, BLOCK, PARTS, AFTER, WATCH, BN, BK, TILE, STAGES, GATE, BIASED, PDL,
            )),
            (_copy, (w, full, empty, w_tiles, first, last, steps, BN, BK, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


@dataclass(slots=True)
class PendingNorm:
    """Rows that are still to be added to the residual stream and normalised, by whoever reads them."""

    x: Tensor  # [T, N] the residual stream; once the rows were read, with the parts added
    parts: Tensor  # [P, T, N]
    weight: Tensor
    eps: float
    after: Tensor | None = None
    multiplier: float = 1.0
    healthy: Tensor | None = None

    def rows(self) -> Tensor:
        """Normalised by a kernel of its own."""
        return add_norm(self.x, self.parts, self.weight, self.eps, self.after, self.multiplier, self.healthy)

    def into(self, weights: TensorDescriptor, bias: Tensor | None, out: Tensor, gate: str) -> None:
        """out [M, N or N / 2]: the product with these weights."""
        (outputs, inner), kept, rows = weights.shape, torch.empty_like(self.x), self.x.shape[0]
        block, units = power(inner), -(-outputs // BN)
        stages = min(STAGES, (shared_memory(out.device) - 2 * TILE * block) // (2 * BN * BK) - 1)
        _normed_stream[(min(units, processors(out.device)),)](
            weights, self.x, self.parts, self.after, self.weight, kept, self.healthy, out, bias, rows,
            self.multiplier, self.eps, outputs, units, inner // BK,
            R=power(rows), N=inner, BLOCK=block, PARTS=self.parts.shape[0], AFTER=self.after is not None,
            WATCH=self.healthy is not None, BN=BN, BK=BK, TILE=TILE, STAGES=stages, GATE=gate,
            BIASED=bias is not None, num_warps=4, **options(out.device),
        )  # fmt: skip
        self.x = kept


def known(x: Tensor) -> bool:
    """Whether these kernels run here."""
    return hopper(x.device) and x.element_size() == 2


def few(x: Tensor) -> bool:
    """Whether a product may normalise these rows on its way."""
    rows, n = x.shape
    return known(x) and 0 < rows <= FEW and n % BK == 0 and power(rows) * power(n) <= NUMBERS and power(n) >= 1024


def add_norm(
    x: Tensor, parts: Tensor, weight: Tensor, eps: float, after: Tensor | None, multiplier: float,
    healthy: Tensor | None,
) -> Tensor:  # fmt: skip
    """See norm.add_norm."""
    y, (rows, n) = torch.empty_like(x), x.shape
    _add_norm[(rows,)](
        x, parts, after, weight, y, healthy, rows, multiplier, eps,
        N=n, PARTS=parts.shape[0], AFTER=after is not None, WATCH=healthy is not None, BLOCK=power(n, 1024),
        num_warps=4, **options(x.device),
    )  # fmt: skip
    return y
