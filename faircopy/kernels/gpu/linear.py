"""Products in one fixed order: tiles may change with the number of rows, the order of summation along K may not.

K is cut into a number of spans fixed by the weight's shape. Few rows: each span is its own block, and whoever reads the
product adds the spans in order. Many rows: one block walks over all spans and adds them in that same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from faircopy.kernels.activation import ACTIVATIONS
from faircopy.kernels.gpu import tables
from faircopy.kernels.gpu.launch import INTERPRETED, aligned, begin, launched, options, processors
from faircopy.kernels.gpu.tables import Tile, span_length

SHORT = 32 << 20  # a product of so few bytes is over before its successor's blocks are in anybody's way


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An activation in float32."""
    if KIND == "silu" or KIND == "swish":
        return x / (1.0 + tl.exp(-x))
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "relu":
        return tl.maximum(x, 0.0)
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    return x / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def _fetch(w, cols, N, K, first, AHEAD: tl.constexpr, BN: tl.constexpr):
    """Ask for the first weights of this block: they do not depend on the kernel before."""
    lines = first + tl.arange(0, AHEAD) * 64
    where = w + cols[:, None].to(tl.int64) * K + tl.minimum(lines, K - 1)[None, :]
    inside = tl.broadcast_to(cols[:, None] < N, (BN, AHEAD))
    where = tl.where(inside, where.to(tl.int64, bitcast=True), w.to(tl.int64, bitcast=True))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
    )


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
def _gated(y, out, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Columns alternate between gate and value: [BM, BN] -> [BM, BN / 2]."""
    kind = out.dtype.element_ty
    gate, value = tl.split(tl.reshape(y.to(kind), (BM, BN // 2, 2)))
    return activated(gate.to(tl.float32), KIND).to(kind).to(tl.float32) * value.to(tl.float32)


@triton.jit
def _put(out, y, row, col, M, N, BM: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr):
    """Store a tile, or what its gates let through."""
    rows = row + tl.arange(0, BM)
    if GATE != "none":
        cols = col // 2 + tl.arange(0, BN // 2)
        where = out + rows[:, None].to(tl.int64) * (N // 2) + cols[None, :]
        y = _gated(y, out, GATE, BM, BN)
        tl.store(where, y.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N // 2))
    else:
        cols = col + tl.arange(0, BN)
        where = out + rows[:, None].to(tl.int64) * N + cols[None, :]
        tl.store(where, y.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def _biased(y, bias, cols, N, BIASED: tl.constexpr):
    if BIASED:
        y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return y


@launched
@triton.jit(do_not_specialize=["M"])
def _narrow(
    x, w, bias, out, M, N, K, SPAN,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    PRECISE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Few rows: one block per (columns, rows, span)."""
    tile_n, tile_m, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, cols = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    first = span * SPAN
    last = tl.minimum(first + SPAN, K)
    if PDL:
        if AHEAD:
            _fetch(w, cols, N, K, first, AHEAD, BN)
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    acc = tl.zeros((BM, BN), tl.float32)
    y = _multiply(acc, x, w, rows, cols, first, last, M, N, K, BK, EVEN, PRECISE)
    if span == 0:
        y = _biased(y, bias, cols, N, BIASED)
    if PDL and not EARLY:
        gdc_launch_dependents()
    part = out + span.to(tl.int64) * M * N
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


@launched
@triton.jit(do_not_specialize=["M", "SPLIT", "GRID"])
def _wide(
    x, w, bias, out, M, N, K, SPAN, SPLIT, GRID,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr,
    GATE: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Many rows: tensor descriptors and a grid that stays. SPANS: "one"; "inside", added in order by the block;
    "apart", each a tile of its own, for the reader to add."""
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    tiles_m, tiles_n = tl.cdiv(M, BM * HIGH), tl.cdiv(N, BN)
    per_span = tiles_m * tiles_n
    total = per_span * SPLIT if SPANS == "apart" else per_span
    for tile in tl.range(tl.program_id(0), total, GRID):
        row, col = _place_tile(tile % per_span, tiles_m, tiles_n, BM * HIGH, BN, GROUP)
        cols = col + tl.arange(0, BN)
        a0 = tl.zeros((BM, BN), tl.float32)
        a1, a2 = a0, a0
        part = out
        if SPANS == "apart":
            span = tile // per_span
            part = out + span.to(tl.int64) * M * N
            last = tl.minimum((span + 1) * SPAN, K)
            a0, a1, a2 = _sweep(a0, a1, a2, x, w, row, col, span * SPAN, last, BM, BK, HIGH)
            if BIASED and span == 0:
                a0 = _biased(a0, bias, cols, N, True)
                a1 = _biased(a1, bias, cols, N, True)
                a2 = _biased(a2, bias, cols, N, True)
        elif SPANS == "inside":
            for span in range(SPLIT):
                b0 = tl.zeros((BM, BN), tl.float32)
                b1, b2 = b0, b0
                last = tl.minimum((span + 1) * SPAN, K)
                b0, b1, b2 = _sweep(b0, b1, b2, x, w, row, col, span * SPAN, last, BM, BK, HIGH)
                if BIASED and span == 0:
                    b0 = _biased(b0, bias, cols, N, True)
                    b1 = _biased(b1, bias, cols, N, True)
                    b2 = _biased(b2, bias, cols, N, True)
                a0 += b0
                if HIGH > 1:
                    a1 += b1
                if HIGH > 2:
                    a2 += b2
        else:
            a0, a1, a2 = _sweep(a0, a1, a2, x, w, row, col, 0, K, BM, BK, HIGH)
            a0 = _biased(a0, bias, cols, N, BIASED)
            a1 = _biased(a1, bias, cols, N, BIASED)
            a2 = _biased(a2, bias, cols, N, BIASED)
        _put(part, a0, row, col, M, N, BM, BN, GATE)
        if HIGH > 1:
            _put(part, a1, row + BM, col, M, N, BM, BN, GATE)
        if HIGH > 2:
            _put(part, a2, row + 2 * BM, col, M, N, BM, BN, GATE)
    if PDL and not EARLY:
        gdc_launch_dependents()


@triton.jit
def _place_tile(tile, tiles_m, tiles_n, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile; neighbours in time share weights."""
    per_group = GROUP * tiles_n
    group = tile // per_group
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    return (group * GROUP + (tile % per_group) % height) * HEIGHT, (tile % per_group) // height * WIDTH


@launched
@triton.jit(do_not_specialize=["size"])
def _add_spans(parts, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for span in range(SPLIT):
        total += tl.load(parts + span * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


class Linear:
    """A weight [N, K] ready to multiply; the same row gives the same bits with any number of rows beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, exact: bool = True) -> None:
        self.weight, self.bias, self.exact = weight.contiguous(), bias, exact
        self.outputs, self.inner = weight.shape
        self.plan = tables.plan(weight.device, self.outputs, self.inner, weight.dtype)
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    @classmethod
    def gating(cls, weight: Tensor, bias: Tensor | None = None, exact: bool = True) -> Linear:
        """From gates on top of values [2 I, K]: rows take turns, so that one tile holds both of each pair."""
        return cls(_alternate(weight), None if bias is None else _alternate(bias), exact)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        if not self.exact:
            return F.linear(x, self.weight, self.bias)
        if not x.shape[0]:
            return x.new_empty(0, self.outputs)
        parts = self.parts(aligned(x))
        return parts[0] if parts.shape[0] == 1 else add_spans(parts, x.dtype)

    def parts(self, x: Tensor) -> Tensor:
        """x [M, K] -> [S, M, N]: either finished, or float32 spans that the reader adds in order."""
        if not self.exact:
            return F.linear(x, self.weight, self.bias)[None]
        return self.run(x, self.plan.tile(x.shape[0], self.wide_enough(x)), self.plan.split)

    def gated(self, x: Tensor, kind: str) -> Tensor:
        """x [M, K] -> activation(gates) * values, [M, N / 2], for weights that take turns."""
        if not self.exact:
            return gated_twin(F.linear(x, self.weight, self.bias), kind)
        return self.run(x, self.plan.gated(x.shape[0], self.wide_enough(x)), 1, kind)[0]

    def wide_enough(self, x: Tensor) -> bool:
        """Descriptors want 16-byte rows, and tensor cores 16-bit numbers."""
        return x.dtype != torch.float32 and self.inner % 64 == 0 and (x.is_cuda or INTERPRETED)

    def run(self, x: Tensor, t: Tile, split: int, gate: str = "none") -> Tensor:
        """[S, M, N or N / 2] by this tile, with K cut into `split` spans."""
        spans = "one" if split == 1 else "inside" if t.wide and not t.apart else "apart"
        parts, kind = (split, torch.float32) if spans == "apart" else (1, x.dtype)
        outputs = self.outputs if gate == "none" else self.outputs // 2
        out = torch.empty(parts, x.shape[0], outputs, dtype=kind, device=x.device)
        common = {
            "BM": t.bm, "BN": t.bn, "BK": t.bk, "GATE": gate, "BIASED": self.bias is not None,
            "EARLY": self.weight.nbytes < SHORT, "num_warps": t.warps, "num_stages": t.stages, **options(x.device),
        }  # fmt: skip
        if t.wide:
            self._wide(x, t, split, spans, out, common)
        else:
            self._narrow(x, t, split, out, common)
        return out

    def _narrow(self, x: Tensor, t: Tile, split: int, out: Tensor, common: dict[str, Any]) -> None:
        span, rows = span_length(self.inner, split), x.shape[0]
        even = span % t.bk == 0 and self.inner % span == 0
        _narrow[(-(-self.outputs // t.bn), -(-rows // t.bm), split)](
            x, self.weight, self.bias, out, rows, self.outputs, self.inner, span,
            EVEN=even, PRECISE=x.dtype == torch.float32, AHEAD=t.ahead, **common,
        )  # fmt: skip

    def _wide(self, x: Tensor, t: Tile, split: int, spans: str, out: Tensor, common: dict[str, Any]) -> None:
        rows = x.shape[0]
        tiles = -(-rows // (t.bm * t.high)) * -(-self.outputs // t.bn) * out.shape[0]
        grid = min(processors(x.device) * t.resident, tiles)
        source = TensorDescriptor.from_tensor(x.contiguous(), [t.bm, t.bk])
        _wide[(grid,)](
            source, self._descriptor(t.bn, t.bk), self.bias, out, rows, self.outputs, self.inner,
            span_length(self.inner, split), split, grid, HIGH=t.high, GROUP=8, SPANS=spans, **common,
        )  # fmt: skip

    def _descriptor(self, bn: int, bk: int) -> TensorDescriptor:
        if (bn, bk) not in self._descriptors:
            self._descriptors[bn, bk] = TensorDescriptor.from_tensor(self.weight, [bn, bk])
        return self._descriptors[bn, bk]


def add_spans(parts: Tensor, kind: torch.dtype) -> Tensor:
    """[S, M, N] float32 -> [M, N], spans added in order."""
    out = torch.empty(parts.shape[1:], dtype=kind, device=parts.device)
    size, block = out.numel(), 1024
    _add_spans[(-(-size // block),)](parts, out, size, SPLIT=parts.shape[0], BLOCK=block, **options(parts.device))
    return out


def add_spans_twin(parts: Tensor, kind: torch.dtype) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part
    return total.to(kind)


def parts_twin(x: Tensor, weight: Tensor, bias: Tensor | None, split: int) -> Tensor:
    """What the kernels compute, span by span."""
    span = span_length(weight.shape[1], split)
    cuts = [slice(s * span, (s + 1) * span) for s in range(split)]
    parts = torch.stack([x[:, cut].float() @ weight[:, cut].float().T for cut in cuts])
    if bias is not None:
        parts[0] += bias.float()
    return parts


def gated_twin(y: Tensor, kind: str) -> Tensor:
    """Gates and values of a product whose outputs take turns."""
    return ACTIVATIONS[kind](y[..., 0::2]) * y[..., 1::2]


def _alternate(stacked: Tensor) -> Tensor:
    return stacked.view(2, -1, *stacked.shape[1:]).transpose(0, 1).reshape(stacked.shape)


__all__ = ["Linear", "activated", "add_spans", "add_spans_twin", "gated_twin", "parts_twin"]
