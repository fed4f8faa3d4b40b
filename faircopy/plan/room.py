"""How much memory passes need besides weights and caches: found out by running the largest one."""

from __future__ import annotations

import torch

from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.layout.tables import Tables
from faircopy.model.base import Model
from faircopy.model.runner import Runner
from faircopy.types import Batch, Draft, Request, Sequence

PAGE = 32


def pass_bytes(model: Model, tokens: int) -> int:
    """Peak bytes on the GPU of one pass over so many prompt tokens, its small cache not counted.

    Twice that: a captured step holds on to its own, and the host may be reading prompts beside it.
    """
    prompt = tuple(n % model.vocab for n in range(max(1, min(tokens, model.context - 1))))
    tables = Tables(PagePool(-(-len(prompt) // PAGE)), PAGE, reuse=False)
    runner = Runner(model, PagedLayout(tables, model.layers, model.dtype, model.device))
    seq = Sequence(0, Request(prompt), list(prompt))
    tables.open(seq)
    tables.reserve(seq, len(prompt))
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    runner.forward(Batch([seq], [len(prompt)], [0]), Draft.empty(1))
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    del runner
    torch.cuda.empty_cache()
    return 2 * peak
