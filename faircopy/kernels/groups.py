"""The order in which products are summed along K.

K is cut into groups by the weight's full shape alone. Each group is summed from its first element to its last in
float32, and the groups are added by a binary tree: (g0 + g1) + (g2 + g3). Devices that share the inputs of a weight
(attention output, down) each own a subtree, so 1, 2 and 4 of them write the same bits; and few rows can be multiplied
by a block per group.
"""

from __future__ import annotations

from torch import Tensor

GROUPS = 4  # at most: the most devices that can share a weight's inputs
GRAIN = 64  # a group is a multiple of this
NARROW, WIDE = 8192, 16384  # outputs up to which a weight has up to four groups, and up to two


def group_count(inner: int, outputs: int = 0) -> int:
    """Groups of a weight [outputs, inner]: the fewer outputs, the more groups, as far as they cut K evenly."""
    most = GROUPS if outputs <= NARROW else 2 if outputs <= WIDE else 1
    return next(groups for groups in (4, 2, 1) if groups == 1 or (groups <= most and inner % (groups * GRAIN) == 0))


def add_tree(parts: Tensor) -> Tensor:
    """[G, M, N] float32 -> [M, N], G a power of two."""
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]
