"""What growing draft trees costs on a CPU: one tree at a time in Python, or all of a batch as tensors.

python -m benchmarks.tree_growing [--rounds 40]

Only the rules are measured, on made-up offers, in turns and on the process's own clock: no network runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from faircopy.drafters.batched_trees import batch_trees
from faircopy.drafters.networks.medusa import default_accuracy
from faircopy.drafters.trees import OFFERED, NodeBudgetTree, RerankedTree, StaticTree, Tree, best_shape

LEVELS, VOCAB = 5, 4096
SHAPE = best_shape(default_accuracy(LEVELS), 63)
RULES: dict[str, Callable[[int], Tree]] = {
    "clover": NodeBudgetTree,
    "eagle3": lambda nodes: RerankedTree(nodes, 6),
    "medusa": lambda nodes: StaticTree(SHAPE, nodes),
}


class Offers(dict[int, tuple[Tensor, Tensor]]):
    """Log probabilities and tokens for a number of rows, made once."""

    def __missing__(self, rows: int) -> tuple[Tensor, Tensor]:
        values, ids = torch.log_softmax(torch.randn(rows, VOCAB) * 3, -1).topk(OFFERED)
        self[rows] = values, ids
        return self[rows]


def one_by_one(make: Callable[[], Tree], batch: int, offers: Offers) -> None:
    trees = [make() for _ in range(batch)]
    for _ in range(LEVELS):
        count = sum(len(tree.front) for tree in trees)
        if not count:
            break
        values, ids = offers[count]
        rows = iter([list(zip(*both, strict=True)) for both in zip(ids.tolist(), values.tolist(), strict=True)])
        for tree in trees:
            if tree.front:
                tree.grow([next(rows) for _ in tree.front])
    for tree in trees:
        tree.result()


def batched(make: Callable[[], Tree], batch: int, offers: Offers) -> None:
    trees, width = batch_trees(make(), batch, torch.device("cpu")), 1
    trees.reset()
    for _ in range(LEVELS):
        values, ids = offers[batch * width]
        front = trees.grow(ids.view(batch, width, -1), values.view(batch, width, -1))
        if front is None:
            break
        width = front.tokens.shape[1]
    for table in trees.result():
        table.tolist()


def milliseconds(ways: list[Callable[[], None]], rounds: int) -> list[float]:
    """The median of each, run in turns."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 5):
        for way, found in zip(ways, times, strict=True):
            begin = time.process_time()
            way()
            if turn >= 5:
                found.append(time.process_time() - begin)
    return [1e3 * statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    offers = Offers()
    for name, rule in RULES.items():
        for nodes in (4, 12):
            for batch in (1, 8, 32):
                alone, together = milliseconds(
                    [
                        lambda rule=rule, nodes=nodes, batch=batch: one_by_one(lambda: rule(nodes), batch, offers),
                        lambda rule=rule, nodes=nodes, batch=batch: batched(lambda: rule(nodes), batch, offers),
                    ],
                    rounds,
                )
                print(
                    f"{name:7s} {nodes:2d} nodes, batch {batch:2d}: {alone:6.3f} ms one by one, {together:6.3f} batched"
                )


if __name__ == "__main__":
    main()
