"""Puts an engine together from a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faircopy.config import EngineConfig
from faircopy.draft_length import DraftLengths, FixedLength
from faircopy.drafters.base import Drafter, NoDrafter
from faircopy.drafters.head_drafter import HeadDrafter
from faircopy.drafters.heads import Head
from faircopy.drafters.model import ModelDrafter
from faircopy.engine import Engine
from faircopy.layout.base import Layout
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.memory import page_count
from faircopy.model.base import Model
from faircopy.model.runner import Runner
from faircopy.scheduler import Scheduler
from faircopy.strategy import STRATEGIES
from faircopy.verify.exact import ExactVerifier
from faircopy.verify.rejection import RejectionVerifier

if TYPE_CHECKING:
    from faircopy.kernels.gpu.suite import Suite
    from faircopy.replay import CapturedRunner


def build_engine(
    target: Model,
    drafter: Drafter | None = None,
    *,
    draft: Model | Head | None = None,
    config: EngineConfig | None = None,
    eos: frozenset[int] = frozenset(),
    draft_lengths: DraftLengths | None = None,
    suite: Suite | None = None,
) -> Engine:
    """An engine with one page pool and one set of tables for the target and its draft model or head, if any.

    draft_lengths: config.k for every sequence unless given. suite: kernels to run with instead of the device's own.
    """
    config = config or EngineConfig()
    models: list[Model | Head] = [target] if draft is None else [target, draft]
    strategy, chunk = STRATEGIES[config.strategy], config.chunk_on(target.device)
    tables = strategy.tables(PagePool(page_count(models, config, strategy.tokens(target.context, config))), config)
    runner = Runner(target, strategy.layout(tables, target, config, False, suite))
    sampled = config.verifier == "rejection"
    draft_layouts: tuple[Layout, ...] = ()
    if isinstance(draft, Head):
        pages = strategy.pages(tables, draft, config, suite)
        drafter, draft_layouts = HeadDrafter(draft, pages, chunk, sampled), (pages,)
    elif draft is not None:
        layout = strategy.layout(tables, draft, config, True, suite)
        drafter, draft_layouts = ModelDrafter(Runner(draft, layout), target.vocab, chunk, sampled), (layout,)
    drafter = drafter or NoDrafter()
    runner.wants = drafter.wants
    captured = None if sampled or not config.graphs else build_captured(runner, drafter, config)
    lengths, policy = draft_lengths or FixedLength(config.k), strategy.policy(config)
    scheduler = Scheduler(tables, runner.layout.cached, policy, lengths, chunk, captured)
    verifier = RejectionVerifier() if sampled else ExactVerifier()
    ends = frozenset(token for token in eos if token < target.vocab)  # some configurations name ids there are none of
    return Engine(runner, tables, drafter, verifier, scheduler, ends, captured, draft_layouts)


def build_captured(target: Runner, drafter: Drafter, config: EngineConfig) -> CapturedRunner | None:
    """Captured steps, where all parts of a step are kernels; None: every step is eager."""
    layout = target.layout
    if not isinstance(layout, PagedLayout) or layout.suite is None:
        return None
    from faircopy.capture import can_capture
    from faircopy.replay import CapturedRunner

    captured = drafter.capture(config.max_batch) if can_capture(target.model, layout) else None
    if captured is None:
        return None
    return CapturedRunner(
        target.model,
        layout,
        captured,
        config.max_batch,
        config.k,
        pack_rows=config.pack_rows,
        expensive_drafts=drafter.expensive,
    )
