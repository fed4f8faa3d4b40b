"""Scylla: EAGLE's drafter, scaled by laws in its depth and its training text (arXiv 2505.07858).

A token's embedding and the target's final state are concatenated and projected from 2h to h; `layers` decoder layers
and a norm follow, and the target's own output layer makes the logits. The normalised output is what the next level
reads instead of a state. Loss and trees are EAGLE-2's: smooth L1 to the target's next state plus a tenth of its
distribution, with noise on what is read; likeliest paths first, then the best k nodes of all, k by the batch size
(`planning/roofline.py`, or k="auto"). `unroll` above 1 trains that many levels on the head's own states, as EAGLE-3
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from faircopy.drafters.heads import Guess, Head, HeadConfig, Rows
from faircopy.drafters.networks.blocks import Block, Norm, Rope
from faircopy.drafters.networks.clover import copy_matching
from faircopy.drafters.networks.eagle3 import DEPTH, noisy
from faircopy.drafters.trees import RerankedTree, Tree
from faircopy.model.base import FINAL

if TYPE_CHECKING:
    from faircopy.drafters.networks.served import ServedLayer
    from faircopy.layout.base import Packed
    from faircopy.layout.paged import PagedLayout


class Scylla(Head):
    deep = True

    def __init__(self, config: HeadConfig) -> None:
        shape, options = config.shape, config.options
        layers = int(options.get("layers", 1))
        super().__init__(config, (FINAL,), layers)
        self.unrolled = int(options.get("unroll", 1))
        self.fuse = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.rope, self.blocks = Rope(shape), nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self._served: list[ServedLayer] = []
        self._fused: Callable[[Tensor], Tensor] | None = None  # the projection on kernels

    def run_on_kernels(self, exact: bool = True) -> None:
        from faircopy.drafters.networks.served import ServedLayer
        from faircopy.kernels.gpu.linear import Linear

        self._served = [
            ServedLayer(block.self_attn, block.mlp, block.post_attention_layernorm.weight, index, exact)
            for index, block in enumerate(self._blocks())
        ]
        self._fused = Linear(self.fuse.weight.detach(), exact=exact)

    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        return self._run(noisy(states, self.training), tokens, rows)

    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        if level:
            assert rows is not None, "guesses of this head need keys of the guesses before"
            memory = self._run(memory, tokens, rows)
        return Guess(self.speak(memory), memory, memory)

    def tree(self, max_nodes: int) -> Tree:
        return RerankedTree(max_nodes, DEPTH)

    def start_from(self, last_layer: dict[str, Tensor], norm: Tensor) -> None:
        """Layers from random weights, the norm from the target's, the projection from the state with little else."""
        copy_matching(self.norm, {"weight": norm})
        with torch.no_grad():
            self.fuse.weight[:, self.config.shape.hidden :].mul_(0.1).diagonal().add_(1.0)

    def _run(self, state: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        if self._fused is not None and rows.packed is not None and rows.cache is not None:
            return self._run_served(self._fused, state[0].contiguous(), tokens[0], rows.packed, rows.cache)[None]
        both = torch.cat([self.token_weights.embedding[tokens].to(self.dtype), state], -1)
        x, angles = self.fuse(both), self.rope(rows.positions)
        for index, block in enumerate(self.blocks):
            x = block(x, *angles, rows.attend, index)
        return self.norm(x)  # type: ignore[no-any-return]

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _run_served(
        self, fused: Callable[[Tensor], Tensor], state: Tensor, tokens: Tensor, packed: Packed, cache: PagedLayout
    ) -> Tensor:
        from faircopy.drafters.networks.served import beside, normalised

        eps = self.config.shape.eps
        x = fused(beside(tokens, self.token_weights.embedding, state, cache, None, eps))
        norms = [*(block.input_layernorm.weight for block in self._blocks()), self.norm.weight]
        x, y = normalised(x, norms[0], eps, cache)
        for layer, after in zip(self._served, norms[1:], strict=True):
            x, y = layer(y, x, packed, cache, after.detach())
        return y
