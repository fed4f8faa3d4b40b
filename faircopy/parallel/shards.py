"""The shares of models that one rank holds, and their caches: what rank 0's messages act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from faircopy.layout.base import Packed
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model, Taps
from faircopy.model.loader import load_model
from faircopy.model.transformers_backend import TransformersModel
from faircopy.parallel.group import Group
from faircopy.threads import use_threads


class Load(NamedTuple):
    """Read a share of a checkpoint, as the next model."""

    path: str
    dtype: torch.dtype | None
    exact: bool
    threads: int


class Release(NamedTuple):
    """Free the stock copies of weights that a model has packed."""

    model: int


class NewCache(NamedTuple):
    """Make a cache for a model."""

    cache: int
    model: int
    pages: int
    page: int
    exact: bool


class DropCache(NamedTuple):
    cache: int


class Move(NamedTuple):
    """Copy keys and values from slots to slots."""

    cache: int
    source: Tensor
    target: Tensor


class Run(NamedTuple):
    """One pass of a model."""

    model: int
    cache: int
    packed: Packed


Order = Load | Release | NewCache | DropCache | Move | Run


class Shards:
    """A rank's shares and caches by number."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._models: list[Model] = []
        self._caches: dict[int, PagedLayout] = {}
        self._acts: dict[type, Callable[[Any], object]] = {
            Load: self._load,
            Release: self._release,
            NewCache: self._new_cache,
            DropCache: lambda order: self._caches.pop(order.cache),
            Move: lambda order: self._caches[order.cache].move(order.source, order.target),
            Run: self._run,
        }

    def serve(self) -> None:
        """Carry out the next message."""
        orders: list[Order] = self.group.fetch()
        for order in orders:
            self._acts[type(order)](order)

    def _load(self, order: Load) -> None:
        use_threads(order.threads)
        self._models.append(load_share(self.group, order))

    def _release(self, order: Release) -> None:
        model = self._models[order.model]
        if isinstance(model, TransformersModel):
            model.release_weights()

    def _new_cache(self, order: NewCache) -> None:
        tables, model = BlockTables(PagePool(order.pages), order.page, reuse=False), self._models[order.model]
        self._caches[order.cache] = PagedLayout(tables, model.layers, model.dtype, model.device, order.exact)

    @torch.no_grad()
    def _run(self, order: Run) -> None:
        run_share(self.group, self._models[order.model], order.packed, self._caches[order.cache])


def load_share(group: Group, order: Load) -> Model:
    return load_model(order.path, order.dtype, group.device, order.exact, ranks=group)


def run_share(group: Group, model: Model, packed: Packed, cache: PagedLayout, taps: Taps | None = None) -> Tensor:
    """A pass over this rank's share; a row is healthy if it is on every rank, since each sees its own heads."""
    logits = model.forward(packed, cache, *([] if taps is None else [taps]))
    assert cache.healthy is not None, "the last layer notes it"
    cache.healthy = group.gather(cache.healthy).all(0)
    return logits
