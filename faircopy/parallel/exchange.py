"""How tensors are gathered from all ranks: gloo on CPUs and on a GPU that ranks share, NCCL or peer memory on GPUs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

PEERS = "faircopy"  # the name of the ranks whose buffers are shared
PEER_BYTES = 16 << 20  # of each buffer


class Exchange(Protocol):
    """Gathers from all ranks."""

    def gather(self, x: Tensor) -> Tensor:
        """[...] of every rank -> [size, ...], in the order of ranks."""

    def abort(self) -> None:
        """A rank has died: whoever waits for it gets an error."""


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

    def abort(self) -> None:
        """Connections to a process that has ended are closed by the system."""


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

    def abort(self) -> None:
        self._nccl.abort()


class PeerExchange:
    """Each rank writes into a buffer of its own and reads those of the others over NVLink; NCCL carries larger tensors.

    There was no machine with several GPUs to run it on.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, larger: Exchange) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        memory: Any = _SymmetricMemory
        memory.set_group_info(PEERS, rank, size, store)
        self._buffer: Tensor = memory.empty_strided_p2p((PEER_BYTES,), (1,), torch.uint8, device, PEERS)
        self._shared: Any = memory.rendezvous(self._buffer)
        self._size, self._larger = size, larger

    def gather(self, x: Tensor) -> Tensor:
        if x.nbytes > PEER_BYTES or not x.numel():
            return self._larger.gather(x)
        self._buffer[: x.nbytes].copy_(x.view(-1).view(torch.uint8))
        self._shared.barrier()
        out = torch.stack([self._shared.get_buffer(rank, x.shape, x.dtype) for rank in range(self._size)])
        self._shared.barrier()  # nobody writes again before all have read
        return out

    def abort(self) -> None:
        self._larger.abort()


def make_exchange(store: Store, gloo: Any, rank: int, size: int, device: torch.device) -> Exchange:
    """The fastest that these devices have; all ranks choose the same."""
    through_host = GlooExchange(gloo, size)
    if device.type != "cuda" or torch.cuda.device_count() < size:
        return through_host
    nccl = NcclExchange(PrefixStore("nccl", store), rank, size)
    peers: Exchange | None = None
    if all(torch.cuda.can_device_access_peer(device, other) for other in range(size) if other != device.index):
        with suppress(ImportError, AttributeError, RuntimeError):
            peers = PeerExchange(PrefixStore("peers", store), rank, size, device, nccl)
    everywhere = bool(through_host.gather(torch.tensor(peers is not None)).all())
    return peers if peers is not None and everywhere else nccl
