"""How much memory there is for keys and values: what passes need besides is found out by running the largest one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from faircopy.config import EngineConfig
from faircopy.drafters.heads import Head
from faircopy.errors import ConfigError
from faircopy.layout.base import kv_bytes_per_token
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model
from faircopy.model.runner import Runner
from faircopy.types import Batch, Draft, Request, Sequence

PAGE_TOKENS = 32  # of the small cache for the trial pass


def page_count(models: Seq[Model | Head], config: EngineConfig, max_tokens: int) -> int:
    """How many pages of all models' keys and values the memory holds, up to the most tokens that could be used."""
    if config.memory is not None:
        problem = "a limit for everything is shared out before models are loaded, by LLM"
        raise ConfigError("memory", config.memory, problem, "limit keys and values with cache_memory=")
    page_bytes = config.page * sum(map(kv_bytes_per_token, models))
    device = models[0].device
    measured = config.cache_memory is None and device.type == "cuda"
    whole = [model for model in models if not isinstance(model, Head)] if measured else []
    choices = 12 * config.max_batch * (config.k + 1) * models[0].vocab  # a batch's logits in float32, three times
    choices += 8 * config.max_batch * models[0].vocab if measured else 0  # token counts and biases of captured steps
    passes = sum(pass_bytes(model, config.chunk_on(device)) for model in whole) + choices
    pages = min(config.cache_bytes(device, passes) // max(1, page_bytes), -(-max_tokens // config.page))
    if pages < 1:
        raise ConfigError("cache_memory", config.cache_memory, f"less than one page of {page_bytes} bytes", "raise it")
    return pages


def pass_bytes(model: Model, tokens: int) -> int:
    """Peak bytes on the GPU of one pass over this many prompt tokens, its small cache not counted.

    Twice that: a captured step keeps its own memory, and the host may read prompts beside it.
    """
    prompt = tuple(n % model.vocab for n in range(max(1, min(tokens, model.context - 1))))
    tables = BlockTables(PagePool(-(-len(prompt) // PAGE_TOKENS)), PAGE_TOKENS, reuse=False)
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
