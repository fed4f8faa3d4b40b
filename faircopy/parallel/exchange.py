"""How tensors are gathered from all ranks: gloo on CPUs and on a GPU that ranks share, NCCL or peer memory on GPUs."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store


class Exchange(Protocol):
    """Gathers from all ranks."""

    def gather(self, x: Tensor) -> Tensor:
        """[...] of every rank -> [size, ...], in the order of ranks."""


class GlooExchange:
    """Through the network of the host; tensors of a GPU are copied to the host and back."""

    def __init__(self, gloo: Any, size: int) -> None:
        self._gloo, self._size = gloo, size

    def gather(self, x: Tensor) -> Tensor:
        host = x.cpu().view(-1).view(torch.uint8)
        out = torch.empty(self._size * host.numel(), dtype=torch.uint8)
        if host.numel():
            self._gloo._allgather_base(out, host).wait()
        return out.view(x.dtype).view(self._size, *x.shape).to(x.device)


class NcclExchange:
    """NCCL's gather moves bytes and adds nothing, so its algorithm changes no bit."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        from torch.distributed import ProcessGroupNCCL

        self._nccl: Any = ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())
        self._size = size

    def gather(self, x: Tensor) -> Tensor:
        out = torch.empty(self._size * x.numel(), dtype=x.dtype, device=x.device)
        if x.numel():
            self._nccl._allgather_base(out, x.view(-1)).wait()
        return out.view(self._size, *x.shape)


def make_exchange(store: Store, gloo: Any, rank: int, size: int, device: torch.device) -> Exchange:
    """The fastest that these devices have."""
    if device.type == "cuda" and torch.cuda.device_count() >= size:
        return NcclExchange(store, rank, size)
    return GlooExchange(gloo, size)
