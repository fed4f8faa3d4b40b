"""Products in one fixed order: tiles may change with the number of rows, the order of summation along K may not.

K is cut into a number of spans fixed by the weight's shape. Few rows: each span is its own block, and whoever reads the
product adds the spans in order. Many rows: one block walks over all spans and adds them in that same order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from faircopy.kernels.activation import ACTIVATIONS
from faircopy.kernels.gpu import tables
from faircopy.kernels.gpu.launch import INTERPRETED, options, processors
from faircopy.kernels.gpu.tables import GRAIN, Tile, span_length


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An activation in float32."""
    if KIND == "silu" or KIND == "swish":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    else:
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
def _multiply(
    acc, x, w, rows, cols, first, last, M, N, K, BK: tl.constexpr, EVEN: tl.constexpr, PRECISE: tl.constexpr
):
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


@triton.jit(do_not_specialize=["M"])
def _narrow(
    x, w, bias, out, M, N, K, SPAN,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, PRECISE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Few rows: one block per (columns, rows, span). Gated: columns n and N + n belong together."""
    tile_n, tile_m, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, cols = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    first = span * SPAN
    last = tl.minimum(first + SPAN, K)
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            _fetch(w, cols, N, K, first, AHEAD, BN)
        gdc_wait()
    acc = tl.zeros((BM, BN), tl.float32)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    kind = out.dtype.element_ty
    if GATE != "none":
        up = tl.zeros((BM, BN), tl.float32)
        w_up = w + N * K
        x_rows = tl.minimum(rows, M - 1)[:, None].to(tl.int64) * K
        w_rows = tl.minimum(cols, N - 1)[None, :].to(tl.int64) * K
        for k in range(first, last, BK):
            ks = k + tl.arange(0, BK)
            if EVEN:
                a = tl.load(x + x_rows + ks[None, :])
                b = tl.load(w + w_rows + ks[:, None])
                c = tl.load(w_up + w_rows + ks[:, None])
            else:
                a = tl.load(x + x_rows + ks[None, :], mask=ks[None, :] < last, other=0.0)
                b = tl.load(w + w_rows + ks[:, None], mask=ks[:, None] < last, other=0.0)
                c = tl.load(w_up + w_rows + ks[:, None], mask=ks[:, None] < last, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee" if PRECISE else "tf32")
            up = tl.dot(a, c, up, input_precision="ieee" if PRECISE else "tf32")
        if BIASED:
            acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + N + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        gate = activated(acc.to(kind).to(tl.float32), GATE).to(kind).to(tl.float32)
        y = gate * up.to(kind).to(tl.float32)
    else:
        y = _multiply(acc, x, w, rows, cols, first, last, M, N, K, BK, EVEN, PRECISE)
        if BIASED and span == 0:
            y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    where = out + (span * M + rows)[:, None].to(tl.int64) * N + cols[None, :]
    tl.store(where, y.to(kind), mask=inside)


@triton.jit(do_not_specialize=["M", "SPLIT", "GRID"])
def _wide(
    x, w, bias, out, M, N, K, SPAN, SPLIT, GRID,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr,
    GATE: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Many rows: tensor descriptors, a grid that stays, spans added in order inside the block."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    kind = out.dtype.element_ty
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, GRID):
        per_group = GROUP * tiles_n
        group = tile // per_group
        height = tl.minimum(tiles_m - group * GROUP, GROUP)
        tile_m = group * GROUP + (tile % per_group) % height
        tile_n = (tile % per_group) // height
        row, col = tile_m * BM, tile_n * BN
        cols = col + tl.arange(0, BN)
        if GATE != "none":
            gate = tl.zeros((BM, BN), tl.float32)
            up = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                a = x.load([row, k])
                gate = tl.dot(a, w.load([col, k]).T, gate)
                up = tl.dot(a, w.load([N + col, k]).T, up)
            if BIASED:
                gate += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
                up += tl.load(bias + N + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
            y = activated(gate.to(kind).to(tl.float32), GATE).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
        elif not SPANS:
            y = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                y = tl.dot(x.load([row, k]), w.load([col, k]).T, y)
            if BIASED:
                y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        else:
            y = tl.zeros((BM, BN), tl.float32)
            for span in range(SPLIT):
                acc = tl.zeros((BM, BN), tl.float32)
                for k in range(span * SPAN, tl.minimum((span + 1) * SPAN, K), BK):
                    acc = tl.dot(x.load([row, k]), w.load([col, k]).T, acc)
                if BIASED and span == 0:
                    acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
                y += acc
        rows = row + tl.arange(0, BM)
        where = out + rows[:, None].to(tl.int64) * N + cols[None, :]
        tl.store(where, y.to(kind), mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit(do_not_specialize=["size"])
def _add_spans(parts, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for span in range(SPLIT):
        total += tl.load(parts + span * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


class Linear:
    """A weight [N, K] ready to multiply; the same row gives the same bits with any number of rows beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, exact: bool = True) -> None:
        self.weight, self.bias, self.exact = weight.contiguous(), bias, exact
        self.outputs, self.inner = weight.shape
        self.plan = tables.plan(weight.device, self.outputs, self.inner)
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        if not self.exact:
            return F.linear(x, self.weight, self.bias)
        parts = self.parts(x)
        return parts[0] if parts.shape[0] == 1 else add_spans(parts, x.dtype)

    def parts(self, x: Tensor) -> Tensor:
        """x [M, K] -> [S, M, N]: either finished, or float32 spans that the reader adds in order."""
        if not self.exact:
            return F.linear(x, self.weight, self.bias)[None]
        tile = self.plan.tile(x.shape[0], self.wide_enough(x))
        if tile.wide:
            return self._wide(x, tile, "none", self.outputs)[None]
        kind = x.dtype if self.plan.split == 1 else torch.float32
        return self._narrow(x, tile, "none", self.outputs, self.plan.split, kind)

    def gated(self, x: Tensor, kind: str) -> Tensor:
        """x [M, K] -> activation(first half of the outputs) * second half, [M, N / 2]."""
        if not self.exact:
            return gated_twin(F.linear(x, self.weight, self.bias), kind)
        tile = self.plan.gated(x.shape[0], self.wide_enough(x))
        if tile.wide:
            return self._wide(x, tile, kind, self.outputs // 2)
        return self._narrow(x, tile, kind, self.outputs // 2, 1, x.dtype)[0]

    def wide_enough(self, x: Tensor) -> bool:
        """Descriptors want 16-byte rows, and tensor cores 16-bit numbers."""
        return x.dtype != torch.float32 and self.inner % 64 == 0 and (x.is_cuda or INTERPRETED)

    def _narrow(self, x: Tensor, t: Tile, gate: str, outputs: int, split: int, kind: torch.dtype) -> Tensor:
        rows = x.shape[0]
        out = torch.empty(split, rows, outputs, dtype=kind, device=x.device)
        span = span_length(self.inner, split)
        _narrow[(-(-outputs // t.bn), -(-rows // t.bm), split)](
            x, self.weight, self.bias, out, rows, outputs, self.inner, span,
            BM=t.bm, BN=t.bn, BK=t.bk, GATE=gate,
            BIASED=self.bias is not None, EVEN=span % t.bk == 0 and self.inner % span == 0,
            PRECISE=x.dtype == torch.float32, AHEAD=t.ahead, num_warps=t.warps, num_stages=t.stages, **options(x.device),
        )  # fmt: skip
        return out

    def _wide(self, x: Tensor, t: Tile, gate: str, outputs: int) -> Tensor:
        rows, split = x.shape[0], 1 if gate != "none" else self.plan.split
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        grid = min(processors(x.device) * t.resident, -(-rows // t.bm) * -(-outputs // t.bn))
        _wide[(grid,)](
            TensorDescriptor.from_tensor(x.contiguous(), [t.bm, t.bk]), self._descriptor(t.bn, t.bk), self.bias, out, rows,
            outputs, self.inner, span_length(self.inner, split), split, grid,
            BM=t.bm, BN=t.bn, BK=t.bk, GROUP=8, SPANS=split > 1, GATE=gate, BIASED=self.bias is not None, num_warps=t.warps, num_stages=t.stages,
            **options(x.device),
        )  # fmt: skip
        return out

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
    gate, up = y.chunk(2, -1)
    return ACTIVATIONS[kind](gate) * up


__all__ = ["GRAIN", "Linear", "activated", "add_spans", "add_spans_twin", "gated_twin", "parts_twin"]
