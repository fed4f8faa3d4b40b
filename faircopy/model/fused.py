"""The fused decoder for the dense Llama family on a GPU: seven kernels a layer, over a cache that kernels write.

Products leave their spans unadded; whatever reads them next adds them on the way: the residual stream, or the heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from faircopy.kernels.gpu.linear import Linear, SharedLinear
from faircopy.kernels.gpu.pending_norm import PendingNorm
from faircopy.kernels.gpu.suite import Suite, add_norm_lazily, residual_stream
from faircopy.kernels.groups import group_count
from faircopy.kernels.linear import Product
from faircopy.layout.base import Cache, Packed
from faircopy.model.base import FINAL, Taps, TokenWeights
from faircopy.model.decoder import Decoder
from faircopy.model.shares import counted_ranks
from faircopy.model.weights import Products, Source, Weights

LONG = 64  # rows of a pass from which on fewer of them take less time


@runtime_checkable
class FusedCache(Protocol):
    """A cache whose pools the kernels may write themselves."""

    suite: Suite | None

    def pools(self, layer: int) -> tuple[Tensor, Tensor]: ...
    def attend_cached(self, packed: Packed, layer: int, q: Tensor, scale: float) -> Tensor: ...
    def watch(self, healthy: Tensor) -> None: ...


class PartsProduct(Protocol):
    """A product whose parts the reader may add."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def parts(self, x: Tensor | PendingNorm) -> Tensor: ...


def fused_weights(source: Source) -> Weights[PartsProduct]:
    """The weights with the GPU's products; gate and up rows alternate, so that one tile holds both of each pair."""

    def gated(weight: Tensor, bias: Tensor | None, exact: bool) -> Product:
        return partial(Linear.gating(weight, bias, exact).gated, kind=source.spec.activation)

    def linear(weight: Tensor, bias: Tensor | None, exact: bool, outputs: int) -> Linear:
        return Linear(weight, bias, exact, group_count(weight.shape[1], outputs))

    def shared(weight: Tensor, bias: Tensor | None, exact: bool) -> PartsProduct:
        ranks = source.ranks
        if ranks is None:
            return Linear(weight, bias, exact)
        groups = group_count(weight.shape[1] * ranks.size, weight.shape[0]) // ranks.size
        return SharedLinear(weight, bias, exact, groups, ranks)

    products: Products[PartsProduct] = Products(linear, gated, shared)
    return Weights(source, products)


class Fused:
    """A dense decoder over packed rows; passes over other caches run in the eager decoder, with the same weights."""

    backend = "fused decoder"

    def __init__(self, weights: Weights[PartsProduct]) -> None:
        source = weights.source
        self.name, self.vocab, self.context = source.name, source.vocab, source.context
        self.weights, self.spec, self._eager = weights, weights.spec, Decoder(weights)
        self.dtype, self.device, self.layers = source.dtype, weights.device, weights.shapes
        self._multiplier = float(weights.multiplier)  # as the type rounds it
        if source.ranks is not None:
            self.backend = f"fused decoder, {counted_ranks(source.ranks)}"

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def token_weights(self) -> TokenWeights:
        return self.weights.token_weights()

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
        if not isinstance(cache, FusedCache) or cache.suite is None:
            return self._eager.forward(packed, cache, taps)
        y = self._states(packed, cache, cache.suite, taps)
        every = y.shape[0] == packed.wanted.shape[0]
        logits = self.weights.head(y if every else y.index_select(0, packed.wanted))
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor

    def _states(self, packed: Packed, cache: FusedCache, suite: Suite, taps: Taps | None = None) -> Tensor:
        """The last layer's normalised output: of every row [T, hidden], or, of long passes, of the wanted ones."""
        s, w, layers = self.spec, self.weights, self.weights.layers
        wanted, lazily = self._wanted(packed, taps), partial(add_norm_lazily, suite)
        healthy = torch.empty(packed.size, dtype=torch.bool, device=self.device)
        y: Tensor | PendingNorm
        x, y = suite.embed_norm(*self._embedded(packed.ids), layers[0].before_attention, self._multiplier, s.eps)
        for i, layer in enumerate(layers):
            if taps is not None:
                taps(i, x, copy=True)  # the stream is added to in place
            last = i == len(layers) - 1
            out = self._heads(i, y, packed, cache, suite)
            x = residual_stream(y, x)
            parts = layer.out.parts(out.view(packed.size, -1))
            watched = healthy if last else None
            y = lazily(x, parts, layer.before_mlp, s.eps, layer.after_attention, s.residual_multiplier, watched)
            if last and wanted is not None:
                assert isinstance(y, Tensor), "long passes leave no rows to a product"
                x, y = x.index_select(0, wanted), y.index_select(0, wanted)
                if not wanted.shape[0]:
                    break
            parts = layer.down.parts(layer.gate_up(y))
            x = residual_stream(y, x)
            after = w.norm if last else layers[i + 1].before_attention
            join = suite.add_norm if last or (taps is not None and i + 1 in taps.wants) else lazily
            y = join(x, parts, after, s.eps, layer.after_mlp, s.residual_multiplier)
        assert isinstance(y, Tensor), "the last rows are left to no product"
        cache.watch(healthy)
        if taps is not None:
            taps(len(layers), x)
            taps(FINAL, y)
        return y

    def _wanted(self, packed: Packed, taps: Taps | None) -> Tensor | None:
        """The rows that the end of the last layer is needed for; None: all."""
        tapped = taps is not None and taps.wants_any(len(self.weights.layers), FINAL)
        fewer = packed.size > LONG and packed.wanted.shape[0] < packed.size
        return packed.wanted if fewer and not tapped else None

    def _embedded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and the table they are looked up in; where ranks share it, the rows that were wanted."""
        if self.weights.source.ranks is None:
            return ids, self.weights.embedding
        return torch.arange(ids.shape[0], device=ids.device), self.weights.embed(ids)

    def _heads(self, i: int, y: Tensor | PendingNorm, packed: Packed, cache: FusedCache, suite: Suite) -> Tensor:
        """Attention's output [T, H, D] for the normalised rows y."""
        s, layer = self.spec, self.weights.layers[i]
        parts = layer.qkv.parts(y)
        table: Any = self.weights.rope if layer.rotary else None
        q = suite.place(
            parts, layer.qk_norm, table, packed.positions, packed.slots, *cache.pools(i), s.heads, s.eps, s.interleaved
        )
        return cache.attend_cached(packed, i, q, s.scale)
