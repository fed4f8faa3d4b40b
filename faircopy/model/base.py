"""What the runner needs of a model, whichever door it came through."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from faircopy.layout.base import Cache, LayerShape, Packed


class Model(Protocol):
    """A causal language model over packed tokens; keys and values live in the cache it is given."""

    name: str
    vocab: int
    context: int
    dtype: torch.dtype
    device: torch.device
    layers: list[LayerShape]

    def forward(self, packed: Packed, cache: Cache) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
