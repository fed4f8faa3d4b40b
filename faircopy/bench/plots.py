"""Pictures of results: lines over batch sizes, and stacked shares of time."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from faircopy.bench.phases import PHASES
from faircopy.bench.run import EAGER, PADDED
from faircopy.errors import ConfigError

_COLOURS = {
    "plain": "#777777", "ragged": "#1b7f4b", "ems": "#7fbf7b", "unpad_inputs": "#5ab4d6", "unpad_cache": "#2166ac",
    "padded": "#c23b2e", "realign": "#e08214", "pool": "#8073ac",
}  # fmt: skip
_STYLES = {"refilled": ("--", "o"), "whole batches": ("--", "o"), EAGER: (":", "s"), PADDED: ("-.", "^")}
_STYLES["from the host"] = _STYLES[EAGER]  # its name in older result files
_SHADES = ("#9ecae1", "#3182bd", "#31a354", "#e6550d", "#756bb1", "#bdbdbd")


def plot_lines(
    file: Path, title: str, label: str, lines: dict[str, list[tuple[int, float]]], one: bool = False
) -> None:
    """A line per strategy over batch sizes; with `one`, a dotted line at 1, where nothing is gained."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    for n, (name, points) in enumerate(lines.items()):
        width, (line, marker) = 2.6 if name == "ragged" else 1.6, _style(name)
        look = {"linestyle": line, "marker": marker, "linewidth": width, "color": _colour(name, n)}
        axes.plot(*zip(*points, strict=True), label=name, **look)
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set(xlabel="batch size, sequences", ylabel=label, xscale="log", xticks=batches, xticklabels=batches)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    if one:
        axes.axhline(1.0, color="#777777", linewidth=1, linestyle=":")
    _finish(file, title, figure, axes)


def plot_lengths(file: Path, title: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Draft tokens over batch sizes, both on logarithmic scales; 0 has a place too."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    for (name, points), colour in zip(lines.items(), pyplot.cm.tab10.colors, strict=False):
        axes.plot(*zip(*points, strict=True), label=name, marker="o", color=colour)
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set(xlabel="batch size, sequences", ylabel="draft tokens per sequence", xscale="log", ylim=(0, None))
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xticks(batches, batches)
    axes.minorticks_off()
    most = max(length for points in lines.values() for _, length in points)
    ticks = [0, *(2**n for n in range(12) if 2 ** (n - 1) < most)]
    axes.set_yticks(ticks, ticks)
    _finish(file, title, figure, axes)


def plot_stacks(file: Path, title: str, stacks: dict[tuple[str, int], dict[str, float]]) -> None:
    """A bar per strategy and batch, cut into phases."""
    pyplot = load_pyplot()
    labels = [f"{name} {batch}" for name, batch in stacks]
    figure, axes = pyplot.subplots(figsize=(max(6.4, 0.3 * len(stacks)), 3.2 + 0.07 * max(map(len, labels))))
    bottom = [0.0] * len(stacks)
    for phase, shade in zip(PHASES, _SHADES, strict=True):
        heights = [share[phase] for share in stacks.values()]
        axes.bar(range(len(stacks)), heights, bottom=bottom, label=phase, color=shade, width=0.8)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(stacks)), labels, rotation=90, fontsize=7)
    axes.set(ylabel="share of the time, prompts included", ylim=(0, 1.15))
    _finish(file, title, figure, axes, columns=len(PHASES))


def load_pyplot() -> Any:
    """matplotlib without a window."""
    try:
        import_module("matplotlib").use("Agg")  # no window; imported here because only pictures need it
    except ImportError as error:
        raise ConfigError("plots", "matplotlib", "not installed", 'pip install "faircopy[bench]"') from error
    return import_module("matplotlib.pyplot")


def _colour(name: str, n: int) -> str:
    """A strategy's own colour, or matplotlib's n-th."""
    return _COLOURS.get(name.partition(",")[0], f"C{n}")


def _style(name: str) -> tuple[str, str]:
    """Line and marker, by how the strategy is run: the last part of its name."""
    return _STYLES.get(name.rpartition(", ")[2], ("-", "o"))


def _finish(file: Path, title: str, figure: Any, axes: Any, columns: int = 1) -> None:
    axes.set_title(title, fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=columns)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    load_pyplot().close(figure)
