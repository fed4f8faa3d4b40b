"""One model with its cache: pack a step, run it, hand back the logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from faircopy.layout.base import Layout, Packed
from faircopy.model.base import Model, Taps
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


class Runner:
    """A model and the layout its keys and values lie in."""

    def __init__(self, model: Model, layout: Layout, wants: tuple[int, ...] = ()) -> None:
        self.model, self.layout, self.wants = model, layout, wants

    @torch.no_grad()
    def forward(self, batch: Batch, draft: Draft, done: int = 0) -> Result:
        """One packed pass over uncached tokens and the draft nodes from `done` on."""
        packed = self.layout.pack(batch, draft, done)
        taps = Taps(self.wants)
        logits = self.model.forward(packed, self.layout, *([taps] if self.wants else []))
        self.layout.advance(batch)
        states = {layer: packed.unpadded(rows) for layer, rows in taps.states.items()}
        return Result(packed, logits, self.layout.healthy, states)
