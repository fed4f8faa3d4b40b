"""The rules of `trees.py` for all trees of a batch at once, as tensors of fixed shape: a captured step can grow them.

All trees have the same max_nodes, and shapes never depend on what is offered: a missing node has the token -1, a
missing path the value minus infinity.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from faircopy.drafters.trees import OFFERED, NodeBudgetTree, RerankedTree, StaticTree, Tree


class Frontier(NamedTuple):
    """The nodes whose children are wanted next [B, F]."""

    tokens: Tensor
    above: Tensor  # the row of the frontier before that each one continues


class BatchedTrees(ABC):
    """`size` trees, one per batch slot; `is_chain`: every node has one child at most."""

    is_chain = False
    num_offered = OFFERED  # tokens wanted of every row

    def __init__(self, size: int, max_nodes: int, device: torch.device) -> None:
        self.size, self.max_nodes, self.device = size, max_nodes, device

    @abstractmethod
    def reset(self) -> None:
        """Start with empty trees."""

    @abstractmethod
    def grow(self, ids: Tensor, scores: Tensor) -> Frontier | None:
        """Add one level from what each row of the frontier offers [B, F, num_offered]; None: the trees are complete."""

    @abstractmethod
    def result(self) -> tuple[Tensor, Tensor]:
        """Tokens and parents [B, max_nodes] of the drafts, parents before children, -1 above the first level."""

    def _full(self, *shape: int, value: float, kind: torch.dtype = torch.int64) -> Tensor:
        return torch.full((self.size, *shape), value, dtype=kind, device=self.device)


class Chains(BatchedTrees):
    """Chains: the first token offered, again and again."""

    is_chain = True
    num_offered = 1

    def reset(self) -> None:
        self._tokens: list[Tensor] = []

    def grow(self, ids: Tensor, scores: Tensor) -> Frontier | None:
        self._tokens.append(torch.where(scores[:, :, 0] > -torch.inf, ids[:, :, 0], -1))
        more = len(self._tokens) < self.max_nodes
        return Frontier(ids[:, :, 0], torch.zeros_like(ids[:, :, 0])) if more else None

    def result(self) -> tuple[Tensor, Tensor]:
        missing = self.max_nodes - len(self._tokens)
        tokens = torch.cat([*self._tokens, self._full(missing, value=-1)], 1)
        return tokens, torch.arange(-1, self.max_nodes - 1, device=self.device).expand(self.size, -1)


class NodeBudgetTrees(BatchedTrees):
    """Clover's: see trees.NodeBudgetTree."""

    def __init__(self, size: int, max_nodes: int, device: torch.device, top_p: float, floor: float) -> None:
        super().__init__(size, max_nodes, device)
        self._top_p, self._floor = top_p, math.log(floor)

    def reset(self) -> None:
        max_nodes = self.max_nodes
        self._tokens, self._parents = self._full(max_nodes + 1, value=-1), self._full(max_nodes + 1, value=-1)
        self._used = self._full(1, value=0)
        self._nodes = self._full(1, value=-1)  # the front, as nodes
        self._values = self._full(1, value=0.0, kind=torch.float32)

    def grow(self, ids: Tensor, scores: Tensor) -> Frontier | None:
        chances = scores.exp()
        likely = (chances.cumsum(-1) - chances < self._top_p) & (scores >= scores[..., :1] + self._floor)
        paths = torch.where(likely, scores + self._values[..., None], -torch.inf).flatten(1)
        count = min(self.max_nodes, paths.shape[1])
        values, places = paths.topk(count, -1)
        rank = torch.arange(count, device=self.device)
        kept = (values > -torch.inf) & (rank < self.max_nodes - self._used)
        nodes = torch.where(kept, self._used + rank, self.max_nodes)  # the last place collects what is dropped
        above, tokens = places // scores.shape[-1], ids.flatten(1).gather(1, places)
        self._tokens.scatter_(1, nodes, tokens)
        self._parents.scatter_(1, nodes, self._nodes.gather(1, above))
        self._used = self._used + kept.sum(1, keepdim=True)
        self._nodes, self._values = nodes, torch.where(kept, values, -torch.inf)
        return Frontier(tokens, above)

    def result(self) -> tuple[Tensor, Tensor]:
        return self._tokens[:, : self.max_nodes], self._parents[:, : self.max_nodes]


class RerankedTrees(BatchedTrees):
    """EAGLE-2's: see trees.RerankedTree."""

    def __init__(self, size: int, max_nodes: int, device: torch.device, breadth: int) -> None:
        super().__init__(size, max_nodes, device)
        self._breadth = breadth

    def reset(self) -> None:
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents, values of every level
        self._count = self._expanded = 0
        self._nodes = self._full(1, value=-1)
        self._values = self._full(1, value=0.0, kind=torch.float32)

    def grow(self, ids: Tensor, scores: Tensor) -> Frontier | None:
        values = (scores + self._values[..., None]).flatten(1)
        tokens, parents = ids.flatten(1), self._nodes.repeat_interleave(scores.shape[-1], 1)
        self._levels.append((tokens, parents, values))
        breadth = min(self._breadth, self.max_nodes - self._expanded, values.shape[1])
        first, self._count = self._count, self._count + values.shape[1]
        if not breadth:
            return None
        self._expanded += breadth
        self._values, places = values.topk(breadth, -1)
        self._nodes = first + places
        return Frontier(tokens.gather(1, places), places // scores.shape[-1])

    def result(self) -> tuple[Tensor, Tensor]:
        tokens, parents, values = (torch.cat(parts, 1) for parts in zip(*self._levels, strict=True))
        count = min(self.max_nodes, values.shape[1])
        best = values.topk(count, -1).indices.sort(-1).values
        places = self._full(self._count + 1, value=-1)  # node -> its place in the result; the last place stays -1
        places.scatter_(1, best, torch.arange(count, device=self.device).expand(self.size, -1))
        there = values.gather(1, best) > -torch.inf
        above = places.gather(1, torch.where(parents < 0, self._count, parents).gather(1, best))
        chosen = torch.where(there, tokens.gather(1, best), -1), torch.where(there, above, -1)
        spare = self._full(self.max_nodes - count, value=-1)
        return torch.cat([chosen[0], spare], 1), torch.cat([chosen[1], spare], 1)


class StaticTrees(BatchedTrees):
    """Medusa's: see trees.StaticTree; one row stands for all nodes of a level."""

    def __init__(
        self, size: int, max_nodes: int, device: torch.device, levels: list[list[tuple[int, int, int]]]
    ) -> None:
        """levels: (node, parent, rank) of each."""
        super().__init__(size, max_nodes, device)
        self._levels = [torch.tensor(level, device=device).T.contiguous() for level in levels]

    def reset(self) -> None:
        self._tokens, self._parents = self._full(self.max_nodes, value=-1), self._full(self.max_nodes, value=-1)
        self._depth = 0

    def grow(self, ids: Tensor, scores: Tensor) -> Frontier | None:
        nodes, parents, ranks = self._levels[self._depth]
        reached = (parents < 0) | (self._tokens.index_select(1, parents.clamp(min=0)) >= 0)
        there = reached & (scores[:, 0].index_select(1, ranks) > -torch.inf)
        tokens = torch.where(there, ids[:, 0].index_select(1, ranks), -1)
        self._tokens.index_copy_(1, nodes, tokens)
        self._parents.index_copy_(1, nodes, parents.expand(self.size, -1))
        self._depth += 1
        more = self._depth < len(self._levels)
        return Frontier(tokens[:, -1:].clamp(min=0), self._full(1, value=0)) if more else None

    def result(self) -> tuple[Tensor, Tensor]:
        return self._tokens, self._parents


def batch_trees(tree: Tree, size: int, device: torch.device) -> BatchedTrees:
    """The rule of this tree for `size` trees with its max_nodes; a class that is not in _RULES grows chains."""
    return _RULES.get(type(tree), _chains)(tree, size, device)


def _chains(tree: Tree, size: int, device: torch.device) -> BatchedTrees:
    return Chains(size, tree.max_nodes, device)


def _node_budget(tree: Any, size: int, device: torch.device) -> BatchedTrees:
    return NodeBudgetTrees(size, tree.max_nodes, device, tree.top_p, tree.floor)


def _reranked(tree: Any, size: int, device: torch.device) -> BatchedTrees:
    return RerankedTrees(size, tree.max_nodes, device, tree.breadth)


def _static(tree: Any, size: int, device: torch.device) -> BatchedTrees:
    return StaticTrees(size, tree.max_nodes, device, tree.levels)


_RULES: dict[type[Tree], Callable[[Any, int, torch.device], BatchedTrees]] = {
    NodeBudgetTree: _node_budget,
    RerankedTree: _reranked,
    StaticTree: _static,
}
