"""Attention over a rectangle of keys and values: torch's own, under a mask of what each query may read."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

PAD = -1  # the position of a column that holds nothing


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """q [rows, queries, H, D] along rows of [rows, columns, Hkv, D] -> the shape of q."""
    rows, queries, heads, dim = q.shape
    kv_heads = keys.shape[2]
    q = q.view(rows, queries, kv_heads, -1, dim).permute(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, dim)
    k, v = keys.permute(0, 2, 1, 3), values.permute(0, 2, 1, 3)
    if softcap or sinks is not None:
        out = _scored(q, k, v, mask, scale, softcap, sinks)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.view(rows, kv_heads, queries, -1, dim).permute(0, 2, 1, 3, 4).reshape(rows, queries, heads, dim)


def _scored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention written out: scores squashed by tanh, and one more score per head that has no value."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores) + mask
    if sinks is not None:
        rows, kv_heads, width, _ = scores.shape
        sink = sinks.float().view(1, kv_heads, 1, -1).expand(rows, -1, width * kv_heads // len(sinks), -1)
        scores = torch.cat([scores, sink.reshape(rows, kv_heads, width, 1)], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]].to(v.dtype) @ v


def ancestry(fed: int, parents: list[int]) -> NDArray[np.bool_]:
    """[fed + nodes, fed + nodes]: tokens attend to those before, nodes to all tokens and ancestors, each to itself."""
    sees = np.tri(fed + len(parents), dtype=np.bool_)
    straight = all(parent == node - 1 for node, parent in enumerate(parents))
    for node, parent in enumerate([] if straight else parents):
        sees[fed + node, fed:] = sees[fed + parent, fed:] if parent >= 0 else False
        sees[fed + node, fed + node] = True
    return sees


def visible(
    window: int, where: Tensor, place: Tensor, own: Tensor, their: Tensor, sees: Tensor, idle: Tensor
) -> Tensor:
    """[rows, queries, columns]: true where a query may attend."""
    old = (place != PAD)[:, None, :].expand(-1, where.shape[1], -1)
    if window:
        old = old & (where[:, :, None] - place[:, None, :] < window)
        sees = sees & (where[:, :, None] - their[:, None, :] < window)
    open_ = F.pad(old, (0, 1)).scatter_(2, own[:, None, :].expand_as(sees), sees)
    return open_[..., :-1] | idle


def additive(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Zeros and minus infinities, a line per query and head of its group."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, -torch.inf).repeat_interleave(group, 1)[:, None]
