"""What captured steps take in which sequences join, beside those in which none do: milliseconds, and by kernel.

python -m benchmarks.joining_steps --out FILE [--steps 64x0 64x2 32x0 32x3 8x5] [--method eagle3] [--kernels 8]
    [--small]

The widened target with a random draft head of its shape, chains. Of each number of batch slots and draft tokens
(64x2): the step without prompts, in which the head reads as many rows as it must, and those with rows of prompts, all
of them filled. --kernels: how many of the longest ones are listed, in microseconds of a step, by torch's profiler.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu import say
from benchmarks.heads_wide import RANDOM, random_head
from benchmarks.planner import Trial
from faircopy.bench.record import collect
from faircopy.replay.graphs import GraphKey, StepGraphs

REPLAYS = 5


def keys(graphs: StepGraphs, size: int, k: int) -> list[GraphKey]:
    """Steps of this kind: without prompts, and with few and many rows of them."""
    plain = graphs.decoding(size, k, graphs.left_unread(size, k))
    found = [graphs.joining(size, k, rows) for rows in (1, graphs.longest_joining)]
    return [plain, *(key for key in found if key is not None)]


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    trial = Trial(args)
    wanted = [tuple(map(int, step.split("x"))) for step in args.steps]
    llm = trial.ready(trial.made(random_head(args, trial, args.method), "auto", cache_memory=args.memory), "auto")
    if llm.engine.captured is None:
        raise SystemExit("steps are captured on a GPU alone")
    graphs = llm.engine.captured.graphs
    for size, k in wanted:
        for key in keys(graphs, size, k):
            seconds = graphs.time(key)
            kernels = profile(graphs, key, args.kernels) if args.kernels else {}
            yield {**key._asdict(), "rows": key.rows, "ms": 1e3 * seconds, "kernels_us": kernels}


def profile(graphs: StepGraphs, key: GraphKey, most: int) -> dict[str, list[float]]:
    """Launches and microseconds of the kernels that take most of a step, by name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    graph, step = graphs.get(key)
    with graphs.kept(graph):
        graphs.pretend(graph)
        with profiled(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(REPLAYS):
                step.start()
            torch.cuda.synchronize()
    count: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for event in seen.events() or ():
        name = event.name[:60]
        count[name] += 1
        taken[name] += event.device_time_total
    return {name: [count[name] / REPLAYS, round(us / REPLAYS, 1)] for name, us in taken.most_common(most)}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--steps", nargs="+", default=["64x0", "64x2", "32x0", "32x3", "8x5"])
    parser.add_argument("--method", choices=list(RANDOM), default="eagle3")
    parser.add_argument("--kernels", type=int, default=8)
    parser.add_argument("--memory", default="8GiB", help="of keys and values")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--small", action="store_true")
    parser.set_defaults(pair="widened", questions=None, own_text=False, costs=None, most=None, history=False)
    args = parser.parse_args(arguments)
    args.batches = [max(int(step.split("x")[0]) for step in args.steps)]
    for row in collect(args.out, vars(args), rows(args)):
        say(row)


if __name__ == "__main__":
    main()
