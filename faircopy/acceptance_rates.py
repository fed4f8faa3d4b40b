"""What is learned of a drafter while texts are written: how likely its draft tokens are accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from faircopy.types import Sequence

HALF_LIFE = 200.0  # drafts after which an observation counts half
FADE = 0.5 ** (1.0 / HALF_LIFE)
UNLIKELY = 1e-3  # no single draft is evidence of more
SPREADS = (0.2, 1.0, 5.0)  # variances that a drafter's sequences may have, in log-odds
OWN_FADE = 0.1  # share by which a sequence comes back to the drafter's rates with every draft
IDLE_FADE = 0.02  # the same with every step in which others have drafts and it has none
PRIOR = 0.7  # acceptance of a position before anything is known, worth PRIOR_DRAFTS observations
PRIOR_DRAFTS = 2.0
BINS = 10  # of confidence
KNOWN_DRAFTS = 20.0  # drafts that rates of earlier runs are worth: the texts may be others now;
KNOWN_TREES = 5.0  # of trees fewer, so that sizes that seemed worse are seen again
HOPE = 3.0  # a tree that was seen this often may accept twice as many tokens as it did
UNSEEN = 1.5  # a tree, where none was seen, may accept this many times what chains tell


@dataclass(slots=True)
class Rate:
    """A share of successes in which old observations fade."""

    hits: float = PRIOR * PRIOR_DRAFTS
    tries: float = PRIOR_DRAFTS

    @classmethod
    def known(cls, value: float, drafts: float = KNOWN_DRAFTS) -> Rate:
        """What earlier runs have found, worth this many drafts."""
        return cls(value * drafts, drafts)

    def add(self, hit: float) -> None:
        self.hits, self.tries = self.hits * FADE + hit, self.tries * FADE + 1.0

    @property
    def value(self) -> float:
        return self.hits / self.tries


@dataclass(slots=True)
class _OwnRates:
    """How much better or worse sequences are than their drafter's rates, if these differences have a given variance.

    All odds of a sequence are the drafter's times one number, whose logarithm an extended Kalman filter follows: texts
    change on their way, and it comes back to 0 with what is not known of it.
    """

    spread: float
    known: dict[Sequence, tuple[float, float]] = field(default_factory=dict)  # the logarithm, and its variance
    evidence: float = 0.0  # logarithm of how likely the drafts were, old ones fading

    def odds(self, seq: Sequence | None) -> float:
        found = None if seq is None else self.known.get(seq)
        return 1.0 if found is None else math.exp(found[0])

    def observe(self, seq: Sequence, seen: Seq[tuple[float, float, bool]]) -> None:
        """Of a draft: hits and misses of each position before it, and whether its token was right."""
        log_odds, variance = self.known.get(seq, (0.0, self.spread))
        odds, innovation, information, likelihood = math.exp(log_odds), 0.0, 0.0, 1.0
        for hits, misses, right in seen:
            likely = hits * odds / (hits * odds + misses)
            wrong = 1.0 - likely
            innovation += wrong if right else -likely
            likelihood *= likely if right else wrong
            information += likely * wrong
        variance /= 1.0 + variance * information
        self.known[seq] = self._faded(log_odds + variance * innovation, variance, OWN_FADE)
        self.evidence = FADE * self.evidence + math.log(max(likelihood, UNLIKELY))

    def fade(self, seq: Sequence) -> None:
        """Others had drafts and this one had none."""
        found = self.known.get(seq)
        if found is not None:
            self.known[seq] = self._faded(*found, IDLE_FADE)

    def _faded(self, log_odds: float, variance: float, share: float) -> tuple[float, float]:
        kept = (1.0 - share) ** 2
        return (1.0 - share) * log_odds, self.spread + kept * (variance - self.spread)


@dataclass(slots=True)
class Acceptance:
    """How likely draft tokens are accepted: by position, by sequence, and by the drafter's confidence.

    How much sequences differ depends on the drafter. Three variances are tried at once, and the one under which the
    last drafts were likeliest is believed.
    """

    positions: list[Rate] = field(default_factory=list)  # given that all before it were accepted
    own: tuple[_OwnRates, ...] = field(default_factory=lambda: tuple(map(_OwnRates, SPREADS)))
    found: Rate = field(default_factory=lambda: Rate(PRIOR_DRAFTS))  # how often there is a draft at all
    bins: list[Rate] = field(
        default_factory=lambda: [Rate((n + 0.5) / BINS * PRIOR_DRAFTS, PRIOR_DRAFTS) for n in range(BINS)]
    )

    def observe(self, seq: Sequence, drafted: int, accepted: int, confidence: Seq[float] = ()) -> None:
        """Of a draft of this length the first `accepted` tokens stood; nothing is known behind the first wrong one."""
        seen = []
        for place in range(min(drafted, accepted + 1)):
            rate, right = self._rate(place), place < accepted
            seen.append((rate.hits, rate.tries - rate.hits, right))
            rate.add(right)
            if place < len(confidence):
                self.bins[min(BINS - 1, int(confidence[place] * BINS))].add(right)
        for own in self.own:
            own.observe(seq, seen)

    def pass_over(self, seq: Sequence) -> None:
        """A step in which others had drafts and this sequence had none: what is known of it grows old."""
        for own in self.own:
            own.fade(seq)

    def survival(self, seq: Sequence | None, k: int, found: float | None = None, ahead: int = 0) -> list[float]:
        """For each of k positions, how likely the draft is accepted up to there; None: of any sequence.

        found: how likely there is a draft, if not as often as before. ahead: drafts that come before this one.
        """
        odds = max(self.own, key=lambda own: own.evidence).odds(seq) ** (1.0 - OWN_FADE) ** ahead
        alive = min(1.0, self.found.value) if found is None else found
        rate, likely = self.positions[0] if self.positions else Rate(), []
        for place in range(k):
            if place < len(self.positions):  # behind those that were seen as likely as the last one
                rate = self.positions[place]
            alive *= _likely(rate.hits, rate.tries, odds)
            likely.append(alive)
        return likely

    def forget(self, seq: Sequence) -> None:
        for own in self.own:
            own.known.pop(seq, None)

    def _rate(self, place: int) -> Rate:
        while len(self.positions) <= place:
            last = self.positions[-1].value if self.positions else PRIOR
            self.positions.append(Rate(last * PRIOR_DRAFTS))
        return self.positions[place]


def _likely(hits: float, tries: float, odds: float) -> float:
    """The rate of a sequence whose odds are this many times the drafter's."""
    own = hits * odds
    return min(0.999, own / (own + tries - hits))


class TreeGains:
    """Accepted tokens per step of trees, by their number of nodes."""

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        """known: what earlier runs have found."""
        self._known = {nodes: Rate.known(gain, KNOWN_TREES) for nodes, gain in (known or {}).items()}

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
