"""A picture of a result file of `faircopy bench steps`: what a pass takes, as a multiple of reading its bytes once.

python -m benchmarks.floor_plot benchmarks/results/gpu-steps-h200.json docs/gpu-floor.png
python -m benchmarks.floor_plot benchmarks/results/gpu-rows-h200.json docs/gpu-rows.png      of --sweep: by rows
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main(results: str, picture: str) -> None:
    rows = json.loads(Path(results).read_text())["rows"]
    figure = by_rows(rows) if any("total_rows" in row for row in rows) else by_model(rows)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def by_rows(rows: list[dict[str, Any]]) -> Any:
    """Milliseconds over the rows of a pass, a line for each set of tiles."""
    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    for name in dict.fromkeys(row.get("tiles", row["model"]) for row in rows):
        line = [row for row in rows if row.get("tiles", row["model"]) == name]
        axis.plot(
            [row["total_rows"] for row in line], [row["exact_ms"] for row in line], "o-", label=name, markersize=3
        )
    axis.set(xlabel="rows of a pass", ylabel="milliseconds", ylim=(0, None))
    axis.legend(fontsize=8)
    return figure


def by_model(rows: list[dict[str, Any]]) -> Any:
    """Passes over their floor, a picture for each model."""
    passes = [row for row in rows if "floor_ms" in row]
    names = list(dict.fromkeys(row["model"] for row in passes))
    figure, axes = pyplot.subplots(2, -(-len(names) // 2), figsize=(3.1 * -(-len(names) // 2), 5.6), sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        draw(axis, name, [row for row in passes if row["model"] == name])
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    highest = max(row[column] / row["floor_ms"] for row in passes for column in ("exact_ms", "cublas_ms"))
    axes.flat[0].set_ylim(0.9, 1.03 * highest)
    for axis in axes[:, 0]:
        axis.set_ylabel("time of a pass over its floor")
    axes.flat[0].legend(fontsize=8)
    return figure


def draw(axis: Any, name: str, rows: list[dict[str, Any]]) -> None:
    labels = [f"{row['batch']}x{row['rows']}" for row in rows]
    for label, column, style in (("exact", "exact_ms", "o-"), ("on cuBLAS", "cublas_ms", "s--")):
        axis.plot(labels, [row[column] / row["floor_ms"] for row in rows], style, label=label, markersize=4)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_title(name)
    axis.tick_params(axis="x", labelsize=7)


if __name__ == "__main__":
    main(*sys.argv[1:])
