"""Clover-2: the token meets the state before the augmenting layers, and once more behind them (arXiv 2408.00264).

From the authors' code: the un-normalised last state and the next token go through an attention decoder with a cosine
gate, then two decoder layers that start as the target's last one, then a norm. Level 0 speaks through a projector;
deeper levels share a second decoder and a projector that is given the token too. The loss pulls each output towards the
target's own state (smooth L1, times ten) and its distribution, 0.7 of that a level deeper; every gradient is cut at 0.5
by itself. Trees grow by the rule of their dynamic path (top-p of 0.95), not by the static tree of 25 nodes that their
numbers were measured with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faircopy.drafters.heads import Guess, Head, HeadConfig, Rows
from faircopy.drafters.networks.blocks import Block, Norm, Rope
from faircopy.drafters.networks.clover import AttentionDecoder, copy_matching
from faircopy.drafters.trees import NodeBudgetTree, Tree


class CosineDecoder(AttentionDecoder):
    """Clover's cell with a cosine for a gate, biases, and nothing around it."""

    def __init__(self, hidden: int, heads: int, eps: float) -> None:
        super().__init__(hidden, heads, eps)
        self.eps = eps
        self.q_proj, self.k_proj, self.v_proj = (near(nn.Linear(hidden, hidden), part) for part in (1, 1, 0))

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        q, k, v = self.parts(x, token)
        gate = F.cosine_similarity(q, k, dim=-1, eps=self.eps)[..., None]
        return x + (gate * v).flatten(-2)


def near(linear: nn.Linear, identity: float) -> nn.Linear:
    """Initial weights as in the authors' code: (part of) the identity plus noise from 0 to 0.01."""
    with torch.no_grad():
        linear.weight.uniform_(0.0, 0.01)
        linear.weight.diagonal().add_(identity)
        linear.bias.zero_()
    return linear


class Clover2(Head):
    def __init__(self, config: HeadConfig) -> None:
        shape, layers = config.shape, config.options.get("layers", 2)
        super().__init__(config, (config.depth,), layers)
        hidden, cell = shape.hidden, (shape.hidden, shape.heads, shape.eps)
        self.first, self.later = CosineDecoder(*cell), CosineDecoder(*cell)
        self.rope, self.blocks = Rope(shape), nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm, self.head_norm = Norm(hidden, shape.eps), Norm(hidden, shape.eps)
        self.project = near(nn.Linear(hidden, hidden), 1.0)
        self.project_later = near(nn.Linear(2 * hidden, hidden), 1.0)

    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        x, angles = self.first(states, self._rows_of(tokens)), self.rope(rows.positions)
        for index, block in enumerate(self.blocks):
            x = block(x, *angles, rows.attend, index)
        return self.norm(x)  # type: ignore[no-any-return]

    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        if level == 0:
            out = self.head_norm(self.project(memory))
        else:
            token = self._rows_of(tokens)
            memory = self.later(memory, token)
            out = self.head_norm(self.project_later(torch.cat([memory, token], -1)))
        return Guess(self.speak(out), memory, out)

    def tree(self, max_nodes: int) -> Tree:
        return NodeBudgetTree(max_nodes, top_p=0.95)

    def start_from(self, last_layer: dict[str, Tensor], norm: Tensor) -> None:
        for block in self.blocks:
            copy_matching(block, last_layer)
        for own in (self.norm, self.head_norm):
            copy_matching(own, {"weight": norm})

    def _rows_of(self, tokens: Tensor) -> Tensor:
        """The target's output rows stand for tokens, as they are."""
        return self.token_weights.rows[tokens].to(self.dtype)
