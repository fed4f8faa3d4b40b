"""Activations whose rows do not know where they lie.

torch's own sigmoid, silu and gelu take a vector path and, at the ragged end of each thread's share or on strided
inputs, another with other bits; where that falls depends on the number of rows. exp, tanh and erf have one path, and
the rest is arithmetic, so these are built from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return _in_float(x, lambda y: (1 + torch.exp(-y)).reciprocal_())


def silu(x: Tensor) -> Tensor:
    return _in_float(x, lambda y: y / (1 + torch.exp(-y)))


def gelu_tanh(x: Tensor) -> Tensor:
    return _in_float(x, lambda y: 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * (y * y * y)))))


def gelu(x: Tensor) -> Tensor:
    return _in_float(x, lambda y: 0.5 * y * (1 + torch.erf(y * math.sqrt(0.5))))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return _in_float(x, lambda y: y.clamp_min(0) + torch.log1p(torch.exp(-y.abs())))


def _in_float(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    return f(x.float()).to(x.dtype) if x.dtype != torch.float32 else f(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "relu": F.relu,
}
