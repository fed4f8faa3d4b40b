"""Puts an engine together: loads target and draft, and builds all parts from a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from faircopy.cache import KeptTable, device_kind, library_versions, source_hash
from faircopy.config import EngineConfig
from faircopy.costs import CostTable
from faircopy.draft_length import (
    AUTO_CHAIN,
    BatchLength,
    DraftLengths,
    FixedLength,
    NoLength,
    Room,
    own_room,
    shared_room,
)
from faircopy.drafters.base import Drafter, NoDrafter, captured_drafter
from faircopy.drafters.folder import load_head
from faircopy.drafters.head_drafter import HeadDrafter
from faircopy.drafters.heads import Head
from faircopy.drafters.model import ModelDrafter
from faircopy.drafters.ngram import NgramDrafter
from faircopy.drafters.per_request import PerRequestDrafter
from faircopy.engine import Engine
from faircopy.errors import ConfigError
from faircopy.kernels.memory import give_back_free_memory
from faircopy.kernels.ranks import OneRank
from faircopy.layout.base import Layout
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.measured_acceptance import HistoryKeeper
from faircopy.measured_costs import cost_table, known_costs
from faircopy.memory import page_count
from faircopy.model.anatomy import file_states, identity, is_head
from faircopy.model.base import Model
from faircopy.model.decoder import Decoder
from faircopy.model.loader import load_model, load_tokenizer, vocabulary_difference
from faircopy.model.runner import Runner
from faircopy.model.selftest import self_test
from faircopy.model.shape import shape_of_model
from faircopy.model.transformers_backend import TransformersModel
from faircopy.parallel.launch import start_ranks
from faircopy.parallel.model import ParallelModel, Pipeline, SharedModel
from faircopy.parallel.shards import Load
from faircopy.planner import AutoLength
from faircopy.planning.devices import named_device
from faircopy.planning.roofline import Roofline
from faircopy.progress import doing
from faircopy.scheduler import Scheduler
from faircopy.strategy import STRATEGIES
from faircopy.verify.exact import ExactVerifier
from faircopy.verify.rejection import RejectionVerifier

if TYPE_CHECKING:
    from faircopy.kernels.gpu.suite import Suite
    from faircopy.replay import CapturedPasses, CapturedRunner

LAW_CONTEXT = 1024  # tokens of a sequence in the roofline of k="law", if none are planned


def load_target(target: Any, config: EngineConfig, field: str = "target") -> Model:
    """A model from a folder or hub id, loaded and tested; a model passes through. field: for errors."""
    if isinstance(target, str):
        target = _loaded_once(target, config)
    elif config.ranks > 1 and not isinstance(target, SharedModel):
        named = "tensor_parallel" if config.tensor_parallel > 1 else "pipeline_parallel"
        problem = "each rank reads its share, and needs the path of a checkpoint"
        raise ConfigError(named, config.ranks, problem, f"pass a folder or a hub id as {field}")
    if not hasattr(target, "forward") or not hasattr(target, "layers"):
        raise ConfigError(field, target, "neither a folder, a hub id nor a model", "pass the path of a checkpoint")
    return target  # type: ignore[no-any-return]


def _loaded_once(name: str, config: EngineConfig) -> Model:
    """On a CPU a checkpoint that another LLM has in use in the same way is not loaded again."""
    dtype, device = config.torch_dtype(), config.torch_device()
    if device.type != "cpu" or config.ranks > 1:
        return _loaded(name, config)
    key = (file_states(name), dtype, config.exact, config.k_groups, torch.get_num_threads())
    model = _IN_USE.get(key)
    if model is None:
        model = _IN_USE[key] = _loaded(name, config)
    return model


def _loaded(name: str, config: EngineConfig) -> Model:
    with doing(f"{name}: reading and packing weights"):
        model = _read(name, config)
    with doing(f"{name}: testing that rows do not depend on their batch"):
        test_once(model, config.exact)
    if isinstance(model, TransformersModel | SharedModel):
        model.release_weights()
    give_back_free_memory()
    return model


def _read(name: str, config: EngineConfig) -> Model:
    """The whole model, or this rank's share of it in a group of ranks that are started now."""
    dtype, device = config.torch_dtype(), config.torch_device()
    if config.ranks > 1:
        pipeline = config.pipeline_parallel > 1
        order = Load(name, dtype, config.exact, torch.get_num_threads(), pipeline)
        return (Pipeline if pipeline else ParallelModel)(start_ranks(config.ranks, device), order)
    return load_model(name, dtype, device, config.exact, ranks=OneRank() if config.k_groups else None)


_IN_USE: WeakValueDictionary[Any, Model] = WeakValueDictionary()


def test_once(model: Model, exact: bool) -> None:
    """The self-test, unless this checkpoint has passed it on this machine, in this type and with this very code."""
    checkpoint = identity(model.name)
    code = f"{source_hash()} {library_versions()}"
    key = f"{checkpoint} {model.backend} {model.dtype} {device_kind(model.device)} {code} exact={exact}"
    if checkpoint is not None and _PASSED.get(key) is not None:
        return
    rows = self_test(model, exact)
    if checkpoint is not None:
        _PASSED.put(key, rows)


_PASSED = KeptTable("self-tests")


def load_draft(
    draft: Any, target: Model, tokenizer: Any | None, config: EngineConfig
) -> tuple[Drafter | None, Model | Head | None]:
    """The drafter, or the model or head to draft with, from what a user passes as draft=."""
    draft = os.fspath(draft) if isinstance(draft, os.PathLike) else draft
    if draft is None or isinstance(draft, Drafter):
        return draft, None
    if draft == "ngram":
        return NgramDrafter(config.lookup_min, config.lookup_max), None
    if isinstance(draft, str) and is_head(draft):
        return None, load_head(draft, target, config.draft_levels)
    model = load_target(draft, replace(config, tensor_parallel=1, pipeline_parallel=1, k_groups=False), "draft")
    if isinstance(target, ParallelModel) and isinstance(draft, str) and _split_pays(target, model, config):
        model = ParallelModel(target.group, Load(draft, model.dtype, config.exact, torch.get_num_threads()))
    theirs = load_tokenizer(draft) if isinstance(draft, str) else tokenizer
    difference = vocabulary_difference(tokenizer, theirs, (target.vocab, model.vocab))
    if difference:
        problem = f"draft and target have different vocabularies: {difference}"
        raise ConfigError("draft", model.name, problem, "use a draft with the target's tokenizer")
    return None, model


def _split_pays(target: ParallelModel, draft: Model, config: EngineConfig) -> bool:
    """Whether measured costs say that a draft model is faster on all ranks; without any it stays on rank 0."""
    known = known_costs(target, draft)
    if known is None or not known.draft.points or not isinstance(draft, Decoder):
        return False
    rows = config.max_batch
    return target.split_pays(known.draft(rows), len(draft.layers), rows, draft.spec.hidden)


def build_engine(
    target: Model,
    drafter: Drafter | None = None,
    *,
    draft: Model | Head | None = None,
    config: EngineConfig | None = None,
    eos: frozenset[int] = frozenset(),
    draft_lengths: DraftLengths | None = None,
    suite: Suite | None = None,
    limited: bool = False,
) -> Engine:
    """An engine with one page pool and one set of tables for the target and its draft model or head, if any.

    draft_lengths: config.k for every sequence unless given. suite: kernels to run with instead of the device's own.
    limited: all memory was planned: `warm_up` tries no larger passes than those that were.
    """
    config = config or EngineConfig()
    models: list[Model | Head] = [target] if draft is None else [target, draft]
    strategy = STRATEGIES[config.strategy]
    tables = strategy.tables(PagePool(page_count(models, config, strategy.tokens(target.context, config))), config)
    runner = Runner(target, strategy.layout(tables, target, config, False, suite))
    pool = torch.cuda.graph_pool_handle() if target.device.type == "cuda" else None  # of all graphs: they take turns
    draft_layouts: tuple[Layout, ...] = ()
    if draft is not None:
        drafter, cache = _drafter_of(draft, target, tables, config, suite, pool, limited)
        draft_layouts = (cache,)
    drafter = default = drafter or NoDrafter()
    if config.drafter_per_request:
        others = {"ngram": NgramDrafter(config.lookup_min, config.lookup_max)}
        drafter = PerRequestDrafter(drafter, others)
    room = _room(drafter, config, target.device) if draft_lengths is None else draft_lengths.room
    runner.wants = drafter.wants
    runner.passes = build_passes(runner, config, pool, limited)
    steps = build_captured(runner, drafter, config, pool, room)
    captured = None if isinstance(steps, str) else steps
    kept = _history_keeper(target, draft, default, config) if draft_lengths is None else None
    lengths: DraftLengths = NoLength()
    if type(drafter) is not NoDrafter:  # a subclass may draft
        table = partial(cost_table, target, draft, config, default, room)
        lengths = draft_lengths or _draft_lengths(target, draft, config, captured, table, room, kept)
    mixed = None if runner.passes is None else partial(runner.passes.mixed_step_rows, config.step_ms)
    policy = strategy.policy(config, captured)
    chunk = config.chunk_on(target.device)
    scheduler = Scheduler(tables, runner.layout.cached, policy, lengths, chunk, captured, mixed)
    verifier = RejectionVerifier() if config.verifier == "rejection" else ExactVerifier()
    ends = frozenset(token for token in eos if token < target.vocab)  # some configurations name ids there are none of
    stages = target.stages if isinstance(target, Pipeline) else 1
    return Engine(runner, tables, drafter, verifier, scheduler, ends, steps, draft_layouts, lengths, stages, kept)


def _drafter_of(
    draft: Model | Head,
    target: Model,
    tables: BlockTables,
    config: EngineConfig,
    suite: Suite | None,
    pool: Any,
    limited: bool,
) -> tuple[Drafter, Layout]:
    """The drafter that a model or head makes, and its cache. pool: of graphs. limited: see build_engine."""
    strategy, chunk = STRATEGIES[config.strategy], config.chunk_on(target.device)
    sampled = config.verifier == "rejection"
    if isinstance(draft, Head):
        pages = strategy.pages(tables, draft, config, suite)
        return HeadDrafter(draft, pages, chunk, sampled, _chain_nodes(target, draft, config)), pages
    layout = strategy.layout(tables, draft, config, True, suite)
    small = Runner(draft, layout)
    small.passes = build_passes(small, config, pool, limited)
    return ModelDrafter(small, target.vocab, chunk, sampled), layout


def _draft_lengths(
    target: Model,
    draft: Model | Head | None,
    config: EngineConfig,
    captured: CapturedRunner | None,
    table: Callable[[], CostTable | None],
    room: Room,
    kept: HistoryKeeper | None,
) -> DraftLengths:
    """As the configuration says. table: of what passes cost. kept: what earlier runs learned of the drafter."""
    most = config.k if captured is None else min(config.k, captured.max_nodes)
    if config.law:
        tokens = min(target.context, config.planned_tokens or LAW_CONTEXT)
        roof = Roofline(shape_of_model(target), named_device("cpu" if target.device.type == "cpu" else None), tokens)
        return BatchLength(roof.law.k, most, config.max_batch)
    if not config.auto:
        return FixedLength(config.k)
    history = None if kept is None else kept.known
    chains = _chain_nodes(target, draft, config) if isinstance(draft, Head) else 0
    return AutoLength(most, config.quality, table(), room, chains, history)


def _history_keeper(
    target: Model, draft: Model | Head | None, drafter: Drafter, config: EngineConfig
) -> HistoryKeeper | None:
    """For k="auto", if the drafter is one that other processes know, too."""
    if not (config.auto and config.acceptance_history) or config.verifier != "exact":
        return None
    if type(drafter) is NgramDrafter:
        return HistoryKeeper(target.name, "ngram")
    if draft is None or (isinstance(draft, Head) and not is_head(draft.name)):
        return None
    return HistoryKeeper(target.name, draft.name)


def _chain_nodes(target: Model, head: Head, config: EngineConfig) -> int:
    """Nodes up to which the drafts of a head that grows trees are chains: with k="auto" on a GPU, where attention of
    trees takes longer. One node more than the head has levels stays empty; a chain's rows are one tile."""
    if not (config.auto and head.grows_trees and target.device.type == "cuda") or config.share_nodes:
        return 0
    from faircopy.replay import nodes_in_a_tile

    return min(AUTO_CHAIN, head.levels + 1, nodes_in_a_tile([*target.layers, *head.layers]))


def _room(drafter: Drafter, config: EngineConfig, device: torch.device) -> Room:
    """How many of a batch's nodes one sequence may have: more than its share where they go to the surest ones."""
    wanted = device.type == "cpu" if config.share_nodes is None else config.share_nodes
    shares = wanted and config.auto and drafter.ranks_nodes and config.quality in ("explicit", "both")
    return partial(shared_room, most=config.k) if shares else own_room


def build_passes(
    runner: Runner, config: EngineConfig, pool: Any = None, limited: bool = False
) -> CapturedPasses | None:
    """The model's eager passes as graphs; None where there are none, or they cannot be captured. pool: of graphs.

    limited: see build_engine.
    """
    layout = runner.layout
    if not config.graphs or not isinstance(layout, PagedLayout) or layout.suite is None or not layout.layers:
        return None
    from faircopy.capture import eager_because
    from faircopy.replay import CapturedPasses

    if eager_because(runner.model, layout):
        return None
    if not limited:
        return CapturedPasses(runner.model, layout, config.max_batch, runner.wants, pool)
    wanted = config.max_batch * (config.k + 1)  # prompts have none
    rows = config.chunk_on(runner.model.device) + wanted  # as planning/memory.py counts them
    return CapturedPasses(runner.model, layout, config.max_batch, runner.wants, pool, rows, wanted)


def build_captured(
    target: Runner, drafter: Drafter, config: EngineConfig, pool: Any = None, room: Room = own_room
) -> CapturedRunner | str:
    """Captured steps, where all parts of a step can be captured; else why every step is eager."""
    layout = target.layout
    if config.verifier == "rejection" or not config.graphs:
        return "rejection sampling draws on the host" if config.graphs else "graphs=False"
    if not isinstance(layout, PagedLayout) or layout.suite is None:
        return f"strategy {config.strategy!r} on {target.model.device.type} has no captured steps"
    from faircopy.capture import eager_because
    from faircopy.replay import CapturedRunner

    problem = eager_because(target.model, layout)
    captured = captured_drafter(drafter, config.max_batch) if problem is None else None
    if captured is None:
        return problem or f"{type(drafter).__name__} drafts on the host"
    return CapturedRunner(
        target.model,
        layout,
        captured,
        config.max_batch,
        config.k,
        pack_rows=config.pack_rows,
        expensive_drafts=drafter.expensive,
        room=room,
        pool=pool,
    )
