"""Counts what steps cost the host beside their passes: torch operators, and places where it may wait for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from faircopy import sampling
from faircopy.drafters.heads import Head
from faircopy.engine import Engine
from faircopy.kernels import filters
from faircopy.model.runner import Runner

READS = ("tolist", "item", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__")
SENDS = ("tensor", "new_tensor")  # from memory that is not pinned: the host waits for the device first
INDEXING = ("__getitem__", "__setitem__")  # an index of the host's is sent in the same way
Told = Callable[[str], None]  # is told a name
KERNELS = ((sampling, "gumbel_argmax"), (filters, "thresholds"))  # a few launches on a GPU


class HostCost:
    """Counts an engine's operators and waits while it is entered: those outside of passes and of sampling kernels."""

    def __init__(self, engine: Engine) -> None:
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        heads = [part for part in vars(engine.drafter).values() if isinstance(part, Head)]
        self._left_out = [*KERNELS, (Runner, "forward"), *((head, name) for head in heads for name in ("read", "step"))]
        self._depth = 0  # of calls that are left out
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for owner, name in self._left_out:
            self._leave_out(owner, name)
        self._stack.enter_context(counted(self._counting(self.operators), self._counting(self.waits)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _counting(self, found: Counter[str]) -> Told:
        def told(name: str) -> None:
            if self._depth == 0:
                found[name] += 1

        return told

    def _leave_out(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)
        own = name in vars(owner)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self._depth -= 1

        setattr(owner, name, outer)
        self._stack.callback(lambda: setattr(owner, name, inner) if own else delattr(owner, name))


@contextmanager
def counted(operator: Told, wait: Told) -> Iterator[None]:
    """Inside, these are told the names of torch operators, and of what may wait for a device."""
    with _Waits(wait), _Operators(operator):
        yield


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, told: Told) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._told(func.__name__)
        return func(*args, **(kwargs or {}))


class _Waits(TorchFunctionMode):
    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS + SENDS or (name in INDEXING and _on_host(args[1])):
            self._told(name)
        return func(*args, **(kwargs or {}))


def _on_host(index: Any) -> bool:
    """Whether a list of numbers says which places are meant."""
    return any(isinstance(part, (list, range)) for part in (index if isinstance(index, tuple) else (index,)))
