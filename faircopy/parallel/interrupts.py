"""Ctrl-C while ranks depend on each other: it waits until they do not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect when this is left without an error; a second one takes effect at once."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone
        return
    held_back: list[tuple[int, FrameType | None]] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, handler)
        held_back.append((number, frame))

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held_back:
        handler(*held_back[0])
