"""Where a step's time goes. Only for a pass of its own: on a GPU every phase ends with a synchronisation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from faircopy.engine import Engine
from faircopy.papers.dense import AlignedLayout

PHASES = ("draft", "verify", "accept", "realign", "captured", "host")  # captured: all of a replayed step


class Stopwatch:
    """Seconds by phase; time inside another phase counts there alone."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._open: list[str] = []
        self._since = 0.0

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted under this phase."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return run

    def _switch(self) -> None:
        """Count the time since the last change for the phase that is open."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def profiled(engine: Engine) -> Iterator[Stopwatch]:
    """Time the parts of this engine's steps while the context lasts; the engine is as before afterwards."""
    watch = Stopwatch(engine.target.model.device)
    places = [
        (engine, "step", "host"),
        (engine.drafter, "propose", "draft"),
        (engine.drafter, "observe", "draft"),
        (engine.target, "forward", "verify"),
        (engine.verifier, "judge", "accept"),
        (engine.target.layout, "commit", "accept"),
        (engine.target.layout, "publish", "accept"),
        *((layout, "align", "realign") for layout in engine.layouts if isinstance(layout, AlignedLayout)),
        *((engine.captured, name, "captured") for name in ("start", "collect") if engine.captured is not None),
    ]
    for owner, name, phase in places:
        setattr(owner, name, watch.timed(phase, getattr(owner, name)))
    try:
        yield watch
    finally:
        for owner, name, _ in places:
            delattr(owner, name)
