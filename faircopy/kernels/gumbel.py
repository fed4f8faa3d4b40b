"""Gumbel noise as a function of (row key, token), and the argmax that samples with it."""

from __future__ import annotations

import torch
from torch import Tensor

# With 23 random bits the noise lies in [-2.82, 16.64], so a token this far below the best cannot win.
REACH = 19.5
BROKEN = -1  # what is chosen in a row that is not finite


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Noise for each (64-bit row key, token id) pair, elementwise; float32."""
    low, high = _int32(keys), _int32(keys >> 32)
    bits = _scramble(_scramble((tokens.to(torch.int32) * _GOLDEN) ^ low) ^ high)
    uniform = (((bits >> 9) & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23  # in (0, 1), exact in float32
    return -torch.log(-torch.log(uniform))


def gumbel_argmax_dense(logits: Tensor, keys: Tensor) -> Tensor:
    """The slow twin: noise for every token. logits [R, V] float32, keys [R] -> token ids [R], lowest id on ties."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    return (logits + gumbel(keys[:, None], tokens[None, :])).argmax(-1)


def gumbel_argmax(logits: Tensor, keys: Tensor) -> Tensor:
    """The same tokens as the dense twin, drawing noise only for those that can win."""
    return with_noise(logits, keys).argmax(-1)


def with_noise(logits: Tensor, keys: Tensor) -> Tensor:
    """Scores with noise of the tokens that can win; minus infinity for the others."""
    best = logits.amax(-1, keepdim=True)
    rows, tokens = (logits >= best - REACH).nonzero(as_tuple=True)
    noisy = torch.full_like(logits, -torch.inf)
    noisy[rows, tokens] = logits[rows, tokens] + gumbel(keys[rows], tokens)
    return noisy


_GOLDEN = 0x9E3779B1 - (1 << 32)
_FIRST, _SECOND = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)


def _int32(value: Tensor) -> Tensor:
    value = value & 0xFFFFFFFF
    return (value - ((value >> 31) << 32)).to(torch.int32)


def _scramble(x: Tensor) -> Tensor:
    """Murmur3's finaliser; int32 arithmetic wraps, and shifts are made logical by masks."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)
