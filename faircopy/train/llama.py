"""A Llama in plain torch with Hugging Face's tensor names: what is trained here loads anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from faircopy.drafters.networks.blocks import Attend, Block, BlockShape, Norm, causal, rope_tables
from faircopy.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(BlockShape):
    """The size of a Llama with tied embeddings."""

    vocab: int
    layers: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers LlamaConfig; refuses what this file does not compute."""
        rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
        plain = rope.get("rope_type", "default") == "default" and not config.attention_bias and not config.mlp_bias
        if config.model_type != "llama" or not config.tie_word_embeddings or not plain:
            raise UnsupportedModel(
                "model", config.model_type, "not a Llama with plain rope and tied embeddings", "pass another checkpoint"
            )
        return cls(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            intermediate=config.intermediate_size,
            context=config.max_position_embeddings,
            theta=float(rope["rope_theta"]),
            eps=config.rms_norm_eps,
        )

    def config(self, **extra: Any) -> Any:
        """The transformers configuration of this shape."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            rms_norm_eps=self.eps,
            tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
            **extra,
        )


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


class Llama(nn.Module):
    """Tokens [B, T] to logits [B, T, V]. Pass `attend` to keep keys and values somewhere between calls."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.model = shape, Trunk(shape)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, attend: Attend | None = None, start: int = 0) -> Tensor:
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[start : start + tokens.shape[1]], self.sin[start : start + tokens.shape[1]]
        for index, block in enumerate(self.model.layers):
            x = block(x, cos, sin, attend or causal, index)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def fresh(shape: Shape, seed: int) -> Llama:
    """New weights: normal, and narrower where a layer writes into the residual stream."""
    network = Llama(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 2:
                narrow = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, 0.02 / math.sqrt(2 * shape.layers) if narrow else 0.02, generator=generator)
    return network


def load_llama(folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Llama:
    """A network from a Hugging Face folder."""
    from transformers import AutoConfig

    network = Llama(Shape.of(AutoConfig.from_pretrained(folder)))
    weights: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights.update(load_file(file))
    weights.pop("lm_head.weight", None)  # tied: the same as the embedding
    network.load_state_dict(weights)
    cos, sin = network.cos, network.sin
    network = network.to(device=device, dtype=dtype)
    network.cos, network.sin = cos.to(device), sin.to(device)  # angles stay float32 in any network
    return network.eval().requires_grad_(False)


def save_llama(network: Llama, folder: Path, **config: Any) -> None:
    """Write config.json, generation_config.json and bfloat16 weights."""
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in _named(network).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    network.shape.config(dtype="bfloat16", **config).save_pretrained(folder)
    ends = {name: value for name, value in config.items() if name.endswith("_token_id")}
    GenerationConfig(**ends).save_pretrained(folder)


def _named(network: Llama) -> dict[str, Tensor]:
    return dict(network.named_parameters())
