"""Clover: Medusa's heads made regressive, each told the tokens guessed before it (arXiv 2405.00263).

Three parts, each of which can be left out (`augment`, `decoder`, `regress`) to see what it does:
- the augmenting block, one more decoder layer behind the target's last, which it is initialised from;
- the regressive connection: the guessed token's row of the target's output layer, normalised to unit variance;
- the attention decoder, which joins the two: with a single key a soft-max would always be one, so its attention is the
  score of query and key itself, per head, as a gate on the value.

Where the paper is silent: the block's output goes through a copy of the target's final norm, since all heads share the
target's output layer, which expects it; the loss is Medusa's with true tokens before; without the decoder
(`decoder=False`) the connection is a plain sum of the state and a projection of the token, with `decoder="sum"` of the
state and the token's row as it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faircopy.drafters.heads import Guess, Head, HeadConfig, Rows
from faircopy.drafters.networks.blocks import Block, Norm, Rope
from faircopy.drafters.networks.medusa import Residual
from faircopy.drafters.trees import NodeBudgetTree, Tree

if TYPE_CHECKING:
    from faircopy.drafters.networks.served import ServedDecoder, ServedLayer


class AttentionDecoder(nn.Module):
    """A state takes in a token: per head, how well they match gates what the token says."""

    def __init__(self, hidden: int, heads: int, eps: float, gated: bool = True) -> None:
        super().__init__()
        self.heads, self.gated = math.gcd(heads, hidden), gated
        self.norm = Norm(hidden, eps)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        with torch.no_grad():
            for near_identity in (self.q_proj, self.k_proj):
                near_identity.weight.normal_(0.0, 0.01).add_(torch.eye(hidden))
            self.v_proj.weight.zero_()

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        q, k, v = self.parts(x, token)
        if self.gated:
            v = (q * k).sum(-1, keepdim=True) * q.shape[-1] ** -0.5 * v
        return x + F.silu(v.flatten(-2))

    def parts(self, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [..., heads, D]."""
        q, k, v = self.q_proj(self.norm(x)), self.k_proj(token), self.v_proj(token)
        return (*(part.view(*part.shape[:-1], self.heads, -1) for part in (q, k, v)),)


class Clover(Head):
    def __init__(self, config: HeadConfig) -> None:
        options, shape = config.options, config.shape
        super().__init__(config, (config.depth,), layers=int(options.get("augment", True)))
        self.augment, self.regress = options.get("augment", True), options.get("regress", True)
        if self.augment:
            self.rope, self.block = Rope(shape), Block(shape)
        self.sums = options.get("decoder", True) == "sum"
        if self.regress and not self.sums:
            self.decoder = AttentionDecoder(shape.hidden, shape.heads, shape.eps, options.get("decoder", True))
        self.norm = Norm(shape.hidden, shape.eps)
        self.blocks = nn.ModuleList(Residual(shape.hidden) for _ in range(config.levels))
        self._served: ServedLayer | None = None
        self._decoder: ServedDecoder | None = None  # its decoder and blocks on kernels

    def run_on_kernels(self, exact: bool = True) -> None:
        from faircopy.drafters.networks.served import ServedDecoder, ServedLayer
        from faircopy.kernels.gpu.suite import TWINS, suite_for

        if self.regress and not self.sums:
            blocks = [block.linear for block in self.blocks if isinstance(block, Residual)]
            self._decoder = ServedDecoder(self.decoder, blocks, exact, suite_for(self.device) or TWINS)
        if self.augment:
            block = self.block
            self._served = ServedLayer(block.self_attn, block.mlp, block.post_attention_layernorm.weight, exact=exact)

    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        if self._served is not None and rows.packed is not None and rows.cache is not None:
            from faircopy.drafters.networks.served import normalised

            weight, eps = self.block.input_layernorm.weight, self.config.shape.eps
            x, y = normalised(states[0], weight, eps, rows.cache)  # the copy is added to in place
            return self._served(y, x, rows.packed, rows.cache, self.norm.weight.detach())[1][None]
        x = self.block(states, *self.rope(rows.positions), rows.attend, 0) if self.augment else states
        return self.norm(x)  # type: ignore[no-any-return]

    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        if self._decoder is not None:
            rows_before = memory.flatten(0, -2).contiguous()
            parts = self._decoder(level, rows_before, tokens.flatten(), self.token_weights.rows)
            state, out = (part.view(memory.shape) for part in parts)
            return Guess(self.speak(out), state, out)
        state = self._told(memory, tokens) if self.regress else memory
        out = self.blocks[level](state)
        return Guess(self.speak(out), state, out)

    def _told(self, memory: Tensor, tokens: Tensor) -> Tensor:
        """What is remembered, told the token."""
        rows = self.token_rows(tokens)
        return memory + rows if self.sums else self.decoder(memory, rows)

    def token_rows(self, tokens: Tensor) -> Tensor:
        """The target's output rows for these tokens, at unit variance."""
        rows = self.token_weights.rows[tokens].to(self.dtype)
        return F.rms_norm(rows, (rows.shape[-1],), None, self.config.shape.eps)

    def tree(self, max_nodes: int) -> Tree:
        """The authors' rule: top-p of 0.8, nothing below a quarter of the best."""
        return NodeBudgetTree(max_nodes)

    def start_from(self, last_layer: dict[str, Tensor], norm: Tensor) -> None:
        if self.augment:
            copy_matching(self.block, last_layer)
        copy_matching(self.norm, {"weight": norm})


def copy_matching(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Take over the weights that have a place here; families that store theirs otherwise give none."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in weights and weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
