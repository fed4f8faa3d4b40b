"""How long captured steps take, from the times at which the host collects them."""

from __future__ import annotations

import time
from typing import Any, Protocol

MARGIN = 0.5e-3  # seconds that the host may take longer than it ever did
DRIFT = 1.005  # a step may take this much longer than the quickest before: texts grow
FADE = 0.98  # what a slow start of a step counts in the next one


class Collectable(Protocol):
    """A captured step."""

    @property
    def kind(self) -> Any:
        """Steps of one kind take about as long."""


class Pace:
    """Measures captured steps that run behind each other."""

    def __init__(self) -> None:
        self._collected: float | None = None  # when the last step was, if another one ran behind it
        self._quickest: dict[Any, float] = {}
        self._lead = 0.0  # seconds from planning a step to its start

    def started(self, seconds: float) -> None:
        """The host took so long to plan and start a step."""
        self._lead = max(seconds, FADE * self._lead)

    def collected(self, step: Collectable, more: bool) -> float | None:
        """A step was collected; returns its seconds, if they are known. more: another one runs behind it."""
        now, before = time.perf_counter(), self._collected
        self._collected = now if more else None
        if before is None:
            return None
        seconds = now - before
        self._quickest[step.kind] = min(seconds, DRIFT * self._quickest.get(step.kind, seconds))
        return seconds

    def stop(self) -> None:
        """The next step does not run behind another one."""
        self._collected = None

    def spare_time(self, step: Collectable) -> float:
        """Seconds the host can wait before it plans the step behind this one, which runs."""
        if self._collected is None or step.kind not in self._quickest:
            return 0.0
        end = self._collected + self._quickest[step.kind]
        return max(0.0, end - self._lead - MARGIN - time.perf_counter())
