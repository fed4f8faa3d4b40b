"""Our packed decoder for the dense Llama family: one structure, described by a spec; products are fused at load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faircopy.kernels.activation import ACTIVATIONS
from faircopy.kernels.linear import Product, product
from faircopy.kernels.norm import rms_norm
from faircopy.kernels.rope import rope_table, rotate
from faircopy.layout.base import Cache, LayerShape, Packed
from faircopy.model.base import FINAL, Taps, Words

Tensors = Callable[[str], Tensor | None]  # name -> tensor of the checkpoint, if it is there

# What a family's configuration does not say: which layers look through a window, how rope pairs dimensions.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"window_everywhere": True},
    "ministral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"window_everywhere": True},
    "glm": {"interleaved": True},
    "glm4": {"interleaved": True},
    "granite": {},
    "smollm3": {},
    "seed_oss": {},
    "gemma": {"norm_offset": 1.0, "scaled_embedding": True},
}


@dataclass(frozen=True, slots=True)
class Spec:
    """The numbers that tell one family member from another."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: Callable[[Tensor], Tensor]
    windows: list[int]  # per layer; 0: none
    rotary: list[bool]  # per layer
    frequencies: Tensor
    rope_factor: float
    interleaved: bool = False
    norm_offset: float = 0.0
    scale: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights, fused: q, k, v in one product, gate and up in another."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    before_attention: Tensor
    before_mlp: Tensor
    after_attention: Tensor | None
    after_mlp: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    rotary: bool


class Decoder:
    """A dense decoder over packed rows; exact if its products are."""

    _product: Callable[..., Product] = staticmethod(product)

    def __init__(
        self, name: str, spec: Spec, tensors: Tensors, vocab: int, context: int, dtype: torch.dtype, exact: bool
    ) -> None:
        self.name, self.vocab, self.context, self.dtype = name, vocab, context, dtype
        self.spec = spec
        self._tensors, self._exact = tensors, exact
        self._embedding = self._need("model.embed_tokens.weight")
        self.device = self._embedding.device
        self._multiplier = torch.tensor(spec.embedding_multiplier, dtype=dtype, device=self.device)
        self._multiplier_value = float(self._multiplier)  # as the type rounds it
        self._layers = [self._layer(i) for i in range(len(spec.windows))]
        self._norm = self._norm_weight("model.norm.weight")
        head = tensors("lm_head.weight")
        self._head = self._product(self._embedding if head is None else head, tensors("lm_head.bias"), exact)
        self._rope = rope_table(spec.frequencies, context, spec.rope_factor, dtype).to(self.device)
        group = spec.heads // spec.kv_heads
        self.layers = [LayerShape(spec.kv_heads, spec.head_dim, window, group) for window in spec.windows]
        self._read_again = tensors
        del self._tensors

    def words(self) -> Words:
        """Embedding and head; a head of its own is read from the checkpoint again, since only its product is kept."""
        head = self._read_again("lm_head.weight")
        rows = self._embedding if head is None else head
        return Words(self._embedding, rows, self._read_again("lm_head.bias"), self.spec.logits_divisor)

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]."""
        x = self._embedding[packed.ids]
        if self.spec.embedding_multiplier != 1.0:
            x = x * self._multiplier
        angles = self._rope[packed.positions]
        for i, layer in enumerate(self._layers):
            if taps is not None:
                taps(i, x)
            x = self._add(x, self._attention(layer, i, x, angles, packed, cache), layer.after_attention)
            x = self._add(x, self._mlp(layer, x), layer.after_mlp)
        if taps is not None:
            taps(len(self._layers), x)
            taps(FINAL, rms_norm(x, self._norm, self.spec.eps))
        logits = self._head(rms_norm(x[packed.wanted], self._norm, self.spec.eps))
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor

    def _attention(self, layer: _Layer, index: int, x: Tensor, angles: Tensor, packed: Packed, cache: Cache) -> Tensor:
        s = self.spec
        qkv = layer.qkv(rms_norm(x, layer.before_attention, s.eps)).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        qk, v = qkv[:, : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]
        if layer.qk_norm is not None:
            qk = torch.nn.functional.rms_norm(qk, (s.head_dim,), None, s.eps) * layer.qk_norm
        if layer.rotary:
            qk = rotate(qk, angles, s.interleaved)
        out = cache.attend(packed, index, qk[:, : s.heads], qk[:, s.heads :], v, s.scale)
        return layer.out(out.reshape(out.shape[0], -1))

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(rms_norm(x, layer.before_mlp, self.spec.eps)).chunk(2, -1)
        return layer.down(self.spec.activation(gate) * up)

    def _add(self, x: Tensor, y: Tensor, norm: Tensor | None) -> Tensor:
        y = y if norm is None else rms_norm(y, norm, self.spec.eps)
        return x + y if self.spec.residual_multiplier == 1.0 else x + y * self.spec.residual_multiplier

    def _need(self, name: str) -> Tensor:
        tensor = self._tensors(name)
        assert tensor is not None, f"{name} was not checked to be there"
        return tensor

    def _layer(self, i: int) -> _Layer:
        at = f"model.layers.{i}."
        return _Layer(
            qkv=self._fused(at + "self_attn.", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            out=self._fused(at + "self_attn.", "o_proj", ()),
            gate_up=self._gate_up(at + "mlp."),
            down=self._fused(at + "mlp.", "down_proj", ()),
            before_attention=self._norm_weight(at + "input_layernorm.weight"),
            before_mlp=self._norm_weight(at + "post_attention_layernorm.weight"),
            after_attention=self._tensors(at + "post_self_attn_layernorm.weight"),
            after_mlp=self._tensors(at + "post_mlp_layernorm.weight"),
            qk_norm=self._qk_norm(at + "self_attn."),
            rotary=self.spec.rotary[i],
        )

    def _norm_weight(self, name: str) -> Tensor:
        weight = self._need(name)
        return weight if not self.spec.norm_offset else weight.float() + self.spec.norm_offset

    def _gate_up(self, at: str) -> Product:
        return self._product(*self._joined(at, "gate_up_proj", ("gate_proj", "up_proj")), self._exact)

    def _fused(self, at: str, whole: str, parts: tuple[str, ...]) -> Product:
        return self._product(*self._joined(at, whole, parts), self._exact)

    def _joined(self, at: str, whole: str, parts: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of several projections in one; a checkpoint may have stored them so already."""
        if self._tensors(f"{at}{whole}.weight") is not None or not parts:
            parts = (whole,)
        weights = [self._need(f"{at}{part}.weight") for part in parts]
        biases = [self._tensors(f"{at}{part}.bias") for part in parts]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        return torch.cat(weights), bias

    def _qk_norm(self, at: str) -> Tensor | None:
        q, k = self._tensors(at + "q_norm.weight"), self._tensors(at + "k_norm.weight")
        if q is None or k is None:
            return None
        return torch.cat([q.expand(self.spec.heads, -1), k.expand(self.spec.kv_heads, -1)])


def decoder_spec(config: Any, frequencies: Tensor, rope_factor: float) -> Spec:
    """Read a transformers configuration of one of the FAMILIES."""
    family = FAMILIES[config.model_type]
    head_dim = head_size(config)
    dtype_scale = math.sqrt(config.hidden_size) if family.get("scaled_embedding") else 1.0
    return Spec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        activation=ACTIVATIONS[config.hidden_act],
        windows=_windows(config, bool(family.get("window_everywhere"))),
        rotary=[bool(r) for r in getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers],
        frequencies=frequencies,
        rope_factor=rope_factor,
        interleaved=bool(family.get("interleaved")),
        norm_offset=family.get("norm_offset", 0.0),
        scale=getattr(config, "attention_multiplier", None) or head_dim**-0.5,
        embedding_multiplier=getattr(config, "embedding_multiplier", dtype_scale),
        residual_multiplier=getattr(config, "residual_multiplier", 1.0),
        logits_divisor=getattr(config, "logits_scaling", 1.0),
    )


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: Any, everywhere: bool) -> list[int]:
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if everywhere or not window or kinds is None:
        return [window if everywhere else 0] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
