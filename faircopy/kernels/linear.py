"""Linear layers whose rows do not know how many rows there are.

Kernels of our own have one order (`kernels/gpu`, `kernels/cpu`). Where a CPU has none of them, every way to multiply is
tried before it is used, on numbers that cancel almost completely: what is left of such a sum
is its rounding, and shows any change of order even in 16 bits. The last way, blocks of a fixed number of rows, is one
shape for every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy.cache import KeptTable, cpu_kind
from faircopy.kernels.available import gpu_module
from faircopy.kernels.cpu.product import PackedWeight, fits
from faircopy.kernels.groups import add_tree, group_count, shared_groups
from faircopy.kernels.memory import use_huge_pages
from faircopy.kernels.ranks import Ranks

Product = Callable[[Tensor], Tensor]

BLOCK = 8  # rows per block of the last way
COLUMNS = 16  # outputs per block where a weight's rows may lie on several ranks
_COMPANIES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 33, 48, 65, 130, 320, 700)  # row counts tried
_WIDEST = 4096  # outputs in a trial at most: the order of summation is a matter of the inner dimension
_LEAST = (1, 2, 4, 8)  # a product may need this many rows before its order settles
_FASTEST = 4  # oneDNN takes 1.2 to 1.4 times as long for one or two rows as for four (LOG.md)

_UNUSABLE = 0
_settled = KeptTable("cpu-products")  # by processor and shape: least rows of the packed product


def product(weight: Tensor, bias: Tensor | None = None, exact: bool = True) -> Product:
    """x [M, K] -> [M, N] for this weight [N, K]; exact: a row's bits do not depend on M."""
    if (kernels := gpu_module("linear", weight.device)) is not None:
        return kernels.Linear(weight, bias, exact)  # type: ignore[no-any-return]
    if weight.device.type != "cpu":
        return _blocks(weight, bias) if exact else lambda x: F.linear(x, weight, bias)
    if fits(weight):
        return PackedWeight(weight, bias)
    packed = _packed(weight, bias)
    if packed is None:
        return _blocks(weight, bias) if exact else lambda x: F.linear(x, weight, bias)
    if not exact:
        return packed
    least = _settled_rows(weight, bias)
    if least == _UNUSABLE:
        return _blocks(weight, bias)
    return _at_least(packed, max(least, _FASTEST))


def column_product(
    weight: Tensor, bias: Tensor | None = None, exact: bool = True, outputs: int | None = None
) -> Product:
    """As `product`, for a weight whose rows may lie on several ranks: an output's bits do not depend on N either.

    outputs: of the whole weight; None: these are all.
    """
    if (kernels := gpu_module("linear", weight.device)) is not None:
        groups = group_count(weight.shape[1], outputs or weight.shape[0])
        return kernels.Linear(weight, bias, exact, groups)  # type: ignore[no-any-return]
    if weight.device.type != "cpu" or not exact or fits(weight):
        return product(weight, bias, exact)
    if fits(weight.float()):
        return _in_float32(weight, bias)
    return _column_blocks(weight, bias)


def _in_float32(weight: Tensor, bias: Tensor | None) -> Product:
    run = PackedWeight(weight.float(), None if bias is None else bias.float())
    return lambda x: run(x.float()).to(weight.dtype)


class RowParallel:
    """A product whose inputs may lie on several ranks: sums along K are made in the groups of `kernels.groups`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, exact: bool, ranks: Ranks) -> None:
        """weight [N, K / ranks]: this rank's columns, a whole number of groups. bias: used by rank 0 alone."""
        groups = shared_groups(weight.shape[0], weight.shape[1] * ranks.size, weight.device.type) // ranks.size
        assert groups, "the caller checks that every rank has a group"
        self._ranks, self._dtype = ranks, weight.dtype
        parts = weight.chunk(groups, 1)
        first = bias if ranks.rank == 0 else None
        self._groups = [_sums(part, None if n else first, exact) for n, part in enumerate(parts)]

    def partial(self, x: Tensor) -> Tensor:
        """x [M, K / ranks] -> float32 [M, N]: this rank's groups, added by its part of the tree."""
        parts = zip(self._groups, x.chunk(len(self._groups), 1), strict=True)
        return add_tree(torch.stack([run(part) for run, part in parts]))

    def __call__(self, x: Tensor) -> Tensor:
        return add_tree(self._ranks.gather(self.partial(x))).to(self._dtype)


def _sums(weight: Tensor, bias: Tensor | None, exact: bool) -> Product:
    """A product whose float32 sums are not rounded to the weight's type."""
    if fits(weight):
        return PackedWeight(weight, bias, out=torch.float32)
    wide, added = weight.float(), None if bias is None else bias.float()
    kernels = gpu_module("linear", weight.device)
    run = column_product(wide, added, exact) if kernels is None else kernels.Linear(wide, added, exact, 1)
    return lambda x: run(x.float())


def _settled_rows(weight: Tensor, bias: Tensor | None) -> int:
    """The least number of rows of this shape's packed product; found by a trial once per machine."""
    shape = f"{'x'.join(map(str, weight.shape))} {weight.dtype} bias={bias is not None}"
    key = f"{cpu_kind()} threads={torch.get_num_threads()} {shape} rows={_COMPANIES[-1]}"
    known = _settled.get(key)
    if known is None:
        known = _least_rows(*_trial(weight, bias)) or _UNUSABLE
        _settled.put(key, known)
    return int(known)


def _packed(weight: Tensor, bias: Tensor | None) -> Product | None:
    """oneDNN's product over a weight stored in its own order, if this CPU and type have one."""
    try:
        stored = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        use_huge_pages(torch.ops.mkldnn.data_ptr(stored), torch.ops.mkldnn._nbytes(stored))
        run = torch.ops.mkldnn._linear_pointwise
        run(weight.new_zeros(1, weight.shape[1]), stored, bias, "none", [], "")
    except (RuntimeError, AttributeError):
        return None
    return lambda x: run(x, stored, bias, "none", [], "")


def _at_least(run: Product, least: int) -> Product:
    def padded(x: Tensor) -> Tensor:
        rows = x.shape[0]
        return run(x) if rows >= least else run(F.pad(x, (0, 0, 0, least - rows)))[:rows]

    return padded


def _blocks(weight: Tensor, bias: Tensor | None) -> Product:
    """The same shape for every call, whatever M is."""

    def blocked(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, weight.shape[0])
        blocks = F.pad(x, (0, 0, 0, -rows % BLOCK)).view(-1, BLOCK, x.shape[1])
        return torch.cat([F.linear(block, weight, bias) for block in blocks])[:rows]

    return blocked


def _column_blocks(weight: Tensor, bias: Tensor | None) -> Product:
    """The same shape for every call, whatever M and N are."""
    outputs, missing = weight.shape[0], -weight.shape[0] % COLUMNS
    bias = weight.new_zeros(outputs) if bias is None else bias
    wide, long = F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing))
    parts = [_blocks(wide[at : at + COLUMNS], long[at : at + COLUMNS]) for at in range(0, outputs, COLUMNS)]
    return lambda x: torch.cat([run(x) for run in parts], 1)[:, :outputs]


def _least_rows(run: Product, x: Tensor) -> int | None:
    """The fewest rows from which on every row's bits agree in all companies tried."""
    whole = run(x)
    wrong = [m for m in _COMPANIES if not _agrees(run, x, whole, m)]
    return next((least for least in _LEAST if all(m < least for m in wrong)), None)


def _agrees(run: Product, x: Tensor, whole: Tensor, m: int) -> bool:
    return all(torch.equal(run(x[s : s + m].contiguous()), whole[s : s + m]) for s in (0, 1))


def _trial(weight: Tensor, bias: Tensor | None) -> tuple[Product, Tensor]:
    """A packed product of this shape and rows for it that cancel: each term has its negative somewhere else."""
    generator = torch.Generator().manual_seed(0)
    outputs, inner = min(weight.shape[0], _WIDEST + weight.shape[0] % 64), weight.shape[1]
    x, w = (
        torch.randn(max(_COMPANIES) + 1, inner, generator=generator),
        torch.randn(outputs, inner, generator=generator),
    )
    first, second = torch.randperm(inner, generator=generator)[: inner // 2 * 2].view(2, -1)
    x[:, second], w[:, second] = -x[:, first], w[:, first]
    run = _packed(w.to(weight.dtype), None if bias is None else bias.new_zeros(outputs))
    assert run is not None, "a product of this type was packed before"
    return run, x.to(weight.dtype)
