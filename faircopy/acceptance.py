"""Which nodes of a draft tree are accepted: the walk that the exact verifier and the kernels' torch twins share."""

from __future__ import annotations


def children(parents: list[int]) -> list[list[int]]:
    """The nodes below the last token (first), and below each node; a node's parent comes before it, -1 is the token."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        below[parent + 1].append(node)
    return below


def accept_path(
    tokens: list[int], parents: list[int], choices: list[int], broken: list[bool]
) -> tuple[list[int], list[int]]:
    """Accepted nodes and the target's tokens: step to the first child whose token the target chose, while there is one.

    choices[0] is the target's token after the last token, choices[n + 1] after node n; broken marks the rows
    without finite logits. There is one token more than nodes, unless the walk ends at a broken row.
    """
    if not tokens:
        return [], [] if broken[0] else choices[:1]
    below = children(parents)
    nodes: list[int] = []
    chosen: list[int] = []
    here = 0
    while not broken[here]:
        chosen.append(choices[here])
        right = next((node for node in below[here] if tokens[node] == choices[here]), None)
        if right is None:
            break
        nodes.append(right)
        here = right + 1
    return nodes, chosen


def nodes_that_fit(max_nodes: int, length: int, limit: int) -> int:
    """How many draft nodes a sequence can use: one more token is always added, so nodes at or behind the limit - 1
    would be wasted."""
    return max(0, min(max_nodes, limit - length - 1))
