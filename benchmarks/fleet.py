"""A simulated fleet: latency and cost of 1 to 10,000 replicas, from step times that were measured on one.

python -m benchmarks.fleet [--sizes 1 10 100 1000 10000] [--load 0.7] [--price 3.0] [--out DIR]
python -m benchmarks.fleet --check        # the one-replica case against the run in results/arrivals-h200.json

Each replica reads prompts in the order they came, and beside that makes steps whose time depends on its batch alone
(results/gpu-speed-h200.json; a prompt costs what it added to a step in results/arrivals-h200.json). Requests belong to
groups that share the beginning of their prompts; a replica that has a group's beginning in its cache reads only the
rest. Time runs in ticks. Prices are what you pass: the default is a round number, not an offer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arrivals import arrivals, percentiles

RESULTS = Path(__file__).parent / "results"
BATCH, PROMPT, TOKENS = 32, 260, 128  # of arrivals-h200.json
GROUPS_PER_REPLICA, SHARED, CACHED = 8, 0.75, 16  # groups; share of a prompt; groups that a replica's cache holds
PERIOD = 4.0  # seconds between bursts
THRESHOLD = 8  # requests by which the replica with the prefix may be busier: Fleet.busy_threshold


@dataclass(frozen=True)
class Costs:
    """Measured times of one replica."""

    batches: list[int]
    step_s: list[float]  # by batch
    tokens_per_step: float
    prompt_s: float  # of one prompt of PROMPT tokens

    @classmethod
    def read(cls, drafter: str) -> Costs:
        speed = [row for row in _rows("gpu-speed-h200.json") if row["drafter"] == drafter and "step_ms" in row]
        trial = next(row for row in _rows("arrivals-h200.json") if row["drafter"] == drafter)
        prompt = (trial["gap_ms_p90"] - trial["gap_ms_p50"]) / 1e3
        steps = [row["step_ms"] / 1e3 for row in speed]
        return cls([row["batch"] for row in speed], steps, trial["tokens_per_step"], prompt)

    def capacity(self) -> float:
        """Requests a second with a full batch, prompts included."""
        decoding = TOKENS / self.tokens_per_step * float(np.interp(BATCH, self.batches, self.step_s)) / BATCH
        return 1.0 / (decoding + self.prompt_s)


@dataclass
class Waiting:
    """A request that was sent to a replica."""

    arrived: float
    prompt_s: float


@dataclass
class Run:
    """What the requests of one simulation saw, in seconds."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    hits: int = 0
    requests: int = 0
    seconds: float = 0.0


class Fleet:
    """Replicas in arrays: one row each, one column per place in the batch."""

    def __init__(self, size: int, costs: Costs) -> None:
        self.size, self._costs = size, costs
        self._left = np.zeros((size, BATCH))  # tokens; 0: the place is free
        self._arrived = np.zeros((size, BATCH))
        self._reading = np.zeros(size)  # seconds of prompts that are admitted and not read
        self._queues: list[deque[Waiting]] = [deque() for _ in range(size)]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(size)]
        self.load = np.zeros(size, np.int64)  # requests that have not ended
        self.run = Run()

    def send(self, replica: int, group: int, now: float) -> None:
        cached = self._cached[replica]
        hit = group in cached
        cached[group] = None
        cached.move_to_end(group)
        if len(cached) > CACHED:
            cached.popitem(last=False)
        self.run.hits += hit
        self.run.requests += 1
        self.load[replica] += 1
        self._queues[replica].append(Waiting(now, self._costs.prompt_s * (1 - SHARED * hit)))

    def tick(self, now: float, seconds: float) -> None:
        self._admit(now)
        read = np.minimum(self._reading, seconds)
        self._reading -= read
        running = self._left > 0
        batch = running.sum(1)
        step = np.interp(batch, self._costs.batches, self._costs.step_s)
        gained = (seconds - read) / step * self._costs.tokens_per_step
        self._left -= np.where(running, gained[:, None], 0.0)
        ended = running & (self._left <= 0)
        self._left[ended] = 0.0
        self.run.whole += (now + seconds - self._arrived[ended]).tolist()
        self.load -= ended.sum(1)

    def _admit(self, now: float) -> None:
        for replica in np.flatnonzero(self.load > (self._left > 0).sum(1)):
            queue = self._queues[replica]
            for place in np.flatnonzero(self._left[replica] == 0)[: len(queue)]:
                request = queue.popleft()
                self._left[replica, place], self._arrived[replica, place] = TOKENS, request.arrived
                self._reading[replica] += request.prompt_s
                step = float(np.interp((self._left[replica] > 0).sum(), self._costs.batches, self._costs.step_s))
                self.run.first.append(
                    now - request.arrived + self._reading[replica] + 1.5 * step
                )  # half of the one in flight


Route = Callable[[Fleet, int], int]


def any_replica(fleet: Fleet, group: int) -> int:
    return random.randrange(fleet.size)


def better_of_two(fleet: Fleet, group: int) -> int:
    """Ray Serve's default."""
    one, other = any_replica(fleet, group), any_replica(fleet, group)
    return one if fleet.load[one] <= fleet.load[other] else other


def least_busy(fleet: Fleet, group: int) -> int:
    return int(fleet.load.argmin())


def prefix(fleet: Fleet, group: int) -> int:
    """Ours: where the beginning is cached, unless that replica is busier than the least busy one by the threshold."""
    home, least = group % fleet.size, int(fleet.load.argmin())
    return home if fleet.load[home] - fleet.load[least] <= THRESHOLD else least


ROUTES: dict[str, Route] = {
    "random": any_replica,
    "better of two": better_of_two,
    "least busy": least_busy,
    "prefix": prefix,
}


def poisson(rate: float, until: float) -> Iterator[float]:
    now = random.expovariate(rate)
    while now < until:
        yield now
        now += random.expovariate(rate)


def bursty(rate: float, until: float) -> Iterator[float]:
    """The first quarter of a period has three times the rate, the rest a third."""
    now = 0.0
    while now < until:
        now += random.expovariate(rate * (3.0 if now % PERIOD < PERIOD / 4 else 1 / 3))
        yield now


ARRIVALS = {"poisson": poisson, "bursty": bursty}


def simulate(fleet: Fleet, due: Iterator[float], groups: Iterator[int], route: Route, tick: float) -> Run:
    """Until all requests have ended. due: when they arrive; groups: whose beginnings they share."""
    now, coming = 0.0, next(due, None)
    while coming is not None or fleet.load.any():
        while coming is not None and coming < now + tick:
            group = next(groups)
            fleet.send(route(fleet, group), group, coming)
            coming = next(due, None)
        fleet.tick(now, tick)
        now += tick
    fleet.run.seconds = now
    return fleet.run


def row(size: int, kind: str, policy: str, drafter: str, load: float, args: argparse.Namespace) -> dict[str, Any]:
    random.seed(0)
    costs = Costs.read(drafter)
    rate = load * costs.capacity() * size
    until = PERIOD * round(min(args.seconds, max(PERIOD, args.requests / rate)) / PERIOD)
    groups = iter(lambda: random.randrange(GROUPS_PER_REPLICA * size), None)
    run = simulate(Fleet(size, costs), ARRIVALS[kind](rate, until), groups, ROUTES[policy], args.tick)
    tokens_per_s = run.requests * TOKENS / until
    return {
        "replicas": size, "arrivals": kind, "policy": policy, "drafter": drafter, "load": load,
        "requests": run.requests, **percentiles("first_ms", run.first), **percentiles("whole_ms", run.whole),
        "prefix_hits": run.hits / run.requests,
        "price_per_million_tokens": size * args.price / 3600 / tokens_per_s * 1e6,
    }  # fmt: skip


def check(tick: float = 0.001) -> list[dict[str, Any]]:
    """One replica with the arrivals of the measured run, in which no two prompts share a beginning."""
    found = []
    for real in _rows("arrivals-h200.json"):
        due = iter(arrivals(real["of"], real["rate"]))
        run = simulate(Fleet(1, Costs.read(real["drafter"])), due, itertools.count(), lambda fleet, group: 0, tick)
        simulated = {"tokens_per_s": real["of"] * TOKENS / run.seconds, **percentiles("first_ms", run.first)}
        about = {name: {"simulated": value, "measured": real[name]} for name, value in simulated.items()}
        found.append({"drafter": real["drafter"], **about})
    return found


def sweep(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for size in args.sizes:
        for kind in ARRIVALS:
            for policy in ROUTES:
                yield row(size, kind, policy, "model", args.load, args)
    for load in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0):
        for drafter in ("none", "model"):
            yield row(10, "poisson", "prefix", drafter, load, args)


def plot(rows: list[dict[str, Any]], load: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    sizes = [found for found in rows if found["load"] == load and found["drafter"] == "model"]
    for axes, kind in ((left, "poisson"), (middle, "bursty")):
        for policy in ROUTES:
            line = [found for found in sizes if (found["arrivals"], found["policy"]) == (kind, policy)]
            line = list({found["replicas"]: found for found in line}.values())
            axes.plot([f["replicas"] for f in line], [f["first_ms_p99"] for f in line], marker="o", label=policy)
        axes.set(xscale="log", xlabel="replicas", ylabel="first token, p99, ms", title=f"{kind}, load {load}")
        axes.legend()
    for drafter in ("none", "model"):
        line = [f for f in rows if (f["replicas"], f["drafter"], f["policy"]) == (10, drafter, "prefix")]
        line = sorted((f for f in line if f["arrivals"] == "poisson"), key=lambda f: f["price_per_million_tokens"])
        prices = [f["price_per_million_tokens"] for f in line]
        right.plot(prices, [f["whole_ms_p50"] for f in line], marker="o", label=f"drafter: {drafter}")
    right.set(
        xlabel="price of a million tokens", ylabel="answer of 128 tokens, p50, ms", title="10 replicas, load 0.2 to 1"
    )
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    above_zero(text)
    return int(text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sizes", type=count, nargs="+", default=[1, 10, 100, 1000, 10_000])
    parser.add_argument("--load", type=above_zero, default=0.7, help="share of the fleet's capacity")
    parser.add_argument("--price", type=above_zero, default=3.0, help="of a replica's hour")
    parser.add_argument("--seconds", type=above_zero, default=60.0, help="of arrivals at most")
    parser.add_argument(
        "--requests", type=count, default=20_000, help="of one simulation, about; four seconds at least"
    )
    parser.add_argument("--tick", type=above_zero, default=0.005, help="seconds")
    parser.add_argument("--out", type=Path, help="folder for fleet.json and fleet.png")
    args = parser.parse_args(argv)
    if args.check and args.out is not None:
        parser.error("--out is for a sweep; leave out --check")
    rows = []
    for found in check() if args.check else sweep(args):
        rows.append(found)
        print(json.dumps(found), flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        about = {"settings": {name: str(value) for name, value in vars(args).items()}, "rows": rows}
        (args.out / "fleet.json").write_text(json.dumps(about, indent=1))
        plot(rows, args.load, args.out / "fleet.png")


def _rows(name: str) -> list[dict[str, Any]]:
    return list(json.loads((RESULTS / name).read_text())["rows"])


if __name__ == "__main__":
    main()
