"""Waiting for a step in flight: as long as its end allows, and never when nothing is known of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from faircopy.pace import DRIFT, MARGIN, Pace


@dataclass(frozen=True)
class Step:
    kind: str
    idle: float = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is; sleeping takes as long as it says."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return now


def test_waits_until_the_next_step_can_just_be_started_in_time(clock: list[float]) -> None:
    pace, step = Pace(), Step("a")
    assert pace.collected(step, more=True) is None
    assert pace.spare_time(step) == 0.0  # nothing is known yet
    pace.started(clock[0] - 0.002)
    clock[0] += 0.010
    assert pace.collected(step, more=True) == pytest.approx(0.010)
    assert pace.spare_time(step) == pytest.approx(0.010 - 0.002 - MARGIN)
    assert pace.spare_time(Step("b")) == 0.0
    clock[0] += 0.009
    assert pace.spare_time(step) == 0.0


def test_waking_up_late_makes_the_next_wait_shorter(clock: list[float]) -> None:
    """The host plans for 2 ms, and begins 3 ms late, since another thread held it up."""
    pace, step = Pace(), Step("a")
    pace.collected(step, more=True)
    pace.started(clock[0] - 0.002)
    clock[0] += 0.010
    pace.collected(step, more=True)
    begin = clock[0]
    pace.wait(step)
    assert clock[0] - begin == pytest.approx(0.010 - 0.002 - MARGIN)
    clock[0] += 0.003 + 0.002
    pace.started(clock[0] - 0.002)
    pace.collected(step, more=True)
    assert pace.spare_time(step) == pytest.approx(0.010 * DRIFT - 0.005 - MARGIN)


def test_a_device_that_was_idle_makes_the_next_wait_shorter(clock: list[float]) -> None:
    """For whatever reason: the host was late, or a started step takes long to begin."""
    pace, step = Pace(), Step("a")
    pace.collected(step, more=True)
    clock[0] += 0.010
    pace.collected(step, more=True)
    before = pace.spare_time(step)
    clock[0] += 0.010
    pace.collected(Step("a", idle=0.002), more=True)
    assert pace.spare_time(step) == pytest.approx(before - 0.002)
    for _ in range(200):
        clock[0] += 0.010
        pace.collected(step, more=True)
    assert pace.spare_time(step) == pytest.approx(before, abs=1e-4), "it fades"


def test_a_long_standstill_is_soon_forgotten(clock: list[float]) -> None:
    """The device waited for minutes, or for a moment in each of many steps: no wait is shorter than none."""
    pace, step = Pace(), Step("a")
    pace.collected(step, more=True)
    clock[0] += 0.010
    pace.collected(step, more=True)
    before = pace.spare_time(step)
    for idle in (60.0, *[0.005] * 500):
        clock[0] += 0.010 + idle
        pace.collected(Step("a", idle), more=True)
        assert pace.spare_time(step) < 0.001
    for _ in range(200):
        clock[0] += 0.010
        pace.collected(step, more=True)
    assert pace.spare_time(step) == pytest.approx(before, abs=1e-3)


def test_a_delay_does_not_become_the_expectation(clock: list[float]) -> None:
    """If waiting has made the device idle, the next wait is not longer for it."""
    pace, step = Pace(), Step("a")
    pace.collected(step, more=True)
    for seconds in (0.010, 0.030, 0.030):
        clock[0] += seconds
        pace.collected(step, more=True)
    assert pace.spare_time(step) <= 0.010 * DRIFT**2


def test_a_step_that_does_not_follow_another_is_not_timed(clock: list[float]) -> None:
    pace, step = Pace(), Step("a")
    pace.collected(step, more=False)
    clock[0] += 1.0
    assert pace.collected(step, more=True) is None
    pace.stop()
    clock[0] += 1.0
    assert pace.collected(step, more=True) is None
