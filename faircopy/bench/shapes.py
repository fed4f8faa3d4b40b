"""Models of a known shape with random weights, for timing: what they say does not matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from faircopy.model.loader import build_decoder
from faircopy.model.weights import DenseModel

_QWEN3: dict[str, Any] = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "intermediate_size": 12288, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    },
}  # fmt: skip


def qwen3_config(name: str, context: int = 4096, **changes: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**{**QWEN3[name], "max_position_embeddings": context, **changes})


def random_model(config: Any, dtype: torch.dtype, device: torch.device, exact: bool = True) -> DenseModel:
    """A decoder of the configuration's shape, its weights drawn on the device."""
    width = config.head_dim
    frequencies = 1.0 / (1e6 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    tensors = _Random(config, dtype, device)
    return build_decoder("random", config, (frequencies, 1.0), tensors, dtype, device, exact)


class _Random:
    """Tensors by name, as the decoder asks for them."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device

    def __call__(self, name: str) -> Tensor | None:
        shape = self._shape(name)
        if shape is None:
            return None
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0.0, shape[1] ** -0.5)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        c, part = self._config, name.removesuffix(".weight").rsplit(".", 1)[-1]
        heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "q_proj": (heads, c.hidden_size),
            "k_proj": (kv, c.hidden_size),
            "v_proj": (kv, c.hidden_size),
            "o_proj": (c.hidden_size, heads),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
            "input_layernorm": (c.hidden_size,),
            "post_attention_layernorm": (c.hidden_size,),
            "norm": (c.hidden_size,),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
        }
        if part == "lm_head" and not c.tie_word_embeddings and name.endswith("weight"):
            return (c.vocab_size, c.hidden_size)
        return shapes.get(part) if name.endswith(".weight") else None
