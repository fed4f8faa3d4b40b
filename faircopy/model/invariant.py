"""Row-invariant replacements for the operations of transformers' modules, in force while one of our models runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from faircopy.kernels import activation
from faircopy.kernels.linear import Product, product
from faircopy.model.fixed_order import PRODUCTS, REDUCTIONS, WIDE_SUMS, Replacement


class RowInvariant(TorchFunctionMode):
    """Inside this context, torch functions whose result for a row may depend on the other rows are replaced.

    Products with the model's weights are packed when a weight is first met. Which other functions are replaced depends
    on the device: CPU activations have a vector and a scalar path, CUDA reductions choose their order by the number of
    rows. Nothing outside the context changes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._replacements = _replacements(device)
        self._products: dict[tuple[Any, ...], Product] = {}
        self._packed: dict[int, Tensor] = {}  # weights of those products
        self.replacing = False  # whether one of the replacements is running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weighted, fixed = _WEIGHTED.get(func), self._replacements.get(func)
        if weighted is None and fixed is None:
            return func(*args, **(kwargs or {}))
        self.replacing = True
        try:
            return weighted(self, *args, **(kwargs or {})) if weighted else fixed(*args, **(kwargs or {}))  # type: ignore[misc]
        finally:
            self.replacing = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        run = self._product(weight, bias, transposed=False)
        return run(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], weight.shape[0])

    def addmm(self, bias: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        if options or not _is_weight(weight):
            return self._other(torch.addmm, bias, x, weight, **options)
        return self._product(weight, bias, transposed=True)(x)

    def matmul(self, x: Tensor, other: Tensor) -> Tensor:
        if other.dim() != 2 or not _is_weight(other):
            return self._other(torch.matmul, x, other)
        run = self._product(other, None, transposed=True)
        return run(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], other.shape[1])

    def _other(self, func: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """A product without a weight."""
        run: Replacement = self._replacements.get(func, func)
        return run(*args, **options)  # type: ignore[no-any-return]

    def _product(self, weight: Tensor, bias: Tensor | None, transposed: bool) -> Product:
        if not _is_weight(weight):  # made anew in every forward: not to be remembered
            return product(weight.t() if transposed else weight, bias)
        whole = weight if isinstance(weight, nn.Parameter) else weight._base
        place = (transposed, id(whole), weight.storage_offset(), weight.shape, None if bias is None else id(bias))
        if place not in self._products:
            self._products[place] = product(weight.t() if transposed else weight, bias)
            self._packed[id(weight)] = weight
        return self._products[place]

    @property
    def packed(self) -> list[nn.Parameter]:
        """Whole parameters that a product has a copy of."""
        return [weight for weight in self._packed.values() if isinstance(weight, nn.Parameter)]


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _replacements(device: torch.device) -> dict[Any, Replacement]:
    return CPU_ACTIVATIONS | WIDE_SUMS if device.type == "cpu" else PRODUCTS | REDUCTIONS


def _of_one(fixed: Callable[[Tensor], Tensor]) -> Replacement:
    return lambda x, *args, **kwargs: fixed(x)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return activation.gelu_tanh(x) if approximate == "tanh" else activation.gelu(x)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return activation.softplus(x) if beta == 1.0 else F.softplus(x, beta, threshold)


# Functions that may multiply by one of the model's weights.
_WEIGHTED: dict[Any, Callable[..., Tensor]] = {
    F.linear: RowInvariant.linear,
    torch.addmm: RowInvariant.addmm,
    torch.mm: RowInvariant.matmul,
    Tensor.mm: RowInvariant.matmul,
    torch.matmul: RowInvariant.matmul,
    Tensor.matmul: RowInvariant.matmul,
    Tensor.__matmul__: RowInvariant.matmul,
}

CPU_ACTIVATIONS: dict[Any, Replacement] = {
    F.silu: _of_one(activation.silu),
    torch.sigmoid: _of_one(activation.sigmoid),
    Tensor.sigmoid: _of_one(activation.sigmoid),
    F.sigmoid: _of_one(activation.sigmoid),
    F.gelu: _gelu,
    F.softplus: _softplus,
}
