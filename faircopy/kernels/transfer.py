"""Numbers between host and device, such that the host waits only where it reads."""

from __future__ import annotations

from collections.abc import Sequence as Seq
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
