"""Loss curves as a picture, from the JSONL logs of the training loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from faircopy.train.loop import read_log


def plot_logs(logs: Sequence[Path], out: Path, names: Sequence[str] = ("loss", "agree")) -> None:
    """One panel per quantity that any log holds, one line per log, over millions of tokens."""
    import_module("matplotlib").use("Agg")  # no window; imported here because only pictures need it
    pyplot = import_module("matplotlib.pyplot")
    runs = {log.stem: read_log(log) for log in logs}
    shown = [name for name in names if any(name in line for lines in runs.values() for line in lines)]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(6 * len(shown), 4), squeeze=False)
    for panel, name in zip(panels[0], shown, strict=True):
        for index, (label, lines) in enumerate(runs.items()):
            points = [(line["tokens"] / 1e6, line[name]) for line in lines if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), label=label, color=f"C{index}")
        panel.set(xlabel="million tokens", ylabel=name)
        panel.grid(alpha=0.3)
        panel.legend()
    _save(figure, out)


def plot_training(log: Path, out: Path) -> None:
    """One run: its loss, and in a second panel every accuracy it logged."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    lines = read_log(log)
    shares = sorted({name for line in lines for name in line if name.startswith(("top1_", "agree"))})
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4))
    for panel, names, title in zip(panels, (["loss"], shares), ("loss", "share of right first guesses"), strict=True):
        for name in names:
            panel.plot([line["step"] for line in lines], [line[name] for line in lines], label=name)
        panel.set(xlabel="step", ylabel=title)
        panel.grid(alpha=0.3)
        panel.legend()
    _save(figure, out)


def _save(figure: Any, out: Path) -> None:
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    import_module("matplotlib.pyplot").close(figure)


if __name__ == "__main__":
    plot_logs([Path(name) for name in sys.argv[1:-1]], Path(sys.argv[-1]))
