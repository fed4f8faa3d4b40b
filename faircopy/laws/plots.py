"""Pictures of laws: accepted tokens over text and depth with both fits, residuals, and tokens per second by batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from faircopy.bench.plots import load_pyplot
from faircopy.laws.fit import MILLION, Fit
from faircopy.laws.points import Point, Result
from faircopy.laws.predict import Prediction
from faircopy.laws.report import MeasureReport

_LINES = {"log": "-", "power": "--"}


def plot_laws(file: Path, title: str, results: Sequence[Result], reports: Sequence[MeasureReport]) -> None:
    """Three panels: A over T with one layer, A over D, residuals of the better form."""
    pyplot = load_pyplot()
    figure, (text, depth, rest) = pyplot.subplots(1, 3, figsize=(15, 4.6))
    for index, report in enumerate(reports):
        colour = f"C{index}"
        _text_panel(text, results, report, colour)
        _depth_panel(depth, results, report, colour)
        best = report.best
        rest.plot([p.tokens / MILLION for p in best.points], best.residuals, "o", color=colour, label=report.measure)
    for tokens, marker in _budgets(results):
        depth.plot([], [], marker, color="#777777", label=f"T = {tokens / MILLION:.3g} M")
    text.set(xlabel="T, million tokens", ylabel="A, accepted draft tokens per cycle", xscale="log")
    layers = sorted({result.layers for result in results})
    depth.set(xlabel="D, layers", xscale="log", xticks=layers, xticklabels=layers)
    depth.minorticks_off()
    rest.set(xlabel="T, million tokens", ylabel="A measured minus fitted, all depths", xscale="log")
    rest.axhline(0.0, color="#777777", linewidth=1)
    _finish(file, title, figure, (text, depth, rest))


def plot_rates(file: Path, title: str, predictions: Sequence[Prediction]) -> None:
    """Tokens per second over batch sizes: plain, and the best head with its interval."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    batches = [prediction.batch for prediction in predictions]
    best = [prediction.best for prediction in predictions]
    axes.plot(batches, [prediction.plain for prediction in predictions], "o-", color="#777777", label="plain")
    axes.plot(batches, [one.rate for one in best], "o-", color="C0", label="best head, best k")
    low, high = [one.rate_interval.low for one in best], [one.rate_interval.high for one in best]
    axes.fill_between(batches, low, high, color="C0", alpha=0.2)
    for batch, one in zip(batches, best, strict=True):
        label = f"D {one.point.layers}, k {one.nodes}"
        axes.annotate(label, (batch, one.rate), textcoords="offset points", xytext=(0, 6), fontsize=7, ha="center")
    axes.set(xlabel="batch size, sequences", ylabel="tokens per second", xscale="log", yscale="log")
    axes.set_xticks(batches, batches)
    axes.minorticks_off()
    _finish(file, title, figure, (axes,))


def _text_panel(axes: Any, results: Sequence[Result], report: MeasureReport, colour: str) -> None:
    shown = [result for result in results if result.layers == 1]
    millions = [result.tokens / MILLION for result in shown]
    axes.plot(millions, [result.accepted(report.measure) for result in shown], "o", color=colour, label=report.measure)
    tokens = np.geomspace(min(millions), max(millions), 60) * MILLION
    for form, found in report.text.items():
        line = [found.law(Point(int(count))) for count in tokens]
        axes.plot(tokens / MILLION, line, _LINES[form], color=colour, linewidth=1)
    _band(axes, report.text["log"], tokens, colour)


def _band(axes: Any, found: Fit, tokens: Any, colour: str) -> None:
    edges = [found.interval(Point(int(count))) for count in tokens]
    axes.fill_between(tokens / MILLION, [e.low for e in edges], [e.high for e in edges], color=colour, alpha=0.15)


def _depth_panel(axes: Any, results: Sequence[Result], report: MeasureReport, colour: str) -> None:
    for tokens, marker in _budgets(results):
        shown = [result for result in results if result.tokens == tokens]
        values = [result.accepted(report.measure) for result in shown]
        axes.plot([r.layers for r in shown], values, marker, color=colour)
        layers = sorted({result.layers for result in shown})
        fitted = [report.best.law(Point(tokens, count)) for count in layers]
        axes.plot(layers, fitted, _LINES[report.best.law.form], color=colour, linewidth=1)


def _budgets(results: Sequence[Result]) -> list[tuple[int, str]]:
    """Tokens of which there are deeper heads, each with a marker."""
    deep = sorted({result.tokens for result in results if result.layers > 1})
    return list(zip(deep, ("o", "s", "^"), strict=False))


def _finish(file: Path, title: str, figure: Any, panels: Sequence[Any]) -> None:
    figure.suptitle(title, fontsize=9)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    load_pyplot().close(figure)
