"""What draft heads need to know of a checkpoint: sizes, the last layer's weights, a fingerprint.

Also reading and writing the folders of draft heads, since only this room knows file formats.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faircopy.errors import CheckpointError
from faircopy.model.loader import CheckpointTensors, find_checkpoint, load_config, read_json
from faircopy.model.transformers_backend import context_length
from faircopy.model.weights import FAMILIES, head_size

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A causal language model's sizes, by the names that decoder layers use."""

    vocab: int
    depth: int
    layer: dict[str, Any]  # hidden, heads, kv_heads, head_dim, intermediate, context, theta, eps, bias, qk_norm
    last_layer: dict[str, Tensor]  # by the names of a Llama layer; what the family stores otherwise is missing
    norm: Tensor  # the final norm's weight; ones if it has none by that name


def anatomy(path: str) -> Anatomy:
    """Of a folder or hub id."""
    folder = find_checkpoint(path)
    config, tensors = load_config(folder), CheckpointTensors(folder, torch.float32, torch.device("cpu"))
    depth, hidden = config.num_hidden_layers, config.hidden_size
    offset = FAMILIES.get(config.model_type, {}).get("norm_offset", 0.0)
    at = f"model.layers.{depth - 1}."
    last = {name.removeprefix(at): _read(tensors, name, offset) for name in tensors.names() if name.startswith(at)}
    norm = tensors("model.norm.weight")
    return Anatomy(
        vocab=config.vocab_size,
        depth=depth,
        layer=_layer(config, last),
        last_layer=last,
        norm=torch.ones(hidden) if norm is None else norm + offset,
    )


def _read(tensors: CheckpointTensors, name: str, offset: float) -> Tensor:
    tensor = tensors(name)
    assert tensor is not None, "a name that was listed"
    return tensor + offset if name.endswith("layernorm.weight") else tensor


def _layer(config: Any, last: dict[str, Tensor]) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    heads = config.num_attention_heads
    return {
        "hidden": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_size(config),
        "intermediate": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "context": context_length(config),
        "theta": float(rope.get("rope_theta") or 10000.0),
        "eps": float(getattr(config, "rms_norm_eps", None) or 1e-5),
        "bias": "self_attn.q_proj.bias" in last,
        "qk_norm": "self_attn.q_norm.weight" in last,
    }


def fingerprint(path: str) -> str:
    """What tells one checkpoint from another, whatever the type of its numbers: the first ones of every tensor."""
    tensors = CheckpointTensors(find_checkpoint(path), torch.bfloat16, torch.device("cpu"))
    digest = hashlib.sha256()
    for name in sorted(tensors.names()):
        digest.update(f"{name} {tensors.shape(name)}".encode())
        digest.update(tensors.beginning(name).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def identity(path: str) -> str | None:
    """A checkpoint's fingerprint and configuration as one word; None for formats that are slow to look into."""
    folder = find_checkpoint(path)
    if not any(folder.glob("*.safetensors")):
        return None
    return f"{fingerprint(path)}-{hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()[:16]}"


def known_identity(name: str) -> str | None:
    """The identity of a model by its name; None: it was not read from files, or these are slow to look into."""
    try:
        return identity(name)
    except CheckpointError:
        return None


def file_states(path: str) -> tuple[tuple[str, int, int], ...]:
    """A checkpoint's files with the size and time of each: equal only if nothing was written in between."""
    files = sorted(file for file in find_checkpoint(path).iterdir() if file.is_file())
    return tuple((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


def is_head(path: str) -> bool:
    """Whether a folder holds a draft head of ours."""
    file = Path(path).expanduser() / CONFIG
    return file.is_file() and "method" in head_settings(path)


def save_head_folder(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """config.json, and bfloat16 weights; whole numbers stay as they are."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
        for name, value in weights.items()
    }
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")


def head_settings(path: str) -> dict[str, Any]:
    """What a head's config.json says."""
    return read_json(Path(path).expanduser() / CONFIG)


def load_head_folder(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path).expanduser()
    try:
        return head_settings(path), load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError("draft", path, f"cannot be loaded ({error})", "train or fetch the head again") from error
