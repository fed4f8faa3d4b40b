"""How long captured steps take, from the times at which the host collects them."""

from __future__ import annotations

import time
from typing import Any, Protocol

MARGIN = 0.5e-3  # seconds that the host may take longer than it ever did, at least
IDLE = 0.05e-3  # seconds that a device takes from one captured step to the next that waits for it, at most
DRIFT = 1.005  # a step may take this much longer than the quickest before: texts grow
FADE = 0.98  # what a slow start of a step counts in the next one


class Collectable(Protocol):
    """A captured step."""

    @property
    def kind(self) -> Any:
        """Steps of one kind take about as long."""

    @property
    def idle(self) -> float:
        """Seconds that the device had nothing to do before it."""


class Pace:
    """Measures captured steps that run behind each other."""

    def __init__(self) -> None:
        self._collected: float | None = None  # when the last step was, if another one ran behind it
        self._quickest: dict[Any, float] = {}
        self._lead = 0.0  # seconds from the end of a wait to the start of the step behind
        self._due: float | None = None  # when the last wait was to end
        self._margin = MARGIN

    def wait(self, step: Collectable) -> None:
        """Sleep for as long as the step behind this one, which runs, need not be planned."""
        spare = self.spare_time(step)
        self._due = time.perf_counter() + spare
        time.sleep(spare)

    def started(self, begin: float) -> None:
        """A step was started; `begin`: when the host began to plan it. Waking up late counts like planning."""
        begin, self._due = begin if self._due is None else self._due, None
        self._lead = max(time.perf_counter() - begin, FADE * self._lead)

    def collected(self, step: Collectable, more: bool) -> float | None:
        """A step was collected; returns its seconds, if they are known. more: another one runs behind it."""
        now, before = time.perf_counter(), self._collected
        self._collected = now if more else None
        self._margin = self._next_margin(step.idle)
        if before is None:
            return None
        seconds = now - before
        self._quickest[step.kind] = min(seconds, DRIFT * self._quickest.get(step.kind, seconds))
        return seconds

    def _next_margin(self, idle: float) -> float:
        """More after a step that the device had to wait for: up to a whole step, for then there is no wait at all."""
        if idle <= IDLE:
            return max(MARGIN, FADE * self._margin)
        return min(self._margin + idle, max((MARGIN, *self._quickest.values())))

    def stop(self) -> None:
        """The next step does not run behind another one."""
        self._collected = self._due = None

    def spare_time(self, step: Collectable) -> float:
        """Seconds the host can wait before it plans the step behind this one, which runs."""
        if self._collected is None or step.kind not in self._quickest:
            return 0.0
        end = self._collected + self._quickest[step.kind]
        return max(0.0, end - self._lead - self._margin - time.perf_counter())
