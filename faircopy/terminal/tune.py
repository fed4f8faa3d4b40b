"""`faircopy tune`: the fastest tiles for one model's products on this GPU."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from faircopy.model.loader import find_checkpoint, load_config
from faircopy.terminal.bench import needs_gpu


def tune(target: str) -> None:
    """Time the tiles of a checkpoint's products and keep the fastest in the cache folder, for this kind of device."""
    needs_gpu()
    import torch

    from faircopy.bench.shapes import products_of
    from faircopy.bench.tune import entries, time_shapes
    from faircopy.kernels.gpu import tables

    shapes = [(*shape, name == "gate_up") for name, shape in products_of(load_config(find_checkpoint(target))).items()]
    records: list[dict[str, Any]] = []
    with Progress(transient=True) as progress:
        for shape in progress.track(shapes, description="timing tiles"):
            records += time_shapes([shape])
    for name, entry in entries(records).items():
        tables.keep(torch.device("cuda"), name, entry)
    Console().print(_summary(records))


def _summary(records: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE, title="microseconds of a product")
    for name in ("outputs x inputs", "rows", "fastest tile", "cuBLAS"):
        table.add_column(name, justify="right")
    for record in records:
        best = min(row[-1] for row in record["tiles"])
        table.add_row(
            "x".join(map(str, record["shape"])), str(record["rows"]), f"{best:.1f}", f"{record['cublas']:.1f}"
        )
    return table
