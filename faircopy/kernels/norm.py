"""Normalisation: one row, one fixed reduction."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
