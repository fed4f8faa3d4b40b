"""A target and a draft, loaded once and shared by all engines of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from faircopy import bundled
from faircopy.bench.inflate import inflated_model
from faircopy.llm import LLM
from faircopy.model.base import Model
from faircopy.model.loader import load_tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """Models, and the words of the target."""

    target: Model
    draft: Model | None
    encode: Callable[[str], list[int]]


def load_pair(target: str, draft: str | None, **options: Any) -> Pair:
    """Two checkpoints, tested as LLM tests them; options are LLM's."""
    llm = LLM(target, memory="64MiB", **options)
    small = LLM(draft, memory="64MiB", **options).model if draft is not None else None
    return Pair(llm.model, small, llm.encode)


def widened_pair(target: Any, draft: Any, dtype: torch.dtype, device: str, exact: bool) -> Pair:
    """The bundled pair at the shapes of these configurations: its text at their cost, made on the device."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "exact": exact}
    tokenizer: Any = load_tokenizer(bundled.target())
    return Pair(
        inflated_model(bundled.target(), target, **options),
        inflated_model(bundled.draft(), draft, **options),
        lambda text: list(tokenizer.encode(text)),
    )
