"""A model's sizes from its configuration, before a weight is read, or from the loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from faircopy.layout.base import LayerShape
from faircopy.model.base import Model, ModelShape
from faircopy.model.loader import (
    check_servable,
    checkpoint_dtype,
    fits_decoder,
    load_config,
    native_dtype,
    stock_skeleton,
)
from faircopy.model.shape_share import WHOLE, Split, first_share
from faircopy.model.transformers_backend import TransformersModel, context_length
from faircopy.model.weights import head_size


def shape_of_checkpoint(path: str, dtype: torch.dtype | None, device: torch.device, split: Split = WHOLE) -> ModelShape:
    """From the config.json of a folder or a hub id; dtype None: as `load_model` chooses it on this device.

    split: the part of it that rank 0 holds, if several devices share it.
    """
    folder = Path(path).expanduser()
    config = load_config(folder if folder.exists() else path)
    check_servable(path, config)
    # before a skeleton is made, which changes the configuration
    kind = dtype or native_dtype(checkpoint_dtype(config), device)
    skeleton = stock_skeleton(config)
    return first_share(_shape(config, skeleton, kind, path), config, skeleton, split, device)


def shape_of_config(config: Any, dtype: torch.dtype, name: str = "") -> ModelShape:
    """From a transformers configuration."""
    return _shape(config, stock_skeleton(config), dtype, name)


def _shape(config: Any, skeleton: Any, dtype: torch.dtype, name: str) -> ModelShape:
    parameters = sum(p.numel() for p in skeleton.parameters())
    embedding = skeleton.get_input_embeddings().weight.numel()
    experts = sum(p.numel() for name, p in skeleton.named_parameters() if ".experts." in name)
    tied = bool(config.tie_word_embeddings)
    layers = _layer_configs(config)
    return ModelShape(
        name=name or config.model_type,
        backend="decoder" if fits_decoder(config) else "transformers",
        dtype=dtype,
        parameters=parameters,
        read=parameters - (0 if tied else embedding) - int(experts * _idle_share(config)),
        idle=_idle_share(config),
        vocab=config.vocab_size,
        context=context_length(config),
        hidden=config.hidden_size,
        intermediate=max(_intermediate(layer) for layer in layers),
        heads=config.num_attention_heads,
        head_dim=max(map(head_size, layers)),
        layers=tuple(map(_layer, layers)),
        tied=tied,
        experts=experts,
        qk_norm=any(name.endswith("q_norm.weight") for name, _ in skeleton.named_parameters()),
    )


def shape_of_model(model: Model) -> ModelShape:
    """From a loaded model. Of a class we do not know only weights, vocabulary, keys and values are known."""
    if isinstance(model, TransformersModel):
        return shape_of_config(model.config, model.dtype, model.name)
    weights = getattr(model, "weights", None)
    spec, itemsize = getattr(weights, "spec", None), model.dtype.itemsize
    parameters = model.weight_bytes // itemsize
    read = parameters if weights is None else (weights.layer_bytes + weights.head_bytes) // itemsize
    return ModelShape(
        name=model.name,
        backend="decoder",
        dtype=model.dtype,
        parameters=parameters,
        read=read,
        vocab=model.vocab,
        context=model.context,
        hidden=0 if spec is None else spec.hidden,
        intermediate=0 if spec is None else spec.intermediate,
        heads=0 if spec is None else spec.heads,
        head_dim=0 if spec is None else spec.head_dim,
        layers=tuple(model.layers),
        tied=read == parameters,
        qk_norm=weights is not None and weights.layers[0].qk_norm is not None,
    )


def _layer_configs(config: Any) -> list[Any]:
    """The configuration as each layer sees it; newer versions of transformers let widths differ between layers."""
    views = getattr(config, "per_layer_config", None)
    return [config if views is None else views[n] for n in range(int(config.num_hidden_layers))]


def _intermediate(config: Any) -> int:
    """Some configurations list one width per layer."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(width) if isinstance(width, list | tuple) else width)


def _layer(config: Any) -> LayerShape:
    heads = config.num_attention_heads
    keys = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    width = max(head_size(config), getattr(config, "v_head_dim", None) or 0, _latent_head(config))
    return LayerShape(keys, width, 0, heads // keys)


def _latent_head(config: Any) -> int:
    """Keys of a head that joins a part with rope and one without (DeepSeek)."""
    return (getattr(config, "qk_nope_head_dim", None) or 0) + (getattr(config, "qk_rope_head_dim", None) or 0)


def _idle_share(config: Any) -> float:
    """Of the experts, how many a token is not sent to."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    count = next((number for name in names if (number := getattr(config, name, None))), 1)
    return 1.0 - (getattr(config, "num_experts_per_tok", None) or count) / count
