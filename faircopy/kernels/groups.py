"""The order in which row-parallel products (attention output, down) are summed along K.

K is cut into groups by the weight's full shape alone. Each group is summed from its first element to its last in
float32, and the groups are added by a binary tree: ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7)). Devices that
split such a weight each own a subtree, so 1, 2, 4 and 8 of them write the same bits.
"""

from __future__ import annotations

from torch import Tensor

GROUPS = 8  # at most: the most devices that can share a weight
GRAIN = 64  # a group is a multiple of this


def group_count(inner: int) -> int:
    """Groups of a row-parallel weight with this many inputs: the largest power of two that cuts it evenly."""
    return next(groups for groups in (GROUPS, 4, 2, 1) if groups == 1 or inner % (groups * GRAIN) == 0)


def add_tree(parts: Tensor) -> Tensor:
    """[G, M, N] float32 -> [M, N], G a power of two."""
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]
