"""A lock that is handed to waiting threads in the order they came."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """threading.Lock lets a thread that gives it back take it again before those that wait; this one does not.

    A thread that steps an engine in a loop would otherwise keep others from adding their requests.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def __enter__(self) -> FairLock:
        with self._mutex:
            if not self._held:
                self._held = True
                return self
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        self._wait(turn)
        return self

    def __exit__(self, *error: object) -> None:
        self._hand_over()

    def _wait(self, turn: threading.Lock) -> None:
        try:
            turn.acquire()
        except BaseException:  # an interrupt while waiting: leave the queue, or pass on what was just handed over
            with self._mutex:
                queued = turn in self._waiting
                if queued:
                    self._waiting.remove(turn)
            if not queued:
                self._hand_over()
            raise

    def _hand_over(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False
