"""What one pass costs on the device, by model shape, batch and rows per sequence, against the floor."""

from __future__ import annotations

from typing import Any

import torch

from faircopy.bench.timing import graph_ms
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.layout.tables import Tables
from faircopy.model.base import Model
from faircopy.types import Batch, Draft, Request, Sequence


def scene(model: Model, batch: int, rows: int, context: int, page: int = 32) -> tuple[PagedLayout, Packed]:
    """A layout filled with noise and a pass of `rows` tokens for each of `batch` sequences at this context."""
    per = -(-(context + rows) // page)
    tables = Tables(PagePool(batch * per), page, reuse=False)
    layout = PagedLayout(tables, model.layers, model.dtype, model.device)
    for layer in range(len(model.layers)):
        for pool in layout.pools(layer):
            pool.normal_()
    seqs = []
    for n in range(batch):
        seq = Sequence(n, Request((1,)), [(7 * i + n) % 1000 for i in range(context)])
        tables.open(seq)
        tables.reserve(seq, context + rows)
        layout.settle(seq, context - 1)
        seqs.append(seq)
    nodes = [list(range(1, rows)) for _ in seqs]
    packed = layout.pack(Batch(seqs, [context] * batch, [rows - 1] * batch), Draft.chains(nodes))
    return layout, packed


def step_ms(model: Model, batch: int, rows: int, context: int) -> float:
    """Median milliseconds of one pass, as a graph."""
    layout, packed = scene(model, batch, rows, context)
    with torch.no_grad():
        return graph_ms(lambda: model.forward(packed, layout))


def weight_bytes(model: Any) -> int:
    """Bytes of weights a pass reads: everything but the embedding's unread rows."""
    layers = [p for layer in model._layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return sum(p.weight.nbytes for p in [*layers, model._head])


def cache_bytes(model: Model, batch: int, context: int) -> int:
    return sum(2 * s.kv_heads * s.head_dim * 2 * batch * context for s in model.layers)
