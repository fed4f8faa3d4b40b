"""Which devices have Triton kernels: nothing imports triton before a tensor on such a device asks for it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch


def gpu_module(name: str, device: torch.device) -> ModuleType | None:
    """faircopy.kernels.gpu.<name> for a CUDA device where Triton is installed, else None."""
    if device.type != "cuda":
        return None
    try:
        return import_module(f"faircopy.kernels.gpu.{name}")
    except ImportError:  # torch came without Triton
        return None
