"""Counts what a step costs the host beside its passes: torch operators, and places where it waits for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from faircopy.engine import Engine

# functions that read numbers from a device, or send some there from memory that is not pinned
WAITS = frozenset(
    (
        "tolist",
        "item",
        "cpu",
        "numpy",
        "nonzero",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "tensor",
        "new_tensor",
    )
)


class HostCost:
    """Counts the operators and waits of an engine's steps, passes left out, while it is entered."""

    def __init__(self, engine: Engine) -> None:
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._in_pass = 0
        self._networks = [engine.target.model, *vars(engine.drafter).values()]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for owner, name in self._passes():
            self._replace(owner, name)
        self._stack.enter_context(_Waits(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def counting(self) -> bool:
        return not self._in_pass

    def _passes(self) -> list[tuple[Any, str]]:
        """Functions that are a pass of a network, packing included."""
        from faircopy.model.runner import Runner

        heads = [part for part in self._networks if isinstance(part, nn.Module) and hasattr(part, "step")]
        return [(Runner, "forward"), *((head, name) for head in heads for name in ("read", "step"))]

    def _replace(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self._in_pass += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self._in_pass -= 1

        own = name in vars(owner)
        setattr(owner, name, outer)
        self._stack.callback(lambda: setattr(owner, name, inner) if own else delattr(owner, name))


class _Operators(TorchDispatchMode):
    def __init__(self, cost: HostCost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._cost.counting:
            self._cost.operators[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class _Waits(TorchFunctionMode):
    def __init__(self, cost: HostCost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self._cost.counting and (name in WAITS or (name in _INDEXING and _sends_index(args[1]))):
            self._cost.waits[name] += 1
        return func(*args, **(kwargs or {}))


_INDEXING = ("__getitem__", "__setitem__")


def _sends_index(index: Any) -> bool:
    """Whether numbers of the host say which places are meant: they are sent first."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, range)) for part in parts)
