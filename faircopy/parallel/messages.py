"""What rank 0 sends to the others, as bytes: Python values, and tensors that arrive on the receiver's device."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    """Tensors travel as arrays of bytes on the host."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return torch.device if isinstance(value, torch.device) else None
        host = value.detach().cpu().contiguous()
        return host.view(-1).view(torch.uint8).numpy(), str(host.dtype).removeprefix("torch."), tuple(host.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        if pid is torch.device:
            return self._device
        numbers, kind, shape = pid
        return torch.from_numpy(numbers).view(getattr(torch, kind)).view(shape).to(self._device)


def to_bytes(message: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()


def from_bytes(data: bytes, device: torch.device) -> Any:
    return _Unpickler(io.BytesIO(data), device).load()
