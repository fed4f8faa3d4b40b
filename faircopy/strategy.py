"""The published ways to hold a ragged batch, as pairs of a policy and a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from faircopy.config import EngineConfig
from faircopy.drafters.heads import Head
from faircopy.layout.base import Layout
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model
from faircopy.papers.dense import AlignedLayout, DenseLayout, SharedLayout
from faircopy.papers.policies import SameLength, WholeBatches
from faircopy.papers.row_tables import RowTables
from faircopy.policy import FirstCome, JoinRule, Policy

if TYPE_CHECKING:
    from faircopy.kernels.gpu.suite import Suite

# For a model, or for a draft model; with kernels of one's own instead of the device's, where a layout has kernels.
MakeLayout = Callable[[BlockTables, Model, EngineConfig, bool, "Suite | None"], Layout]


GROUPS = 8  # where captured steps have to stop, a full queue's sequences join when one in this many places is free


@dataclass(frozen=True, slots=True)
class Strategy:
    """Which sequences run together, and how their keys and values lie in memory."""

    layout: MakeLayout
    refills: bool  # as published: new sequences join at once, or when the whole batch is done
    dense: bool = True
    same_length: bool = False

    def tables(self, pool: PagePool, config: EngineConfig) -> BlockTables:
        return RowTables(pool, config.page) if self.dense else BlockTables(pool, config.page, config.prefix_reuse)

    def tokens(self, context: int, config: EngineConfig) -> int:
        """How many tokens' keys a full batch could ever use; a shared length may be k + 1 times that of its rows."""
        rows = config.window() if self.same_length else config.max_batch
        width = context * (config.k + 1) if self.dense else -(-context // config.page) * config.page
        return rows * width

    def pages(self, tables: BlockTables, head: Head, config: EngineConfig, suite: Suite | None) -> PagedLayout:
        """A head's cache: in the target's own pages, or in pages beside its rectangle."""
        held = tables.paged() if isinstance(tables, RowTables) else tables
        return _paged(held, head, config, True, suite)

    def policy(self, config: EngineConfig, joins: JoinRule | None = None) -> Policy:
        """joins: of captured steps, which take longer where sequences join, so that those of a full queue do so in
        groups; None: there are no captured steps."""
        if self.same_length:
            return SameLength(config.max_batch, config.window(), config.pool_sort)
        refills = self.refills if config.refill is None else config.refill
        if not refills:
            return WholeBatches(config.max_batch)
        if joins is None:
            return FirstCome(config.max_batch)
        return FirstCome(config.max_batch, max(1, config.max_batch // GROUPS), joins)


def _paged(
    tables: BlockTables, model: Model | Head, config: EngineConfig, drafting: bool, suite: Suite | None
) -> PagedLayout:
    return PagedLayout(tables, model.layers, model.dtype, model.device, config.exact, suite)


def _dense(kind: type[DenseLayout], packs: bool) -> MakeLayout:
    def make(tables: BlockTables, model: Model, config: EngineConfig, drafting: bool, suite: Suite | None) -> Layout:
        assert isinstance(tables, RowTables)
        return kind(tables, model.layers, model.dtype, model.device, packs)

    return make


def _aligned(
    tables: BlockTables, model: Model, config: EngineConfig, drafting: bool, suite: Suite | None, lazy: bool
) -> Layout:
    """In EQSPEC only the draft skips sequences that are done before their batch is."""
    assert isinstance(tables, RowTables)
    keeps_free_rows = not (lazy or drafting)
    return AlignedLayout(tables, model.layers, model.dtype, model.device, lazy, keeps_free_rows)


STRATEGIES: dict[str, Strategy] = {
    "ragged": Strategy(_paged, refills=True, dense=False),
    "padded": Strategy(_dense(SharedLayout, packs=False), refills=False),
    "realign": Strategy(partial(_aligned, lazy=False), refills=False),
    "pool": Strategy(partial(_aligned, lazy=True), refills=True, same_length=True),
    "unpad_cache": Strategy(_dense(DenseLayout, packs=False), refills=False),
    "unpad_inputs": Strategy(_dense(SharedLayout, packs=True), refills=False),
    "ems": Strategy(_dense(DenseLayout, packs=True), refills=False),
}
