"""Steps without an engine: a chooser of draft lengths, drafts that are right with some chance, and what steps cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from faircopy.planner import AutoLength
from faircopy.types import Batch, Decision, Draft, FinishedStep, Request, Sequence, Verdict


def sequences(count: int) -> list[Sequence]:
    return [Sequence(n, Request((1,)), [1], limit=1 << 30) for n in range(count)]


@dataclass(frozen=True)
class Trees:
    """A head whose drafts of more than `chains` nodes are trees, which are right more often."""

    chains: int
    levels: int
    rate: float  # of a tree's level

    def of(self, nodes: int, rate: float) -> tuple[int, float]:
        """Levels of a draft, and how often one is right."""
        return min(nodes, self.levels), rate if nodes <= self.chains else self.rate

    def drafts(self, lengths: list[int]) -> Draft:
        chains = [min(nodes, self.levels) if nodes <= self.chains else 0 for nodes in lengths]
        parents = [[*range(-1, nodes - 1)] or [-1] * length for nodes, length in zip(chains, lengths, strict=True)]
        return Draft([[0] * len(above) for above in parents], parents)

    def first(self, source: random.Random, nodes: int, rate: float) -> int:
        """The first node of an accepted path: a chain's, as often as a chain's is right."""
        return int(nodes > self.chains and source.random() * self.rate > rate)


def simulate(
    chooser: AutoLength,
    rate: float,
    cost: Callable[[int, int], float],
    steps: int = 400,
    batch: int = 4,
    seed: int = 0,
    trees: Trees | None = None,
    seqs: list[Sequence] | None = None,
    adds: Callable[[int, int, int], float] | None = None,
) -> tuple[int, float, list[int]]:
    """Tokens, seconds and lengths of an engine whose drafts are right with this chance and whose steps take
    cost(batch, k). seqs: the batch, if its requests have draft lengths of their own.

    adds: of eager steps, seconds that (batch, k, sequences with drafts) add to a plain one; else drafts for some take
    what those for all do.
    """
    source, tokens, seconds, chosen = random.Random(seed), 0, 0.0, []
    seqs = sequences(batch) if seqs is None else seqs
    batch = len(seqs)
    for _ in range(steps):
        lengths = chooser.choose(seqs)
        kinds = [(length, rate) if trees is None else trees.of(length, rate) for length in lengths]
        accepted = [_accepted(source, *kind) for kind in kinds]
        taken = cost(batch, max(lengths))
        if adds is not None:
            taken = cost(batch, 0) + adds(batch, max(lengths), sum(map(bool, lengths)))
        first = [0 if trees is None else trees.first(source, length, rate) for length in lengths]
        paths = [list(range(node, node + good)) for node, good in zip(first, accepted, strict=True)]
        verdict = Verdict([Decision(path, [0] * (len(path) + 1)) for path in paths])
        draft = Draft.chains([[0] * length for length in lengths]) if trees is None else trees.drafts(lengths)
        chooser.observe(FinishedStep(Batch(seqs, [1] * batch, lengths), draft, verdict, 0, 0), taken)
        tokens, seconds = tokens + sum(good + 1 for good in accepted), seconds + taken
        chosen.append(max(lengths))
    return tokens, seconds, chosen


def _accepted(source: random.Random, length: int, rate: float) -> int:
    good = 0
    while good < length and source.random() < rate:
        good += 1
    return good
