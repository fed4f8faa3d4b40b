"""A target and a draft, loaded once and shared by all engines of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faircopy.drafters.heads import Head
from faircopy.llm import LLM
from faircopy.model.base import Model


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, its draft, and its tokenizer."""

    target: Model
    draft: Model | Head | None
    encode: Callable[[str], list[int]]


def load_pair(target: str, draft: str | None, **options: Any) -> Pair:
    """A target, and a draft model or head for it, loaded and checked by LLM; options are LLM's."""
    llm = LLM(target, memory="64MiB", **options)
    return Pair(llm.model, None if draft is None else llm.load_draft(draft)[1], llm.encode)
