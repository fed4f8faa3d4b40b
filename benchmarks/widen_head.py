"""Heads of a wide target's shape with random weights, and a small head that runs beside one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy.drafters.folder import METHODS
from faircopy.drafters.heads import Guess, Head, HeadConfig, Rows
from faircopy.drafters.networks.blocks import BlockShape
from faircopy.drafters.trees import Tree
from faircopy.model.base import FINAL, Model, TokenWeights

DRAFT_VOCAB = 32000  # tokens that a wide head guesses, as heads of targets with large vocabularies do


def wide_head(
    small: Head, shape: dict[str, Any], target: Model, draft_vocab: int = DRAFT_VOCAB, **changes: Any
) -> Head:
    """A random head at the wide shape, of the same method and options unless `changes` name others.

    draft_vocab: the tokens it guesses at most; 0: all.
    """
    sizes = BlockShape(
        hidden=shape["hidden_size"],
        heads=shape["num_attention_heads"],
        kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        intermediate=shape["intermediate_size"],
        context=target.context,
    )
    vocab = shape["vocab_size"]
    options = {name: value for name, value in small.config.options.items() if name not in ("words", "wants")}
    options["draft_vocab"] = min(draft_vocab or vocab, vocab)
    widths = {"shape": sizes, "vocab": vocab, "depth": shape["num_hidden_layers"], "options": options}
    config: HeadConfig = replace(small.config, **{**widths, **changes})
    with target.device:
        return METHODS[config.method](config).to(target.dtype)


def wide_wants(small: Head, wide: Head) -> tuple[int, ...]:
    """Where the wide target has the states that the small head wants."""
    layers, more = small.config.depth, wide.config.depth
    return tuple(FINAL if want == FINAL else want * more // layers for want in small.wants)


class WidenedHead(Head):
    """Says what the small head says, from the small target's states within the wide one's, at the cost of both.

    For texts that benchmarks.recorded cannot know before: sampled ones.
    """

    def __init__(self, small: Head, wide: Head) -> None:
        super().__init__(wide.config, wide_wants(small, wide), len(wide.layers))
        self.layers, self.deep = [*wide.layers, *small.layers], small.deep
        self.small, self.wide = small, wide
        self._hidden = wide.config.shape.hidden

    def bind(self, weights: TokenWeights) -> Self:
        self.wide.bind(weights)
        return super().bind(weights)

    def serve(self) -> Self:
        self.small.serve()
        self.wide.serve()
        return self.eval()

    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        wide = self.wide.read(states, tokens, rows)
        inner = self.small.config.shape.hidden
        parts = [part[..., :inner] for part in states.split(self._hidden, -1)]
        return torch.cat([wide, self.small.read(torch.cat(parts, -1), tokens, self._inner(rows))], -1)

    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        cost = self.wide.step(level, memory[..., : self._hidden], tokens, rows)
        guess = self.small.step(level, memory[..., self._hidden :], tokens, rows and self._inner(rows))
        logits = self.small.over_vocabulary(guess.logits)
        logits = F.pad(logits, (0, self.vocab - logits.shape[-1]), value=-torch.inf)
        return Guess(logits, torch.cat([cost.memory, guess.memory], -1), guess.out)

    def tree(self, max_nodes: int) -> Tree:
        return self.small.tree(max_nodes)

    def _inner(self, rows: Rows) -> Rows:
        """The small head's layers lie behind the wide one's, and attention is scaled for the wide ones."""
        behind = len(self.wide.layers)
        factor = (self.config.shape.head_dim / self.small.config.shape.head_dim) ** 0.5
        return Rows(rows.positions, lambda layer, q, k, v: rows.attend(layer + behind, q * factor, k, v))
