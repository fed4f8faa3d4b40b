"""How the tokens a draft head offers become a tree: one rule per class, one tree at a time.

A tree grows level by level until it has max_nodes nodes. Captured steps grow all trees of a batch at once with the
rules of `batched_trees.py`; tests keep the two alike.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter

Offer = list[tuple[int, float]]  # tokens and their log probabilities, best first

OFFERED = 10  # tokens a node offers at most


class Tree:
    """Nodes with the probability of the path to them. `front` holds the nodes whose children are wanted next.

    This one is a chain: the first token offered, again and again.
    """

    ranked = False  # true: nodes of several trees can be compared by their values

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []  # log probability of the whole path
        self.front: list[int] = [-1]
        self.expanded: list[int] = []  # nodes that have been in front, in that order

    def grow(self, offers: list[Offer]) -> None:
        """Add one level from what each node in front offers, and choose the next front."""
        self._advance([self._add(node, *offer[0]) for node, offer in zip(self.front, offers, strict=True)])

    def result(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the draft: the likeliest nodes, if there are more than max_nodes.

        A parent is never less likely than its child and comes before it, so that whole paths are kept.
        """
        if len(self.tokens) <= self.max_nodes:
            return self.tokens, self.parents
        best = sorted(self.ranking()[: self.max_nodes])
        place = {node: n for n, node in enumerate(best)}
        return [self.tokens[n] for n in best], [place.get(self.parents[n], -1) for n in best]

    def ranking(self) -> list[int]:
        """Its nodes, the likeliest path first."""
        return sorted(range(len(self.tokens)), key=lambda n: -self.values[n])

    def above(self, node: int) -> int:
        """The node whose memory this one continues."""
        return self.parents[node]

    def path(self, node: int) -> list[int]:
        """The tokens from the first level down to this node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def _add(self, parent: int, token: int, value: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value + (self.values[parent] if parent >= 0 else 0.0))
        return len(self.tokens) - 1

    def _advance(self, front: list[int]) -> None:
        self.front = front if len(self.tokens) < self.max_nodes else []
        self.expanded += self.front

    def _candidates(self, offers: list[Offer]) -> list[tuple[float, int, int, float]]:
        """All children on offer, most probable path first: (path, parent, token, own), logarithms."""
        found = [
            (value + (self.values[node] if node >= 0 else 0.0), node, token, value)
            for node, offer in zip(self.front, offers, strict=True)
            for token, value in offer
        ]
        return sorted(found, key=lambda c: -c[0])


class NodeBudgetTree(Tree):
    """Clover's: a node keeps its likely tokens, a level its likely paths. All levels share one node budget, spent from
    the root down."""

    ranked = True

    def __init__(self, max_nodes: int, top_p: float = 0.8, floor: float = 0.25) -> None:
        super().__init__(max_nodes)
        self.top_p, self.floor = top_p, floor

    def grow(self, offers: list[Offer]) -> None:
        kept = self._candidates([self._likely(offer) for offer in offers])[: self.max_nodes - len(self.tokens)]
        self._advance([self._add(parent, token, value) for _, parent, token, value in kept])

    def _likely(self, offer: Offer) -> Offer:
        """Tokens within top-p, none below a share of the best; the best always stays."""
        kept, total, least = offer[:1], math.exp(offer[0][1]), offer[0][1] + math.log(self.floor)
        for token, value in offer[1:]:
            if total >= self.top_p or value < least:
                break
            kept.append((token, value))
            total += math.exp(value)
        return kept


class RerankedTree(Tree):
    """EAGLE-2's: expand the likeliest paths of each level, then keep the best nodes of all levels."""

    ranked = True

    def __init__(self, max_nodes: int, depth: int) -> None:
        super().__init__(max_nodes)
        self.breadth = max(
            1, min(OFFERED, max_nodes // depth)
        )  # the expanded nodes need KV slots too: no more than max_nodes

    def grow(self, offers: list[Offer]) -> None:
        nodes = [self._add(parent, token, value) for _, parent, token, value in self._candidates(offers)]
        self.front = nodes[: min(self.breadth, self.max_nodes - len(self.expanded))]
        self.expanded += self.front


class StaticTree(Tree):
    """Medusa's: the shape is fixed before; every node of a level is offered the same tokens."""

    def __init__(self, shape: list[tuple[int, int]], max_nodes: int) -> None:
        super().__init__(max_nodes)
        self.levels = _levels(shape[:max_nodes])
        self._places: dict[int, int] = {-1: -1}  # node of the shape -> node of this tree
        self._depth = 0
        self._last = -1  # the node that stood for the level above

    def above(self, node: int) -> int:
        return self._last

    def grow(self, offers: list[Offer]) -> None:
        (offer,) = offers
        for node, parent, rank in self.levels[self._depth]:
            if parent in self._places and rank < len(offer):
                self._places[node] = self._add(self._places[parent], *offer[rank])
        self._depth += 1
        self._last = self.front[0]
        self.front = [len(self.tokens) - 1] if self._depth < len(self.levels) else []  # one node stands for the level
        self.expanded += self.front


def share_nodes(trees: list[Tree], nodes: int) -> None:
    """Let the likeliest nodes of all trees stay, no more than `nodes`, and of each tree no more than its max_nodes."""
    ranked = [(-tree.values[node], n) for n, tree in enumerate(trees) for node in tree.ranking()[: tree.max_nodes]]
    kept = Counter(n for _, n in sorted(ranked)[:nodes])
    for n, tree in enumerate(trees):
        tree.max_nodes = kept[n]


def shared_depth(k: int) -> int:
    """Levels of trees that share k nodes per tree: one more than a tree of k nodes can have."""
    return k + 1


def best_shape(table: list[list[float]], size: int) -> list[tuple[int, int]]:
    """The tree of (parent, rank) with the most expected right nodes; table[level][rank]: how often that one is right.

    Best first, parents before children, so that its beginning is the best smaller tree.
    """
    return [(parent, rank) for parent, rank, _ in _best_nodes(table, size)]


def node_values(table: list[list[float]], size: int) -> list[float]:
    """How likely each node of `best_shape` is right, its parents included: their sum is expected to be accepted."""
    return [value for _, _, value in _best_nodes(table, size)]


def _best_nodes(table: list[list[float]], size: int) -> list[tuple[int, int, float]]:
    """(parent, rank, how likely the path is right) of the best nodes, best first."""
    found: list[tuple[int, int, float]] = []
    heap = [(-table[0][0], 0, -1, 0, 1.0)]  # value, level, parent, rank, value of the parent
    while heap and len(found) < size:
        value, level, parent, rank, above = heapq.heappop(heap)
        found.append((parent, rank, -value))
        if rank + 1 < len(table[level]):
            heapq.heappush(heap, (-above * table[level][rank + 1], level, parent, rank + 1, above))
        if level + 1 < len(table):
            heapq.heappush(heap, (value * table[level + 1][0], level + 1, len(found) - 1, 0, -value))
    return found


def _levels(shape: list[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """(node, parent, rank) by depth."""
    depths: list[int] = []
    levels: list[list[tuple[int, int, int]]] = []
    for node, (parent, rank) in enumerate(shape):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        levels += [[] for _ in range(depths[-1] + 1 - len(levels))]
        levels[depths[-1]].append((node, parent, rank))
    return levels
