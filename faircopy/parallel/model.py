"""A model that several ranks share, as rank 0's engine sees it: each pass is announced to the others and run by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary, finalize

from torch import Tensor

from faircopy.errors import RankError
from faircopy.layout.base import Cache, Packed
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import PassResult, StageModel, Taps, TokenWeights
from faircopy.model.transformers_backend import TransformersModel
from faircopy.parallel.group import STATES, Group
from faircopy.parallel.interrupts import uninterrupted
from faircopy.parallel.shards import (
    DropCache,
    Load,
    Move,
    NewCache,
    Order,
    Rehearse,
    Release,
    Run,
    exchange_seconds,
    load_share,
    run_share,
    run_stage,
)


class SharedModel:
    """Rank 0's share of a model; its caches exist on every rank."""

    def __init__(self, group: Group, order: Load) -> None:
        group.post([order])
        self.group, self._own, self._index = group, load_share(group, order), group.models
        group.models += 1
        own = self._own
        self.backend, self.name, self.vocab, self.context = own.backend, own.name, own.vocab, own.context
        self.dtype, self.device, self.layers = own.dtype, own.device, own.layers
        self._waiting: list[Order] = []  # what the next message says before its pass
        self._numbers: WeakKeyDictionary[PagedLayout, int] = WeakKeyDictionary()  # by which all ranks know a cache

    @property
    def weight_bytes(self) -> int:
        """Of rank 0's share."""
        return self._own.weight_bytes

    def token_weights(self) -> TokenWeights:
        return self._own.token_weights()

    def release_weights(self) -> None:
        """Free the stock copies of packed weights, on every rank."""
        if isinstance(self._own, TransformersModel):
            self.group.post([Release(self._index)])
            self._own.release_weights()

    def _number(self, cache: PagedLayout) -> int:
        """Of a cache; that of a new one is made on every rank before the next pass, and dropped after its end."""
        if cache not in self._numbers:
            number, waiting = self.group.new_number(), self._waiting
            self._numbers[cache] = number
            waiting.append(NewCache(number, self._index, cache.tables.pool.pages, cache.tables.page, cache.exact))
            cache.on_move = lambda source, target: waiting.append(Move(number, source, target))
            finalize(cache, waiting.append, DropCache(number))
        return self._numbers[cache]

    def _announced(self, packed: Packed, cache: Cache, wants: tuple[int, ...] = ()) -> PagedLayout:
        """Tell the other ranks of a pass, and of what happened to caches since the last one."""
        assert isinstance(cache, PagedLayout), "the other ranks have pages"
        run = Run(self._index, self._number(cache), packed, wants)
        waiting = self._waiting[:]  # a cache may be dropped at any time
        self.group.post([*waiting, run])
        del self._waiting[: len(waiting)]
        return cache

    @contextmanager
    def _to_its_end(self) -> Iterator[None]:
        """Rank 0's part of a pass. If it is left before its end, the others are in the middle of it: they are ended."""
        with uninterrupted(partial(self.group.fail, 0, "a second Ctrl-C came before the end of a pass")):
            try:
                yield
            except BaseException as error:
                if not isinstance(error, RankError):
                    self.group.fail(0, f"it left a pass before its end ({type(error).__name__})")
                raise


class ParallelModel(SharedModel):
    """A model each of whose layers is shared by all ranks."""

    def split_pays(self, seconds: float, layers: int, rows: int, width: int) -> bool:
        """Whether another model's pass of this many seconds is faster if these ranks share it, exchanges included."""
        order = Rehearse(rows, width, times=5)
        self.group.post([order])
        exchanges = (2 * layers + 3) * exchange_seconds(self.group, order)
        return seconds / self.group.size + exchanges < seconds

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
        wants = () if taps is None else taps.wants
        with self._to_its_end():
            return run_share(self.group, self._own, packed, self._announced(packed, cache, wants), taps)


class Pipeline(SharedModel):
    """A model whose layers lie on several ranks, each of which may work on another pass."""

    def __init__(self, group: Group, order: Load) -> None:
        super().__init__(group, order)
        self._begun, self._ended = 0, 0  # passes that were started, and those whose results were read

    @property
    def stages(self) -> int:
        return self.group.size

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
        passed = self.start(packed, cache, () if taps is None else taps.wants)()
        if taps is not None:
            taps.states = passed.states
        if isinstance(cache, PagedLayout) and passed.healthy is not None:
            cache.watch(passed.healthy)
        return passed.logits

    def start(self, packed: Packed, cache: Cache, wants: tuple[int, ...]) -> Callable[[], PassResult]:
        """Begin a pass; what is returned waits for its end."""
        assert isinstance(self._own, StageModel), "pipelines are made of stages"
        with self._to_its_end():
            run_stage(self.group, self._own, packed, self._announced(packed, cache, wants), wants)
            self._begun += 1
            return partial(self._result, self._begun)

    def _result(self, number: int) -> PassResult:
        """Of the pass of this number; those before it that were not read, after an interrupt, are dropped."""
        with self._to_its_end():
            while self._ended < number:
                found: PassResult = self.group.fetch(self.group.size - 1, STATES)
                self._ended += 1
            return found
