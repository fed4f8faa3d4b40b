"""Numbers between host and device, such that the host waits only where it reads."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 16  # bytes: kernels are compiled for pointers that are divisible by it, or not


def sent(values: Any, kind: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device; the host does not wait for what the device is doing."""
    host = torch.as_tensor(values, dtype=kind)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def sent_together(*arrays: NDArray[Any], device: torch.device) -> list[Tensor]:
    """The same for several arrays, in one copy."""
    if device.type != "cuda":
        return [torch.tensor(array, device=device) for array in arrays]
    size = sum(map(_room, arrays))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for place, array in zip(parts_of(host, arrays), arrays, strict=True):
        place.numpy()[...] = array
    there = torch.empty(size, dtype=torch.uint8, device=device)
    there.copy_(host, non_blocking=True)
    return parts_of(there, arrays)


def parts_of(memory: Tensor, arrays: Seq[NDArray[Any]]) -> list[Tensor]:
    """Parts of a block of bytes with the shapes and types of these arrays, one behind the other."""
    found, at = [], 0
    for array in arrays:
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        found.append(memory[at : at + array.nbytes].view(kind).view(array.shape))
        at += _room(array)
    return found


def _room(array: NDArray[Any]) -> int:
    """Bytes from the beginning of an array to that of the next one."""
    return -(-array.nbytes // ALIGNED) * ALIGNED


def received(*parts: Tensor) -> list[list[float]]:
    """The numbers of tensors [n], read at once; float64 has every number of the other types below 2^53."""
    numbers: list[float] = torch.cat([part.double() for part in parts]).tolist()
    found, at = [], 0
    for part in parts:
        found.append(numbers[at : at + len(part)])
        at += len(part)
    return found


def rows_of(table: Tensor, places: Seq[int]) -> Tensor:
    """These rows of a table; the table itself if they are all of it, in order."""
    if len(places) == len(table) and all(n == place for n, place in enumerate(places)):
        return table
    if not places:
        return table[:0]
    return table.index_select(0, sent(places, torch.int64, table.device))


@dataclass(frozen=True, slots=True)
class Field:
    """A part of the memory of HostInputs."""

    name: str
    kind: torch.dtype
    shape: tuple[int, ...]
    empty: int  # what is there where nothing was written


class HostInputs:
    """Inputs of a graph that the host writes, in one block of memory, so that one copy brings them to the device."""

    def __init__(self, fields: Seq[Field], device: torch.device) -> None:
        sizes = [-(-field.kind.itemsize * int(np.prod(field.shape)) // ALIGNED) * ALIGNED for field in fields]
        pinned = device.type == "cuda"
        self._device = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn, self._empty = 0, {field.name: field.empty for field in fields}
        self.tensors = self._views(self._device, fields, sizes)
        self._arrays = [{n: t.numpy() for n, t in self._views(host, fields, sizes).items()} for host in self._hosts]

    def write(self, values: dict[str, NDArray[Any]]) -> None:
        """Bring these values to the beginnings of the fields, with the rest empty."""
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        for name, array in self._arrays[self._turn].items():
            array[...] = self._empty[name]
            if name in values:
                array[tuple(slice(0, n) for n in values[name].shape)] = values[name]
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        if self._device.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied[self._turn] = copied

    @staticmethod
    def _views(memory: Tensor, fields: Seq[Field], sizes: list[int]) -> dict[str, Tensor]:
        found, at = {}, 0
        for field, size in zip(fields, sizes, strict=True):
            part = memory[at : at + field.kind.itemsize * int(np.prod(field.shape))]
            found[field.name] = part.view(field.kind).view(field.shape)
            at += size
        return found
