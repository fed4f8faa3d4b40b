"""What the runner needs of a model, whichever backend runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from faircopy.layout.base import Cache, LayerShape, Packed

FINAL = -1  # the normalised state that a model's head reads


class Taps:
    """Keeps the wanted hidden states of a pass, a row per token: n is what enters layer n, or leaves the last.

    It keeps references: a model that goes on to write into a state hands over a copy.
    """

    def __init__(self, wants: tuple[int, ...]) -> None:
        self.wants = wants
        self.states: dict[int, Tensor] = {}

    def wants_any(self, *layers: int) -> bool:
        return any(layer in self.wants for layer in layers)

    def __call__(self, layer: int, x: Tensor, copy: bool = False) -> None:
        if layer in self.wants:
            self.states[layer] = x.clone() if copy else x


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What a model knows of single tokens: its embedding [V, hidden] and the rows of its head [V, hidden]."""

    embedding: Tensor
    rows: Tensor
    bias: Tensor | None = None  # [V]
    divisor: float = 1.0  # logits are divided by it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model's sizes, which its configuration alone tells."""

    name: str
    backend: Literal["decoder", "transformers"]  # our decoder, or transformers' own modules
    dtype: torch.dtype
    parameters: int  # a shared embedding counts once
    read: int  # of them, how many a pass multiplies with: a lookup in the embedding is none
    vocab: int
    context: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    layers: tuple[LayerShape, ...]
    tied: bool  # the output layer shares the embedding
    qk_norm: bool = False
    experts: int = 0  # numbers of all experts; a CPU keeps them packed and as they were read
    idle: float = 0.0  # share of the experts that a token is not sent to
    # Of a device's share, see model/shape_share.py:
    head_rows: int | None = None  # tokens whose rows of the output layer it holds; None: all
    ranks: int = 1  # devices that share each layer
    stages: int = 1  # devices that have some of the layers each

    @property
    def whole(self) -> bool:
        return self.ranks == self.stages == 1

    @property
    def spoken(self) -> int:
        """Tokens whose rows of the output layer are here."""
        return self.vocab if self.head_rows is None else self.head_rows

    @property
    def qkv(self) -> int:
        """Numbers of queries, keys and values that one row has in a layer."""
        keys = max((layer.kv_heads * layer.head_dim for layer in self.layers), default=0)
        return self.heads * self.head_dim + 2 * keys


class Model(Protocol):
    """A causal language model over packed tokens; keys and values live in the cache it is given."""

    backend: str  # what runs it, in words for people
    name: str
    vocab: int
    context: int
    dtype: torch.dtype
    device: torch.device
    layers: list[LayerShape]

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> Tensor:
        """Logits of the wanted rows [R, vocab]; taps collect hidden states of all rows."""

    @property
    def weight_bytes(self) -> int:
        """Memory that its weights take."""

    def token_weights(self) -> TokenWeights:
        """The weights that heads of their own share with it."""


class PassResult(NamedTuple):
    """What a pass of a pipeline brings."""

    logits: Tensor  # [R, vocab]
    healthy: Tensor | None  # [T] which rows came to the last layer with finite states
    states: dict[int, Tensor]  # wanted layer -> [T, hidden]


@runtime_checkable
class PipelinedModel(Protocol):
    """A model whose layers lie on several ranks, each of which may work on another pass."""

    def start(self, packed: Packed, cache: Cache, wants: tuple[int, ...]) -> Callable[[], PassResult]:
        """Begin a pass; what is returned waits for its end."""


@runtime_checkable
class StageModel(Model, Protocol):
    """Some of a model's layers, which one rank of a pipeline runs."""

    def run_stage(self, x: Tensor | None, packed: Packed, cache: Cache, taps: Taps) -> Tensor:
        """What leaves these layers [T, hidden]; of the last ones, logits [R, vocab]. x: what enters, None: the ids."""
