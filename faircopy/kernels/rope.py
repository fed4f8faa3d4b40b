"""Rotary positions from a table: a row's angles depend on its position alone."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(frequencies: Tensor, positions: int, factor: float, dtype: torch.dtype) -> Tensor:
    """[positions, 2, rotary / 2]: cosines and sines, times the scaling factor of the rope's kind."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.float()[None, :]
    return torch.stack([angles.cos() * factor, angles.sin() * factor], 1).to(dtype)


def rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D] with its first dimensions rotated by table [T, 2, rotary / 2]; pairs are halves or neighbours."""
    cos, sin = table[:, None, 0], table[:, None, 1]
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return pairs if rest.shape[-1] == 0 else torch.cat([pairs, rest], -1)
