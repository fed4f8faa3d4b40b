"""Heads as folders: made for a target, saved, and loaded for that target only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from faircopy.drafters.heads import Head, HeadConfig
from faircopy.drafters.networks.blocks import BlockShape
from faircopy.drafters.networks.clover import Clover
from faircopy.drafters.networks.clover2 import Clover2
from faircopy.drafters.networks.eagle3 import Eagle3, options_for
from faircopy.drafters.networks.medusa import Medusa
from faircopy.drafters.networks.scylla import Scylla
from faircopy.errors import CheckpointError, ConfigError
from faircopy.model.anatomy import anatomy, fingerprint, head_settings, load_head_folder, save_head_folder
from faircopy.model.base import Model, TokenWeights

METHODS: dict[str, Callable[[HeadConfig], Head]] = {
    "medusa": Medusa,
    "clover": Clover,
    "clover2": Clover2,
    "eagle3": Eagle3,
    "scylla": Scylla,
}
LEVELS = {"medusa": 4, "clover": 4, "clover2": 5, "eagle3": 7, "scylla": 7}  # default number of tokens drafted ahead

LAYERED = ("clover2", "scylla")  # methods whose number of layers is an option


def new_head(
    method: str, target: str, weights: TokenWeights, levels: int | None = None, seed: int = 0, **options: Any
) -> Head:
    """A head for this checkpoint before training, on the CPU in float32."""
    if method not in METHODS:
        raise ConfigError("method", method, "unknown", f"use one of {', '.join(METHODS)}")
    body = anatomy(target)
    options = options_for(body.vocab, options) if method == "eagle3" else options
    config = HeadConfig(
        method=method,
        shape=BlockShape(**body.layer),
        vocab=body.vocab,
        depth=body.depth,
        levels=levels or LEVELS[method],
        target=target,
        fingerprint=fingerprint(target),
        options=options,
    )
    torch.manual_seed(seed)
    head = METHODS[method](config).bind(weights)
    head.start_from(body.last_layer, body.norm)
    return head


def save_head(head: Head, folder: Path, **learned: Any) -> None:
    """Write the folder that LLM(target, draft=folder) takes; `learned` options belong to the method."""
    config = replace(head.config, options={**head.config.options, **learned})
    save_head_folder(folder, {"faircopy": "head", **asdict(config)}, head.state_dict())


def load_head(path: str, target: Model, levels: int | None = None) -> Head:
    """A head for this very target, in its type and on its device; one for another target is refused.

    levels: load no more than it needs to guess this many tokens ahead.
    """
    raw, weights = load_head_folder(path)
    config, make = _head_config(path, raw, levels)
    if fingerprint(target.name) != config.fingerprint:
        raise ConfigError(
            "draft", path, f"a head for {config.target}, not for {target.name}", "train one with `faircopy train head`"
        )
    head = make(config)
    kept = weights if levels is None else {name: weights[name] for name in head.state_dict() if name in weights}
    try:
        head.load_state_dict(kept)
    except RuntimeError as error:
        raise CheckpointError("draft", path, f"its weights do not fit ({error})", "train it again") from error
    head.name = path
    return head.to(target.device, target.dtype).bind(target.token_weights()).requires_grad_(False)


def head_skeleton(path: str, levels: int | None = None) -> Head:
    """A head without memory for its weights, from its config.json alone: for its sizes."""
    config, make = _head_config(path, head_settings(path), levels)
    with torch.device("meta"):
        return make(config)


def _head_config(
    path: str, raw: dict[str, Any], levels: int | None = None
) -> tuple[HeadConfig, Callable[[HeadConfig], Head]]:
    try:
        known = {**raw, "shape": BlockShape(**raw["shape"])}
        known.pop("faircopy", None)
        config = HeadConfig(**known)
        return replace(config, levels=min(config.levels, levels or config.levels)), METHODS[config.method]
    except (KeyError, TypeError) as error:
        raise CheckpointError("draft", path, f"not a head we know ({error})", "train it again") from error
