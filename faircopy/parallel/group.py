"""The processes that share a model: gathering from all, messages from rank 0, and the error when one of them dies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo

from faircopy.errors import RankError
from faircopy.parallel.exchange import Exchange, make_exchange
from faircopy.parallel.messages import from_bytes, to_bytes

HEAD = 16384  # bytes of a message's first part; most messages have no second one
KEPT = 4  # messages per rank whose buffers are kept: those before have arrived
ORDERS, STATES = 0, 1  # what is sent: orders of rank 0, and hidden states from stage to stage
FOREVER = timedelta(days=3650)  # a rank that dies closes its connections; one that waits is only idle
PATIENCE = 5.0  # seconds in which the system notices which process has ended
LOST = 17  # the exit status of a rank that ends because another one has
T = TypeVar("T")


class Group:
    """This process among those that share a model.

    ended: which ranks' processes have ended, with their exit status; known to rank 0 alone.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.ended: Callable[[], dict[int, int]] = dict
        self.close: Callable[[], object] = lambda: None  # ends the other ranks
        self.pids: list[int] = []  # of the other ranks' processes; known to rank 0 alone
        self.models = 0  # loaded so far
        self._numbers = count()
        self._failed: RankError | None = None
        self._gloo = self._guarded(lambda: connect(PrefixStore("messages", store), rank, size))
        self._exchange: Exchange = self._guarded(
            lambda: make_exchange(PrefixStore("exchange", store), self._gloo, rank, size, device)
        )
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()

    def new_number(self) -> int:
        """For something that all ranks have."""
        return next(self._numbers)

    def gather(self, x: Tensor) -> Tensor:
        """[...] of every rank -> [size, ...] in the order of the ranks, on every rank."""
        return self._guarded(lambda: self._exchange.gather(x.contiguous()))

    def post(self, message: Any) -> None:
        """Rank 0 sends orders to all others, and does not wait until they read them."""
        self.send(message, [rank for rank in range(self.size) if rank != self.rank], ORDERS)

    def send(self, message: Any, to: list[int], channel: int = STATES) -> None:
        """A message to some ranks; this one does not wait until they read it."""
        data = to_bytes(message)
        whole = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8)
        parts = [torch.nn.functional.pad(whole[:HEAD], (0, max(0, HEAD - len(whole))))]
        parts += [whole[HEAD:]] if len(whole) > HEAD else []
        self._guarded(lambda: self._start_sending(parts, to, channel))

    def fetch(self, source: int = 0, channel: int = ORDERS) -> Any:
        """The next message of a rank on a channel."""
        head = torch.empty(HEAD, dtype=torch.uint8)
        self._guarded(lambda: self._gloo.recv([head], source, channel).wait())
        length = int.from_bytes(bytes(head[:8].numpy()), "little")
        data = bytes(head[8 : 8 + length].numpy())
        if len(data) < length:
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self._guarded(lambda: self._gloo.recv([rest], source, channel).wait())
            data += bytes(rest.numpy())
        return from_bytes(data, self.device)

    def fail(self, rank: int, problem: str) -> RankError:
        """Nothing works from now on; the other processes are ended. Returns the error that says why."""
        if self._failed is None:
            self._failed = RankError("rank", rank, problem, "see what it printed, then make the LLM again")
            self.close()
        return self._failed

    def abort(self) -> None:
        """A rank has died: what waits for it gets an error."""
        self._exchange.abort()

    def _start_sending(self, parts: list[Tensor], to: list[int], channel: int) -> None:
        while len(self._sent) >= KEPT * self.size:
            for work, _ in self._sent.popleft():
                work.wait()
        self._sent.append([(self._gloo.send([part], rank, channel), part) for rank in to for part in parts])

    def _guarded(self, call: Callable[[], T]) -> T:
        """What a call over the network returns; if it fails, an error that names the rank that has died."""
        if self._failed is not None:
            raise self._failed
        for rank, status in self.ended().items():
            raise self.fail(rank, _problem(status))
        try:
            return call()
        except RuntimeError as error:
            raise self.fail(*self._culprit(str(error))) from error

    def _culprit(self, seen: str) -> tuple[int, str]:
        """The rank that died, and how; not one that ended because another one had."""
        if self.rank:
            return 0, "its process or that of another rank has ended"
        end, ended = time.monotonic() + PATIENCE, self.ended()
        while time.monotonic() < end and all(status == LOST for status in ended.values()):
            time.sleep(0.05)
            ended = self.ended()
        for rank in sorted(ended, key=lambda rank: ended[rank] == LOST):
            return rank, _problem(ended[rank])
        return 0, f"the connection to another rank failed ({seen})"


def _problem(status: int) -> str:
    return f"its process was ended by signal {-status}" if status < 0 else f"its process ended with status {status}"


def connect(store: Store, rank: int, size: int) -> Any:
    """Connections between all ranks over this machine's own network, apart from any other group of the process."""
    gloo: Any = ProcessGroupGloo  # torch's type stubs leave out most of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = FOREVER
    return gloo(store, rank, size, options)
