"""What is learned of a drafter while texts are written: how likely its draft tokens are accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from faircopy.types import Sequence

HALF_LIFE = 200.0  # drafts after which an observation counts half
OWN_STEP = 0.2  # log-odds that a sequence moves from the drafter's rates for each token by which these were wrong
OWN_FADE = 0.1  # share by which it comes back with every draft,
IDLE_FADE = 0.02  # and with every step in which others have drafts and it has none
PRIOR = 0.7  # acceptance of a position before anything is known, worth PRIOR_DRAFTS observations
PRIOR_DRAFTS = 2.0
BINS = 10  # of confidence
HOPE = 3.0  # a tree that was seen this often may accept twice as many tokens as it did


@dataclass(slots=True)
class Rate:
    """A share of successes in which old observations fade."""

    hits: float = PRIOR * PRIOR_DRAFTS
    tries: float = PRIOR_DRAFTS

    def add(self, hit: float) -> None:
        fade = 0.5 ** (1.0 / HALF_LIFE)
        self.hits, self.tries = self.hits * fade + hit, self.tries * fade + 1.0

    @property
    def value(self) -> float:
        return self.hits / self.tries


@dataclass(slots=True)
class Acceptance:
    """How likely draft tokens are accepted: by position, by sequence, and by the drafter's confidence.

    A sequence's own rates are the drafter's with all odds multiplied by one number, which follows its drafts, the
    last ones most (an online logistic regression, as ratings of players are): texts change on their way.
    """

    positions: list[Rate] = field(default_factory=list)  # given that all before it were accepted
    own: dict[Sequence, float] = field(default_factory=dict)  # the logarithm of that number
    found: Rate = field(default_factory=lambda: Rate(PRIOR_DRAFTS))  # how often there is a draft at all
    bins: list[Rate] = field(
        default_factory=lambda: [Rate((n + 0.5) / BINS * PRIOR_DRAFTS, PRIOR_DRAFTS) for n in range(BINS)]
    )

    def observe(self, seq: Sequence, drafted: int, accepted: int, confidence: Seq[float] = ()) -> None:
        """Of a draft of this length the first `accepted` tokens stood; nothing is known behind the first wrong one."""
        own = self.own.get(seq, 0.0)
        odds, surprise = math.exp(own), 0.0
        for place in range(min(drafted, accepted + 1)):
            rate, right = self._rate(place), place < accepted
            surprise += right - _likely(rate, odds)
            rate.add(right)
            if place < len(confidence):
                self.bins[min(BINS - 1, int(confidence[place] * BINS))].add(right)
        self.own[seq] = (1.0 - OWN_FADE) * own + OWN_STEP * surprise

    def pass_over(self, seq: Sequence) -> None:
        """Others had drafts and this one had none: what is known of it grows old."""
        if seq in self.own:
            self.own[seq] *= 1.0 - IDLE_FADE

    def survival(self, seq: Sequence | None, k: int, found: float | None = None) -> list[float]:
        """For each of k positions, how likely the draft is accepted up to there; None: of any sequence.

        found: how likely there is a draft, if not as often as before.
        """
        odds = 1.0 if seq is None else math.exp(self.own.get(seq, 0.0))
        alive = min(1.0, self.found.value) if found is None else found
        likely = []
        for place in range(k):
            alive *= _likely(self._rate(place), odds)
            likely.append(alive)
        return likely

    def forget(self, seq: Sequence) -> None:
        self.own.pop(seq, None)

    def _rate(self, place: int) -> Rate:
        while len(self.positions) <= place:
            last = self.positions[-1].value if self.positions else PRIOR
            self.positions.append(Rate(last * PRIOR_DRAFTS))
        return self.positions[place]


def _likely(rate: Rate, odds: float) -> float:
    """The rate of a sequence whose odds are this many times the drafter's."""
    hit = rate.hits * odds
    return min(0.999, hit / (hit + rate.tries - rate.hits))


class TreeGains:
    """Accepted tokens per step of trees, by their number of nodes."""

    def __init__(self) -> None:
        self._known: dict[int, Rate] = {}

    @property
    def found(self) -> tuple[tuple[int, float], ...]:
        return tuple(sorted((nodes, rate.value) for nodes, rate in self._known.items()))

    def observe(self, nodes: int, accepted: int) -> None:
        self._known.setdefault(nodes, Rate(1.0, 1.0)).add(accepted)

    def of(self, nodes: int) -> float:
        """What trees may bring: those that were seen seldom more than they did, so that they are seen again."""
        if not self._known:
            return PRIOR * math.log2(1 + nodes)
        if not nodes:
            return 0.0
        known = {size: rate.value * (1.0 + HOPE / rate.tries) for size, rate in self._known.items()}
        return tree_gain(known, nodes)


def tree_gain(known: Mapping[int, float], nodes: int) -> float:
    """Accepted tokens of a tree, by the nearest known number of nodes: they grow with its logarithm."""
    nearest = min(known, key=lambda size: abs(math.log(size / nodes)))
    return known[nearest] * math.log(1 + nodes) / math.log(1 + nearest)
