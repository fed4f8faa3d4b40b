"""A rank other than 0: loads its share of each model, and runs the passes that rank 0 asks for."""

from __future__ import annotations

import os
import signal
import sys
import time
from threading import Thread

import torch
from torch._C._distributed_c10d import TCPStore

from faircopy.errors import FaircopyError, RankError
from faircopy.parallel.group import LOST, Group
from faircopy.parallel.launch import HOST, WATCH_S, rank_device, ready_key
from faircopy.parallel.shards import Shards


def main(rank: int, size: int, port: int, device: torch.device, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is rank 0's, which tells this one what follows
    Thread(target=_watch, args=(rank, parent), daemon=True).start()
    own = rank_device(device, rank)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    store = TCPStore(HOST, port, is_master=False)
    store.set(ready_key(rank), "")
    try:
        shards = Shards(Group(store, rank, size, own))
        while True:
            shards.serve()
    except FaircopyError as error:
        _leave(rank, str(error), LOST if isinstance(error, RankError) else 1)


def _watch(rank: int, parent: int) -> None:
    """End with rank 0, also while this rank waits for something that can no longer come."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    _leave(rank, "the process of rank 0 has ended", LOST)


def _leave(rank: int, problem: str, status: int) -> None:
    print(f"faircopy: rank {rank} ends: {problem}", file=sys.stderr, flush=True)
    os._exit(status)


if __name__ == "__main__":
    own, of, port, device, parent = sys.argv[1:]
    main(int(own), int(of), int(port), torch.device(device), int(parent))
