"""What one level of a draft costs: a head's layers and output layer over some rows, on a GPU as a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from faircopy.drafters.folder import new_head
from faircopy.drafters.head_drafter import rows_over
from faircopy.drafters.heads import Head
from faircopy.model.base import TokenWeights
from faircopy.model.trial import CachedRows, scene

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXT = 256  # keys that each row sees
REPEATS = 5


def level_times(
    target: str, weights: TokenWeights, depths: Sequence[int], device: torch.device, rows: Sequence[int] = ROWS
) -> list[dict[str, Any]]:
    """Milliseconds of a level by layers and rows, of heads with random weights in the target's type."""
    kind = weights.rows.dtype
    found = []
    for layers in depths:
        head = new_head("scylla", target, weights, layers=layers).to(device, kind).serve()
        found += [{"layers": layers, "rows": count, "ms": level_ms(head, count)} for count in rows]
    return found


@torch.no_grad()
def level_ms(head: Head, rows: int) -> float:
    """Milliseconds of one level over this many rows, each with its own context."""
    return _ms(_level(head, rows), head.device)


def _level(head: Head, count: int) -> Callable[[], object]:
    """A level as the engine runs it: packed rows over a cache of pages, on kernels where the head has them."""
    cached = CachedRows(head.layers, head.dtype, head.device, head.vocab)
    layout, packed = scene(cached, count, 1, CONTEXT)
    rows = rows_over(layout, packed, head.config.shape.head_dim)
    memory = torch.randn(1, count, head.config.shape.hidden, device=head.device, dtype=head.dtype)
    return lambda: head.step(1, memory, packed.ids[None], rows).logits.topk(10, -1)


def _ms(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        from faircopy.bench.timing import graph_ms

        return graph_ms(run)
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times[1:])
