"""The shares of models that one rank holds, and their caches: what rank 0's messages act on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from faircopy.layout.base import Packed
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model, PassResult, StageModel, Taps
from faircopy.model.loader import load_model, load_stage
from faircopy.model.transformers_backend import TransformersModel
from faircopy.parallel.group import STATES, Group
from faircopy.threads import use_threads


class Load(NamedTuple):
    """Read a share of a checkpoint, as the next model."""

    path: str
    dtype: torch.dtype | None
    exact: bool
    threads: int
    pipeline: bool = False  # its layers are split, not each of them


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
    """Free a cache."""

    cache: int


class Rehearse(NamedTuple):
    """Gather tensors of this size some times, so that rank 0 can time it."""

    rows: int
    width: int
    times: int


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
    wants: tuple[int, ...] = ()  # hidden states that rank 0 wants: they decide which rows go on to the end


Order = Load | Release | NewCache | DropCache | Move | Run | Rehearse


class Shards:
    """A rank's shares and caches by number."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._models: list[Model] = []
        self._stages: set[int] = set()  # which of them are parts of pipelines
        self._caches: dict[int, PagedLayout] = {}
        self._acts: dict[type, Callable[[Any], object]] = {
            Load: self._load,
            Release: self._release,
            NewCache: self._new_cache,
            DropCache: lambda order: self._caches.pop(order.cache),
            Move: lambda order: self._caches[order.cache].move(order.source, order.target),
            Run: self._run,
            Rehearse: lambda order: exchange_seconds(self.group, order),
        }

    def serve(self) -> None:
        """Carry out the next message."""
        orders: list[Order] = self.group.fetch()
        for order in orders:
            self._acts[type(order)](order)

    def _load(self, order: Load) -> None:
        use_threads(order.threads)
        if order.pipeline:
            self._stages.add(len(self._models))
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
        model, cache = self._models[order.model], self._caches[order.cache]
        if order.model in self._stages:
            assert isinstance(model, StageModel), "pipelines are made of stages"
            run_stage(self.group, model, order.packed, cache, order.wants)
        else:
            run_share(self.group, model, order.packed, cache, Taps(order.wants) if order.wants else None)


def load_share(group: Group, order: Load) -> Model:
    """This rank's share, when all ranks have theirs; a rank that cannot load its own is noticed here."""
    try:
        share = _share(group, order)
    except BaseException as error:
        group.fail(group.rank, f"it could not load its share ({type(error).__name__})")
        raise
    group.gather(torch.zeros(1, device=group.device))
    return share


def _share(group: Group, order: Load) -> Model:
    if order.pipeline:
        return load_stage(order.path, order.dtype, group.device, order.exact, group.rank, group.size)
    return load_model(order.path, order.dtype, group.device, order.exact, ranks=group)


def exchange_seconds(group: Group, order: Rehearse) -> float:
    """What gathering takes, at best."""
    x, found = torch.zeros(order.rows, order.width, device=group.device), []
    for _ in range(order.times):
        begin = time.perf_counter()
        group.gather(x).sum().item()  # waits for a GPU
        found.append(time.perf_counter() - begin)
    return min(found)


def run_stage(group: Group, model: StageModel, packed: Packed, cache: PagedLayout, wants: tuple[int, ...]) -> None:
    """A pass over this rank's layers: from the rank before, to the rank behind; the last one's results go to rank 0."""
    taps = Taps(wants)
    x, taps.states = (None, {}) if group.rank == 0 else group.fetch(group.rank - 1, STATES)
    x = model.run_stage(x, packed, cache, taps)
    if group.rank < group.size - 1:
        group.send((x, taps.states), [group.rank + 1])
    else:
        group.send(PassResult(x, cache.healthy, taps.states), [0])


def run_share(group: Group, model: Model, packed: Packed, cache: PagedLayout, taps: Taps | None = None) -> Tensor:
    """A pass over this rank's share; a row is healthy if it is on every rank, since each sees its own heads."""
    logits = model.forward(packed, cache, *([] if taps is None else [taps]))
    assert cache.healthy is not None, "the last layer notes it"
    cache.healthy = group.gather(cache.healthy).all(0)
    return logits
