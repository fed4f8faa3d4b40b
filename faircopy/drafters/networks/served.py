"""A draft head's decoder layers on the GPU's kernels, for heads that only guess: a dozen launches a layer, not forty.

Weights are joined as the kernels want them, and the network's own parameters become views of the joined ones: nothing
is held twice. Guesses change no token, so nothing here needs to have the bits of the network in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from faircopy.drafters.networks.blocks import Attention, BlockShape, Mlp, rope_tables
from faircopy.kernels.gpu.linear import Linear
from faircopy.kernels.gpu.suite import Suite, add_norm_lazily, residual_stream

if TYPE_CHECKING:
    from faircopy.drafters.networks.clover import AttentionDecoder
    from faircopy.layout.base import Packed
    from faircopy.layout.paged import PagedLayout


class ServedLayer:
    """Attention and MLP of one layer over packed rows."""

    def __init__(self, attention: Attention, mlp: Mlp, between: Tensor, index: int = 0, exact: bool = True) -> None:
        """between: the norm's weight between the two. index: of the layer in its cache."""
        shape = self._shape = attention.shape
        self._qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj], exact)
        self._out = Linear(attention.o_proj.weight.detach(), exact=exact)
        self._down = Linear(mlp.down_proj.weight.detach(), exact=exact)
        self._gate_up = alternating(mlp.gate_proj, mlp.up_proj, exact)
        self._between, self._index = between.detach(), index
        self._heads_norm = _heads_norm(attention) if shape.qk_norm else None
        self._rope = half_tables(shape, between.device)

    def __call__(
        self, y: Tensor, x: Tensor, packed: Packed, cache: PagedLayout, after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden] plus what the layer makes of y, its normalised input, and the sum normalised by `after`.

        Of many rows x itself is added to; of few rows the sum is a new tensor.
        """
        suite, shape = _suite(cache), self._shape
        q = suite.place(
            self._qkv.parts(y), self._heads_norm, self._rope, packed.positions, packed.slots,
            *cache.pools(self._index), shape.heads, shape.eps, False,
        )  # fmt: skip
        mixed = cache.attend_cached(packed, self._index, q, shape.head_dim**-0.5)
        z = add_norm_lazily(suite, x, self._out.parts(mixed.view(x.shape[0], -1)), self._between, shape.eps)
        parts = self._down.parts(self._gate_up.gated(z, "silu"))
        x = residual_stream(z, x)
        return x, suite.add_norm(x, parts, after, shape.eps)


class ServedDecoder:
    """Clover's attention decoder and the blocks behind it."""

    def __init__(self, decoder: AttentionDecoder, blocks: list[nn.Linear], exact: bool, suite: Suite) -> None:
        """blocks: the layer of every level's block."""
        self._suite, self._heads, self._eps = suite, decoder.heads, decoder.norm.eps or 0.0
        weight = decoder.norm.weight.detach()
        self._norms = torch.ones_like(weight), weight
        self._query = Linear(decoder.q_proj.weight.detach(), exact=exact) if decoder.gated else None
        self._said = joined([decoder.k_proj, decoder.v_proj] if decoder.gated else [decoder.v_proj], exact)
        self._blocks = [Linear(block.weight.detach(), block.bias.detach(), exact) for block in blocks]

    def __call__(self, level: int, memory: Tensor, tokens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """What is remembered [T, hidden], told the tokens by their rows of a table, and what the block makes of it."""
        token, state = self._suite.pair(tokens, table, memory, self._norms, self._eps, apart=True)
        query = None if self._query is None else self._query.parts(state)
        told = self._suite.take_in(memory, self._said.parts(token), query, self._heads)
        return told, self._suite.take_in(told, self._blocks[level].parts(told))


def normalised(x: Tensor, weight: Tensor, eps: float, cache: PagedLayout) -> tuple[Tensor, Tensor]:
    """A copy of the rows, and the same normalised."""
    return _suite(cache).embed_norm(None, x, weight.detach(), 1.0, eps)


def beside(
    tokens: Tensor, table: Tensor, state: Tensor, cache: PagedLayout, norms: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """Tokens' rows of a table and states [T, hidden], side by side; norms: both are normalised by these weights."""
    weights = None if norms is None else (norms[0].detach(), norms[1].detach())
    return _suite(cache).pair(tokens, table, state, weights, eps)


def joined(layers: list[nn.Linear], exact: bool = True) -> Linear:
    """One product for several layers that read the same."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    for layer, rows in zip(layers, torch.split(weight, [layer.out_features for layer in layers]), strict=True):
        layer.weight.data = rows
    return Linear(weight, torch.cat(biases) if biases else None, exact)


def alternating(gate: nn.Linear, up: nn.Linear, exact: bool = True) -> Linear:
    """One product for gate and up, whose rows take turns."""
    weight = torch.stack([gate.weight.detach(), up.weight.detach()], 1)
    gate.weight.data, up.weight.data = weight[:, 0], weight[:, 1]
    return Linear(weight.view(-1, weight.shape[-1]), exact=exact, groups=1)


def half_tables(shape: BlockShape, device: torch.device) -> Tensor:
    """Cosines and sines as the kernels read them: [context, 2, head_dim / 2]."""
    half = shape.head_dim // 2
    return torch.stack([table[:, :half] for table in rope_tables(shape)], 1).contiguous().to(device)


def _heads_norm(attention: Attention) -> Tensor:
    """The norm's weight of every query and key head."""
    shape = attention.shape
    weights = [attention.q_norm.weight] * shape.heads + [attention.k_norm.weight] * shape.kv_heads
    return torch.stack([weight.detach() for weight in weights])


def _suite(cache: PagedLayout) -> Suite:
    assert cache.suite is not None, "served layers are made of kernels"
    return cache.suite
