"""torch's calling conventions for the fixed-order reductions and products: what stands in for which function.

Each replacement takes the arguments that the torch function takes. Integers, and calls that write into an `out=`
tensor, go to torch: integer sums have one result in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from faircopy.kernels import reduce
from faircopy.kernels.product import batched_product, matmul

Replacement = Callable[..., Any]

PARALLEL_SUM = 32768  # from this many numbers on torch splits the sum of a single row over CPU threads


def _float_only(stock: Replacement, fixed: Replacement) -> Replacement:
    """fixed for floating-point inputs, the stock function for all others."""

    def run(x: Tensor, *args: Any, **options: Any) -> Any:
        kind = options.get("dtype") or x.dtype
        use = x.is_floating_point() and kind.is_floating_point and options.get("out") is None
        return (fixed if use else stock)(x, *args, **options)

    return run


def _wide_only(stock: Replacement, fixed: Replacement) -> Replacement:
    """fixed for rows that torch would split over threads, the stock function for all others."""

    def run(x: Tensor, dim: Any = None, *args: Any, **options: Any) -> Any:
        width = math.prod(x.shape[d] for d in reduce.reduced_dims(x, dim))
        given = (x, *args) if dim is None else (x, dim, *args)
        return (fixed if width >= PARALLEL_SUM else stock)(*given, **options)

    return run


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    return reduce.row_sum(x, dim, keepdim, dtype)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    return reduce.row_mean(x, dim, keepdim, dtype)


def _var(
    x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: float | None = None
) -> Tensor:
    if isinstance(dim, bool):  # var(x, unbiased)
        dim, unbiased = None, dim
    return reduce.row_var(x, dim, float(unbiased) if correction is None else correction, keepdim)


def _std(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return _var(x, *args, **options).sqrt()


def _norm(x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    order = 2.0 if p in (None, "fro") else p
    if not isinstance(order, int | float) or not 0 < order < math.inf:
        free: Tensor = torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype)  # a maximum or a count
        return free
    return reduce.row_norm(x if dtype is None else x.to(dtype), order, dim, keepdim)


def _vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    return _norm(x, ord, dim, keepdim, dtype)


def _softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return reduce.softmax(x, dim, dtype)


def _log_softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return reduce.log_softmax(x, dim, dtype)


def _functional_softmax(x: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return reduce.softmax(x, dim, dtype)


def _functional_log_softmax(x: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return reduce.log_softmax(x, dim, dtype)


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *ignored: bool
) -> Tensor:
    return reduce.layer_norm(x, math.prod(shape), weight, bias, eps)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return reduce.rms_norm(x, math.prod(shape), weight, torch.finfo(x.dtype).eps if eps is None else eps)


def _sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    return torch.return_types.sort(reduce.sort(x, dim, descending))


def _argsort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    return reduce.sort(x, dim, descending)[1]


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return torch.return_types.topk(reduce.topk(x, k, dim, largest))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return batched_product(a[None], b[None])[0]


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias + alpha * _mm(a, b)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * batched_product(a, b) if beta == 0 else beta * bias + alpha * batched_product(a, b)


def _einsum(*args: Any) -> Tensor:
    """torch's own rewriting into batched products, with ours in their place."""
    with _ProductsInside():  # type: ignore[no-untyped-call]
        return torch.einsum(*args)


class _ProductsInside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the products and sums that a composite function is made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSIDE.get(func, func)(*args, **(kwargs or {}))


_INSIDE: dict[Any, Replacement] = {
    torch.ops.aten.bmm.default: batched_product,
    torch.ops.aten.mm.default: _mm,
    torch.ops.aten.sum.dim_IntList: _sum,
}

PRODUCTS: dict[Any, Replacement] = {
    torch.bmm: batched_product,
    Tensor.bmm: batched_product,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    torch.einsum: _einsum,
}

_REDUCTIONS: list[tuple[Replacement, tuple[Replacement, ...]]] = [
    (_sum, (torch.sum, Tensor.sum)),
    (_mean, (torch.mean, Tensor.mean)),
    (_var, (torch.var, Tensor.var)),
    (_std, (torch.std, Tensor.std)),
    (_norm, (torch.norm, Tensor.norm)),
    (_vector_norm, (torch.linalg.vector_norm, torch.linalg.norm)),
    (_softmax, (torch.softmax, Tensor.softmax)),
    (_log_softmax, (torch.log_softmax, Tensor.log_softmax)),
    (_functional_softmax, (F.softmax,)),
    (_functional_log_softmax, (F.log_softmax,)),
    (reduce.logsumexp, (torch.logsumexp, Tensor.logsumexp)),
    (reduce.cumsum, (torch.cumsum, Tensor.cumsum)),
    (_layer_norm, (F.layer_norm, torch.layer_norm)),
    (_rms_norm, (F.rms_norm, torch.rms_norm)),
    (_sort, (torch.sort, Tensor.sort)),
    (_argsort, (torch.argsort, Tensor.argsort)),
    (_topk, (torch.topk, Tensor.topk)),
]
REDUCTIONS = {stock: _float_only(stock, fixed) for fixed, stocks in _REDUCTIONS for stock in stocks}

# On a CPU the sum of a row is one thread's work, in one order, unless a single row is wide enough to be split.
WIDE_SUMS = {
    stock: _wide_only(stock, _float_only(stock, fixed)) for fixed, stocks in _REDUCTIONS[:2] for stock in stocks
}
