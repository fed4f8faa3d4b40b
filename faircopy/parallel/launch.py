"""Starts the other ranks of a model as processes of their own, and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from weakref import finalize, ref

import torch
from torch._C._distributed_c10d import TCPStore

from faircopy import errors
from faircopy.errors import RankError
from faircopy.parallel.group import Group

HOST = "127.0.0.1"
WATCH_S = 0.5  # how often ranks look whether the others are still there
CONNECT_POLL_S = 0.05  # how often rank 0 looks whether a rank that it waits for has ended
GRACE = 2.0  # seconds in which a rank that is told to may end by itself


def start_ranks(size: int, device: torch.device) -> Group:
    """This process becomes rank 0 of a group; the others are started and wait for its messages."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    started = {rank: _start(rank, size, store.port, device) for rank in range(1, size)}
    try:
        _wait_until_ready(store, started)
        group = _connected(lambda: Group(store, 0, size, rank_device(device, 0)), started)
    except BaseException:
        _end(started)
        raise
    group.ended = lambda: _ended(started)
    group.close = finalize(group, _end, started)
    Thread(target=_watch, args=(ref(group), started), daemon=True).start()
    group.pids = [process.pid for process in started.values()]
    return group


def _connected(connect: Callable[[], Group], started: dict[int, subprocess.Popen[bytes]]) -> Group:
    """What connects all ranks also waits for one that has ended, for ever: a thread of its own, which is then left."""
    found: Future[Group] = Future()
    Thread(target=_connect, args=(found, connect), daemon=True).start()
    while not wait([found], CONNECT_POLL_S).done:
        _refuse_ended(started)
    return found.result()


def _connect(found: Future[Group], connect: Callable[[], Group]) -> None:
    try:
        found.set_result(connect())
    except BaseException as error:
        found.set_exception(error)


def _watch(group: ref[Group], started: dict[int, subprocess.Popen[bytes]]) -> None:
    """Until a rank has ended; rank 0 may wait for it in a way that the system does not end."""
    while not _ended(started):
        time.sleep(WATCH_S)
    known = group()
    if known is not None:
        known.abort()


def rank_device(device: torch.device, rank: int) -> torch.device:
    """A device for each rank; where there are fewer GPUs, ranks share them."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", ((device.index or 0) + rank) % torch.cuda.device_count())


def _start(rank: int, size: int, port: int, device: torch.device) -> subprocess.Popen[bytes]:
    """A session of its own: Ctrl-C is for rank 0, which the others follow."""
    package = str(Path(errors.__file__).parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    about = [rank, size, port, device, os.getpid()]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "faircopy.parallel.worker", *map(str, about)],  # no modules of the present folder
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def _wait_until_ready(store: TCPStore, started: dict[int, subprocess.Popen[bytes]]) -> None:
    missing = set(started)
    while missing:
        _refuse_ended(started)
        missing = {rank for rank in missing if not store.check([ready_key(rank)])}
        time.sleep(0.01 if missing else 0.0)


def _refuse_ended(started: dict[int, subprocess.Popen[bytes]]) -> None:
    for rank, status in _ended(started).items():
        raise RankError("rank", rank, f"it could not start (status {status})", "see what it printed")


def ready_key(rank: int) -> str:
    return f"rank {rank} is ready"


def _ended(started: dict[int, subprocess.Popen[bytes]]) -> dict[int, int]:
    found = {rank: process.poll() for rank, process in started.items()}
    return {rank: status for rank, status in found.items() if status is not None}


def _end(started: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in started.values():
        process.terminate()
    for process in started.values():
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
