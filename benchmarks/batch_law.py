"""Scylla's batch law against measured passes: how many rows per sequence cost no time, over batch sizes.

python -m benchmarks.batch_law --shape qwen3-0.6b --layers 8 --out benchmarks/results/batch-law-cpu.json --plot law.png
python -m benchmarks.batch_law --device cuda --shape qwen3-8b --out $OUT/batch-law-h200.json --plot $OUT/law.png

A pass of n rows for each sequence is timed (on a GPU as a graph) for every batch size. Free are the rows up to which it
takes at most 1 + SLACK times as long as with one; between two measured numbers of rows time is taken to be linear. The
two constants of the law are fitted to that, and compared with the roofline's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from faircopy.bench.plots import plot_lengths
from faircopy.bench.record import write
from faircopy.bench.shapes import SHAPES, random_model, shape_config
from faircopy.bench.steps import pass_ms, scene
from faircopy.model.base import Model
from faircopy.model.shape import shape_of_model
from faircopy.planning.devices import named_device
from faircopy.planning.roofline import BatchLaw, Roofline, fit

SLACK = 0.1
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)


def passes(model: Model, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds by batch and rows per sequence."""
    for batch in args.batches:
        for rows in (n for n in ROWS if n * batch <= args.most):
            yield {"batch": batch, "rows": rows, "ms": timed(model, batch, rows, args.context, args.repeats)}


def timed(model: Model, batch: int, rows: int, context: int, repeats: int) -> float:
    if model.device.type == "cuda":
        return pass_ms(model, batch, rows, context)
    layout, packed = scene(model, batch, rows, context)
    taken = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            model.forward(packed, layout)
            taken.append(time.perf_counter() - begin)
    return 1e3 * min(taken[1:])


def free_rows(found: list[dict[str, Any]], batch: int) -> float:
    """Rows per sequence up to which a pass takes no more than 1 + SLACK times one row's."""
    line = [(row["rows"], row["ms"]) for row in found if row["batch"] == batch]
    allowed = (1.0 + SLACK) * line[0][1]
    for (low, before), (high, after) in pairwise(line):
        if after > allowed:
            return float(low + (high - low) * max(0.0, allowed - before) / (after - before))
    return float(line[-1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*SHAPES])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, default=384, help="rows of a pass at most")
    parser.add_argument("--out")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
    config = shape_config(args.shape, **changes)
    model = random_model(config, getattr(torch, args.dtype), torch.device(args.device))
    roof = Roofline(shape_of_model(model), named_device("cpu" if args.device == "cpu" else None), args.context)
    found = list(passes(model, args))
    free = [(batch, free_rows(found, batch)) for batch in args.batches]
    measured, law = fit(free), roof.law
    for batch, rows in free:
        print(f"batch {batch:3d}  free rows per sequence {rows:6.1f} measured  {law.rows(batch):6.1f} by the roofline")
    for name, one in (("measured", measured), ("roofline", law)):
        print(f"{name}: {one.shared:.1f} / batch + {one.own:.2f}")
    if args.plot:
        draw(args.plot, f"{args.shape}, {args.dtype}, {args.context} tokens, {args.device}", args.batches, free, law)
    if args.out:
        settings = {**vars(args), "plot": str(args.plot), "slack": SLACK, "threads": torch.get_num_threads()}
        laws = {"measured": measured._asdict(), "roofline": law._asdict(), "free_rows": free}
        write(args.out, settings | laws, found)


def draw(file: Path, title: str, batches: list[int], free: list[tuple[int, float]], law: BatchLaw) -> None:
    plot_lengths(
        file,
        title,
        {
            f"measured, {1 + SLACK:.1f} times one row": [(batch, max(0.0, rows - 1.0)) for batch, rows in free],
            "roofline": [(batch, law.k(batch)) for batch in batches],
        },
    )


if __name__ == "__main__":
    main()
