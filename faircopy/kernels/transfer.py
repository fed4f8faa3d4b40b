"""Numbers between host and device, such that the host waits only where it reads."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor


def sent(values: Any, kind: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device; the host does not wait for what the device is doing."""
    host = torch.as_tensor(values, dtype=kind)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


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
