"""A model that several ranks share, as rank 0's engine sees it: each pass is announced to the others and run by all."""

from __future__ import annotations

from weakref import WeakKeyDictionary, finalize

from torch import Tensor

from faircopy.errors import RankError
from faircopy.layout.base import Cache, Packed
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Taps, TokenWeights
from faircopy.model.transformers_backend import TransformersModel
from faircopy.parallel.group import Group
from faircopy.parallel.shards import DropCache, Load, Move, NewCache, Order, Release, Run, load_share, run_share


class ParallelModel:
    """Rank 0's share of a model, which runs together with all others."""

    def __init__(self, group: Group, order: Load) -> None:
        group.post([order])
        self._group, self._own, self._index = group, load_share(group, order), group.models
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

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
        assert isinstance(cache, PagedLayout), "the other ranks have pages"
        run = Run(self._index, self._number(cache), packed)
        self._group.post([*self._waiting, run])
        self._waiting.clear()
        try:
            return run_share(self._group, self._own, packed, cache, taps)
        except RankError:
            raise
        except BaseException as error:  # an interrupt too: the others are in the middle of the pass
            self._group.fail(0, f"it left a pass before its end ({type(error).__name__})")
            raise

    def release_weights(self) -> None:
        """Free the stock copies of packed weights, on every rank."""
        if isinstance(self._own, TransformersModel):
            self._group.post([Release(self._index)])
            self._own.release_weights()

    def _number(self, cache: PagedLayout) -> int:
        """Of a cache; that of a new one is made on every rank before the next pass, and dropped after its end."""
        if cache not in self._numbers:
            number, waiting = self._group.new_number(), self._waiting
            self._numbers[cache] = number
            waiting.append(NewCache(number, self._index, cache.tables.pool.pages, cache.tables.page, cache.exact))
            cache.on_move = lambda source, target: waiting.append(Move(number, source, target))
            finalize(cache, waiting.append, DropCache(number))
        return self._numbers[cache]
