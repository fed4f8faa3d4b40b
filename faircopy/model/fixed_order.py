"""torch's calling conventions for the fixed-order reductions and products: what stands in for which function.

Each replacement takes the arguments that the torch function takes, and returns NotImplemented for forms it does not
understand: the stock function is called then, and the list of operations shows it.
"""

from __future__ import annotations

import inspect
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


def _understood(fixed: Replacement) -> Replacement:
    """fixed for the forms it understands; NotImplemented for all others: the caller uses the stock function.

    Not understood: integers, complex numbers and float64, scalars and empty tensors, results written into `out=`.
    """
    known = inspect.signature(fixed)

    def run(*args: Any, **options: Any) -> Any:
        given = {_SYNONYMS.get(name, name): value for name, value in options.items()}
        if given.pop("out", None) is not None:
            return NotImplemented
        try:
            bound = known.bind(*args, **given)
        except TypeError:
            return NotImplemented
        tensors = [value for value in bound.args if isinstance(value, Tensor)]
        kinds = [t.dtype for t in tensors] + [k for k in bound.args if isinstance(k, torch.dtype)]
        plain = all(kind in _TYPES for kind in kinds) and all(t.dim() and t.numel() for t in tensors)
        return fixed(*bound.args, **bound.kwargs) if plain and _dims_exist(bound) else NotImplemented

    return run


_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SYNONYMS = {
    "axis": "dim",
    "input": "x",
    "self": "x",
    "mat1": "a",
    "mat2": "b",
    "batch1": "a",
    "batch2": "b",
    "other": "b",
}


def _dims_exist(bound: inspect.BoundArguments) -> bool:
    """Whether `dim` names existing dimensions, each once; torch has an error for everything else."""
    dim, x = bound.arguments.get("dim"), bound.arguments.get("x")
    if dim is None or isinstance(dim, bool) or not isinstance(x, Tensor):
        return not isinstance(dim, bool) or "unbiased" in bound.signature.parameters
    dims = [dim] if isinstance(dim, int) else list(dim)
    inside = all(isinstance(d, int) and -x.dim() <= d < x.dim() for d in dims)
    return inside and len({d % x.dim() for d in dims}) == len(dims)


def _wide_only(fixed: Replacement) -> Replacement:
    """fixed for rows that torch would split over threads; NotImplemented for all others."""

    def run(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
        width = math.prod(x.shape[d] for d in reduce.reduced_dims(x, dim))
        return fixed(x, dim, keepdim, dtype) if width >= PARALLEL_SUM else NotImplemented

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


def _softmax(x: Tensor, dim: int | None, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if dim is None else reduce.softmax(x, dim, dtype)


def _log_softmax(x: Tensor, dim: int | None, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if dim is None else reduce.log_softmax(x, dim, dtype)


def _functional_softmax(x: Tensor, dim: int | None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if dim is None else reduce.softmax(x, dim, dtype)


def _functional_log_softmax(x: Tensor, dim: int | None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if dim is None else reduce.log_softmax(x, dim, dtype)


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


def _logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return reduce.logsumexp(x, dim, keepdim)


def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * _mm(a, b) if beta == 0 else beta * x + alpha * _mm(a, b)


def _baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * batched_product(a, b) if beta == 0 else beta * x + alpha * batched_product(a, b)


def _einsum(*args: Any) -> Any:
    """torch's own rewriting into batched products, with ours in their place."""
    if not all(t.dtype in _TYPES for t in args if isinstance(t, Tensor)):
        return NotImplemented
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

_PRODUCTS: list[tuple[Replacement, tuple[Replacement, ...]]] = [
    (batched_product, (torch.bmm, Tensor.bmm)),
    (_mm, (torch.mm, Tensor.mm)),
    (matmul, (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
    (_addmm, (torch.addmm, Tensor.addmm)),
    (_baddbmm, (torch.baddbmm, Tensor.baddbmm)),
]
PRODUCTS = {stock: _understood(fixed) for fixed, stocks in _PRODUCTS for stock in stocks} | {torch.einsum: _einsum}

_REDUCTIONS: list[tuple[Replacement, tuple[Replacement, ...]]] = [
    (_sum, (torch.sum, Tensor.sum)),
    (_mean, (torch.mean, Tensor.mean)),
    (_var, (torch.var, Tensor.var)),
    (_std, (torch.std, Tensor.std)),
    (_norm, (torch.norm, Tensor.norm)),
    (_vector_norm, (torch.linalg.vector_norm,)),
    (_softmax, (torch.softmax, Tensor.softmax)),
    (_log_softmax, (torch.log_softmax, Tensor.log_softmax)),
    (_functional_softmax, (F.softmax,)),
    (_functional_log_softmax, (F.log_softmax,)),
    (_logsumexp, (torch.logsumexp, Tensor.logsumexp)),
    (reduce.cumsum, (torch.cumsum, Tensor.cumsum)),
    (_layer_norm, (F.layer_norm, torch.layer_norm)),
    (_rms_norm, (F.rms_norm, torch.rms_norm)),
    (_sort, (torch.sort, Tensor.sort)),
    (_argsort, (torch.argsort, Tensor.argsort)),
    (_topk, (torch.topk, Tensor.topk)),
]
REDUCTIONS = {stock: _understood(fixed) for fixed, stocks in _REDUCTIONS for stock in stocks}

# On a CPU the sum of a row is one thread's work, in one order, unless a single row is wide enough to be split.
WIDE_SUMS = {stock: _understood(_wide_only(fixed)) for fixed, stocks in _REDUCTIONS[:2] for stock in stocks}
