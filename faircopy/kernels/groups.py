"""The order in which products are summed along K.

K is cut into groups by the weight's full shape alone. Each group is summed from its first element to its last in
float32, and the groups are added by a binary tree: (g0 + g1) + (g2 + g3). Weights that have no more outputs than inputs
(attention output, down) have four: devices that share their inputs each own a subtree, so 1, 2 and 4 devices write the
same bits, and few rows keep a whole GPU busy with a block per group. Others (q, k, v; gate and up; the vocabulary) are
shared by outputs and have one.
"""

from __future__ import annotations

from torch import Tensor

GROUPS = 4  # at most: the most devices that can share a weight's inputs
GRAIN = 64  # a group is a multiple of this


def group_count(inner: int, outputs: int = 0) -> int:
    """Groups of a weight [outputs, inner]: as many as cut K evenly; a quarter more outputs than inputs still count."""
    most = GROUPS if 4 * outputs <= 5 * inner else 1
    return next(groups for groups in (4, 2, 1) if groups == 1 or (groups <= most and inner % (groups * GRAIN) == 0))


def shared_groups(outputs: int, inner: int, device: str) -> int:
    """Groups of a weight whose inputs ranks may share: on a CPU, where other weights have none, enough for eight."""
    if device != "cpu":
        return group_count(inner, outputs)
    return next(groups for groups in (8, 4, 2, 1) if groups == 1 or inner % (groups * GRAIN) == 0)


def add_tree(parts: Tensor) -> Tensor:
    """[G, M, N] float32 -> [M, N], G a power of two."""
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]
