"""How many launches a draft head's levels are inside captured steps; counted on a CPU, nothing runs on a GPU.

python -m benchmarks.head_launches [--names]

A small checkpoint stands for the target: how many launches there are does not depend on the width of layers.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import argparse
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch

from faircopy import bundled
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.folder import new_head
from faircopy.drafters.heads import Head
from faircopy.kernels.gpu.linear import Linear
from faircopy.kernels.gpu.suite import KERNELS
from faircopy.replay.graphs import GraphKey
from faircopy.testing.launches import Launches
from tests.test_replay import fused

BATCH, DRAFT_VOCAB = 8, 1024
CASES = (("eagle3", 4, 4), ("clover", 4, 4), ("scylla", 24, 7), ("eagle3", 24, 7), ("clover", 12, 4))  # nodes, levels


def levels_of(method: str, nodes: int, levels: int) -> list[Launches]:
    """What reading, each level, and everything behind the last step of the head launch."""
    folder = str(bundled.draft())
    model = fused(folder)
    head: Head = new_head(method, folder, model.token_weights(), levels=levels, draft_vocab=DRAFT_VOCAB)
    with patch("faircopy.kernels.gpu.suite.suite_for", lambda device: KERNELS):
        head.run_on_kernels()
    config = EngineConfig(cache_memory="64MiB", k=nodes, max_batch=BATCH)
    engine = build_engine(model, draft=head, config=config, suite=KERNELS)
    head._product = Linear(torch.zeros(DRAFT_VOCAB, head.config.shape.hidden), exact=False)
    assert engine.captured is not None
    graph = engine.captured.graphs.make_state(GraphKey(BATCH, nodes))
    fill = engine.captured._drafter.plan_fill(graph)
    with torch.no_grad(), Launches():
        fill()  # what is made in the trial run
    found: list[Launches] = []
    step = head.step

    def watched(*args: Any) -> Any:
        found[-1].__exit__()
        found.append(Launches().__enter__())
        return step(*args)

    with torch.no_grad(), patch.object(head, "step", watched):
        found.append(Launches().__enter__())
        fill()
        found[-1].__exit__()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="what is launched, of the second level")
    names = parser.parse_args().names
    for method, nodes, levels in CASES:
        reading, *steps = levels_of(method, nodes, levels)
        counts = [f"{part.kernels.total()} + {part.operators.total()}" for part in (reading, *steps)]
        total = sum((part.total for part in (reading, *steps)), 0)
        print(
            f"{method} {nodes} nodes: {total} launches; kernels + operators of reading and levels: {', '.join(counts)}"
        )
        if names:
            print("   ", dict(sum((steps[1].kernels, steps[1].operators), Counter())))


if __name__ == "__main__":
    main()
