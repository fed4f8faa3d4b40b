"""Drafters as sizes and expectations: what each would hold in memory, and how much of its drafts would be accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from faircopy.drafters.base import Drafter
from faircopy.drafters.folder import head_skeleton
from faircopy.drafters.heads import Head
from faircopy.drafters.trees import OFFERED, node_values
from faircopy.errors import ConfigError
from faircopy.layout.base import LayerShape
from faircopy.model.anatomy import is_head
from faircopy.model.base import ModelShape
from faircopy.model.shape import shape_of_checkpoint, shape_of_model

Kind = Literal["none", "ngram", "model", "head", "own"]
ACCEPTANCE = {"ngram": 0.35, "model": 0.7, "head": 0.6, "own": 0.5, "none": 0.0}  # assumed until it is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """A drafter before it is loaded."""

    name: str
    kind: Kind
    model: ModelShape | None = None  # of a draft model
    sizes: tuple[int, ...] = ()  # parameters of a head that guesses 1, 2, ... tokens ahead
    layers: tuple[LayerShape, ...] = ()  # of a head: those with keys and values
    inputs: int = 0  # numbers of hidden state that a head reads per row
    draft_vocab: int = 0  # tokens that a head guesses, if not the whole vocabulary; 0: all
    largest_weight: int = 0  # numbers of a head's largest weight
    levels: int = 0  # tokens it drafts ahead at most; 0: as many as it is asked for
    breadth: int = 1  # rows per sequence whose children it looks for at once, at most
    accuracy: tuple[tuple[float, ...], ...] = ()  # of a static tree: how often each rank of each level is right

    def parameters(self, levels: int) -> int:
        """Of a head that guesses this many tokens ahead."""
        return self.sizes[min(levels, len(self.sizes)) - 1] if self.sizes and levels else 0

    @property
    def tree(self) -> bool:
        """Whether more nodes need not be more levels."""
        return self.kind == "head"

    def accepted(self, nodes: int, levels: int, acceptance: float | None = None) -> float:
        """Expected tokens per step beyond the target's own. acceptance: of a token whose predecessors stood."""
        if not nodes or self.kind == "none":
            return 0.0
        if self.accuracy and acceptance is None:
            return sum(node_values(list(map(list, self.accuracy[:levels])), nodes))
        rate = ACCEPTANCE[self.kind] if acceptance is None else acceptance
        if self.tree:
            table = [[rate * (1.0 - rate) ** rank for rank in range(OFFERED)]] * levels
            return sum(node_values(table, nodes))
        return sum(rate**place for place in range(1, min(nodes, levels or nodes) + 1))


NO_DRAFT = DraftShape(name="none", kind="none")
NGRAM = DraftShape(name="ngram", kind="ngram")


def shape_of_draft(draft: Any, dtype: torch.dtype, device: torch.device) -> DraftShape:
    """Of what a user passes as draft=: a folder, a hub id, "ngram", None, or something loaded already."""
    if draft is None or draft == "none":
        return NO_DRAFT
    if draft == "ngram":
        return NGRAM
    if isinstance(draft, Head):
        return _head(draft.name, draft, (draft.size,) * draft.levels)
    if isinstance(draft, Drafter):
        return DraftShape(name=type(draft).__name__, kind="own")
    if not isinstance(draft, str):
        return _model(shape_of_model(draft))
    if not is_head(draft):
        return _model(shape_of_checkpoint(draft, dtype, device))
    head = head_skeleton(draft)
    return _head(draft, head, tuple(head_skeleton(draft, n + 1).size for n in range(head.levels)))


def check_head(draft: str, target: ModelShape) -> None:
    """Refuse a head whose sizes show that it was made for another target; weights may tell more when they are read."""
    if is_head(draft):
        made = head_skeleton(draft).config
        if (made.vocab, made.depth) != (target.vocab, len(target.layers)):
            problem = f"a head for {made.target}, not for {target.name}"
            raise ConfigError("draft", draft, problem, "train one with `faircopy train head`")


def _model(shape: ModelShape) -> DraftShape:
    return DraftShape(name=shape.name, kind="model", model=shape)


def _head(name: str, head: Head, sizes: tuple[int, ...]) -> DraftShape:
    table = head.config.options.get("accuracy") or ()
    return DraftShape(
        name=name,
        kind="head",
        sizes=sizes,
        layers=tuple(head.layers),
        inputs=head.input_size,
        draft_vocab=0 if head.words is None else len(head.words),
        largest_weight=head.largest_weight,
        levels=head.levels,
        breadth=1 if head.config.method == "medusa" else OFFERED,
        accuracy=tuple(tuple(level[:OFFERED]) for level in table),
    )
