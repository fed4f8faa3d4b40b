"""Counts what a piece of work would launch on a GPU: kernels of ours, and torch operators that are more than a view."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from faircopy.kernels.gpu.launch import Launcher

EMPTY = ("empty", "empty_like", "new_empty", "empty_strided")
NOTHING = (*EMPTY, "_unsafe_view", "detach", "scalar_tensor")  # operators without a launch


class Launches:
    """While it is entered kernels run nothing, on a CPU with Triton's interpreter: shapes never depend on results."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        def counted(launcher: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
            self.kernels[getattr(launcher.kernel, "fn", launcher.kernel).__name__] += 1

        self._stack.enter_context(patch.object(Launcher, "_launch", counted))
        self._stack.enter_context(_Operators(self.operators))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def total(self) -> int:
        return self.kernels.total() + self.operators.total()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name in EMPTY:
            result.zero_()  # a token that no kernel has written is one of the vocabulary all the same
        if name not in NOTHING and not _is_view(result, args):
            self._found[name] += 1
        return result


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator only looks at its first argument in another way; one that writes to it returns it itself."""
    first, parts = (args[0] if args else None), result if isinstance(result, list | tuple) else (result,)
    return isinstance(first, Tensor) and all(
        isinstance(part, Tensor) and part is not first and part.untyped_storage().data_ptr() == _begin(first)
        for part in parts
    )


def _begin(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
