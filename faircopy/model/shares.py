"""Which part of a model's tensors each rank holds: outputs by whole key heads, inputs by K groups, tokens by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy.errors import ConfigError
from faircopy.kernels.groups import shared_groups
from faircopy.kernels.linear import Product
from faircopy.kernels.ranks import Ranks
from faircopy.progress import counted

GRAIN = 16  # a share of the vocabulary is a multiple of this


class Cut(NamedTuple):
    """Ranges of one dimension of a tensor, end to end."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    size: int = 0  # what is missing at the end is zero


class CheckpointParts(Protocol):
    """A checkpoint's tensors by name, whole or in part; dtype None: the model's type."""

    device: torch.device

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None: ...
    def part(self, name: str, cut: Cut, dtype: torch.dtype | None = None) -> Tensor | None: ...
    def names(self) -> list[str]: ...


class TokenShares:
    """The vocabulary in contiguous shares of one size; the last ones may reach beyond its end."""

    def __init__(self, vocab: int, ranks: Ranks) -> None:
        self._vocab, self._ranks = vocab, ranks
        self.width = -(-vocab // (ranks.size * GRAIN)) * GRAIN
        self.begin = ranks.rank * self.width

    @property
    def cut(self) -> Cut:
        """This rank's rows of the embedding and of the head."""
        return Cut(0, ((min(self.begin, self._vocab), min(self.begin + self.width, self._vocab)),), self.width)

    def embedded(self, ids: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Embeddings [T, hidden], each from the rank that holds it. rows: of this rank's share, by place in it."""
        own = rows((ids - self.begin).clamp(0, self.width - 1))
        return self._ranks.gather(own)[ids // self.width, torch.arange(len(ids), device=ids.device)]

    def joined(self, run: Product) -> Product:
        """Logits [R, vocab] from a product that makes this rank's share of them."""

        def whole(x: Tensor) -> Tensor:
            shares = self._ranks.gather(run(x))
            return shares.transpose(0, 1).flatten(1)[:, : self._vocab]  # of no rows, too: a prompt's first chunks

        return whole


@dataclass(frozen=True, slots=True)
class DenseShares:
    """A rank's share of a decoder: query and key heads, and inner numbers of the MLP."""

    heads: int  # of the whole model
    kv_heads: int
    head_dim: int
    intermediate: int
    tokens: TokenShares
    ranks: Ranks

    @property
    def own_heads(self) -> int:
        return self.heads // self.ranks.size

    @property
    def own_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.ranks.size)

    def cut(self, name: str) -> Cut | None:
        """What this rank reads of the tensor of this name; None: all of it."""
        parts = name.split(".")
        known = _CUTS.get(parts[-2]) if parts[-1] in ("weight", "bias") else None
        return None if known is None or (parts[-1] == "bias" and parts[-2] in _BY_K) else known(self)

    def queries(self) -> tuple[int, int]:
        width = self.own_heads * self.head_dim
        return self.ranks.rank * width, (self.ranks.rank + 1) * width

    def keys(self) -> tuple[int, int]:
        """Where there are fewer key heads than ranks, several ranks hold the same one."""
        first = self.ranks.rank * self.kv_heads // self.ranks.size
        return first * self.head_dim, (first + self.own_kv_heads) * self.head_dim

    def inner(self) -> tuple[int, int]:
        width = self.intermediate // self.ranks.size
        return self.ranks.rank * width, (self.ranks.rank + 1) * width


_BY_K = ("o_proj", "down_proj")


def _shifted(part: tuple[int, int], by: int) -> tuple[int, int]:
    return part[0] + by, part[1] + by


def _qkv(shares: DenseShares) -> Cut:
    queries, keys = shares.heads * shares.head_dim, shares.kv_heads * shares.head_dim
    own = shares.keys()
    return Cut(0, (shares.queries(), _shifted(own, queries), _shifted(own, queries + keys)))


_CUTS: dict[str, Callable[[DenseShares], Cut]] = {
    "q_proj": lambda shares: Cut(0, (shares.queries(),)),
    "k_proj": lambda shares: Cut(0, (shares.keys(),)),
    "v_proj": lambda shares: Cut(0, (shares.keys(),)),
    "qkv_proj": _qkv,
    "o_proj": lambda shares: Cut(1, (shares.queries(),)),
    "gate_proj": lambda shares: Cut(0, (shares.inner(),)),
    "up_proj": lambda shares: Cut(0, (shares.inner(),)),
    "gate_up_proj": lambda shares: Cut(0, (shares.inner(), _shifted(shares.inner(), shares.intermediate))),
    "down_proj": lambda shares: Cut(1, (shares.inner(),)),
    "embed_tokens": lambda shares: shares.tokens.cut,
    "lm_head": lambda shares: shares.tokens.cut,
}


def padded(tensor: Tensor, cut: Cut) -> Tensor:
    """A share with zeros where the vocabulary has ended."""
    missing = cut.size - tensor.shape[0] if cut.size else 0
    return F.pad(tensor, (0, 0, 0, missing) if tensor.dim() > 1 else (0, missing)) if missing else tensor


@dataclass(frozen=True, slots=True)
class Divisible:
    """What of a model must be shared evenly. weights: outputs and inputs of those whose inputs are shared, by name."""

    heads: int
    kv_heads: int
    weights: dict[str, tuple[int, int]]
    device: torch.device

    def problem(self, size: int) -> str | None:
        """Why this number of ranks cannot share it; None: they can."""
        if self.heads % size:
            return f"its {self.heads} attention heads cannot be shared evenly"
        if self.kv_heads % size and size % self.kv_heads:
            return f"its {self.kv_heads} key heads can neither be shared evenly nor repeated"
        for called, (outputs, inner) in self.weights.items():
            groups = shared_groups(outputs, inner, self.device.type)
            if groups < size:
                return (
                    f"the {inner} inputs of its {called} have {groups} groups on {self.device.type}, fewer than ranks"
                )
        return None

    def check(self, name: str, size: int) -> None:
        problem = self.problem(size)
        if problem is not None:
            possible = [fewer for fewer in (4, 2) if fewer < size and self.problem(fewer) is None]
            remedy = f"use {possible[0]}" if possible else "use 1, or pipeline_parallel"
            raise ConfigError("tensor_parallel", size, f"{name}: {problem}", remedy)


def dense_shares(name: str, config: Any, head_dim: int, vocab: int, device: torch.device, ranks: Ranks) -> DenseShares:
    """A rank's share of the model that this configuration describes."""
    heads, hidden, intermediate = config.num_attention_heads, config.hidden_size, config.intermediate_size
    kv_heads = config.num_key_value_heads or heads
    weights = {"attention output": (hidden, heads * head_dim), "down projection": (hidden, intermediate)}
    Divisible(heads, kv_heads, weights, device).check(name, ranks.size)
    return DenseShares(heads, kv_heads, head_dim, intermediate, TokenShares(vocab, ranks), ranks)


def counted_ranks(ranks: Ranks) -> str:
    return counted(ranks.size, "rank")
