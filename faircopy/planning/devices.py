"""Devices people plan for: memory, bandwidth and matrix rate, from their makers' data sheets.

Rates are of dense 16-bit products with 32-bit sums. Where a bandwidth was measured, that is used: 4.69 TB/s for an
H200, whose data sheet says 4.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from faircopy.config import free_memory
from faircopy.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """What a roofline needs to know. memory in bytes, bandwidth in bytes/s, rate in operations/s."""

    name: str
    memory: int
    bandwidth: float
    rate: float
    kind: Literal["cuda", "cpu"] = "cuda"
    source: str = "data sheet"

    @property
    def torch_device(self) -> torch.device:
        """The kind of device that the engine allocates for; it need not be there."""
        return torch.device(self.kind)

    @property
    def critical(self) -> float:
        """Operations per byte above which products wait for arithmetic and no longer for memory."""
        return self.rate / self.bandwidth


_TABLE = (
    Device("h200", 141 * 10**9, 4.69e12, 989e12, source="data sheet; bandwidth measured"),
    Device("h100", 80 * 10**9, 3.35e12, 989e12),
    Device("a100-80", 80 * 10**9, 2.039e12, 312e12),
    Device("a100-40", 40 * 10**9, 1.555e12, 312e12),
    Device("l40s", 48 * 10**9, 864e9, 362e12),
    Device("l4", 24 * 10**9, 300e9, 121e12),
    Device("a10", 24 * 10**9, 600e9, 125e12),
    Device("rtx4090", 24 * GIB, 1008e9, 165e12),
    Device("rtx3090", 24 * GIB, 936e9, 71e12),
    Device("t4", 16 * 10**9, 320e9, 65e12),
    Device("mi250", 128 * 10**9, 3.277e12, 362e12),
    Device("mi300x", 192 * 10**9, 5.3e12, 1307e12),
)
DEVICES = {device.name: device for device in _TABLE}
_ALIASES = {"a100": "a100-80", "4090": "rtx4090", "3090": "rtx3090"}
# One core of an AMD EPYC with AVX-512: bfloat16 products of 64 and more rows, and the reading of weights for 4 rows.
_CPU_CORE, _CPU_BANDWIDTH = 112e9, 30e9
_ASSUMED = DEVICES["a100-40"]  # for GPUs in no table


def named_device(name: str | None) -> Device:
    """A device by its name; None: the one of this machine."""
    if name is None:
        return _this_machine()
    word = name.lower().replace(" ", "").replace("_", "-")
    word = _ALIASES.get(word, word)
    if word == "cpu":
        return this_cpu()
    if word not in DEVICES:
        raise ConfigError("gpu", name, "not a device we know", f"use one of {', '.join([*DEVICES, 'cpu'])}")
    return DEVICES[word]


def this_cpu() -> Device:
    """The processor of this machine and the memory that is free now."""
    memory, rate = free_memory(torch.device("cpu")), _CPU_CORE * torch.get_num_threads()
    return Device("cpu", memory, _CPU_BANDWIDTH, rate, "cpu", "products measured on a server's core")


def _this_machine() -> Device:
    if not torch.cuda.is_available():
        return this_cpu()
    found = torch.cuda.get_device_name().lower().replace(" ", "")
    known = [device for name, device in DEVICES.items() if name.split("-")[0] in found]
    total = torch.cuda.get_device_properties(0).total_memory
    if not known:
        return Device(found, total, _ASSUMED.bandwidth, _ASSUMED.rate, source=f"not in our table: as {_ASSUMED.name}")
    return min(known, key=lambda device: abs(device.memory - total))
