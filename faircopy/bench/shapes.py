"""Models of a known shape with random weights, for timing: what they say does not matter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from faircopy.model.loader import build_decoder
from faircopy.model.weights import DenseModel, head_size

_COLUMNS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_ROWS: dict[str, tuple[Any, ...]] = {
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "qwen3-1.7b": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
    "qwen3-4b": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "qwen3-14b": ("qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False),
    "qwen3-32b": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False),
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-3b": ("qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
    "qwen2.5-14b": ("qwen2", 5120, 48, 40, 8, 128, 13824, 152064, False),
    "qwen2.5-32b": ("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, False),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "llama-3.2-3b": ("llama", 3072, 28, 24, 8, 128, 8192, 128256, True),
    "llama-3.1-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
    "mistral-7b": ("mistral", 4096, 32, 32, 8, 128, 14336, 32768, False),
    "mistral-24b": ("mistral", 5120, 40, 32, 8, 128, 32768, 131072, False),
    "vicuna-7b": ("llama", 4096, 32, 32, 32, 128, 11008, 32000, False),
    "vicuna-13b": ("llama", 5120, 40, 40, 40, 128, 13824, 32000, False),
    "phi-3-mini": ("phi3", 3072, 32, 32, 32, 96, 8192, 32064, False),
    "phi-4": ("phi3", 5120, 40, 40, 10, 128, 17920, 100352, False),
    "smollm2-135m": ("llama", 576, 30, 9, 3, 64, 1536, 49152, True),
    "smollm2-360m": ("llama", 960, 32, 15, 5, 64, 2560, 49152, True),
    "smollm2-1.7b": ("llama", 2048, 24, 32, 32, 64, 8192, 49152, True),
    "gemma-2b": ("gemma", 2048, 18, 8, 1, 256, 16384, 256000, True),
    "gemma-7b": ("gemma", 3072, 28, 16, 16, 256, 24576, 256000, True),
}
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_COLUMNS, values, strict=True)) for name, values in _ROWS.items()}
PAIR = ("qwen3-8b", "qwen3-0.6b")  # target and draft model of most measurements


def shape_config(name: str, context: int = 4096, **changes: Any) -> Any:
    """A transformers configuration of a named shape."""
    from transformers import AutoConfig

    values = {**SHAPES[name], "max_position_embeddings": context, **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def products(name: str) -> dict[str, tuple[int, int]]:
    """Shapes [N, K] of a named shape's products."""
    return products_of(SimpleNamespace(**SHAPES[name]))


def products_of(config: Any) -> dict[str, tuple[int, int]]:
    """Shapes [N, K] of the products of a configuration's decoder."""
    hidden, width = config.hidden_size, head_size(config)
    heads, kv = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    return {
        "qkv": ((heads + 2 * kv) * width, hidden),
        "out": (hidden, heads * width),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "head": (config.vocab_size, hidden),
    }


def random_model(config: Any, dtype: torch.dtype, device: torch.device, exact: bool = True) -> DenseModel:
    """A decoder of the configuration's shape, its weights drawn on the device."""
    width = head_size(config)
    frequencies = 1.0 / (1e6 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    tensors = RandomTensors(config, dtype, device)
    return build_decoder("random", config, (frequencies, 1.0), tensors, dtype, device, exact)


class RandomTensors:
    """Tensors by name, as the decoder asks for them."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device

    def __call__(self, name: str) -> Tensor | None:
        shape = self.shape(name)
        if shape is None:
            return None
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0.0, shape[1] ** -0.5)

    def shape(self, name: str) -> tuple[int, ...] | None:
        c, (owner, kind) = self._config, name.rsplit(".", 1)
        part, width = owner.rsplit(".", 1)[-1], head_size(c)
        heads, kv = c.num_attention_heads * width, c.num_key_value_heads * width
        if kind == "bias":
            return {"q_proj": (heads,), "k_proj": (kv,), "v_proj": (kv,)}.get(part) if c.model_type == "qwen2" else None
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
        }
        if c.model_type == "qwen3":
            shapes |= {"q_norm": (width,), "k_norm": (width,)}
        if not c.tie_word_embeddings:
            shapes["lm_head"] = (c.vocab_size, c.hidden_size)
        return shapes.get(part)
