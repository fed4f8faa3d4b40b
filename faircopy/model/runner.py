"""One model with its cache: pack a step, run it, hand back the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from faircopy.layout.base import Layout, Packed
from faircopy.model.base import Model, PipelinedModel, Taps
from faircopy.types import Batch, Draft


@dataclass(frozen=True, slots=True)
class Result:
    """What a pass over a batch produced."""

    packed: Packed
    logits: Tensor  # [R, vocab]
    healthy: Tensor | None = None  # [N] which rows had finite states, padding left out; None: not checked
    states: dict[int, Tensor] = field(default_factory=dict)  # wanted layer -> [N, hidden] of the same rows, see Taps

    def of(self, i: int) -> Tensor:
        """The rows of sequence i: asked-for prompt rows, its last token, its nodes."""
        rows = self.packed.rows[i]
        return self.logits[rows.start : rows.stop]


class Passes(Protocol):
    """Runs packed passes in a way of its own, see replay.passes."""

    times: dict[int, float]  # rows -> seconds, of the sizes that were warmed

    def run(
        self, batch: Batch, draft: Draft, done: int, ids: Tensor | None
    ) -> tuple[Packed, Tensor, dict[int, Tensor]]:
        """The packed rows, the logits of the wanted ones and the hidden states of all. ids: see Runner.forward."""

    def warm(self) -> None:
        """Make now what would be made when it is first needed."""

    def rehearse(self) -> None:
        """Make every launch of `warm` once, for kernels that are compiled ahead."""

    def mixed_step_rows(self, step_ms: float | None) -> int:
        """Rows of a step in which texts go on and prompts are read, so that it takes step_ms milliseconds at most.

        None: 2.5 times as long as a step without prompts.
        """


class Runner:
    """A model and the layout its keys and values lie in. passes: how its passes run; None: operation by operation."""

    def __init__(self, model: Model, layout: Layout, wants: tuple[int, ...] = (), passes: Passes | None = None) -> None:
        self.model, self.layout, self.wants, self.passes = model, layout, wants, passes

    @torch.no_grad()
    def start(self, batch: Batch, draft: Draft, states: bool = True) -> Callable[[], Result]:
        """Begin a pass; what is returned waits for its end. Passes end in the order in which they begin.

        states: whether hidden states are wanted; where passes are graphs they come in any case.
        """
        if not isinstance(self.model, PipelinedModel):
            result = self.forward(batch, draft, states=states)
            return lambda: result
        packed = self.layout.pack(batch, draft)
        wait = self.model.start(packed, self.layout, self.wants)
        self.layout.advance(batch)

        def end() -> Result:
            passed = wait()
            states = {layer: packed.unpadded(rows) for layer, rows in passed.states.items()}
            return Result(packed, passed.logits, passed.healthy, states)

        return end

    @torch.no_grad()
    def forward(
        self, batch: Batch, draft: Draft, done: int = 0, ids: Tensor | None = None, states: bool = True
    ) -> Result:
        """One packed pass over uncached tokens and the draft nodes from `done` on.

        ids: the tokens of all its rows, if the host has not read them; those in the draft are ignored.
        """
        if self.passes is not None:
            packed, logits, found = self.passes.run(batch, draft, done, ids)
        else:
            packed, logits, found = self._run(batch, draft, done, ids, self.wants if states else ())
        self.layout.advance(batch)
        kept = {layer: packed.unpadded(rows) for layer, rows in found.items()}
        return Result(packed, logits, self.layout.healthy, kept)

    def _run(
        self, batch: Batch, draft: Draft, done: int, ids: Tensor | None, wants: tuple[int, ...]
    ) -> tuple[Packed, Tensor, dict[int, Tensor]]:
        packed, taps = self.layout.pack(batch, draft, done).with_ids(ids), Taps(wants)
        logits = self.model.forward(packed, self.layout, *([taps] if wants else []))
        return packed, logits, taps.states
