"""How kernels are launched: one after the other without waiting for the last block of the one before, and directly.

Triton's own launch binds arguments and looks its variant up by a long key; `launched` keeps compiled variants by what
Triton specialises on and calls them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for everything the kernel before has written, then let the next one's blocks come up.

    In this order: blocks that wait hold on to their share of a processor, so no more than one kernel may wait, but for
    the small ones of `call_next`.
    """
    wait(PDL)
    call_next(PDL)


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for everything the kernel before has written."""
    if PDL:
        gdc_wait()


@triton.jit
def call_next(PDL: tl.constexpr):
    """Let the next kernel's blocks come up, as far as processors have room for them.

    Called before `wait` by small kernels between two large ones: the one behind loads weights, or keys of earlier
    passes, while the one ahead still ends. So the one behind runs beside two others until it has waited.
    """
    if PDL:
        gdc_launch_dependents()


def launched(kernel: Any) -> Launcher:
    """Decorates a kernel that the host launches; its compile-time parameters are given by name."""
    return Launcher(kernel)


class Launcher:
    """A kernel whose compiled variants are launched without Triton's own argument handling."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        params = [] if INTERPRETED else kernel.params
        self._constants = [param.name for param in params if param.is_constexpr]
        behind = [param.name for param in params[len(params) - len(self._constants) :]]
        assert self._constants == behind, "compile-time parameters come last"
        given = (kernel.kwargs if INTERPRETED and hasattr(kernel, "kwargs") else vars(kernel)).get("do_not_specialize")
        self._kinds = [_size if name in (given or ()) else _specialised for name in kernel.arg_names]
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self._asked: set[Any] = set()  # variants that are compiled ahead

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        if INTERPRETED:
            self.kernel[grid](*args, **meta)
            return
        key = (torch.cuda.current_device(), *self.variant(args, meta))
        found = self._compiled.get(key)
        if _AHEAD.get():
            self._ask(key, found is not None, grid, args, meta)
        elif found is not None:
            found[0][grid + (1,) * (3 - len(grid))](*args, *found[1])
        else:
            compiled = self.kernel[grid](*args, **meta)
            first_launches.append(self.kernel.fn.__name__)
            self._compiled[key] = (compiled, tuple(meta[name] for name in self._constants))

    def variant(self, args: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...]:
        """What such a launch is compiled for."""
        return (*(kind(x) for kind, x in zip(self._kinds, args, strict=False)), *meta.values())

    def _ask(self, key: Any, known: bool, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        """Have a variant compiled, and run nothing."""
        if not known and key not in self._asked:
            self._asked.add(key)
            self.kernel.warmup(*args, grid=grid, **meta)


first_launches: list[str] = []  # kernels by name, once per variant: each may have waited for a compiler
_AHEAD: ContextVar[bool] = ContextVar("compiling ahead", default=False)


class _ZeroedMemory(TorchFunctionMode):
    """New tensors are zero: kernels that would write them do not run, and what is read as a token or row must exist."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in (torch.empty, torch.empty_like, Tensor.new_empty) else made


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Within, launches run nothing: their variants are compiled side by side, and are there when the context ends."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool), _ZeroedMemory():
        token = _AHEAD.set(True)
        try:
            yield
        finally:
            _AHEAD.reset(token)


def compiling_ahead() -> bool:
    return _AHEAD.get()


def _specialised(x: Any) -> Any:
    """What Triton compiles a variant for: a tensor's type and alignment, whether a number is 1, even or long."""
    if isinstance(x, Tensor):
        return x.dtype if x.data_ptr() % ALIGNMENT == 0 else (x.dtype, False)
    if x.__class__ is int:
        return 1 if x == 1 else (16 if x % 16 == 0 else 2) << (0 if -_LONG <= x < _LONG else 8)
    if isinstance(x, TensorDescriptor | GluonDescriptor):
        return x.base.dtype, *x.block_shape
    return float if x.__class__ is float else x


def _size(x: int) -> bool:
    """A number whose value does not matter: whether it is long."""
    return not -_LONG <= x < _LONG


_LONG = 1 << 31


@cache
def options(device: torch.device) -> dict[str, Any]:
    """Launch arguments every kernel gets: programmatic dependent launch where the chip has it."""
    if INTERPRETED or device.type != "cuda":
        return {"PDL": False}
    early = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


@cache
def hopper(device: torch.device) -> bool:
    """Whether kernels for Hopper alone run here."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def processors(device: torch.device) -> int:
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes a block may have at most."""
    if device.type != "cuda":
        return 232_448  # Hopper's
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def power(n: int, least: int = 1) -> int:
    """The smallest power of two of at least n and least."""
    return max(least, 1 << max(0, n - 1).bit_length())


def aligned(x: Tensor) -> Tensor:
    """The same numbers, contiguous and at a multiple of 16 bytes.

    Triton compiles another variant, perhaps with another order of addition, for pointers that are not.
    """
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
