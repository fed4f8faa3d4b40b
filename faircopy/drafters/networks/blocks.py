"""Pieces of networks in plain torch, with Hugging Face's tensor names: decoder layers, and where their keys live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faircopy.kernels.cpu.product import PackedWeight, fits
from faircopy.kernels.norm import rms_norm
from faircopy.layout.base import LayerShape

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q [B, heads, T, D], k and v [B, kv_heads, T, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The size of one decoder layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    theta: float = 10000.0
    eps: float = 1e-5
    bias: bool = False  # of q, k and v
    qk_norm: bool = False

    @property
    def cached(self) -> LayerShape:
        """What the layer keeps per token."""
        return LayerShape(self.kv_heads, self.head_dim, 0, self.heads // self.kv_heads)


class Norm(nn.RMSNorm):
    """Computed in its weight's type, so that mixed precision keeps the fast kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps or 0.0)


class Attention(nn.Module):
    """Causal attention; `inputs` is the width of what it reads, if that is not the hidden size."""

    def __init__(self, shape: BlockShape, inputs: int | None = None) -> None:
        super().__init__()
        self.shape, inputs = shape, inputs or shape.hidden
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=shape.bias)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        if shape.qk_norm:
            self.q_norm = Norm(shape.head_dim, shape.eps)
            self.k_norm = Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        mixed = attend(layer, *self.qkv(x, cos, sin))
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
        return out

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, heads, T, D], keys and values [B, kv_heads, T, D] of x [B, T, inputs], in their places."""
        q, k, v = (part(x).view(*x.shape[:2], -1, self.shape.head_dim) for part in self._projections())
        if self.shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q_proj, self.k_proj, self.v_proj


class Mlp(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, layer)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class PackedLinear(nn.Module):
    """A linear layer on the CPU's kernels: faster for few rows, and as fast in the first call as later on.

    Its weight lies packed, and is put together again to be saved.
    """

    like: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, self.bias = linear.weight.detach(), linear.bias
        self._product = PackedWeight(weight, None if self.bias is None else self.bias.detach())
        self._outputs, self.numbers = len(weight), weight.numel()
        self.register_buffer("like", weight.new_empty(0), persistent=False)  # its type and place

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x.flatten(0, -2)).view(*x.shape[:-1], self._outputs)

    @property
    def weight(self) -> Tensor:
        return self._product.rows(torch.arange(self._outputs))

    @property
    def nbytes(self) -> int:
        return self._product.nbytes

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def pack_linears(network: nn.Module) -> None:
    """Let a network that learns no more run its products on the CPU's kernels, where there are some for its weights.

    Weights are packed one after the other, so that no more than one is there twice.
    """
    for parent in [module for module in network.modules() if not isinstance(module, nn.Linear)]:
        for name in [name for name, child in parent.named_children() if isinstance(child, nn.Linear)]:
            linear: nn.Linear = getattr(parent, name)
            if fits(linear.weight):
                setattr(parent, name, PackedLinear(linear))


def packed_linears(network: nn.Module) -> list[PackedLinear]:
    return [module for module in network.modules() if isinstance(module, PackedLinear)]


class Rope(nn.Module):
    """Cosines and sines by position; they stay float32 in a network of any type."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self._tables = rope_tables(shape)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._tables[0].device != positions.device:
            self._tables = (self._tables[0].to(positions.device), self._tables[1].to(positions.device))
        at = positions.clamp(max=len(self._tables[0]) - 1)  # behind its context a head only guesses worse
        return self._tables[0][at], self._tables[1][at]


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every position sees itself and what came before; nothing is kept."""
    k, v = shared_keys(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class UnrolledAttention:
    """An `Attend` for a head that reads a text and then, level by level, its own states at every row of it.

    A layer's first call is the text: causal. In each later one a row sees the text's keys up to its own place, and one
    key per later call: those of its own path.
    """

    def __init__(self) -> None:
        self._text: dict[int, tuple[Tensor, Tensor]] = {}
        self._later: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = shared_keys(q, k, v)
        if layer not in self._text:
            self._text[layer] = k, v
            return causal(layer, q, k, v)
        self._later.setdefault(layer, []).append((k, v))
        return self._attend(q, *self._text[layer], self._later[layer])

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, later: list[tuple[Tensor, Tensor]]) -> Tensor:
        count, scale = q.shape[2], q.shape[-1] ** -0.5
        hidden = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ keys[:, :, :count].transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
        own = [(q * k[:, :, :count]).sum(-1, keepdim=True) * scale for k, _ in later]
        shares = torch.softmax(torch.cat([scores, *own], -1).float(), -1).to(q.dtype)
        out = shares[..., :count] @ values[:, :, :count]
        for n, (_, v) in enumerate(later):
            out = out + shares[..., count + n, None] * v[:, :, :count]
        return out


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once per query head: copies are a few percent slower than enable_gqa, and work everywhere."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


def rope_tables(shape: BlockShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, head_dim] in Hugging Face's layout: two equal halves."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float32), 1.0 / shape.theta**steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
