"""Where two passes over the same row first differ in bits: for the message of a failed self-test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = _BITS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class RowRecording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps one row of the result of every ATen operation inside the context."""

    def __init__(self, rows: int, row: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._row = rows, row
        self.results: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.results.append((str(func), self._candidates(out)))
        return out

    def _candidates(self, out: Tensor) -> list[Tensor]:
        """The row along each dimension that could be the packed one."""
        dims = [dim for dim, size in enumerate(out.shape) if size == self._rows]
        return [out.select(dim, self._row).clone() for dim in dims]


def first_operation(alone: RowRecording, together: RowRecording) -> str | None:
    """The first operation whose result for the row differs; None where the two runs took different operations."""
    for (name, own), (other, others) in zip(alone.results, together.results, strict=False):
        if name != other:
            return None
        pairs = [(a, b) for a in own for b in others if a.shape == b.shape]
        if pairs and not any(same_bits(a, b) for a, b in pairs):
            return name
    return None


def first_layer(alone: dict[int, Tensor], together: dict[int, Tensor]) -> int | None:
    """The first layer whose output differs; both hold the row's state after layer n - 1 under n."""
    return next((n - 1 for n in sorted(alone) if not same_bits(alone[n], together[n])), None)
