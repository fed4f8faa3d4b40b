"""The rules of `trees.py` for all trees of a batch at once, as tensors of fixed shape: a captured step can grow them.

All trees have the same max_nodes, and shapes never depend on what is offered. The arithmetic is that of
`kernels/tree_growth.py`, or of the kernels that do the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from faircopy.drafters.trees import OFFERED, NodeBudgetTree, RerankedTree, StaticTree, Tree
from faircopy.kernels.tree_growth import TORCH, Budget, Candidates, Front, Nodes, TreeRules


class BatchedTrees(ABC):
    """`size` trees, one per batch slot; `is_chain`: every node has one child at most."""

    is_chain = False
    num_offered = OFFERED  # tokens wanted of every row

    def __init__(self, size: int, max_nodes: int, device: torch.device, out: Nodes | None = None) -> None:
        """out: where drafts are written; None: to tables of their own."""
        self.size, self.max_nodes, self.device = size, max_nodes, device
        self.out = out or Nodes.empty(size, max_nodes, device)

    @abstractmethod
    def reset(self) -> None:
        """Start with empty trees."""

    @abstractmethod
    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        """Add one level from what each row of the front offers [B, F, num_offered]; None: the trees are complete."""

    @abstractmethod
    def finish(self) -> None:
        """Write the drafts, parents before children."""

    def result(self) -> tuple[Tensor, Tensor]:
        """Tokens and parents [B, max_nodes] of the drafts, -1 above the first level."""
        self.finish()
        return self.out.tokens.long(), self.out.parents.long() - 1

    def _full(self, *shape: int, value: float, kind: torch.dtype = torch.int64) -> Tensor:
        return torch.full((self.size, *shape), value, dtype=kind, device=self.device)

    def _root(self) -> Front:
        """The text's last token."""
        zeros = self._full(1, value=0)
        return Front(zeros, zeros, self._full(1, value=-1), self._full(1, value=0.0, kind=torch.float32))


class Chains(BatchedTrees):
    """Chains: the first token offered, again and again."""

    is_chain = True
    num_offered = 1

    def reset(self) -> None:
        self._tokens: list[Tensor] = []

    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        tokens, values = ids[:, :, 0], scores[:, :, 0]
        self._tokens.append(torch.where(values > -torch.inf, tokens, -1))
        level, zeros = len(self._tokens), torch.zeros_like(tokens)
        return Front(tokens, zeros, zeros + level - 1, values) if level < self.max_nodes else None

    def finish(self) -> None:
        missing = self.max_nodes - len(self._tokens)
        tokens = torch.cat([*self._tokens, self._full(missing, value=-1)], 1)
        self.out.write(tokens, torch.arange(-1, self.max_nodes - 1, device=self.device).expand(self.size, -1))


class NodeBudgetTrees(BatchedTrees):
    """Clover's: see trees.NodeBudgetTree."""

    def __init__(
        self, size: int, max_nodes: int, device: torch.device, out: Nodes | None, rules: TreeRules, budget: Budget
    ) -> None:
        super().__init__(size, max_nodes, device, out)
        self._rules, self._budget, self._first = rules, budget, self._root()

    def reset(self) -> None:
        self._front: Front | None = None

    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        begin = self._front is None
        self._front = self._rules.spend(ids, scores, self._front or self._first, self._budget, self.out, begin)
        return self._front

    def finish(self) -> None:
        """Nodes are written as they are added."""


class RerankedTrees(BatchedTrees):
    """EAGLE-2's: see trees.RerankedTree."""

    def __init__(
        self, size: int, max_nodes: int, device: torch.device, out: Nodes | None, rules: TreeRules, breadth: int
    ) -> None:
        super().__init__(size, max_nodes, device, out)
        self._rules, self._breadth, self._first = rules, breadth, self._root()
        self._found = Candidates.empty(size, OFFERED * (max_nodes + 1), device)  # no more than max_nodes are expanded

    def reset(self) -> None:
        self._count = self._expanded = 0
        self._front = self._first

    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        offered = ids.shape[1] * ids.shape[2]
        breadth = min(self._breadth, self.max_nodes - self._expanded, offered)
        self._front = self._rules.expand(ids, scores, self._front, self._found, self._count, breadth)
        self._count += offered
        self._expanded += breadth
        return self._front if breadth else None

    def finish(self) -> None:
        self._rules.rerank(self._found, self._count, self.out)


class StaticTrees(BatchedTrees):
    """Medusa's: see trees.StaticTree; one row stands for all nodes of a level."""

    def __init__(
        self,
        size: int,
        max_nodes: int,
        device: torch.device,
        out: Nodes | None,
        levels: list[list[tuple[int, int, int]]],
    ) -> None:
        """levels: (node, parent, rank) of each."""
        super().__init__(size, max_nodes, device, out)
        self._levels = [torch.tensor(level, device=device).T.contiguous() for level in levels]

    def reset(self) -> None:
        self._tokens, self._parents = self._full(self.max_nodes, value=-1), self._full(self.max_nodes, value=-1)
        self._depth = 0

    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        nodes, parents, ranks = self._levels[self._depth]
        reached = (parents < 0) | (self._tokens.index_select(1, parents.clamp(min=0)) >= 0)
        there = reached & (scores[:, 0].index_select(1, ranks) > -torch.inf)
        tokens = torch.where(there, ids[:, 0].index_select(1, ranks), -1)
        self._tokens.index_copy_(1, nodes, tokens)
        self._parents.index_copy_(1, nodes, parents.expand(self.size, -1))
        self._depth += 1
        if self._depth == len(self._levels):
            return None
        zeros = self._full(1, value=0)
        return Front(tokens[:, -1:].clamp(min=0), zeros, zeros, scores[:, :1, 0])

    def finish(self) -> None:
        self.out.write(self._tokens, self._parents)


def batch_trees(
    tree: Tree, size: int, device: torch.device, rules: TreeRules = TORCH, out: Nodes | None = None
) -> BatchedTrees:
    """The rule of this tree for `size` trees with its max_nodes; a class that is not in _MAKERS grows chains."""
    return _MAKERS.get(type(tree), _chains)(tree, size, device, rules, out)


def _chains(tree: Tree, size: int, device: torch.device, rules: TreeRules, out: Nodes | None) -> BatchedTrees:
    return Chains(size, tree.max_nodes, device, out)


def _node_budget(tree: Any, size: int, device: torch.device, rules: TreeRules, out: Nodes | None) -> BatchedTrees:
    budget = Budget(torch.zeros(size, dtype=torch.int64, device=device), tree.top_p, math.log(tree.floor))
    return NodeBudgetTrees(size, tree.max_nodes, device, out, rules, budget)


def _reranked(tree: Any, size: int, device: torch.device, rules: TreeRules, out: Nodes | None) -> BatchedTrees:
    return RerankedTrees(size, tree.max_nodes, device, out, rules, tree.breadth)


def _static(tree: Any, size: int, device: torch.device, rules: TreeRules, out: Nodes | None) -> BatchedTrees:
    return StaticTrees(size, tree.max_nodes, device, out, tree.levels)


_MAKERS: dict[type[Tree], Callable[[Any, int, torch.device, TreeRules, Nodes | None], BatchedTrees]] = {
    NodeBudgetTree: _node_budget,
    RerankedTree: _reranked,
    StaticTree: _static,
}
