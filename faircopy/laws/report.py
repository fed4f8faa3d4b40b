"""What results say: both forms of the law per measure, and whether heads that were left out are predicted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from faircopy.errors import ConfigError
from faircopy.laws.fit import Fit, Form, Interval, fit
from faircopy.laws.points import Point, Result

FORMS: tuple[Form, ...] = ("log", "power")
LEFT_OUT_DEPTH = 4
CLOSE = 4.0  # difference of two criteria below which neither form can be ruled out


@dataclass(frozen=True, slots=True)
class Check:
    """A head that a law was fitted without."""

    form: Form
    point: Point
    measured: float
    interval: Interval

    @property
    def inside(self) -> bool:
        return self.measured in self.interval


@dataclass(frozen=True, slots=True)
class MeasureReport:
    """One kind of draft: laws over T with one layer, laws over T and D, and checks."""

    measure: str
    text: dict[Form, Fit]
    joint: dict[Form, Fit]  # empty where all heads have one layer
    checks: list[Check]

    @property
    def plausible(self) -> list[Fit]:
        """Of the widest fits there are, the form with the lower criterion first; the other one if it is close."""
        fits = sorted((self.joint or self.text).values(), key=lambda found: found.law.aic)
        return [found for found in fits if found.law.aic <= fits[0].law.aic + CLOSE]

    @property
    def best(self) -> Fit:
        return self.plausible[0]


def one_target(results: Sequence[Result], name: str | None = None) -> list[Result]:
    """The results of one target; which one must be said if there are several."""
    names = sorted({result.target for result in results})
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        problem = "no results" if not names else f"results are of {', '.join(names)}"
        raise ConfigError("--target-name", name, problem, "pass one of them")
    mine = [result for result in results if result.target == name]
    _refuse_mixed(mine)
    return mine


def _refuse_mixed(results: Sequence[Result]) -> None:
    """A head that is there twice makes a law look surer; heads of other settings are points of another law."""
    settings: dict[str, Any] = {}
    for result in results:
        for option, value in result.settings.items():
            if settings.setdefault(option, value) != value:
                problem = f"heads with {option} = {settings[option]!r} and {value!r} are no points of one law"
                raise ConfigError("results", result.target, problem, "pass the files of one grid")
    for point, times in Counter(result.point for result in results).items():
        if times > 1:
            raise ConfigError("results", str(point), "there more than once", "pass every file once")


def measures_of(results: Sequence[Result]) -> list[str]:
    """Those that every head has."""
    shared = [name for name in results[0].measures if all(name in result.measures for result in results)]
    if not shared:
        raise ConfigError("results", results[0].target, "no measure that every head has", "pass the files of one grid")
    return shared


def report(results: Sequence[Result], measure: str) -> MeasureReport:
    flat = [result for result in results if result.layers == 1]
    if not flat:
        raise ConfigError("results", measure, "no heads of one layer", "train some: laws over T are fitted to those")
    deep = len(flat) < len(results)
    return MeasureReport(
        measure,
        {form: fit(flat, measure, form) for form in FORMS},
        {form: fit(results, measure, form) for form in FORMS} if deep else {},
        [check for form in FORMS for check in _checks(results, measure, form)],
    )


def _checks(results: Sequence[Result], measure: str, form: Form) -> Iterator[Check]:
    flat = [result for result in results if result.layers == 1]
    most = max(result.tokens for result in flat)
    yield from _without(flat, [result for result in flat if result.tokens == most], measure, form)
    yield from _without(results, [result for result in results if result.layers == LEFT_OUT_DEPTH], measure, form)


def _without(results: Sequence[Result], left_out: Sequence[Result], measure: str, form: Form) -> Iterator[Check]:
    """Fit the others and see where these lie, if the others say anything of their depth."""
    others = [result for result in results if result not in left_out]
    if not left_out or len({(result.tokens, result.layers) for result in others}) < 4:
        return
    if {1} == {result.layers for result in others} != {result.layers for result in left_out}:
        return
    found = fit(others, measure, form)
    for result in left_out:
        yield Check(form, result.point, result.accepted(measure), found.interval(result.point, single=True))


def as_json(found: MeasureReport) -> dict[str, Any]:
    def entry(one: Fit) -> dict[str, Any]:
        law = one.law
        names = ("constant", "text", "depth") + (("exponent",) if law.form == "power" else ())
        numbers = {name: [getattr(law, name), *_ends(one.coefficient(name))] for name in names}
        return {
            "formula": law.formula,
            **numbers,
            "aic": law.aic if law.aic < math.inf else None,
            "squares": law.squares,
            "points": law.count,
        }

    def checked(check: Check) -> dict[str, Any]:
        place = {"form": check.form, "tokens": check.point.tokens, "layers": check.point.layers}
        return {**place, "measured": check.measured, "interval": _ends(check.interval), "inside": check.inside}

    return {
        "measure": found.measure,
        "one layer": {form: entry(one) for form, one in found.text.items()},
        "all depths": {form: entry(one) for form, one in found.joint.items()},
        "left out": [checked(check) for check in found.checks],
    }


def _ends(interval: Interval) -> list[float]:
    return [interval.low, interval.high]
