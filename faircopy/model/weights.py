"""The dense Llama family: what a configuration says of a model (`Spec`), and the weights that both decoders run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from faircopy.kernels.cpu.product import PackedWeight
from faircopy.kernels.linear import Product
from faircopy.kernels.memory import give_back_free_memory
from faircopy.kernels.ranks import Ranks
from faircopy.kernels.rope import rope_table
from faircopy.layout.base import LayerShape
from faircopy.model.base import Model, TokenWeights
from faircopy.model.shares import TokenShares

Tensors = Callable[[str], Tensor | None]  # name -> tensor of the checkpoint, if it is there
P = TypeVar("P", bound=Product, covariant=True)  # how a decoder multiplies

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
    activation: str  # one of kernels.activation.ACTIVATIONS
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
    intermediate: int = 0


class Stage(NamedTuple):
    """A rank's layers in a pipeline."""

    layers: range
    last: bool  # whether the norm and the head follow them

    @property
    def first(self) -> bool:
        """Whether the embedding comes before them."""
        return self.layers.start == 0


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of the family before its weights are read."""

    name: str
    spec: Spec
    tensors: Tensors
    vocab: int
    context: int
    dtype: torch.dtype
    exact: bool  # whether a row's bits must not depend on the rows beside it
    ranks: Ranks | None = None  # who has the other shares of the tensors; None: sums are not made in groups
    whole: Tensors | None = None  # the tensors before they were cut; None: they are not cut
    whole_spec: Spec | None = None  # the same of the numbers
    part: Stage | None = None  # the layers that are read; None: all

    @property
    def stage(self) -> Stage:
        return self.part or Stage(range(len(self.spec.windows)), True)


@dataclass(frozen=True, slots=True)
class Products(Generic[P]):
    """How a decoder turns a weight, its bias and `Source.exact` into a product."""

    linear: Callable[[Tensor, Tensor | None, bool, int], P]  # and how many outputs all ranks' weights have
    gated: Callable[[Tensor, Tensor | None, bool], Product]  # of gate and up: x -> activation(gate) * up
    rows: Callable[[Tensor, Tensor | None, bool], P]  # of attention's output and down: ranks may share their inputs


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[P]):
    """One decoder layer: q, k, v in one product, gate and up in another."""

    qkv: P
    out: P
    gate_up: Callable[..., Tensor]  # x -> activation(gate) * up
    down: P
    before_attention: Tensor
    before_mlp: Tensor
    after_attention: Tensor | None
    after_mlp: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    rotary: bool


class Weights(Generic[P]):
    """A checkpoint's weights on its device, as a decoder reads them."""

    def __init__(self, source: Source, products: Products[P]) -> None:
        self.source, self.spec, self._products = source, source.spec, products
        self.layer_bytes = self.head_bytes = 0  # of all layers' products and of the head's: what a pass reads
        self.layers: list[LayerWeights[P]] = []
        for i in source.stage.layers:
            self.layers.append(self._layer(i))
            give_back_free_memory()  # of the weights as they were read, which else lies unused between packed ones
        self.device = self.layers[0].before_attention.device
        self.multiplier = torch.tensor(self.spec.embedding_multiplier, dtype=source.dtype, device=self.device)
        self._tokens = None if source.ranks is None else TokenShares(source.vocab, source.ranks)
        self._shared: PackedWeight | None = None  # the head's product, if it holds the embedding too
        own = source.tensors("lm_head.weight") if source.stage.last else None
        reads = source.stage.first or (source.stage.last and own is None)
        embedding = self._need("model.embed_tokens.weight") if reads else None
        if source.stage.last:
            self.norm, self.head = self._norm_weight("model.norm.weight"), self._head(own, embedding)
        self._embedding = embedding if source.stage.first and self._shared is None else None
        self.rope = rope_table(self.spec.frequencies, source.context, self.spec.rope_factor, source.dtype)
        self.rope = self.rope.to(self.device)

    @property
    def shapes(self) -> list[LayerShape]:
        """What each layer keeps per token."""
        s, stage = self.spec, self.source.stage
        windows = s.windows[stage.layers.start : stage.layers.stop]
        return [LayerShape(s.kv_heads, s.head_dim, window, s.heads // s.kv_heads) for window in windows]

    @property
    def nbytes(self) -> int:
        """Bytes of all products and of the embedding, if that is kept beside them."""
        return self.layer_bytes + self.head_bytes + (0 if self._embedding is None else self._embedding.nbytes)

    @property
    def embedding(self) -> Tensor:
        """[V, hidden]; read from the checkpoint again where only the head's product is kept, or a share of it."""
        read = self.source.whole
        if self._embedding is not None and read is None:
            return self._embedding
        return _needed(read or self.source.tensors, "model.embed_tokens.weight")

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings [T, hidden] of tokens; a head that shares them keeps them once, in its product."""
        return self._rows(ids) if self._tokens is None else self._tokens.embedded(ids, self._rows)

    def _rows(self, ids: Tensor) -> Tensor:
        """Rows of the embedding, or of this rank's share of it."""
        if self._shared is not None:
            return self._shared.rows(ids)
        assert self._embedding is not None, "what the head does not share is kept"
        return self._embedding[ids]

    def token_weights(self) -> TokenWeights:
        """Embedding and head; a head of its own is read from the checkpoint again, since only its product is kept."""
        tensors, embedding = self.source.whole or self.source.tensors, self.embedding
        head = tensors("lm_head.weight")
        rows = embedding if head is None else head
        return TokenWeights(embedding, rows, tensors("lm_head.bias"), self.spec.logits_divisor)

    def _head(self, own: Tensor | None, embedding: Tensor | None) -> Product:
        """The output layer; without weights of its own it shares the embedding's."""
        rows, bias = embedding if own is None else own, self.source.tensors("lm_head.bias")
        assert rows is not None, "one of the two was read"
        head: Product = self._products.linear(rows, bias, self.source.exact, self.source.vocab)
        self.head_bytes = rows.nbytes
        if own is None and isinstance(head, PackedWeight):
            self._shared = head
        return head if self._tokens is None else self._tokens.joined(head)

    def _need(self, name: str) -> Tensor:
        return _needed(self.source.tensors, name)

    def _layer(self, i: int) -> LayerWeights[P]:
        at, tensors, whole = f"model.layers.{i}.", self.source.tensors, self.source.whole_spec or self.spec
        return LayerWeights(
            qkv=self._products.linear(
                *self._joined(at + "self_attn.", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
                self.source.exact,
                (whole.heads + 2 * whole.kv_heads) * whole.head_dim,
            ),
            out=self._products.rows(*self._joined(at + "self_attn.", "o_proj", ()), self.source.exact),
            gate_up=self._gate_up(at + "mlp."),
            down=self._products.rows(*self._joined(at + "mlp.", "down_proj", ()), self.source.exact),
            before_attention=self._norm_weight(at + "input_layernorm.weight"),
            before_mlp=self._norm_weight(at + "post_attention_layernorm.weight"),
            after_attention=tensors(at + "post_self_attn_layernorm.weight"),
            after_mlp=tensors(at + "post_mlp_layernorm.weight"),
            qk_norm=self._qk_norm(at + "self_attn."),
            rotary=self.spec.rotary[i],
        )

    def _norm_weight(self, name: str) -> Tensor:
        weight = self._need(name)
        return weight if not self.spec.norm_offset else weight.float() + self.spec.norm_offset

    def _gate_up(self, at: str) -> Product:
        return self._products.gated(*self._joined(at, "gate_up_proj", ("gate_proj", "up_proj")), self.source.exact)

    def _joined(self, at: str, whole: str, parts: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of several projections in one; a checkpoint may have stored them so already."""
        tensors = self.source.tensors
        joined = tensors(f"{at}{whole}.weight")
        parts = parts if joined is None else (whole,)
        weights = [joined] if joined is not None else [self._need(f"{at}{part}.weight") for part in parts]
        biases = [tensors(f"{at}{part}.bias") for part in parts]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        weight = torch.cat(weights)
        self.layer_bytes += weight.nbytes
        return weight, bias

    def _qk_norm(self, at: str) -> Tensor | None:
        q, k = self.source.tensors(at + "q_norm.weight"), self.source.tensors(at + "k_norm.weight")
        if q is None or k is None:
            return None
        return torch.cat([q.expand(self.spec.heads, -1), k.expand(self.spec.kv_heads, -1)])


def _needed(tensors: Tensors, name: str) -> Tensor:
    tensor = tensors(name)
    assert tensor is not None, f"{name} was not checked to be there"
    return tensor


class DenseModel(Model, Protocol):
    """A model of the family, whichever decoder runs it."""

    @property
    def weights(self) -> Weights[Product]: ...


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
        activation=config.hidden_act,
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
        intermediate=config.intermediate_size,
    )


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: Any, everywhere: bool) -> list[int]:
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if everywhere or not window or kinds is None:
        return [window if everywhere else 0] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
