"""What Triton's interpreter does for tests: products that do not depend on the machine, and no address outside.

Products go by way of 64 bits, as `gluon_interpreter.py` does it: numpy's library sums in an order that depends on the
shape of the whole product and on the processor, so that on some machines (without AVX-512) a row would have other bits
beside other rows. On a GPU it does not. What a kernel loads and stores must lie in the tensors that it was given: on a
GPU an address outside is seen only where nothing else lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

ANYWHERE = ("_compact",)  # reaches the pools of all layers from the first one's address


class Addresses:
    """Where the tensors of the kernel that runs lie."""

    def __init__(self) -> None:
        self._kernel, self._begins, self._ends = "", np.zeros(0, np.int64), np.zeros(0, np.int64)

    def of(self, kernel: str, arguments: list[Any]) -> None:
        spans = [_span(tensor) for tensor in _tensors(arguments)]
        self._kernel, table = kernel, np.array(spans, np.int64).reshape(-1, 2)
        self._begins, self._ends = table[:, 0], table[:, 1]

    def check(self, pointers: Any, mask: Any = None) -> None:
        places = np.asarray(pointers.data).astype(np.int64)
        meant = places.ravel() if mask is None else places[np.broadcast_to(mask.data, places.shape).astype(bool)]
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        inside = (meant[:, None] >= self._begins) & (meant[:, None] + size <= self._ends)
        outside = int((~inside.any(1)).sum())
        if outside and self._kernel not in ANYWHERE:
            raise AssertionError(f"{self._kernel}: {outside} of {len(meant)} addresses lie outside of its tensors")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the one behind its last number."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size() * bool(tensor.numel())


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, tuple | list):
            yield from _tensors(argument)
        elif isinstance(argument, TensorDescriptor):
            yield argument.base
        elif hasattr(argument, "data_ptr"):
            yield interpreter._unwrap_tensor(argument)


def _dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    product = a.data.astype(np.float64) @ b.data.astype(np.float64)
    return type(total)(product.astype(total.data.dtype) + total.data, total.dtype.scalar)


def install(patch: pytest.MonkeyPatch) -> None:
    addresses, builder, executor = Addresses(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    arguments_of, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    add, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    def launched(self: Any, *given: Any) -> Any:
        found = arguments_of(self, *given)
        addresses.of(self.fn.__name__, [*found[0], *found[1].values()])
        return found

    def loaded(self: Any, pointers: Any, mask: Any, *options: Any, **named: Any) -> Any:
        addresses.check(pointers, mask)
        return load(self, pointers, mask, *options, **named)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *options: Any, **named: Any) -> Any:
        addresses.check(pointers, mask)
        return store(self, pointers, value, mask, *options, **named)

    def added(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        addresses.check(pointers, mask)
        return add(self, operation, pointers, value, mask, *options)

    def exchanged(self: Any, pointers: Any, *options: Any) -> Any:
        addresses.check(pointers)
        return exchange(self, pointers, *options)

    patch.setattr(executor, "_init_args_hst", launched)
    for name, function in (
        ("create_dot", _dot), ("create_masked_load", loaded), ("create_masked_store", stored),
        ("create_atomic_rmw", added), ("create_atomic_cas", exchanged),
    ):  # fmt: skip
        patch.setattr(builder, name, function)
