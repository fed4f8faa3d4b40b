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
LONG = ((1, 1, 8192), (1, 1, 32768), (1, 6, 32768), (8, 6, 8192), (8, 6, 32768))  # the same, and the context
CHUNK = 4096  # rows of a long prompt that one pass reads
SEQUENCES = 16  # whose rows grow one by one in the sweep


def rows(
    context: int = 512,
    names: tuple[str, ...] = PAIR,
    late: Callable[[], bool] = lambda: False,
    long: bool = False,
    sweep: bool = False,
) -> Iterator[dict[str, Any]]:
    """The two ceilings, measured now, and passes against them; no further shape is begun once it is late.

    long: contexts of 8k and 32k, and a prompt of 32k, instead. sweep: 16 to 512 rows, instead.
    """
    rate, operations = read_rate(), matrix_rate()
    yield {"read_bytes_per_s": rate, "matrix_operations_per_s": operations}
    for name in names:
        if late():
            return
        if long or sweep:
            yield from long_rows(rate, name) if long else ()
            yield from sweep_rows(name, context) if sweep else ()
        else:
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


def long_rows(rate: float, name: str) -> Iterator[dict[str, Any]]:
    """Passes at long contexts against the floor, and a prompt of 32k read in chunks."""
    model = random_model(shape_config(name), torch.bfloat16, torch.device("cuda"))
    read, line = weight_bytes(model), kv_bytes_per_token(model)
    for batch, rows, context in LONG:
        ms, floor = pass_ms(model, batch, rows, context), (read + batch * context * line) / rate * 1e3
        yield {"model": name, "batch": batch, "rows": rows, "context": context, "exact_ms": ms, "floor_ms": floor}
        torch.cuda.empty_cache()
    prompt = LONG[-1][-1]
    chunks = [pass_ms(model, 1, CHUNK, end, prompt=True) for end in range(CHUNK, prompt + 1, CHUNK)]
    yield {"model": name, "prompt": prompt, "chunk": CHUNK, "tokens_per_s": prompt / sum(chunks) * 1e3}


def sweep_rows(name: str, context: int) -> Iterator[dict[str, Any]]:
    """Passes of 16, 32, ... 512 rows: what sixteen more of them cost."""
    model, before = random_model(shape_config(name), torch.bfloat16, torch.device("cuda")), 0.0
    for rows in range(1, 33):
        ms = pass_ms(model, SEQUENCES, rows, context)
        more = ms / before - 1 if before else 0.0
        yield {"model": name, "total_rows": SEQUENCES * rows, "context": context, "exact_ms": ms, "more": more}
        before = ms


def prompt_row(rate: float, name: str, batch: int = 8, tokens: int = 512) -> dict[str, Any]:
    """Reading prompts: milliseconds, and the share of the measured matrix rate that its products reach."""
    model = random_model(shape_config(name), torch.bfloat16, torch.device("cuda"))
    ms = pass_ms(model, batch, tokens, tokens, prompt=True)
    operations = 2 * batch * tokens * (weight_bytes(model, head=False) // 2)
    return {
        "model": name, "batch": batch, "prompt": tokens, "exact_ms": ms,
        "share_of_matrix_rate": operations / ms * 1e3 / rate,
    }  # fmt: skip


def pass_ms(model: Model, batch: int, rows: int, context: int, prompt: bool = False) -> float:
    """Median milliseconds of one pass, as a graph; prompt: the rows are the last of the prompt itself."""
    layout, packed = scene(model, batch, rows, context, prompt)
    with torch.no_grad():
        return graph_ms(lambda: model.forward(packed, layout), repeats=5 if prompt else 20)


def weight_bytes(model: DenseModel, head: bool = True) -> int:
    """Bytes of weights a pass reads: everything but the embedding's unread rows."""
    return model.weights.layer_bytes + (model.weights.head_bytes if head else 0)
