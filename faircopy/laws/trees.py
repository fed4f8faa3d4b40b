"""What trees of fewer nodes accept, given what the large tree accepts.

A tree of k nodes can have min(k, 7) tokens accepted. The part of them that is missing is taken to be a power of the
large tree's missing part, fitted to heads that were measured with both. So no tree accepts more than its nodes, and
both reach their most together. Heads worse than the worst one measured keep that one's share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faircopy.laws.points import CHAIN, TREE, Result, measure_name
from faircopy.laws.run import SMALLER_TREES

LEAST = 1e-3  # missing part of the best tree that is thought of
SPREAD = 0.05  # of the large tree's accepted tokens, over which a power can be fitted


@dataclass(frozen=True, slots=True)
class SmallTree:
    """Accepted tokens per cycle of a tree with this many nodes."""

    nodes: int
    worst: float = 0.0  # the large tree's accepted tokens of the worst head measured
    scale: float = 1.0
    power: float = 1.0

    def __call__(self, large: float) -> float:
        large = min(max(large, 0.0), float(CHAIN))
        known = max(large, self.worst)
        most = min(self.nodes, CHAIN)
        found: float = most * max(0.0, 1.0 - self.scale * _missing(known, CHAIN) ** self.power)
        return min(found, known) * (large / known if known else 0.0)


def small_trees(results: Sequence[Result]) -> dict[int, SmallTree]:
    """By nodes: those that were measured, none, and the large tree itself."""
    found = {0: SmallTree(0), TREE: SmallTree(TREE)}
    for nodes in SMALLER_TREES:
        pairs = _measured(results, nodes)
        if pairs:
            found[nodes] = _fitted(nodes, pairs)
    return dict(sorted(found.items()))


def _measured(results: Sequence[Result], nodes: int) -> list[tuple[float, float]]:
    """(accepted by the large tree, by this one) of the heads that were measured with both."""
    large, small = measure_name("tree", TREE, 0.0), measure_name("tree", nodes, 0.0)
    known = [result for result in results if small in result.measures]
    return [(r.accepted(large), r.accepted(small)) for r in known if r.accepted(large) > 0]


def _fitted(nodes: int, pairs: Sequence[tuple[float, float]]) -> SmallTree:
    worst, best = min(pairs)[0], max(pairs)[0]
    x = [math.log(_missing(large, CHAIN)) for large, _ in pairs]
    y = [math.log(_missing(small, min(nodes, CHAIN))) for _, small in pairs]
    power = 1.0
    if best - worst > SPREAD:
        power = float(np.clip(np.polyfit(x, y, 1)[0], 0.0, 2.0))
    return SmallTree(nodes, worst, math.exp(float(np.mean(y)) - power * float(np.mean(x))), power)


def _missing(accepted: float, most: int) -> float:
    return max(LEAST, 1.0 - accepted / most)
