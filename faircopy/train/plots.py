"""Loss curves as a picture, from the JSONL logs of the training loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

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
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    plot_logs([Path(name) for name in sys.argv[1:-1]], Path(sys.argv[-1]))
