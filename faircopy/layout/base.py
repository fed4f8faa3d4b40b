"""What every layout answers, and the packed step it hands to a model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from faircopy.kernels.cpu.attention import has_kernel
from faircopy.types import Batch, Draft, Sequence, Verdict


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token, and how far back it looks (0: to the beginning)."""

    kv_heads: int
    head_dim: int
    window: int = 0
    group: int = 1  # query heads per key head


@dataclass(frozen=True, slots=True)
class Packed:
    """One step's tokens of all sequences; with pages, end to end. Everything that depends on lengths is here."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] where each token's keys and values go
    plans: dict[tuple[int, int], Any]  # by (window, group): what the attention in use wants to know
    wanted: Tensor  # [R] the rows of [T] whose logits are needed, ascending
    fed: list[int]  # per sequence, how many of its tokens are in here
    nodes: list[range]  # per sequence, which draft nodes are in here
    rows: list[range]  # per sequence, its rows among the wanted ones: fed tokens, then nodes

    @property
    def size(self) -> int:
        return int(self.ids.shape[0])

    @property
    def padded(self) -> int:
        """How many of the rows stand for nothing."""
        return self.size - sum(self.fed) - sum(map(len, self.nodes))

    def with_ids(self, ids: Tensor | None) -> Packed:
        """The same rows with these tokens, if there are any."""
        return self if ids is None else replace(self, ids=ids.to(self.ids.dtype))

    def unpadded(self, rows: Tensor) -> Tensor:
        """Of [T, ...] the rows that stand for something: each sequence's tokens, then its nodes, end to end."""
        return rows


class Cache(Protocol):
    """What a model sees of a layout: a place for keys and values, and attention over them."""

    def attend(
        self,
        packed: Packed,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class Layout(Cache, Protocol):
    """How a batch and its keys and values lie in memory."""

    moved: int  # rows of keys and values copied so far
    healthy: Tensor | None  # [T] of the last pass: which rows came to the last layer with finite states

    def cached(self, seq: Sequence) -> int: ...
    def pack(self, batch: Batch, draft: Draft, done: int = 0) -> Packed: ...
    def advance(self, batch: Batch) -> None: ...
    def commit(self, batch: Batch, verdict: Verdict) -> Verdict: ...
    def publish(self, batch: Batch, verdict: Verdict) -> None: ...
    def forget(self, seq: Sequence) -> None: ...


def cache_dtype(layers: Seq[LayerShape], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What keys and values are stored as: the model's type, or float32 on a CPU without an attention kernel for it.

    torch's own 16-bit attention on a CPU may choose its way by the load.
    """
    fits = all(has_kernel(layer.head_dim, dtype, device) for layer in layers)
    return torch.float32 if device.type == "cpu" and not fits else dtype


class Cached(Protocol):
    """Anything with layers that keep keys and values: a model, or a draft head."""

    @property
    def layers(self) -> list[LayerShape]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def kv_bytes_per_token(model: Cached) -> int:
    """Bytes of keys and values that one token keeps in all layers."""
    return kv_bytes(model.layers, model.dtype, model.device)


def kv_bytes(layers: Seq[LayerShape], dtype: torch.dtype, device: torch.device) -> int:
    """The same, of these layers."""
    size = cache_dtype(layers, dtype, device).itemsize
    return sum(2 * layer.kv_heads * layer.head_dim * size for layer in layers)
