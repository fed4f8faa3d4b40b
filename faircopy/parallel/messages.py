"""What rank 0 sends to the others, as bytes: Python values, and tensors that arrive on the receiver's device."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    """Tensors travel as arrays of bytes on the host; those of a device go to the receiver's."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return torch.device if isinstance(value, torch.device) else None
        # not contiguous(): a single number has any stride, and bytes are viewed with a stride of one alone
        host = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        kind = str(host.dtype).removeprefix("torch.")
        return host.view(-1).view(torch.uint8).numpy(), kind, tuple(host.shape), value.device.type == "cpu"


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        if pid is torch.device:
            return self._device
        numbers, kind, shape, on_host = pid
        found = torch.from_numpy(numbers).view(getattr(torch, kind)).view(shape)
        return found if on_host else found.to(self._device)


def to_bytes(message: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()


def from_bytes(data: bytes, device: torch.device) -> Any:
    return _Unpickler(io.BytesIO(data), device).load()
