"""`LLM(memory=...)`: a configuration whose weights, drafter, cache, graphs and passes together stay below a limit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from faircopy.config import EngineConfig, parse_bytes
from faircopy.errors import RequestError
from faircopy.model.base import Model, ModelShape
from faircopy.model.shape import shape_of_checkpoint, shape_of_model
from faircopy.model.shape_share import Split
from faircopy.planning.devices import named_device
from faircopy.planning.drafts import shape_of_draft
from faircopy.planning.ladder import NONE, Speed
from faircopy.planning.measured import Measured
from faircopy.planning.memory import MARGIN, Setup
from faircopy.planning.plan import Plan, make_plan, with_all_pages
from faircopy.types import SamplingParams


def fit_into_memory(target: str | Model, draft: Any, config: EngineConfig) -> tuple[Any, EngineConfig, Plan]:
    """The draft, or None if it does not fit, and a configuration that keeps config.memory; before anything is loaded.

    Draft tokens, levels of a head, the prompt chunk and the bytes for keys and values are chosen. Where accepted tokens
    and passes were measured before, the setup with the most tokens per second is taken; else the one that accepts most,
    and whether that pays is measured while it runs.
    """
    assert config.memory is not None, "the caller asks for a limit"
    budget, device = parse_bytes(config.memory), config.torch_device()
    shape = _shape(target, config, device)
    drafter = shape_of_draft(draft, shape.dtype, device)
    machine = named_device("cpu" if device.type == "cpu" else None)
    setup, asked = _setup(shape, config), config.memory
    here = device if shape.whole else None  # passes were timed of whole models
    known = Measured.of(shape.name, [drafter], shape.dtype, here, config.max_batch * (config.k + 1))
    timed, source = known.knows(drafter), known.source(drafter)
    speed = known.alone_and_full if timed else partial(_tokens_per_pass, known)
    plan = make_plan(setup, [drafter], config.k, budget, machine, speed, asked, timed, source)
    chosen, drafts = plan.setup, plan.chosen.rung != NONE
    fitted = replace(
        config,
        memory=None,
        planned_tokens=None,
        k=chosen.nodes,
        draft_levels=chosen.levels if drafts and drafter.tree else None,
        chunk=chosen.chunk,
        cache_memory=_pages(chosen, budget, config) * sum(chosen.page_bytes()),
    )
    return draft if drafts else None, fitted, plan


def check_limited(params: SamplingParams) -> None:
    """Refuse what the limit does not count."""
    if params.prompt_logprobs is not None:
        problem = "the logits of a whole prompt are not counted in memory="
        raise RequestError("prompt_logprobs", params.prompt_logprobs, problem, "limit the cache alone: cache_memory=")


def _shape(target: str | Model, config: EngineConfig, device: torch.device) -> ModelShape:
    if isinstance(target, str):
        split = Split(config.tensor_parallel, config.pipeline_parallel)
        return shape_of_checkpoint(target, config.torch_dtype(), device, split)
    return shape_of_model(target)


def _setup(shape: ModelShape, config: EngineConfig) -> Setup:
    """Without a number of planned tokens, one sequence must fit that fills its context."""
    device = config.torch_device()
    whole = -(-shape.context // config.page)
    return Setup(
        target=shape,
        draft=shape_of_draft(None, shape.dtype, device),
        nodes=0,
        levels=0,
        batch=config.max_batch,
        tokens=min(config.planned_tokens or shape.context, shape.context),
        device=device,
        page=config.page,
        chunk=config.chunk_on(device),
        rejection=config.verifier == "rejection",
        graphs=config.graphs,
        margin=MARGIN,
        pages=None if config.planned_tokens else whole,
    )


def _pages(setup: Setup, budget: int, config: EngineConfig) -> int:
    most = config.max_batch * -(-setup.target.context // config.page)
    return with_all_pages(setup, budget, most).pool_pages


def _tokens_per_pass(known: Measured, setup: Setup) -> Speed:
    """More accepted tokens are better, whatever they cost in time."""
    per_step = 1.0 + known.accepted(setup)
    return Speed(per_step, setup.batch * per_step)
