"""A target and a draft, loaded once and shared by all engines of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faircopy.build import load_draft
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
    llm = LLM(target, cache_memory="64MiB", **options)
    _, small = load_draft(draft, llm.model, llm.tokenizer, llm.config)
    return Pair(llm.model, small, llm.encode)
