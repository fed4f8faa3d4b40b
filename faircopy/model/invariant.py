"""Row-invariant replacements for the operations of transformers' modules, in force while one of our models runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from faircopy.kernels import activation
from faircopy.kernels.cpu.product import PackedWeight
from faircopy.kernels.linear import Product, product
from faircopy.model.fixed_order import PRODUCTS, REDUCTIONS, WIDE_SUMS, Replacement
from faircopy.model.stock_shares import StockShares


class RowInvariant(TorchFunctionMode):
    """Inside this context, torch functions whose result for a row may depend on the other rows are replaced.

    Products with the model's weights are packed when a weight is first met. Which other functions are replaced depends
    on the device: CPU activations have a vector and a scalar path, CUDA reductions choose their order by the number of
    rows. Nothing outside the context changes.
    """

    def __init__(self, device: torch.device, shares: StockShares | None = None) -> None:
        """shares: of a model that several ranks share."""
        super().__init__()
        self._shares = shares
        self._replacements = _replacements(device)
        weighted = {func: partial(run, self) for func, run in _WEIGHTED.items()}
        self._replaced: dict[Any, Replacement] = {**self._replacements, **weighted}
        self._products: dict[tuple[Any, ...], Product] = {}
        self._packed: dict[int, Tensor] = {}  # weights of those products
        self.replacing = False  # whether one of the replacements is running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement, options = self._replaced.get(func), kwargs or {}
        if replacement is None:
            return func(*args, **options)
        self.replacing = True
        try:
            result = replacement(*args, **options)
        finally:
            self.replacing = False
        return func(*args, **options) if result is NotImplemented else result

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        x = input
        if weight.dim() != 2 or not x.is_floating_point():
            return NotImplemented
        run = self._product(weight, bias, transposed=False)
        out = run(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[1])

    def addmm(self, *args: Any, **options: Any) -> Any:
        if options or len(args) != 3 or not _is_weight(args[2]):
            return self._other(torch.addmm, *args, **options)
        bias, x, weight = args
        return self._product(weight, bias, transposed=True)(x)

    def matmul(self, *args: Any, **options: Any) -> Any:
        if options or len(args) != 2 or args[1].dim() != 2 or not _is_weight(args[1]):
            return self._other(torch.matmul, *args, **options)
        x, other = args
        run = self._product(other, None, transposed=True)
        return run(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], other.shape[1])

    def embedding(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
        """Rows of a weight that an output layer shares, from the copy that its product keeps; or of other ranks."""
        if self._shares is not None:
            found = self._shares.embedded(input, weight)
            return NotImplemented if found is None else found
        packed = self.packed_copy(weight)
        return NotImplemented if packed is None else packed.rows(input)

    def packed_copy(self, weight: Tensor) -> PackedWeight | None:
        """The product that holds all rows of a parameter, if there is one."""
        found = self._products.get((False, id(weight), 0, weight.shape, None))
        return found if isinstance(found, PackedWeight) else None

    def _other(self, func: Callable[..., Tensor], *args: Any, **options: Any) -> Any:
        """A product without a weight."""
        return self._replacements[func](*args, **options) if func in self._replacements else NotImplemented

    def _product(self, weight: Tensor, bias: Tensor | None, transposed: bool) -> Product:
        if not _is_weight(weight):  # made anew in every forward: not to be remembered
            return product(weight.t() if transposed else weight, bias)
        whole = weight if isinstance(weight, nn.Parameter) else weight._base
        place = (transposed, id(whole), weight.storage_offset(), weight.shape, None if bias is None else id(bias))
        if place not in self._products:
            turned = weight.t() if transposed else weight
            made = product(turned, bias) if self._shares is None else self._shares.product(id(whole), turned, bias)
            self._products[place] = made
            self._packed[id(weight)] = weight
        return self._products[place]

    @property
    def nbytes(self) -> int:
        """Of the packed copies, each as large as what it was made from."""
        return sum(weight.numel() * weight.itemsize for weight in self._packed.values())

    @property
    def packed(self) -> list[nn.Parameter]:
        """Whole parameters that a product has a copy of."""
        return [weight for weight in self._packed.values() if isinstance(weight, nn.Parameter)]


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _replacements(device: torch.device) -> dict[Any, Replacement]:
    return CPU_ACTIVATIONS | WIDE_SUMS if device.type == "cpu" else PRODUCTS | REDUCTIONS


def _of_one(fixed: Callable[[Tensor], Tensor]) -> Replacement:
    """A function of one tensor; any other argument is not understood, but for an `inplace` that is false."""

    def run(input: Tensor, inplace: bool = False) -> Any:
        return NotImplemented if inplace or not input.is_floating_point() else fixed(input)

    return run


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return activation.gelu_tanh(input) if approximate == "tanh" else activation.gelu(input)


def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return activation.softplus(input) if beta == 1.0 else NotImplemented


def _complex_product(a: Any, b: Any) -> Any:
    """Complex multiplication on a CPU has a vector and a scalar path; real products have one."""
    if not any(isinstance(x, Tensor) and x.is_complex() for x in (a, b)):
        return NotImplemented
    (a_real, a_imag), (b_real, b_imag) = _parts(a), _parts(b)
    if b_imag is None:
        return torch.complex(a_real * b_real, a_imag * b_real)
    if a_imag is None:
        return torch.complex(a_real * b_real, a_real * b_imag)
    return torch.complex(a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real)


def _parts(x: Any) -> tuple[Any, Any]:
    """Real and imaginary part; the latter None for a real number."""
    is_complex = isinstance(x, complex) or (isinstance(x, Tensor) and x.is_complex())
    return (x.real, x.imag) if is_complex else (x, None)


# Functions that may multiply by one of the model's weights, or read its rows.
_WEIGHTED: dict[Any, Callable[..., Tensor]] = {
    F.linear: RowInvariant.linear,
    F.embedding: RowInvariant.embedding,
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
    torch.mul: _complex_product,
    Tensor.mul: _complex_product,
    Tensor.__mul__: _complex_product,
}
