"""Which head to train within a time budget, and how many draft nodes to verify at a batch size.

Tokens per second = b (1 + a(A(T, D), k)) / (target's pass of b (k + 1) rows + levels of the draft). A is a fitted law,
T what the budget can train at D layers, and a(A, k) what a tree of k nodes accepts where the large one accepts A
(`trees.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from faircopy.costs import SHORTEST, Curve
from faircopy.drafters.networks.eagle3 import DEPTH
from faircopy.drafters.trees import OFFERED
from faircopy.errors import ConfigError
from faircopy.laws.fit import Fit, Interval
from faircopy.laws.points import CHAIN, Point, Result
from faircopy.laws.trees import SmallTree
from faircopy.model.base import ModelShape

Seconds = Callable[[int, int], float]  # of a target's pass: sequences, rows

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What things cost on the device that will serve."""

    target: Seconds
    level: Mapping[int, Curve]  # by layers: seconds of one level by rows
    train: Callable[[int], float]  # seconds per token of training, by layers
    answers: int = 0  # tokens of the second stage, which T does not count
    sources: list[str] = field(default_factory=list)  # where each of the three comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A head to train and how to serve it."""

    point: Point
    nodes: int  # 0: plain decoding
    accepted: float  # draft tokens per cycle with that many nodes
    accepted_interval: Interval
    rate: float  # tokens per second of all sequences together
    rate_interval: Interval
    draft_share: float  # of a cycle's time
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    batch: int
    plain: float  # tokens per second without a draft
    candidates: tuple[Candidate, ...]  # the best k of every depth

    @property
    def best(self) -> Candidate:
        return max(self.candidates, key=lambda one: one.rate)


def predict(
    fits: Sequence[Fit], trees: Mapping[int, SmallTree], costs: Costs, batch: int, budget: float, same: bool
) -> Prediction:
    """fits: the best first; intervals hold those of all. trees: by nodes.
    same: whether the law was measured on this target."""
    plain = batch / costs.target(batch, batch)
    candidates = [
        max((_candidate(fits, tree, costs, batch, _point(costs, layers, budget), same) for tree in trees.values()),
            key=lambda one: one.rate)
        for layers in sorted(costs.level)
    ]  # fmt: skip
    return Prediction(batch=batch, plain=plain, candidates=tuple(candidates))


def training_seconds(results: Sequence[Result]) -> Callable[[int], float]:
    """Seconds per token by layers: a line through each depth's longest training."""
    longest: dict[int, Result] = {}
    for result in results:
        if result.layers not in longest or result.tokens > longest[result.layers].tokens:
            longest[result.layers] = result
    depths = sorted(longest)
    times = [_seconds_per_token(longest[layers]) for layers in depths]
    if len(depths) == 1:
        return lambda layers: times[0] * layers / depths[0]
    slope, start = np.polyfit(depths, times, 1)
    return lambda layers: float(max(min(times), start + slope * layers))


def _seconds_per_token(result: Result) -> float:
    return max(SHORTEST, result.train_seconds / (result.tokens + result.answers))


def training_operations(shape: ModelShape, layers: int) -> float:
    """Per token: the target's pass, the head forwards and backwards, and the output layer for both."""
    spoken = shape.vocab * shape.hidden
    return 2.0 * (shape.read - spoken) + 6.0 * head_parameters(shape, layers) + 2.0 * spoken + 4.0 * spoken


def head_parameters(shape: ModelShape, layers: int) -> int:
    """Of a Scylla head: the projection, and decoder layers of the target's widths."""
    attention = shape.hidden * (shape.qkv + shape.heads * shape.head_dim)
    return 2 * shape.hidden**2 + layers * (attention + 3 * shape.hidden * shape.intermediate)


def parse_time(text: str) -> float:
    """Seconds of a duration: 90s, 45m, 10h, 2d."""
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        raise ConfigError("--budget", text, "not a duration", "write for example 45m or 10h") from None
    if not 0 < seconds < math.inf:
        raise ConfigError("--budget", text, "not above 0, or endless", "write for example 45m or 10h")
    return seconds


def _point(costs: Costs, layers: int, budget: float) -> Point:
    return Point(max(1, int(budget / costs.train(layers)) - costs.answers), layers)


def _candidate(fits: Sequence[Fit], tree: SmallTree, costs: Costs, batch: int, point: Point, same: bool) -> Candidate:
    nodes = tree.nodes
    drafting = draft_seconds(costs.level[point.layers], batch, nodes)
    seconds = costs.target(batch, batch * (nodes + 1)) + drafting

    def rate(accepted: float) -> float:
        return batch * (1.0 + accepted) / seconds

    intervals = [found.interval(point, single=True) for found in fits]
    ends = min(one.low for one in intervals), max(one.high for one in intervals)
    accepted, low, high = (tree(value) for value in (fits[0].law(point), *ends))
    return Candidate(
        point=point,
        nodes=nodes,
        accepted=accepted,
        accepted_interval=Interval(low, high),
        rate=rate(accepted),
        rate_interval=Interval(rate(low), rate(high)),
        draft_share=drafting / seconds,
        warnings=tuple(_warnings(fits[0], point, same)),
    )


def draft_seconds(level: Curve, batch: int, nodes: int) -> float:
    """A first level of one row per sequence, then as many as EAGLE-2's tree expands."""
    if not nodes:
        return 0.0
    breadth = max(1, min(OFFERED, nodes // DEPTH))
    return level(batch) + (min(CHAIN, nodes) - 1) * level(batch * breadth)


def _warnings(found: Fit, point: Point, same: bool) -> list[str]:
    """Where the prediction goes beyond what was measured."""
    tokens, layers = [p.tokens for p in found.points], [p.layers for p in found.points]
    said = [] if same else ["the law was measured on another target"]
    if point.tokens > max(tokens):
        said.append(f"T is {point.tokens / max(tokens):.3g} times the largest measured")
    if point.tokens < min(tokens):
        said.append(f"T is {point.tokens / min(tokens):.3g} times the smallest measured")
    if not min(layers) <= point.layers <= max(layers):
        said.append(f"D = {point.layers} was not measured")
    return said
