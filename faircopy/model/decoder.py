"""The eager decoder for the dense Llama family: packed rows, torch operations, any cache."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from faircopy.kernels.activation import ACTIVATIONS
from faircopy.kernels.cpu.product import PackedWeight, fits
from faircopy.kernels.linear import Product, RowParallel, column_product, product
from faircopy.kernels.norm import rms_norm
from faircopy.kernels.rope import rotate
from faircopy.layout.base import Cache, Packed
from faircopy.model.base import FINAL, Taps, TokenWeights
from faircopy.model.shares import counted_ranks
from faircopy.model.weights import LayerWeights, Products, Source, Weights


def eager_weights(source: Source) -> Weights[Product]:
    """The weights with the device's own products."""
    name, ranks = source.spec.activation, source.ranks
    act = ACTIVATIONS[name]

    def linear(weight: Tensor, bias: Tensor | None, exact: bool, outputs: int) -> Product:
        return product(weight, bias, exact) if ranks is None else column_product(weight, bias, exact, outputs)

    def gated(weight: Tensor, bias: Tensor | None, exact: bool) -> Product:
        if fits(weight, name):
            return PackedWeight(weight, bias, name)
        gate_up = linear(weight, bias, exact, weight.shape[0] * (1 if ranks is None else ranks.size))

        def run(x: Tensor) -> Tensor:
            gate, up = gate_up(x).chunk(2, -1)
            return act(gate) * up

        return run

    return Weights(source, Products(linear, gated, product if ranks is None else partial(RowParallel, ranks=ranks)))


class Decoder:
    """A dense decoder over packed rows; exact if its products are."""

    backend = "eager decoder"

    def __init__(self, weights: Weights[Product]) -> None:
        source = weights.source
        self.name, self.vocab, self.context = source.name, source.vocab, source.context
        self.weights, self.spec = weights, weights.spec
        self.dtype, self.device, self.layers = source.dtype, weights.device, weights.shapes
        if source.ranks is not None:
            self.backend = f"eager decoder, sums in K groups, {counted_ranks(source.ranks)}"

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def token_weights(self) -> TokenWeights:
        return self.weights.token_weights()

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
        return self.logits(self.run_layers(self.embed(packed), packed, cache, taps), packed, taps)

    def run_stage(self, x: Tensor | None, packed: Packed, cache: Cache, taps: Taps) -> Tensor:
        """What leaves the layers that are here; of the last ones, logits. x: what enters, None: the ids."""
        x = self.run_layers(self.embed(packed) if x is None else x, packed, cache, taps)
        return self.logits(x, packed, taps) if self.weights.source.stage.last else x

    def embed(self, packed: Packed) -> Tensor:
        """What enters the first layer [T, hidden]."""
        x = self.weights.embed(packed.ids)
        return x if self.spec.embedding_multiplier == 1.0 else x * self.weights.multiplier

    def run_layers(self, x: Tensor, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """What leaves the layers that are here; of the last one, the wanted rows alone if no other is looked at."""
        s, stage = self.spec, self.weights.source.stage
        angles = self.weights.rope[packed.positions]
        for i, layer in enumerate(self.weights.layers, stage.layers.start):
            if taps is not None:
                taps(i, x)
            index = i - stage.layers.start
            x = self._add(x, self._attention(layer, index, x, angles, packed, cache), layer.after_attention)
            if stage.last and i == stage.layers.stop - 1 and not self._taps_last(taps):
                x = x[packed.wanted]
            if x.shape[0]:
                x = self._add(x, layer.down(layer.gate_up(rms_norm(x, layer.before_mlp, s.eps))), layer.after_mlp)
        return x

    def logits(self, x: Tensor, packed: Packed, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab], of what left the last layer."""
        w, s = self.weights, self.spec
        y = rms_norm(x, w.norm, s.eps)
        if taps is not None:
            taps(w.source.stage.layers.stop, x)
            taps(FINAL, y)
        every = y.shape[0] == packed.wanted.shape[0]
        logits = w.head(y if every else y[packed.wanted])
        return logits if s.logits_divisor == 1.0 else logits / s.logits_divisor

    def _taps_last(self, taps: Taps | None) -> bool:
        """Whether states of all rows are wanted behind the last layer."""
        return taps is not None and taps.wants_any(self.weights.source.stage.layers.stop, FINAL)

    def _attention(
        self, layer: LayerWeights[Product], index: int, x: Tensor, angles: Tensor, packed: Packed, cache: Cache
    ) -> Tensor:
        s = self.spec
        qkv = layer.qkv(rms_norm(x, layer.before_attention, s.eps)).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        qk, v = qkv[:, : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]
        if layer.qk_norm is not None:
            qk = torch.nn.functional.rms_norm(qk, (s.head_dim,), None, s.eps) * layer.qk_norm
        if layer.rotary:
            qk = rotate(qk, angles, s.interleaved)
        out = cache.attend(packed, index, qk[:, : s.heads], qk[:, s.heads :], v, s.scale)
        return layer.out(out.reshape(out.shape[0], -1))

    def _add(self, x: Tensor, y: Tensor, norm: Tensor | None) -> Tensor:
        y = y if norm is None else rms_norm(y, norm, self.spec.eps)
        return x + y if self.spec.residual_multiplier == 1.0 else x + y * self.spec.residual_multiplier
