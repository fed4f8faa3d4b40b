"""Which ATen operations a model's modules run, and whether a row of their result can depend on the other rows.

The list is taken by a dispatch mode while the replacements of `model/invariant.py` are in force, so it shows what is
left of torch's own arithmetic. An operation that is not known to treat rows one by one is reported with its module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

# Copies, look-ups and constants: no arithmetic.
_MOVES = {
    "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "arange", "cat", "clone",
    "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "diagonal", "embedding", "empty", "empty_like",
    "empty_strided", "eye", "fill", "fill_", "flip", "full", "full_like", "gather", "index", "index_copy",
    "index_copy_", "index_select", "item", "lift_fresh", "lift_fresh_copy", "masked_scatter", "masked_select",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "nonzero", "one_hot", "ones", "ones_like",
    "pad", "repeat", "roll", "scalar_tensor", "scatter", "scatter_", "select_scatter", "set_", "slice_scatter",
    "stack", "take_along_dim", "tril", "triu", "unbind", "unfold", "view", "zero_", "zeros", "zeros_like",
}  # fmt: skip
# One result in any order, ties included.
_ORDER_FREE = {
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "equal", "is_nonzero", "isin", "max", "min",
    "polar",
}  # fmt: skip
# Adds to rows named by an index; right if each is named once, as in mixtures of experts that visit experts in order.
_ONE_ADDEND = {"index_add", "index_add_"}
# A CPU thread computes whole rows of these in one order (LOG.md, "which CPU operations are row-invariant?").
_CPU_ROWWISE = {
    "_fused_rms_norm", "_log_softmax", "_softmax", "bmm", "cumsum", "linalg_vector_norm", "logsumexp", "mean",
    "native_layer_norm", "rms_norm", "sort", "std", "sum", "topk", "var",
}  # fmt: skip
_SIMPLE_POWERS = (-2, -1, -0.5, 0.5, 1, 2, 3)  # torch computes these from products, quotients and roots
# Pointwise on the CPU, and yet with a vector and a scalar path of different bits.
_CPU_TWO_PATHS = {
    "atan2", "celu", "cosh", "elu", "exp2", "gelu", "hardswish", "logaddexp", "logit", "mish", "selu", "sigmoid",
    "sigmoid_", "silu", "silu_", "sinh", "softplus",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    """One ATen operation as a module ran it."""

    name: str
    module: str  # path inside the model; "" outside any module
    shapes: tuple[tuple[int, ...], ...]  # of the tensors it read
    row_invariant: bool

    def __str__(self) -> str:
        sizes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.name}({sizes}) in {self.module or 'the model itself'}"


class ModulePath:
    """The path of the module that is running, while this context is in force."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[str] = []
        self._hooks = ExitStack()
        self.last = ""  # the module that was entered last: where an error came from

    def __str__(self) -> str:
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> ModulePath:
        for path, module in self._model.named_modules():
            self._hooks.enter_context(module.register_forward_pre_hook(self._entering(path)))
            self._hooks.enter_context(module.register_forward_hook(self._leaving, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(path)
            self.last = path

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


class OperationList(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operations that run inside the context, each once per module."""

    def __init__(self, path: ModulePath, device_type: str, ignoring: Callable[[], bool] = lambda: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, self._device_type, self._ignoring = path, device_type, ignoring
        self._seen: dict[tuple[str, str], Operation] = {}

    @property
    def operations(self) -> list[Operation]:
        return list(self._seen.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        place = (str(func), str(self._path))
        if not self._ignoring():
            tensors = [a for a in args if isinstance(a, Tensor)]
            known = is_row_invariant(func, args, self._device_type)
            if place not in self._seen or not known:  # one call may add up where another did not
                self._seen[place] = Operation(*place, tuple(tuple(t.shape) for t in tensors), known)
        return out


def is_row_invariant(func: OpOverload, args: Any, device_type: str) -> bool:
    """Whether each row of the result is a function of the same rows of the inputs, in bits, on this kind of device."""
    name, tensors = func._schema.name.split("::")[1], [a for a in args if isinstance(a, Tensor)]
    if func.namespace != "aten":
        return False
    if not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return True  # integers have one result in any order
    if _adds_up(func, name, args):
        return False
    if name in _MOVES | _ORDER_FREE | _ONE_ADDEND or name.startswith("index_put") or _is_view(func):
        return True
    if name == "sort" and func._overloadname == "stable":
        return True
    if device_type == "cpu" and _has_two_paths(name, args, tensors):
        return False
    return torch.Tag.pointwise in func.tags or (device_type == "cpu" and name in _CPU_ROWWISE)


def _adds_up(func: OpOverload, name: str, args: Any) -> bool:
    """Whether several numbers are added to one place, in an order that is not fixed."""
    if name.startswith("index_put"):
        return len(args) > 3 and args[3] is True
    if name in _ONE_ADDEND:
        return len(set(args[2].tolist())) != len(args[2])
    return name in ("scatter", "scatter_") and "reduce" in func._overloadname


def _has_two_paths(name: str, args: Any, tensors: list[Tensor]) -> bool:
    """Whether a pointwise CPU operation has a vector and a scalar path of different bits for these arguments."""
    if name == "mul":
        return tensors[0].is_complex()
    if name == "rsqrt":
        return any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
    if name in ("pow", "pow_"):
        return isinstance(args[1], Tensor) or args[1] not in _SIMPLE_POWERS
    return name in _CPU_TWO_PATHS


def _is_view(func: OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
