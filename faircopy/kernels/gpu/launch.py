"""How kernels are launched: one after the other without waiting for the last block of the one before."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ALIGNMENT = 16  # bytes
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for everything the kernel before has written, then let the next one's blocks come up.

    In this order: blocks that wait hold on to their share of a processor, so no more than one kernel may wait.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def options(device: torch.device) -> dict[str, Any]:
    """Launch arguments every kernel gets: programmatic dependent launch where the chip has it."""
    if INTERPRETED or device.type != "cuda":
        return {"PDL": False}
    early = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


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
