"""A device whose time is computed: captured steps and passes take what a cost table says, on any machine.

The host's work takes no time unless `host` says so, so what is left is what the device was asked to do, and in which
order. Used to compare plain decoding with drafting in the engine that runs, without the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from faircopy import engine as engine_module
from faircopy import pace
from faircopy.costs import CostTable
from faircopy.drafters.model import ModelDrafter
from faircopy.drafters.per_request import PerRequestDrafter
from faircopy.engine import Engine
from faircopy.layout.base import Cache, LayerShape, Packed
from faircopy.model.base import FINAL, Taps
from faircopy.model.fused import Fused
from faircopy.model.runner import Result
from faircopy.testing import TableModel


class FreeModel(TableModel, Fused):
    """A model that costs nothing and may be part of captured steps: of its kind, without weights.

    Its logits are those of a table, and of another one in a share of the rows, and in all rows from a position on: so
    it drafts for the other model as well as one likes.
    """

    def __init__(self, vocab: int = 64, context: int = 512, right: float = 1.0, turn: int | None = None) -> None:
        super().__init__(vocab, context)
        source = torch.Generator().manual_seed(1)
        wrong = torch.rand(context, vocab, generator=source) >= right
        wrong[turn:] |= turn is not None
        self.layers, self._wrong = [LayerShape(1, 1)], wrong

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        cache.watch(torch.ones(packed.size, dtype=torch.bool))  # type: ignore[attr-defined]
        ids, positions = packed.ids[packed.wanted].long(), packed.positions[packed.wanted].long()
        logits = self._table[positions % 7, ids]
        if taps is not None:
            taps(FINAL, self._table[packed.positions % 7, packed.ids])
        return torch.where(self._wrong[positions, ids, None], logits.roll(1, -1), logits)


class SimulatedDevice:
    """The time of one engine."""

    def __init__(self, engine: Engine, table: CostTable, host: float = 0.0) -> None:
        """host: seconds of the host in an eager step and the captured one behind it, in which the device waits."""
        self._engine, self._host, self.now, self._free = engine, host, 0.0, 0.0
        self._table = replace(table, steps=_steps(engine, table))
        self.busy: dict[str, float] = {}  # seconds of the device by what it did
        self._ends: dict[int, float] = {}  # when captured steps in flight will have ended
        if engine.captured is not None:
            graphs = engine.captured.graphs
            graphs.times = dict(self._table.steps)
            graphs.joining_times = {key: self._joined(key.size, key.k, key.rows) for key in graphs.joining_times}
            self._table = replace(self._table, joining=graphs.joining_costs)
        engine.draft_lengths.use(self._table)
        self._watch()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the engine's clock is this device's."""
        with patch.object(engine_module, "time", self), patch.object(pace, "time", self):
            yield

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _launch(self, kind: str, seconds: float) -> float:
        """When what is launched now will have ended."""
        self.busy[kind] = self.busy.get(kind, 0.0) + seconds
        self._free = max(self._free, self.now) + seconds
        return self._free

    def _watch(self) -> None:
        engine, drafter = self._engine, self._engine.drafter
        drafter = drafter.default if isinstance(drafter, PerRequestDrafter) else drafter
        _after(engine.target, "forward", lambda result, *_: self._passed("target", result))
        if isinstance(drafter, ModelDrafter):
            _after(drafter._runner, "forward", lambda result, *_: self._passed("draft", result))
        _after(engine.verifier, "judge", lambda *_: self._judged())
        if engine.captured is not None:
            _after(engine.captured, "start", self._started)
            _after(engine.captured, "collect", lambda _, step: self._wait(self._ends.pop(id(step))))

    def _passed(self, kind: str, result: Result) -> None:
        curve = self._table.target if kind == "target" else self._table.draft
        self._launch(kind, curve(result.packed.size))

    def _judged(self) -> None:
        self._wait(self._free)
        self.now += self._host

    def _wait(self, end: float) -> None:
        self.now = max(self.now, end)

    def _started(self, step: Any, *_: Any) -> None:
        size, k, joined = step.kind
        seconds = self._joined(size, k, step.rows, step.read) if joined else self._table.step(size, k)
        self._ends[id(step)] = self._launch(f"captured k {k}", seconds)

    def _joined(self, size: int, k: int, rows: int, read: int = 0) -> float:
        """Seconds of a step with this many rows, those of prompts included, of which the drafter reads some."""
        table = self._table
        more = table.target(rows) - table.target(size * (k + 1))
        return table.step(size, k) + more + table.reading_beside(read, size)


def _steps(engine: Engine, table: CostTable) -> dict[tuple[int, int], float]:
    if engine.captured is None:
        return {}
    engine.captured.warm(engine.draft_lengths.lengths)
    return {(size, k): table.step(size, k) for size, k in engine.captured.graphs.captured_sizes}


def _after(owner: Any, name: str, then: Any) -> None:
    """Call then(result, *arguments) behind every call of a method."""
    inner = getattr(owner, name)

    def called(*args: Any, **named: Any) -> Any:
        result = inner(*args, **named)
        then(result, *args)
        return result

    setattr(owner, name, called)
