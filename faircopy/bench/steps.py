"""`faircopy bench steps`: what a pass costs on the device, by shape, batch and rows per sequence, against the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from faircopy.bench.shapes import PAIR, random_model, shape_config
from faircopy.bench.timing import graph_ms, matrix_rate, read_rate
from faircopy.layout.base import kv_bytes_per_token
from faircopy.model.base import Model
from faircopy.model.trial import scene
from faircopy.model.weights import DenseModel

PASSES = ((1, 1), (1, 6), (8, 1), (8, 6), (32, 1), (32, 6), (64, 6))  # batch, rows per sequence


def rows(
    context: int = 512, names: tuple[str, ...] = PAIR, late: Callable[[], bool] = lambda: False
) -> Iterator[dict[str, Any]]:
    """The two ceilings, measured now, and passes against them; no further shape is begun once it is late."""
    rate, operations = read_rate(), matrix_rate()
    yield {"read_bytes_per_s": rate, "matrix_operations_per_s": operations}
    for name in names:
        if not late():
            yield from step_rows(rate, context, name)
            yield prompt_row(operations, name)


def step_rows(rate: float, context: int, name: str) -> Iterator[dict[str, Any]]:
    """One row per pass: milliseconds exact and on cuBLAS, medians of graph replays, and the floor."""
    times: dict[bool, list[float]] = {}
    for exact in (True, False):
        model = random_model(shape_config(name), torch.bfloat16, torch.device("cuda"), exact)
        times[exact] = [pass_ms(model, batch, rows, context) for batch, rows in PASSES]
        read = weight_bytes(model)
        floors = [(read + batch * context * kv_bytes_per_token(model)) / rate * 1e3 for batch, _ in PASSES]
        del model
        torch.cuda.empty_cache()
    for n, (batch, rows) in enumerate(PASSES):
        yield {
            "model": name, "batch": batch, "rows": rows, "context": context, "exact_ms": times[True][n],
            "cublas_ms": times[False][n], "floor_ms": floors[n],
        }  # fmt: skip


def prompt_row(rate: float, name: str, batch: int = 8, tokens: int = 512) -> dict[str, Any]:
    """Reading prompts: milliseconds, and the share of the measured matrix rate that its products reach."""
    model = random_model(shape_config(name), torch.bfloat16, torch.device("cuda"))
    ms = pass_ms(model, batch, tokens, tokens, first=True)
    operations = 2 * batch * tokens * (weight_bytes(model, head=False) // 2)
    return {
        "model": name, "batch": batch, "prompt": tokens, "exact_ms": ms,
        "share_of_matrix_rate": operations / ms * 1e3 / rate,
    }  # fmt: skip


def pass_ms(model: Model, batch: int, rows: int, context: int, first: bool = False) -> float:
    """Median milliseconds of one pass, as a graph; first: the rows are the prompt itself."""
    layout, packed = scene(model, batch, rows, context, first)
    with torch.no_grad():
        return graph_ms(lambda: model.forward(packed, layout))


def weight_bytes(model: DenseModel, head: bool = True) -> int:
    """Bytes of weights a pass reads: everything but the embedding's unread rows."""
    return model.weights.layer_bytes + (model.weights.head_bytes if head else 0)
