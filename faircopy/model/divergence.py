"""Where two passes over the same row first differ in bits: for the message of a failed self-test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from faircopy.model.bits import same_bits
from faircopy.model.operations import ModulePath

_UNWRITTEN = ("empty", "empty_like", "empty_strided", "as_strided")  # memory that holds no result yet


@dataclass(frozen=True, slots=True)
class RowResult:
    """An operation's result for one row: one candidate for each dimension that could be the packed one."""

    order: int
    name: str
    candidates: list[Tensor]

    def differs(self, other: RowResult) -> bool:
        pairs = [(a, b) for a in self.candidates for b in other.candidates if a.shape == b.shape]
        return bool(pairs) and not any(same_bits(a, b) for a, b in pairs)


class RowRecording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps one row of the result of every ATen operation inside the context, by module."""

    def __init__(self, path: ModulePath, rows: int, row: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, self._rows, self._row = path, rows, row
        self._count = 0
        self.results: dict[str, list[RowResult]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and not func._schema.name.endswith(_UNWRITTEN):
            self._count += 1
            dims = [dim for dim, size in enumerate(out.shape) if size == self._rows]
            own = [out.select(dim, self._row).clone() for dim in dims]
            self.results.setdefault(str(self._path), []).append(RowResult(self._count, str(func), own))
        return out


def first_operation(one: RowRecording, other: RowRecording) -> str | None:
    """The first operation, with its module, whose result for the row differs."""
    found = [
        (result.order, f"{result.name} in {path}")
        for path, results in one.results.items()
        if path and (result := _first_difference(results, other.results.get(path, []))) is not None
    ]
    return min(found)[1] if found else None


def _first_difference(one: list[RowResult], other: list[RowResult]) -> RowResult | None:
    """Of a module's operations; where they depend on the batch (attention, experts), as far as they are the same."""
    for a, b in zip(one, other, strict=False):
        if a.name != b.name:
            return None
        if a.differs(b):
            return a
    return None


def first_layer(alone: dict[int, Tensor], together: dict[int, Tensor]) -> int | None:
    """The first layer whose output differs; both hold the row's state after layer n - 1 under n."""
    return next((n - 1 for n in sorted(alone) if not same_bits(alone[n], together[n])), None)
