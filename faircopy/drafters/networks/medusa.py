"""Medusa: independent heads on one hidden state, head i guessing i tokens further; a static tree (arXiv 2401.10774).

As in the authors' code each head is a residual block that starts as the identity and an output layer that starts as the
target's; the loss is cross entropy with the text, a level weighing 0.8 of the one before. The tree is built from how
often each rank of each head was right where the heads before it were (`accuracy` in the configuration), best nodes
first, so any number of nodes is used well. The paper multiplies unconditional accuracies, which makes small trees too
broad.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faircopy.drafters.heads import Guess, Head, HeadConfig, Rows
from faircopy.drafters.trees import OFFERED, StaticTree, Tree, best_shape
from faircopy.model.base import FINAL

LARGEST = 63  # nodes: the paper's tree


class Residual(nn.Module):
    """x + SiLU(Wx + b), the identity at first."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(Head):
    """`shared`: all heads speak through the target's own output layer, and are a fraction of the size."""

    independent = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, (FINAL,))
        hidden, options = config.shape.hidden, config.options
        self.blocks = nn.ModuleList(Residual(hidden) for _ in range(config.levels))
        self.own = not options.get("shared", False)
        if self.own:
            self.outputs = nn.ModuleList(nn.Linear(hidden, config.vocab, bias=False) for _ in range(config.levels))
        table = options.get("accuracy") or default_accuracy(config.levels)
        self._shape = best_shape([level[:OFFERED] for level in table], LARGEST)

    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        return states

    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        out = self.blocks[level](memory)
        logits = self.outputs[level](out) / self.token_weights.divisor if self.own else self.speak(out)
        return Guess(logits, memory, out)

    def all_levels(self, memory: Tensor, levels: int) -> list[Tensor]:
        """Heads that share an output layer read it once."""
        if self.own:
            return super().all_levels(memory, levels)
        return list(self.speak(torch.stack([self.blocks[level](memory) for level in range(levels)])).unbind())

    def tree(self, max_nodes: int) -> Tree:
        return StaticTree(self._shape, max_nodes)

    def start_from(self, last_layer: dict[str, Tensor], norm: Tensor) -> None:
        if self.own:
            with torch.no_grad():
                for output in self._outputs():
                    output.weight.copy_(self.token_weights.rows)

    def _outputs(self) -> list[nn.Linear]:
        return [output for output in self.outputs if isinstance(output, nn.Linear)]

    def learned(self, ranks: list[list[float]]) -> dict[str, Any]:
        return {"accuracy": [[round(share, 4) for share in level[:OFFERED]] for level in ranks]}


def default_accuracy(levels: int) -> list[list[float]]:
    """Before anything was measured: each level somewhat worse than the one before, ranks halving."""
    return [[0.6 * 0.8**level * 0.4**rank for rank in range(OFFERED)] for level in range(levels)]
