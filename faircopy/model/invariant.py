"""Row-invariant twins for the operations of untouched modules, in force only while one of our models runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from faircopy.kernels import activation
from faircopy.kernels.linear import Product, product


class RowInvariant(TorchFunctionMode):
    """Inside this context, products with a model's weights and the activations with two paths are replaced by twins.

    A weight's product is packed when it is first met. Nothing outside the context changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._products: dict[tuple[Any, ...], Product] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        twin = _TWINS.get(func)
        return func(*args, **(kwargs or {})) if twin is None else twin(self, *args, **(kwargs or {}))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        run = self._product(weight, bias, transposed=False)
        return run(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], weight.shape[0])

    def addmm(self, bias: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        if options or not _is_weight(weight):
            return torch.addmm(bias, x, weight, **options)
        return self._product(weight, bias, transposed=True)(x)

    def matmul(self, x: Tensor, other: Tensor) -> Tensor:
        if other.dim() != 2 or not _is_weight(other):
            return torch.matmul(x, other)
        run = self._product(other, None, transposed=True)
        return run(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], other.shape[1])

    def _product(self, weight: Tensor, bias: Tensor | None, transposed: bool) -> Product:
        if not _is_weight(weight):  # made anew in every forward: not to be remembered
            return product(weight.t() if transposed else weight, bias)
        place = (
            transposed,
            weight.data_ptr(),
            weight.shape,
            weight.stride(),
            None if bias is None else bias.data_ptr(),
        )
        if place not in self._products:
            self._products[place] = product(weight.t() if transposed else weight, bias)
        return self._products[place]


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _plain(twin: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda mode, x, *args, **kwargs: twin(x)


def _gelu(mode: RowInvariant, x: Tensor, approximate: str = "none") -> Tensor:
    return activation.gelu_tanh(x) if approximate == "tanh" else activation.gelu(x)


def _softplus(mode: RowInvariant, x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return activation.softplus(x) if beta == 1.0 else F.softplus(x, beta, threshold)


_TWINS: dict[Any, Callable[..., Any]] = {
    F.linear: RowInvariant.linear,
    torch.addmm: RowInvariant.addmm,
    torch.matmul: RowInvariant.matmul,
    Tensor.matmul: RowInvariant.matmul,
    Tensor.__matmul__: RowInvariant.matmul,
    F.silu: _plain(activation.silu),
    torch.sigmoid: _plain(activation.sigmoid),
    Tensor.sigmoid: _plain(activation.sigmoid),
    F.sigmoid: _plain(activation.sigmoid),
    F.gelu: _gelu,
    F.softplus: _softplus,
}
