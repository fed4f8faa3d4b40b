"""EAGLE-3: one decoder layer over fused states of three depths, trained on its own guesses (arXiv 2503.01840).

States entering layers 2, n/2 and n - 3 are fused to one; the layer's attention reads it beside the token's embedding,
its output is what the next step reads instead of a fused state. The output layer is its own, over the target's most
frequent tokens (`draft_vocab` of them). Training-time test: the layer runs `unroll` times over a text, each time fed
what it said before, with keys of the text from the first run and one key of its own per later run; a level weighs 0.8
of the one before. Trees are EAGLE-2's: likeliest paths first, then the best nodes of all.

`style="eagle1"` is the method's ancestor for comparison: the final state alone, the target's own output layer, no
training-time test, and a loss of smooth L1 to the target's next state plus a tenth of its distribution, with noise on
what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from faircopy.drafters.heads import Guess, Head, HeadConfig, Rows
from faircopy.drafters.networks.blocks import Attention, Mlp, Norm, Rope
from faircopy.drafters.networks.clover import copy_matching
from faircopy.drafters.trees import RerankedTree, Tree
from faircopy.model.base import FINAL

if TYPE_CHECKING:
    from faircopy.drafters.networks.served import ServedLayer
    from faircopy.layout.base import Packed
    from faircopy.layout.paged import PagedLayout

DEPTH = 6  # levels that the node budget is spread over
NOISE = 0.2  # width of EAGLE-1's uniform noise


class FusedLayer(nn.Module):
    """A decoder layer whose attention reads a token's embedding and a state, and that changes the state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        shape = config.shape
        self.self_attn, self.mlp = Attention(shape, 2 * shape.hidden), Mlp(shape)
        self.token_norm, self.state_norm, self.post_attention_layernorm = (
            Norm(shape.hidden, shape.eps) for _ in range(3)
        )

    def read(self, token: Tensor, state: Tensor) -> Tensor:
        """What attention reads."""
        return torch.cat([self.token_norm(token), self.state_norm(state)], -1)

    def finish(self, state: Tensor, mixed: Tensor) -> Tensor:
        """The new state, given what attention found [B, heads, T, D]."""
        found = self.self_attn.o_proj(mixed.transpose(1, 2).reshape(*state.shape[:2], -1))
        state = state + found
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class Eagle3(Head):
    deep = True
    words_kept: Tensor

    def __init__(self, config: HeadConfig) -> None:
        shape, options = config.shape, config.options
        self_taught = options.get("style") != "eagle1"
        super().__init__(config, tuple(options.get("wants") or default_wants(config)), layers=1)
        self.own, self.unrolled = self_taught, options.get("unroll", config.levels) if self_taught else 1
        self.rope, self.layer = Rope(shape), FusedLayer(config)
        if self.own:
            count = options.get("draft_vocab") or options.get("words") or config.vocab  # words: its name in old folders
            count = min(count, config.vocab)
            self.fuse = nn.Linear(self.input_size, shape.hidden, bias=False)
            self.norm, self.output = Norm(shape.hidden, shape.eps), nn.Linear(shape.hidden, count, bias=False)
            self.register_buffer("words_kept", torch.arange(count))
        self._served: ServedLayer | None = None
        self._outputs: Callable[[Tensor], Tensor] | None = None  # the output layer on kernels,
        self._fuses: Callable[[Tensor], Tensor] | None = None  # and what fuses states

    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        return self._run(self._fused(states), tokens, rows)[0]

    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        out = None
        if level:
            assert rows is not None, "guesses of this head need keys of the guesses before"
            memory, out = self._run(memory, tokens, rows)
        return self._guess(memory, out)

    def run_on_kernels(self, exact: bool = True) -> None:
        from faircopy.drafters.networks.served import ServedLayer
        from faircopy.kernels.gpu.linear import Linear

        layer = self.layer
        self._served = ServedLayer(layer.self_attn, layer.mlp, layer.post_attention_layernorm.weight, exact=exact)
        if self.own:
            self._outputs = Linear(self.output.weight.detach(), exact=exact)
            self._fuses = Linear(self.fuse.weight.detach(), exact=exact)

    def tree(self, max_nodes: int) -> Tree:
        return RerankedTree(max_nodes, DEPTH)

    def start_from(self, last_layer: dict[str, Tensor], norm: Tensor) -> None:
        """The authors start from random weights; the output layer from the target's rows, which costs nothing."""
        if self.own:
            copy_matching(self.norm, {"weight": norm})
            copy_matching(self.output, {"weight": self.token_weights.rows[self.words_kept]})

    def keep_frequent(self, counts: Tensor) -> None:
        super().keep_frequent(counts)
        if self.own:
            copy_matching(self.output, {"weight": self.token_weights.rows[self.words_kept]})

    def _fused(self, states: Tensor) -> Tensor:
        if not self.own:
            return noisy(states, self.training)
        if self._fuses is None:
            return self.fuse(states)  # type: ignore[no-any-return]
        return self._fuses(states.flatten(0, -2)).view(*states.shape[:-1], -1)

    def _run(self, state: Tensor, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """The new states; where kernels ran, also normalised."""
        if self._served is not None and rows.packed is not None and rows.cache is not None:
            return self._run_served(self._served, state[0].contiguous(), tokens[0], rows.packed, rows.cache)
        read = self.layer.read(self._embedded(tokens), state)
        q, k, v = self.layer.self_attn.qkv(read, *self.rope(rows.positions))
        return self.layer.finish(state, rows.attend(0, q, k, v)), None

    def _run_served(
        self, served: ServedLayer, state: Tensor, tokens: Tensor, packed: Packed, cache: PagedLayout
    ) -> tuple[Tensor, Tensor]:
        """state [T, hidden] may be added to in place: callers hand over what they do not keep."""
        from faircopy.drafters.networks.served import beside

        state = state if self.own else state.clone()  # what EAGLE-1 reads is the target's
        layer, norms = self.layer, (self.layer.token_norm.weight, self.layer.state_norm.weight)
        read = beside(tokens, self.token_weights.embedding, state, cache, norms, self.config.shape.eps)
        after = self.norm.weight if self.own else layer.state_norm.weight
        state, out = served(read, state, packed, cache, after.detach())
        return state[None], out[None]

    def _guess(self, memory: Tensor, out: Tensor | None = None) -> Guess:
        if not self.own:
            return Guess(self.speak(memory), memory, memory)
        out = self.norm(memory) if out is None else out
        few = self.output(out) if self._outputs is None else self._outputs(out.flatten(0, -2)).view(*out.shape[:-1], -1)
        return Guess(few if self._product is not None else self.over_vocabulary(few), memory, out)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.token_weights.embedding[tokens].to(self.dtype)


def noisy(states: Tensor, training: bool) -> Tensor:
    """States with EAGLE-1's noise while a head learns."""
    return states + (torch.rand_like(states) - 0.5) * NOISE if training else states


def default_wants(config: HeadConfig) -> tuple[int, ...]:
    """The paper's three depths, kept apart as far as a shallow target allows; EAGLE-1 reads the final state."""
    if config.options.get("style") == "eagle1":
        return (FINAL,)
    middle = config.depth // 2
    return min(2, middle), middle, max(config.depth - 3, min(middle + 1, config.depth))


def default_draft_vocab(vocab: int) -> int:
    """A quarter of the vocabulary, as 32,000 of Llama's 128,256, within bounds."""
    return min(vocab, 32000, max(1024, vocab // 4))


def options_for(vocab: int, options: dict[str, Any]) -> dict[str, Any]:
    return options if options.get("style") == "eagle1" else {"draft_vocab": default_draft_vocab(vocab), **options}
