"""The activations of gated products, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An activation in float32."""
    if KIND == "silu" or KIND == "swish":
        return x / (1.0 + tl.exp(-x))
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "relu":
        return tl.maximum(x, 0.0)
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    return x / (1.0 + tl.exp(-2.0 * inner))
