"""Ctrl-C while ranks depend on each other: it waits until they do not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType

NO_ONE = -1  # whom the system tells of signals, if Python alone is told
BEGIN = 0  # what is written where a wait begins: no signal has this number


@contextmanager
def uninterrupted(give_up: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Ctrl-C takes effect when this is left without an error; a second one takes effect at once.

    give_up: ends what is waited for, so that a second Ctrl-C is not held up by it; called in another thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone
        return
    held_back: list[tuple[int, FrameType | None]] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, handler)
        held_back.append((number, frame))

    watcher, failed = _watcher(), True
    signal.signal(signal.SIGINT, hold_back)
    try:
        with watcher.watching(give_up):
            yield
        failed = False
    finally:
        signal.signal(signal.SIGINT, handler)
        if held_back and (not failed or watcher.count > 1):
            handler(*held_back[0])


class _Watcher:
    """Counts Ctrl-C while the main thread waits for another rank, where Python calls no handler."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._waits = self._begun = 0  # waits so far, and how many of their beginnings the thread has read
        self._count = 0
        self._give_up: Callable[[], object] | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def count(self) -> int:
        """Ctrl-C of the present wait, as far as the thread has read; those of earlier ones may be read late."""
        return self._count if self._begun == self._waits else 0

    @contextmanager
    def watching(self, give_up: Callable[[], object]) -> Iterator[None]:
        """The second Ctrl-C from now on calls give_up. An event loop that is told of signals keeps being told."""
        self._waits, self._give_up = self._waits + 1, give_up
        os.write(self._write, bytes([BEGIN]))
        told = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if told != NO_ONE:
            signal.set_wakeup_fd(told)
        try:
            yield
        finally:
            self._give_up = None
            signal.set_wakeup_fd(told)

    def _watch(self) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number == BEGIN:
                    self._begun, self._count = self._begun + 1, 0
                self._count += number == signal.SIGINT
                give_up = self._give_up
                if self.count > 1 and give_up is not None:
                    give_up()


@cache
def _watcher() -> _Watcher:
    """One for the process; what it needs is made when ranks are used."""
    return _Watcher()
