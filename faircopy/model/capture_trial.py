"""Whether passes of a stock model can be captured: nothing in them waits for the host, and replays have eager bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from faircopy.layout.base import Packed
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.bits import same_bits
from faircopy.model.transformers_backend import TransformersModel
from faircopy.types import Batch, Draft, Request, Sequence

_PAGE = 32
_LENGTHS = (9, 20)  # tokens of two texts, each in one page
_NODES = [3, 5, 7]  # draft tokens behind each
_known: WeakKeyDictionary[TransformersModel, str | None] = WeakKeyDictionary()


def capture_problem(model: TransformersModel) -> str | None:
    """Why this model's passes stay eager; None: they can be captured. Tried once per model, on its device."""
    if model not in _known:
        _known[model] = None if model.device.type != "cuda" else _Trial(model).problem()
    return _known[model]


class _Trial:
    """Two passes of the same shape over different texts: the first is captured, and replayed with the second's data."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        tables = BlockTables(PagePool(len(_LENGTHS)), _PAGE, reuse=False)
        self._layout = PagedLayout(tables, model.layers, model.dtype, model.device, True)
        self._one, self._other = (self._pack(tables, length) for length in _LENGTHS)

    @torch.no_grad()
    def problem(self) -> str | None:
        path = self._model.module_path
        try:
            with path, _no_waiting():
                self._pass(self._one)
        except RuntimeError as error:
            return f"{path.last or 'the model'} needs the host ({_first_line(error)})"
        try:
            return self._replay_problem()
        except RuntimeError as error:
            return f"its pass cannot be captured ({_first_line(error)})"

    def _replay_problem(self) -> str | None:
        torch.cuda.synchronize(self._model.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._pass(self._one)
        copy_rows(self._other, self._one)
        graph.replay()
        replayed, stored = logits.clone(), self._stored(self._other)
        eager = self._pass(self._other)
        same = same_bits(replayed, eager) and all(map(same_bits, stored, self._stored(self._other)))
        return None if same else "a captured pass has other bits than an eager one"

    def _pass(self, packed: Packed) -> Tensor:
        return self._model.forward(packed, self._layout)

    def _pack(self, tables: BlockTables, length: int) -> Packed:
        """The last token of a text and draft tokens behind it, the rest being cached."""
        tokens = [(5 * n + length) % self._model.vocab for n in range(length)]
        seq = Sequence(0, Request(tuple(tokens)), tokens)
        tables.open(seq)
        tables.reserve(seq, length + len(_NODES))
        self._pass(self._layout.pack(Batch([seq], [length - 1], [0]), Draft.empty(1)))
        self._layout.set_cached(seq, length - 1)
        return self._layout.pack(Batch([seq], [length], [len(_NODES)]), Draft.chains([_NODES]))

    def _stored(self, packed: Packed) -> list[Tensor]:
        """The keys and values that a pass has written."""
        return [pool[packed.slots].clone() for pool in self._layout.all_pools()]


def copy_rows(source: Packed, target: Packed) -> None:
    """Write one pass's tokens, positions, slots and page tables over another's of the same shape."""
    for name in ("ids", "positions", "slots"):
        getattr(target, name).copy_(getattr(source, name))
    for kind, plan in target.plans.items():
        plan.tables.copy_(source.plans[kind].tables)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160]
