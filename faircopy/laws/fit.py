"""Fits of accepted tokens per cycle over text and depth: a log law, a saturating power law, and how sure either is.

    log:    A = b + a ln T + d ln D
    power:  A = b - c T^-beta + d ln D

T in millions of tokens, D in layers. For a given beta both are linear, so least squares and a search over beta is all.
Intervals come from a bootstrap: prompts are drawn again, the same ones for every head, and residuals of the fit are
added with random signs, since heads differ by more than the prompts they are measured on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from faircopy.errors import ConfigError
from faircopy.laws.points import Point, Result

Form = Literal["log", "power"]
Array = NDArray[np.float64]

MILLION = 1e6
EXPONENTS = np.geomspace(0.02, 3.0, 120)  # of the power law
REPLICATES = 400
SHARE = 0.95  # of an interval


@dataclass(frozen=True, slots=True)
class Law:
    """A law and how well it describes the points that it was fitted to."""

    form: Form
    constant: float  # b
    text: float  # a, or c
    depth: float  # d; 0 where all points have one depth
    exponent: float = 0.0  # beta
    squares: float = 0.0  # sum of squared residuals
    count: int = 0  # points
    parameters: int = 2

    def __call__(self, point: Point) -> float:
        return (
            self.constant + self.text * _text_term(self.form, point.tokens, self.exponent) + self.depth * _deep(point)
        )

    @property
    def aic(self) -> float:
        """Akaike's criterion with the correction for few points; the lower one describes the points better."""
        unknown = self.parameters + 1  # and the variance
        if self.count - unknown - 1 <= 0:
            return math.inf
        spread = self.count * math.log(max(self.squares, 1e-12) / self.count)
        return spread + 2 * unknown + 2 * unknown * (unknown + 1) / (self.count - unknown - 1)

    @property
    def limit(self) -> float:
        """What a power law says of one layer and endless text; a log law has no limit."""
        return self.constant if self.form == "power" else math.inf

    @property
    def formula(self) -> str:
        depth = f" {self.depth:+.3f} ln D" if self.depth else ""
        if self.form == "log":
            return f"A = {self.constant:.3f} {self.text:+.3f} ln T{depth}"
        return f"A = {self.constant:.3f} {-self.text:+.3f} T^-{self.exponent:.2f}{depth}"


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


@dataclass(frozen=True, slots=True)
class Fit:
    """A law with its bootstrap replicates."""

    law: Law
    points: tuple[Point, ...]
    values: tuple[float, ...]
    replicates: tuple[Law, ...]
    residuals: tuple[float, ...]

    def interval(self, point: Point, single: bool = False) -> Interval:
        """Where the law passes at a point; single: where one more head would lie."""
        passes = np.array([law(point) for law in self.replicates])
        if single:
            passes = passes + _rng().choice(self._spread(), len(passes))
        return _interval(passes)

    def coefficient(self, name: str) -> Interval:
        return _interval(np.array([getattr(law, name) for law in self.replicates]))

    def covers(self, point: Point) -> bool:
        """Whether text and depth lie within those of the points."""
        tokens, layers = [p.tokens for p in self.points], [p.layers for p in self.points]
        return min(tokens) <= point.tokens <= max(tokens) and min(layers) <= point.layers <= max(layers)

    def _spread(self) -> Array:
        return _inflated(np.array(self.residuals), self.law)


def fit(results: Sequence[Result], measure: str, form: Form, replicates: int = REPLICATES) -> Fit:
    """The law of this form through all heads that have the measure."""
    known = [result for result in results if measure in result.measures]
    points = [result.point for result in known]
    if len({(p.tokens, p.layers) for p in points}) < 3:
        problem = f"{len(points)} heads with {measure!r} are too few for a law"
        raise ConfigError("results", measure, problem, "train at least three different points")
    if len({len(result.measures[measure]["tokens"]) for result in known}) > 1:
        problem = "heads were measured behind different prompts"
        raise ConfigError("results", measure, problem, "fit those of one set of prompts")
    values = np.array([result.accepted(measure) for result in known])
    (law,) = fit_rows(points, values[None], form)
    residuals = values - np.array([law(point) for point in points])
    drawn = _drawn(known, measure, law, residuals, replicates)
    again = fit_rows(points, drawn, form)
    return Fit(law, tuple(points), tuple(values.tolist()), tuple(again), tuple(residuals.tolist()))


def fit_rows(points: Sequence[Point], rows: Array, form: Form) -> list[Law]:
    """A law per row of values [rows, points], by least squares; of the exponents of a power law the best."""
    exponents = EXPONENTS if form == "power" else (0.0,)
    solved = [_solved(points, rows, form, float(exponent)) for exponent in exponents]
    return [min(laws, key=lambda law: law.squares) for laws in zip(*solved, strict=True)]


def _solved(points: Sequence[Point], rows: Array, form: Form, exponent: float) -> list[Law]:
    """All rows with one exponent: they have the same terms."""
    deep = len({point.layers for point in points}) > 1
    columns = [np.ones(len(points)), np.array([_text_term(form, point.tokens, exponent) for point in points])]
    columns += [np.array([_deep(point) for point in points])] if deep else []
    matrix = np.stack(columns, 1)
    solutions = np.linalg.lstsq(matrix, rows.T, rcond=None)[0]
    squares = ((matrix @ solutions - rows.T) ** 2).sum(0)
    depths = solutions[2] if deep else np.zeros(len(rows))
    parameters = len(columns) + (form == "power")
    return [
        Law(form, constant, text, depth, exponent, missed, len(points), parameters)
        for constant, text, depth, missed in zip(
            *(numbers.tolist() for numbers in (solutions[0], solutions[1], depths, squares)), strict=True
        )
    ]


def _text_term(form: Form, tokens: int, exponent: float) -> float:
    millions = tokens / MILLION
    return math.log(millions) if form == "log" else -(millions**-exponent)


def _deep(point: Point) -> float:
    return math.log(point.layers)


def _drawn(known: Sequence[Result], measure: str, law: Law, residuals: Array, replicates: int) -> Array:
    """Values of all heads [replicates, heads], with prompts drawn again and residuals under random signs."""
    rng = _rng()
    tokens, cycles = (np.array([r.measures[measure][name] for r in known], float) for name in ("tokens", "cycles"))
    prompts = rng.integers(0, tokens.shape[1], (replicates, tokens.shape[1]))
    means = tokens[:, prompts].sum(-1) / np.maximum(1.0, cycles[:, prompts].sum(-1))
    signs = rng.choice([-1.0, 1.0], (replicates, len(known)))
    drawn: Array = means.T + signs * _inflated(residuals, law)
    return drawn


def _inflated(residuals: Array, law: Law) -> Array:
    """Residuals of a fit are smaller than those of new points."""
    return residuals * math.sqrt(len(residuals) / max(1, len(residuals) - law.parameters))


def _interval(values: Array) -> Interval:
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Interval(float(low), float(high))


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)
