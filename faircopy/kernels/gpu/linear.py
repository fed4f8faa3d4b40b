"""Products in one fixed order: tiles may change with the number of rows, the order of summation along K may not.

K is cut into groups (`kernels/groups.py`). Few rows: each group is its own block's, and whoever reads the product adds
these parts by the tree. Many rows: one block walks over all groups and adds them by that same tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from faircopy.kernels.activation import ACTIVATIONS
from faircopy.kernels.gpu import pipelined, stream, tables
from faircopy.kernels.gpu.activation import activated
from faircopy.kernels.gpu.launch import INTERPRETED, aligned, begin, launched, options, processors
from faircopy.kernels.gpu.pending_norm import BK, BN, PendingNorm
from faircopy.kernels.gpu.tables import Tile
from faircopy.kernels.groups import add_tree, group_count
from faircopy.kernels.ranks import Ranks

SHORT = 32 << 20  # bytes of a weight: so short a product ends before its successor's blocks take processors from it


@triton.jit
def _multiply(acc, x, w, rows, cols, first, last, M, N, K, BK: tl.constexpr, EVEN: tl.constexpr, PRECISE: tl.constexpr):
    """acc += x[rows, first:last] @ w[cols, first:last].T"""
    x_rows = tl.minimum(rows, M - 1)[:, None].to(tl.int64) * K
    w_rows = tl.minimum(cols, N - 1)[None, :].to(tl.int64) * K
    for k in range(first, last, BK):
        ks = k + tl.arange(0, BK)
        if EVEN:
            a = tl.load(x + x_rows + ks[None, :])
            b = tl.load(w + w_rows + ks[:, None])
        else:
            a = tl.load(x + x_rows + ks[None, :], mask=ks[None, :] < last, other=0.0)
            b = tl.load(w + w_rows + ks[:, None], mask=ks[:, None] < last, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee" if PRECISE else "tf32")
    return acc


@triton.jit
def _gated(y, kind: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Columns alternate between gate and value: [BM, BN] -> [BM, BN / 2]."""
    gate, value = tl.split(tl.reshape(y.to(kind), (BM, BN // 2, 2)))
    return activated(gate.to(tl.float32), KIND).to(kind).to(tl.float32) * value.to(tl.float32)


@triton.jit
def _put(out, y, row, col, M, N, BM: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr):
    """Store a tile, or what its gates let through."""
    rows = row + tl.arange(0, BM)
    if GATE != "none":
        cols = col // 2 + tl.arange(0, BN // 2)
        where = out + rows[:, None].to(tl.int64) * (N // 2) + cols[None, :]
        y = _gated(y, out.dtype.element_ty, GATE, BM, BN)
        tl.store(where, y.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N // 2))
    else:
        cols = col + tl.arange(0, BN)
        where = out + rows[:, None].to(tl.int64) * N + cols[None, :]
        tl.store(where, y.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def _finish(out, y, row, col, M, N, BM: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr, COPIED: tl.constexpr):
    """Store a tile; COPIED: out is a descriptor, and the copy engine stores what lies inside."""
    if not COPIED:
        _put(out, y, row, col, M, N, BM, BN, GATE)
    elif GATE != "none":
        out.store([row, col // 2], _gated(y, out.dtype, GATE, BM, BN).to(out.dtype))
    else:
        out.store([row, col], y.to(out.dtype))


@triton.jit
def _biased(y, bias, cols, N, BIASED: tl.constexpr):
    if BIASED:
        y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return y


@launched
@triton.jit(do_not_specialize=["M"])
def _narrow(
    x, w, bias, out, M, N, K, LENGTH,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    PRECISE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Few rows: one block per (columns, rows, group)."""
    tile_n, tile_m, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, cols = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    first = group * LENGTH
    last = tl.minimum(first + LENGTH, K)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    acc = tl.zeros((BM, BN), tl.float32)
    y = _multiply(acc, x, w, rows, cols, first, last, M, N, K, BK, EVEN, PRECISE)
    if group == 0:
        y = _biased(y, bias, cols, N, BIASED)
    if PDL and not EARLY:
        gdc_launch_dependents()
    part = out + group.to(tl.int64) * M * N
    _put(part, y, tile_m * BM, tile_n * BN, M, N, BM, BN, GATE)


@triton.jit
def _sweep(a0, a1, a2, x, w, row, col, first, last, BM: tl.constexpr, BK: tl.constexpr, HIGH: tl.constexpr):
    """Up to three tiles of rows that share each tile of weights."""
    for k in range(first, last, BK):
        b = w.load([col, k]).T
        a0 = tl.dot(x.load([row, k]), b, a0)
        if HIGH > 1:
            a1 = tl.dot(x.load([row + BM, k]), b, a1)
        if HIGH > 2:
            a2 = tl.dot(x.load([row + 2 * BM, k]), b, a2)
    return a0, a1, a2


@triton.jit
def _group(
    x, w, bias, row, col, group, LENGTH, N,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HIGH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Up to three tiles of rows, summed over one group of K; the first group has the bias."""
    a0 = tl.zeros((BM, BN), tl.float32)
    a1, a2 = a0, a0
    a0, a1, a2 = _sweep(a0, a1, a2, x, w, row, col, group * LENGTH, (group + 1) * LENGTH, BM, BK, HIGH)
    if BIASED and group == 0:
        cols = col + tl.arange(0, BN)
        a0 = _biased(a0, bias, cols, N, True)
        a1 = _biased(a1, bias, cols, N, True)
        a2 = _biased(a2, bias, cols, N, True)
    return a0, a1, a2


@triton.jit
def _pair(
    x, w, bias, row, col, group, LENGTH, N,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HIGH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Two groups, added."""
    a0, a1, a2 = _group(x, w, bias, row, col, group, LENGTH, N, BM, BN, BK, HIGH, BIASED)
    b0, b1, b2 = _group(x, w, bias, row, col, group + 1, LENGTH, N, BM, BN, BK, HIGH, False)
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _place_aside(stash, tile, BM: tl.constexpr, BN: tl.constexpr):
    return stash + (tile * BM + tl.arange(0, BM))[:, None] * BN + tl.arange(0, BN)[None, :]


@triton.jit
def _put_aside(stash, a0, a1, a2, BM: tl.constexpr, BN: tl.constexpr, HIGH: tl.constexpr):
    """The first pair's sums wait in memory: registers hold no third tile."""
    tl.debug_barrier()  # other threads may still read the tile before
    tl.store(_place_aside(stash, 0, BM, BN), a0)
    if HIGH > 1:
        tl.store(_place_aside(stash, 1, BM, BN), a1)
    if HIGH > 2:
        tl.store(_place_aside(stash, 2, BM, BN), a2)


@triton.jit
def _added_aside(stash, a0, a1, a2, BM: tl.constexpr, BN: tl.constexpr, HIGH: tl.constexpr):
    tl.debug_barrier()  # threads may read what others have put aside
    a0 = tl.load(_place_aside(stash, 0, BM, BN)) + a0
    if HIGH > 1:
        a1 = tl.load(_place_aside(stash, 1, BM, BN)) + a1
    if HIGH > 2:
        a2 = tl.load(_place_aside(stash, 2, BM, BN)) + a2
    return a0, a1, a2


@launched
@triton.jit(do_not_specialize=["M", "GRID"])
def _wide(
    x, w, bias, out, stash, M, N, LENGTH, GRID,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HIGH: tl.constexpr, ABREAST: tl.constexpr,
    GROUPS: tl.constexpr, APART: tl.constexpr, COPIED: tl.constexpr, GATE: tl.constexpr, BIASED: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Many rows: tensor descriptors and a persistent grid. APART: each group is a tile of its own, for the reader to
    add; else a block adds its groups by the tree."""
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    tiles_m, tiles_n = tl.cdiv(M, BM * HIGH), tl.cdiv(N, BN)
    per_group = tiles_m * tiles_n
    total = per_group * GROUPS if APART else per_group
    stash += tl.program_id(0).to(tl.int64) * (BM * HIGH * BN)
    for tile in tl.range(tl.program_id(0), total, GRID):
        row, col = _place_tile(tile % per_group, tiles_m, tiles_n, BM * HIGH, BN, ABREAST)
        part = out
        if APART or GROUPS == 1:
            group = tile // per_group
            if not COPIED:
                part = out + group.to(tl.int64) * M * N
            a0, a1, a2 = _group(x, w, bias, row, col, group, LENGTH, N, BM, BN, BK, HIGH, BIASED)
        else:
            a0, a1, a2 = _pair(x, w, bias, row, col, 0, LENGTH, N, BM, BN, BK, HIGH, BIASED)
            if GROUPS == 4:
                _put_aside(stash, a0, a1, a2, BM, BN, HIGH)
                a0, a1, a2 = _pair(x, w, bias, row, col, 2, LENGTH, N, BM, BN, BK, HIGH, False)
                a0, a1, a2 = _added_aside(stash, a0, a1, a2, BM, BN, HIGH)
        _finish(part, a0, row, col, M, N, BM, BN, GATE, COPIED)
        if HIGH > 1:
            _finish(part, a1, row + BM, col, M, N, BM, BN, GATE, COPIED)
        if HIGH > 2:
            _finish(part, a2, row + 2 * BM, col, M, N, BM, BN, GATE, COPIED)
    if PDL and not EARLY:
        gdc_launch_dependents()


@triton.jit
def _place_tile(tile, tiles_m, tiles_n, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ABREAST: tl.constexpr):
    """First row and column of a tile; neighbours in time share weights."""
    per_band = ABREAST * tiles_n
    band = tile // per_band
    height = tl.minimum(tiles_m - band * ABREAST, ABREAST)
    return (band * ABREAST + (tile % per_band) % height) * HEIGHT, (tile % per_band) // height * WIDTH


@triton.jit
def _part(parts, size, inside):
    return tl.load(parts + size, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def added(parts, size, inside, COUNT: tl.constexpr):
    """One, two or four parts that lie `size` apart, added by the tree."""
    total = _part(parts, 0, inside)
    if COUNT > 1:
        total += _part(parts, size, inside)
    if COUNT > 2:
        total += _part(parts, 2 * size, inside) + _part(parts, 3 * size, inside)
    return total


@launched
@triton.jit(do_not_specialize=["size"])
def _add_parts(parts, out, size, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    total = added(parts + at, size.to(tl.int64), at < size, COUNT)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


class Linear:
    """A weight [N, K] ready to multiply; the same row gives the same bits with any number of rows beside it."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, exact: bool = True, groups: int | None = None
    ) -> None:
        """groups: of K, for a share of a larger weight; else by the weight's own shape."""
        self.weight, self.bias, self.exact = weight.contiguous(), bias, exact
        self.outputs, self.inner = weight.shape
        self.groups = group_count(self.inner, self.outputs) if groups is None else groups
        self.plan = tables.plan(weight.device, self.outputs, self.inner, weight.dtype)
        self._descriptors: dict[tuple[int, int, Any], Any] = {}

    @classmethod
    def gating(cls, weight: Tensor, bias: Tensor | None = None, exact: bool = True) -> Linear:
        """From gates on top of values [2 I, K]: rows take turns, so that one tile holds both of each pair."""
        return cls(_alternate(weight), None if bias is None else _alternate(bias), exact, groups=1)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        if not self.exact:
            return F.linear(x, self.weight, self.bias)
        if not x.shape[0]:
            return x.new_empty(0, self.outputs)
        parts = self.parts(aligned(x))
        return parts[0] if parts.shape[0] == 1 else add_parts(parts, x.dtype)

    def parts(self, x: Tensor | PendingNorm) -> Tensor:
        """x [M, K] -> [P, M, N]: either finished, or float32 groups that the reader adds by the tree."""
        if isinstance(x, PendingNorm):
            return self._normalised(x, "none")
        if not self.exact:
            return F.linear(x, self.weight, self.bias)[None]
        return self.run(x, self.plan.tile(x.shape[0], self.tensor_cores(x), self.groups))

    def partial(self, x: Tensor) -> Tensor:
        """x [M, K] -> float32 [M, N], not rounded to the weight's type: what a rank has of a larger sum."""
        if not self.exact:
            return F.linear(x, self.weight, self.bias).float()
        if not x.shape[0]:
            return x.new_empty(0, self.outputs, dtype=torch.float32)
        x = aligned(x)
        tile = self.plan.tile(x.shape[0], self.tensor_cores(x), self.groups)
        parts = self.run(x, tile, kind=torch.float32)
        return parts[0] if parts.shape[0] == 1 else add_parts(parts, torch.float32)

    def gated(self, x: Tensor | PendingNorm, kind: str) -> Tensor:
        """x [M, K] -> activation(gates) * values, [M, N / 2], for weights that take turns."""
        if isinstance(x, PendingNorm):
            return self._normalised(x, kind)[0]
        if not self.exact:
            return gated_twin(F.linear(x, self.weight, self.bias), kind)
        return self.run(x, self.plan.gated(x.shape[0], self.tensor_cores(x)), kind)[0]

    def _normalised(self, pending: PendingNorm, gate: str) -> Tensor:
        """The product of rows that are not normalised yet: its kernel does that, or, of groups of K, one before it."""
        if not self.exact or self.groups > 1:
            return self.parts(pending.rows()) if gate == "none" else self.gated(pending.rows(), gate)[None]
        x, width = pending.x, self.outputs if gate == "none" else self.outputs // 2
        out = torch.empty(1, x.shape[0], width, dtype=x.dtype, device=x.device)
        pending.into(self._descriptor(BN, BK, stream.descriptor), self.bias, out[0], gate)
        return out

    def tensor_cores(self, x: Tensor) -> bool:
        """Descriptors want 16-byte rows, and tensor cores 16-bit numbers."""
        return x.dtype != torch.float32 and self.inner % 64 == 0 and (x.is_cuda or INTERPRETED)

    def run(self, x: Tensor, t: Tile, gate: str = "none", kind: torch.dtype | None = None) -> Tensor:
        """[P, M, N or N / 2] by this tile. kind: of a finished product, if not the type of x."""
        outputs = self.outputs if gate == "none" else self.outputs // 2
        same = (kind or x.dtype) == x.dtype
        if t.pipelined and not (same and tables.can_pipeline(t, outputs, self.inner, self.groups)):
            t = tables.default_tile(x.shape[0], wide=True)
        if t.apart and self.groups == 1:
            t = replace(t, apart=False)
        parts = self.groups if not t.wide or t.apart else 1
        made = (kind or x.dtype) if parts == 1 else torch.float32
        out = torch.empty(parts, x.shape[0], outputs, dtype=made, device=x.device)
        more = options(x.device)
        if t.streamed:
            weight = self._descriptor(t.bn // t.warpgroups, t.bk, stream.descriptor)
            stream.stream(weight, self.bias, x, out, t, gate, more)
            return out
        if t.pipelined:
            weight = self._descriptor(t.bn, t.bk, stream.descriptor)
            pipelined.pipelined(weight, self.bias, x, out[0], t, self.groups, gate, more)
            return out
        common = {
            "BM": t.bm, "BN": t.bn, "BK": t.bk, "GATE": gate, "BIASED": self.bias is not None,
            "EARLY": self.weight.nbytes < SHORT, "num_warps": t.warps, "num_stages": t.stages, **more,
        }  # fmt: skip
        if t.wide:
            self._wide(x, t, out, common)
        else:
            self._narrow(x, t, out, common)
        return out

    def _narrow(self, x: Tensor, t: Tile, out: Tensor, common: dict[str, Any]) -> None:
        length, rows = self.inner // self.groups, x.shape[0]
        _narrow[(-(-self.outputs // t.bn), -(-rows // t.bm), self.groups)](
            x, self.weight, self.bias, out, rows, self.outputs, self.inner, length,
            EVEN=length % t.bk == 0, PRECISE=x.dtype == torch.float32, **common,
        )  # fmt: skip

    def _wide(self, x: Tensor, t: Tile, out: Tensor, common: dict[str, Any]) -> None:
        rows, height = x.shape[0], t.bm * t.high
        tiles = -(-rows // height) * -(-self.outputs // t.bn) * out.shape[0]
        grid = min(processors(x.device) * t.resident, tiles)
        source = TensorDescriptor.from_tensor(x.contiguous(), [t.bm, t.bk])
        waits = self.groups == 4 and not t.apart
        stash = torch.empty(grid * height * t.bn if waits else 1, dtype=torch.float32, device=x.device)
        copied = len(out) == 1 and out.dtype == x.dtype and out.shape[2] % 8 == 0
        target = _tiles(out[0], t.bm, t.bn * out.shape[2] // self.outputs) if copied else out
        _wide[(grid,)](
            source, self._descriptor(t.bn, t.bk, _tiles), self.bias, target, stash, rows, self.outputs,
            self.inner // self.groups, grid, HIGH=t.high, ABREAST=8, GROUPS=self.groups, APART=t.apart, COPIED=copied,
            **common,
        )  # fmt: skip

    def _descriptor(self, height: int, depth: int, make: Callable[[Tensor, int, int], Any]) -> Any:
        key = (height, depth, make)
        if key not in self._descriptors:
            self._descriptors[key] = make(self.weight, height, depth)
        return self._descriptors[key]


class SharedLinear:
    """A weight whose inputs several ranks share; each rank's sum is one of the parts."""

    def __init__(self, weight: Tensor, bias: Tensor | None, exact: bool, groups: int, ranks: Ranks) -> None:
        """weight [N, K / ranks], groups: this rank's. bias: used by rank 0 alone."""
        self._own, self._ranks = Linear(weight, bias if ranks.rank == 0 else None, exact, groups), ranks

    def parts(self, x: Tensor | PendingNorm) -> Tensor:
        """x [M, K / ranks] -> float32 [ranks, M, N], for the reader to add by the tree."""
        return self._ranks.gather(self._own.partial(x.rows() if isinstance(x, PendingNorm) else x))

    def __call__(self, x: Tensor) -> Tensor:
        parts = self.parts(x)
        return parts[0].to(x.dtype) if parts.shape[0] == 1 else add_parts(parts, x.dtype)


def _tiles(tensor: Tensor, height: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [height, depth])


def add_parts(parts: Tensor, kind: torch.dtype) -> Tensor:
    """[P, M, N] float32 -> [M, N], parts added by the tree."""
    out = torch.empty(parts.shape[1:], dtype=kind, device=parts.device)
    size, block = out.numel(), 1024
    _add_parts[(-(-size // block),)](parts, out, size, COUNT=parts.shape[0], BLOCK=block, **options(parts.device))
    return out


def add_parts_twin(parts: Tensor, kind: torch.dtype) -> Tensor:
    return add_tree(parts.float()).to(kind)


def parts_twin(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """What the kernels compute, group by group."""
    pairs = zip(x.float().chunk(groups, 1), weight.float().chunk(groups, 1), strict=True)
    parts = torch.stack([rows @ columns.T for rows, columns in pairs])
    if bias is not None:
        parts[0] += bias.float()
    return parts


def gated_twin(y: Tensor, kind: str) -> Tensor:
    """Gates and values of a product whose outputs take turns."""
    return ACTIVATIONS[kind](y[..., 0::2]) * y[..., 1::2]


def _alternate(stacked: Tensor) -> Tensor:
    return stacked.view(2, -1, *stacked.shape[1:]).transpose(0, 1).reshape(stacked.shape)


__all__ = ["Linear", "SharedLinear", "add_parts", "add_parts_twin", "added", "gated_twin", "parts_twin"]
