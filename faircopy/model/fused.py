"""Our decoder on a GPU: the same weights and the same structure, seven kernels a layer.

Products leave their spans unadded; whatever reads them next adds them on the way: the residual stream, or the heads.
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from faircopy.kernels.gpu.linear import Linear
from faircopy.kernels.gpu.suite import Suite
from faircopy.kernels.linear import Product
from faircopy.kernels.norm import rms_norm
from faircopy.layout.base import Cache, Packed
from faircopy.model.base import FINAL, Taps
from faircopy.model.decoder import Decoder, Spec, Tensors, _Layer


@runtime_checkable
class FusedCache(Protocol):
    """A cache whose pools the kernels may write themselves."""

    suite: Suite | None

    def pools(self, layer: int) -> tuple[Tensor, Tensor]: ...
    def attend_cached(self, packed: Packed, layer: int, q: Tensor, scale: float) -> Tensor: ...
    def watch(self, healthy: Tensor) -> None: ...


class Fused(Decoder):
    """A dense decoder over packed rows; any other cache than a fused one is served as the decoder does it."""

    _product = staticmethod(Linear)

    def __init__(
        self,
        name: str,
        spec: Spec,
        tensors: Tensors,
        vocab: int,
        context: int,
        dtype: torch.dtype,
        exact: bool,
        activation: str,
    ) -> None:
        super().__init__(name, spec, tensors, vocab, context, dtype, exact)
        self._activation = activation

    def _gate_up(self, at: str) -> Product:
        return Linear.gating(*self._joined(at, "gate_up_proj", ("gate_proj", "up_proj")), self._exact)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        y = rms_norm(x, layer.before_mlp, self.spec.eps)
        return layer.down(cast(Linear, layer.gate_up).gated(y, self._activation))

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
        if not isinstance(cache, FusedCache) or cache.suite is None:
            return super().forward(packed, cache, taps)
        y = self._states(packed, cache, cache.suite, taps)
        every = packed.wanted.shape[0] == packed.size
        logits = self._head(y if every else y.index_select(0, packed.wanted))
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor

    def _states(self, packed: Packed, cache: FusedCache, suite: Suite, taps: Taps | None = None) -> Tensor:
        """The last layer's normalised output of every row [T, hidden]."""
        s, layers = self.spec, self._layers
        healthy = torch.empty(packed.size, dtype=torch.bool, device=self.device)
        x, y = suite.embed_norm(packed.ids, self._embedding, layers[0].before_attention, self._multiplier_value, s.eps)
        for i, layer in enumerate(layers):
            if taps is not None:
                taps(i, x, copy=True)  # the stream is added to in place
            last = i == len(layers) - 1
            out = self._heads(i, y, packed, cache, suite)
            parts = cast(Linear, layer.out).parts(out.view(packed.size, -1))
            y = suite.add_norm(
                x,
                parts,
                layer.before_mlp,
                s.eps,
                layer.after_attention,
                s.residual_multiplier,
                healthy if last else None,
            )
            parts = cast(Linear, layer.down).parts(cast(Linear, layer.gate_up).gated(y, self._activation))
            after = self._norm if last else layers[i + 1].before_attention
            y = suite.add_norm(x, parts, after, s.eps, layer.after_mlp, s.residual_multiplier)
        cache.watch(healthy)
        if taps is not None:
            taps(len(layers), x)
            taps(FINAL, y)
        return y

    def _heads(self, i: int, y: Tensor, packed: Packed, cache: FusedCache, suite: Suite) -> Tensor:
        """Attention's output [T, H, D] for the normalised rows y."""
        s, layer = self.spec, self._layers[i]
        parts = cast(Linear, layer.qkv).parts(y)
        table: Any = self._rope if layer.rotary else None
        q = suite.place(
            parts, layer.qk_norm, table, packed.positions, packed.slots, *cache.pools(i), s.heads, s.eps, s.interleaved
        )
        return cache.attend_cached(packed, i, q, s.scale)
