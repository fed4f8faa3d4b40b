"""k="auto": draft lengths from measured acceptance and measured cost, never slower than plain decoding for long.

The text does not depend on k, so a step of k draft tokens shows what every smaller k would have given: acceptance by
position is known downwards, and only going up has to be tried. Times are measured per (batch, k) while running. A
ledger compares every step with what plain decoding of the same batch would have cost; one percent behind, k is 0 until
the allowance has grown again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from faircopy.types import FinishedStep, Sequence

HALF_LIFE = 200.0  # drafts after which an observation counts half
SHRINK = 8.0  # drafts of its own after which a sequence's rate counts as much as the drafter's
PRIOR = 0.7  # acceptance of a position before anything is known, worth PRIOR_DRAFTS observations
PRIOR_DRAFTS = 2.0
SMOOTHING = 0.2  # share of a new measurement in a time
BETTER = 1.02  # a change of k must promise this much
HOLD = 8  # steps a choice is kept
ALLOWANCE = 0.01  # share of the time that drafting may have cost without return
PROBE = 256  # steps after which a k that looked worse is tried again
PLAIN = 6  # plain steps of a batch before drafting is tried in it: the last texts of a queue are not worth a trial
FIRST = 2  # draft tokens of the first trial
TRIAL = 3  # its steps


@dataclass(slots=True)
class Rate:
    """A share of successes in which old observations fade."""

    hits: float = PRIOR * PRIOR_DRAFTS
    tries: float = PRIOR_DRAFTS

    def add(self, hit: bool) -> None:
        fade = 0.5 ** (1.0 / HALF_LIFE)
        self.hits, self.tries = self.hits * fade + hit, self.tries * fade + 1.0

    @property
    def value(self) -> float:
        return self.hits / self.tries


@dataclass(slots=True)
class Acceptance:
    """How likely draft tokens are accepted, by position, and how a sequence's own rate compares."""

    positions: list[Rate] = field(default_factory=list)  # given that all before it were accepted
    own: dict[Sequence, tuple[float, float]] = field(
        default_factory=dict
    )  # hits, and what the drafter's rates expected

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Of a draft of this length the first `accepted` tokens stood; nothing is known behind the first wrong one."""
        hits, expected = self.own.get(seq, (0.0, 0.0))
        for place in range(min(drafted, accepted + 1)):
            rate = self._rate(place)
            hits, expected = hits + (place < accepted), expected + rate.value
            rate.add(place < accepted)
        self.own[seq] = hits, expected

    def survival(self, seq: Sequence, k: int) -> list[float]:
        """For each of k positions, how likely the draft is accepted up to there."""
        hits, expected = self.own.get(seq, (0.0, 0.0))
        factor = (hits + SHRINK) / (expected + SHRINK)
        found, alive = [], 1.0
        for place in range(k):
            alive *= min(0.999, self._rate(place).value * factor)
            found.append(alive)
        return found

    def forget(self, seq: Sequence) -> None:
        self.own.pop(seq, None)

    def _rate(self, place: int) -> Rate:
        while len(self.positions) <= place:
            last = self.positions[-1].value if self.positions else PRIOR
            self.positions.append(Rate(last * PRIOR_DRAFTS))
        return self.positions[place]


class StepTimes:
    """Measured seconds of steps by (batch, k): averages in which old measurements fade."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], float] = {}
        self._count: dict[tuple[int, int], int] = {}

    def add(self, batch: int, k: int, seconds: float) -> None:
        place = bucket(batch), k
        self._count[place] = self._count.get(place, 0) + 1
        before = self._known.get(place)
        if before is None or self._count[place] == 2:  # the first one may have compiled or captured something
            self._known[place] = seconds
        else:
            self._known[place] = before + SMOOTHING * (seconds - before)

    def tried(self, batch: int, k: int) -> int:
        return self._count.get((bucket(batch), k), 0)

    def of(self, batch: int, k: int) -> float | None:
        """Seconds of a step, on the line through the two known k nearest to it; None: too few are known."""
        size = bucket(batch)
        known = sorted((n, seconds) for (b, n), seconds in self._known.items() if b == size)
        exact = dict(known).get(k)
        if exact is not None or len(known) < 2:
            return exact
        at = next((place for place, (n, _) in enumerate(known) if n > k), len(known) - 1)
        (low, first), (high, last) = known[max(at, 1) - 1], known[max(at, 1)]
        return first + max(0.0, last - first) * (k - low) / (high - low)


def bucket(batch: int) -> int:
    """Batches that share their times: the next power of two."""
    return 1 << max(0, batch - 1).bit_length()


class AutoLength:
    """Chooses the number of draft tokens of each sequence, at most max_k."""

    def __init__(self, max_k: int) -> None:
        self._max_k = max_k
        self.acceptance, self.times = Acceptance(), StepTimes()
        self.k = 0  # the present choice
        self.reason = "nothing is measured yet"
        self._worth = 0.0  # tokens that a row costs in time: a draft token less likely than this is left out
        self._held = 0
        self._since_probe = 0
        self._saved, self._elapsed = 0.0, 0.0  # seconds against plain decoding, and in all

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        live = [seq for seq in seqs if seq.request.k is None]
        k = self._decide(live) if live else 0
        return [self._length(seq, k) if seq.request.k is None else seq.request.k for seq in seqs]

    def observe(self, step: FinishedStep, seconds: float | None) -> None:
        """A step has finished; seconds: None if its time says nothing of decoding."""
        accepted = [len(decision.nodes) for decision in step.verdict.decisions]
        drafted = [len(tokens) for tokens in step.draft.tokens]
        for seq, nodes, good in zip(step.batch.seqs, drafted, accepted, strict=True):
            if nodes:
                self.acceptance.observe(seq, nodes, good)
        if seconds is None:
            return
        batch, k = len(step.batch), max(drafted, default=0)
        self.times.add(batch, k, seconds)
        plain = self.times.of(batch, 0)
        if plain is not None and k:
            gained = sum(len(decision.tokens) for decision in step.verdict.decisions)
            self._saved += gained * plain / batch - seconds
        self._elapsed += seconds

    def forget(self, seq: Sequence) -> None:
        self.acceptance.forget(seq)

    def _length(self, seq: Sequence, k: int) -> int:
        """As many of k tokens as bring more than their rows cost."""
        return sum(alive >= self._worth for alive in self.acceptance.survival(seq, k))

    def _decide(self, seqs: list[Sequence]) -> int:
        self._held += 1
        self._since_probe += 1
        batch = len(seqs)
        if self.times.tried(batch, 0) < PLAIN:
            self.k, self._held, self.reason = 0, 0, f"measuring plain decoding at batch {batch}"
            return 0
        first = min(FIRST, self._max_k)
        if self.times.tried(batch, first) < TRIAL:
            self.k, self._held, self.reason = first, 0, f"trying {first} draft tokens at batch {batch}"
            return first
        if self._saved < -ALLOWANCE * self._elapsed:
            self.k, self.reason = 0, "drafting is off: it has cost more than it brought"
            return 0
        if self._held < HOLD:
            return self.k
        best, rate, now = self._best(seqs)
        if best != self.k and rate > BETTER * now:
            self.k, self._held = best, 0
        if self.k == 0 and self._since_probe > PROBE:
            self.k, self._held, self._since_probe = min(FIRST, self._max_k), HOLD - TRIAL, 0
            self.reason = "drafting is off; trying again whether it pays"
        return self.k

    def _best(self, seqs: list[Sequence]) -> tuple[int, float, float]:
        """The best k, its tokens per second, and those of the present one."""
        batch = len(seqs)
        survivals = [self.acceptance.survival(seq, self._max_k) for seq in seqs]
        gained, rates = float(batch), []
        for k in range(self._max_k + 1):
            gained += sum(survival[k - 1] for survival in survivals) if k else 0.0
            seconds = self.times.of(batch, k)
            rates.append(gained / seconds if seconds else 0.0)
        best = max(range(len(rates)), key=rates.__getitem__)
        self._worth = self._row_cost(batch, best, rates[best])
        ratio = rates[best] / rates[0] if rates[0] else 1.0
        self.reason = f"{best} draft tokens: {ratio:.2f} times plain decoding at batch {batch}"
        if best == 0:
            worst = rates[1] / rates[0] if rates[0] and len(rates) > 1 else 1.0
            self.reason = (
                f"drafting is off: at batch {batch} one draft token would give {worst:.2f} times plain decoding"
            )
        return best, rates[best], rates[min(self.k, self._max_k)]

    def _row_cost(self, batch: int, k: int, rate: float) -> float:
        """What one more row costs, in tokens that could have been written meanwhile."""
        plain, drafted = self.times.of(batch, 0), self.times.of(batch, k)
        if not k or plain is None or drafted is None:
            return 0.0
        return max(0.0, min(0.9, rate * (drafted - plain) / (k * batch)))
