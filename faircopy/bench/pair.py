"""A target and a draft, loaded once and shared by all engines of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faircopy.drafters.folder import load_head
from faircopy.drafters.heads import Head
from faircopy.llm import LLM
from faircopy.model.anatomy import is_head
from faircopy.model.base import Model


@dataclass(frozen=True, slots=True)
class Pair:
    """Models, and the words of the target."""

    target: Model
    draft: Model | Head | None
    encode: Callable[[str], list[int]]


def load_pair(target: str, draft: str | None, **options: Any) -> Pair:
    """Two checkpoints, tested as LLM tests them, or a target and a head of its own; options are LLM's."""
    llm = LLM(target, memory="64MiB", **options)
    if draft is not None and is_head(draft):
        return Pair(llm.model, load_head(draft, llm.model), llm.encode)
    small = LLM(draft, memory="64MiB", **options).model if draft is not None else None
    return Pair(llm.model, small, llm.encode)
