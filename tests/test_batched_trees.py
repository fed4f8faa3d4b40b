"""Trees grown as tensors, a batch at once: the same trees as one by one."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faircopy.drafters.batched_trees import BatchedTrees, batch_trees
from faircopy.drafters.trees import OFFERED, NodeBudgetTree, Offer, RerankedTree, StaticTree, Tree, best_shape
from faircopy.kernels.tree_growth import Front

CPU = torch.device("cpu")
Path = tuple[int, ...]


def offer(seed: int, path: Path, only: int | None, coarse: bool) -> Offer:
    """What a head would say after this path; only: the number of possible tokens; coarse: many paths are equal."""
    draw = random.Random(f"{seed} {path}")
    weights = sorted((draw.random() ** 4 + 1e-6 for _ in range(OFFERED)), reverse=True)
    tokens = draw.sample(range(50), OFFERED)
    total = torch.tensor(weights).sum() * 1.1
    values = torch.log(torch.tensor(weights) / total)
    return list(zip(tokens, ((values * 2).floor() / 2 if coarse else values).tolist(), strict=True))[:only]


def paths_of(tokens: list[int], parents: list[int]) -> set[Path]:
    paths: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    there = [path for path in paths if path[-1] >= 0]
    assert all(min(path) >= 0 for path in there), "every parent is there"
    return set(there)


def one_by_one(tree: Tree, seed: int, levels: int, only: int | None, same: bool, coarse: bool) -> set[Path]:
    for level in range(levels):
        if not tree.front:
            break
        about = [(level,) if same else tuple(tree.path(node)) for node in tree.front]
        tree.grow([offer(seed, path, only, coarse) for path in about])
    return paths_of(*tree.result())


def together(
    trees: BatchedTrees, seeds: list[int], levels: int, only: list[int | None], same: bool, coarse: bool
) -> list[set[Path]]:
    trees.reset()
    front: list[list[Path]] = [[()] for _ in seeds]
    for level in range(levels):
        ids = torch.zeros(len(seeds), len(front[0]), trees.num_offered, dtype=torch.int64)
        scores = torch.full(ids.shape, -torch.inf)
        for s, rows in enumerate(front):
            for f, path in enumerate(rows):
                said = offer(seeds[s], (level,) if same else path, only[s], coarse)[: trees.num_offered]
                ids[s, f, : len(said)] = torch.tensor([token for token, _ in said])
                scores[s, f, : len(said)] = torch.tensor([value for _, value in said])
        grown: Front | None = trees.grow(ids, scores)
        if grown is None:
            break
        front = [
            [(*front[s][above], token) for above, token in zip(a, t, strict=True)]
            for s, (a, t) in enumerate(zip(grown.above.tolist(), grown.tokens.tolist(), strict=True))
        ]
    tokens, parents = trees.result()
    assert tokens.shape == parents.shape == (len(seeds), trees.max_nodes)
    assert bool((parents < torch.arange(trees.max_nodes)).all()), "parents come first"
    return [paths_of(t, p) for t, p in zip(tokens.tolist(), parents.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["chain", "spent", "reranked", "static"])
@settings(max_examples=40)
@given(max_nodes=st.integers(1, 30), levels=st.integers(1, 7), seed=st.integers(0, 9999), coarse=st.booleans())
def test_batched_trees_are_the_trees_of_their_rule(
    kind: str, max_nodes: int, levels: int, seed: int, coarse: bool
) -> None:
    shape = best_shape([[0.6 * 0.8**level * 0.4**rank for rank in range(OFFERED)] for level in range(levels)], 30)
    make = {
        "chain": lambda: Tree(max_nodes),
        "spent": lambda: NodeBudgetTree(max_nodes),
        "reranked": lambda: RerankedTree(max_nodes, 6),
        "static": lambda: StaticTree(shape, max_nodes),
    }[kind]
    seeds, only = [seed, seed + 1, seed + 2], [None, 1, 3]  # one tree is sampled: a single token is possible
    wanted = [one_by_one(make(), s, levels, o, kind == "static", coarse) for s, o in zip(seeds, only, strict=True)]
    assert together(batch_trees(make(), 3, CPU), seeds, levels, only, kind == "static", coarse) == wanted
