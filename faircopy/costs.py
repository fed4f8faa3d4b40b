"""What steps cost: seconds by batch and draft length, measured once and kept, corrected by what running steps take."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from statistics import median_low
from typing import Any, NamedTuple

SMOOTHING = 0.02  # share of a new measurement in a factor
MEDIAN_OF = 5  # measurements of a kind of which the median counts
FEW = 10  # drafted steps of a kind that are forgotten once they are stale
NEAR = 3  # steps of a kind after which the level follows it
STALE = 200  # steps after which a kind that has not run is measured anew,
STALE_CAPTURED = 400  # plain ones where steps are captured, whose times change less,
STALE_DRIFTED = 64  # plain ones where the level has moved by DRIFT since,
STALE_NEW = 16  # and those this many steps after they were first measured, or found changed by DRIFT: a machine has
# slow moments, and an engine's first steps are slow
CHEAPER = 0.97  # drafted steps that take this share of plain ones, as these were measured, show that they are off,
AGAIN = 24  # unless that was asked so few steps ago
LEVELLING = 0.1  # share of a step's deviation that counts for steps of all kinds
SHORTEST = 1e-9  # seconds that anything takes at least
SLOW_START = 3.0  # a kind's first step is not counted if it takes this much longer than expected
DRIFT = 1.15  # up or down
AGREES = 1.05  # one stale plain step that is no further from what was known confirms it: up or down
OUTLIER = 1.75  # what takes more than this many times as long as expected counts as much as that
REFERENCE = 3  # plain steps that say what plain decoding takes
NOTICED = 0.03  # share of a plain step that drafts must add by the table, for other lengths to be judged by them
LOWEST = 0.25  # share of what a measured table says at least: if drafts seem to add less, plain steps were slow ones
LOOKED_UP = 4096  # costs of a table that are kept at hand


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a pass by its rows, at the sizes that were measured."""

    points: tuple[tuple[int, float], ...] = ()  # rising
    stepped: bool = False  # a size in between costs what the next larger one does, as captured passes do

    def __call__(self, rows: int) -> float:
        """On the line between two sizes, or on the last one drawn further."""
        sizes = [size for size, _ in self.points]
        at = bisect_left(sizes, rows)
        if at < len(sizes) and (self.stepped or sizes[at] == rows or at == 0):
            return self.points[at][1]
        above = min(at, len(sizes) - 1)
        (low, first), (high, last) = self.points[max(0, above - 1)], self.points[above]
        if high == low:
            return last * rows / high
        return first + max(0.0, last - first) * (rows - low) / (high - low)

    @property
    def largest(self) -> int:
        """Rows of the largest pass that was measured."""
        return self.points[-1][0] if self.points else 1

    @property
    def rises(self) -> bool:
        """Whether its sizes are those of passes, each larger than the one before."""
        sizes = [0, *(size for size, _ in self.points)]
        return all(low < high for low, high in pairwise(sizes))

    @property
    def valid(self) -> bool:
        """Whether it may have been measured: rising sizes, and times."""
        return bool(self.points) and self.rises and all(0.0 < seconds < math.inf for _, seconds in self.points)

    def scaled(self, share: float) -> Curve:
        """Passes that take this share of the time."""
        return Curve(tuple((rows, share * seconds) for rows, seconds in self.points), self.stepped)


class Joining(NamedTuple):
    """A captured step that reads prompts of sequences which join."""

    k: int  # nodes per batch slot, which may be fewer than are wanted
    rows: int  # of prompts, for which it has room
    seconds: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured costs of one target and drafter on one device."""

    target: Curve
    draft: Curve = Curve()  # of a draft model; empty: drafting costs nothing before it was measured
    steps: Mapping[tuple[int, int], float] = field(default_factory=dict)  # (batch slots, k) -> seconds, captured
    measured: bool = True
    head: Curve = Curve()  # of a draft head's layers over rows of text
    drafts: Mapping[int, Curve] = field(default_factory=dict)  # of a head's drafts by nodes: over sequences, not rows
    joining: Mapping[tuple[int, int], Seq[Joining]] = field(default_factory=dict)  # (batch slots, k wanted), captured

    def step(self, batch: int, k: int, rows: int | None = None) -> float:
        """Seconds of a step with drafts of k tokens; rows: what the target verifies, if not (k + 1) per sequence."""
        fitting = [(size, nodes) for size, nodes in self.steps if size >= batch and nodes >= k]
        if fitting:
            return max(SHORTEST, self.steps[min(fitting)])
        return max(SHORTEST, self.target(batch * (k + 1) if rows is None else rows) + self._drafting(batch, k))

    def joined(self, batch: int, k: int) -> Seq[Joining]:
        """The steps in which sequences join where k nodes are wanted, as far as they were measured."""
        fitting = [(size, nodes) for size, nodes in self.joining if size >= batch and nodes >= k]
        return self.joining[min(fitting)] if fitting else ()

    def adds(self, batch: int, k: int, drafted: int) -> float:
        """Seconds that drafts of k tokens for this many sequences add to a plain step of a batch."""
        if self.captured(batch, k):
            return max(0.0, self.step(batch, k) - self.step(batch, 0))
        rows = self.target(batch + drafted * k) - self.target(batch)
        return max(0.0, rows + self._drafting(drafted, k))

    def _drafting(self, batch: int, k: int) -> float:
        """Seconds in which drafts of k tokens are made for each of a batch."""
        if k and self.draft.points:
            return self.draft(2 * batch) + (k - 1) * self.draft(batch)
        if not (k and self.drafts):
            return 0.0
        nodes = min((n for n in self.drafts if n >= k), default=max(self.drafts))
        return self.drafts[nodes](batch) * max(1.0, k / nodes)

    def with_head(self, share: float) -> CostTable:
        """With a draft head whose layers are this share of the target's, and take that share of its passes' time."""
        return replace(self, head=self.target.scaled(share)) if share else self

    def reading(self, rows: int) -> float:
        """Seconds in which a drafter reads rows of text."""
        curve = self.draft if self.draft.points else self.head
        return curve(rows) if rows and curve.points else 0.0

    def reading_beside(self, rows: int, batch: int) -> float:
        """The same in a captured step: a draft model reads them in a pass that it makes anyway."""
        if not rows or not self.draft.points:
            return self.reading(rows)
        return self.draft(2 * batch + rows) - self.draft(2 * batch)

    def captured(self, batch: int, k: int) -> bool:
        """Whether a step takes the same time however many draft tokens there are."""
        return any(size >= batch and nodes >= k for size, nodes in self.steps)

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target.points,
            "draft": self.draft.points,
            "stepped": self.target.stepped,
            "steps": [[size, k, seconds] for (size, k), seconds in self.steps.items()],
        }

    def with_drafts(self, drafts: Mapping[int, Curve]) -> CostTable:
        """With what a draft head's drafts take."""
        return replace(self, drafts=drafts)

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> CostTable:
        target, draft = (
            Curve(tuple((int(rows), float(seconds)) for rows, seconds in kept[name]), bool(kept["stepped"]))
            for name in ("target", "draft")
        )
        steps = {(int(size), int(k)): float(seconds) for size, k, seconds in kept["steps"]}
        times = [seconds for _, seconds in (*target.points, *draft.points)] + list(steps.values())
        if not (target.rises and draft.rises and all(0.0 < seconds < math.inf for seconds in times)):
            raise ValueError("not a table of measured costs")
        return cls(target, draft, steps)


GUESSED = CostTable(Curve(((1, 1.0), (64, 4.0))), measured=False)  # its shape is corrected by what is measured


@dataclass(slots=True)
class _Cell:
    factor: float = 1.0  # measured over expected, with the level taken out
    count: int = 0
    first: list[float] = field(default_factory=list)  # of them, since it was last measured anew
    fresh: int = 0  # measurements since then
    before: float = 0.0  # the factor until then
    doubted_since: int | None = None  # of plain ones: the number of the step since when it waits to be confirmed
    last: int = 0  # the number of its last step
    level: float = 0.0  # at that time
    host: float = 0.0  # of plain ones: seconds over the table's when they were confirmed, 1 at least; 0: not yet

    def drifted(self, level: float) -> bool:
        """Whether other kinds have moved the level much since: they do not tell whether this one has changed too."""
        return not self.level / DRIFT <= level <= self.level * DRIFT

    def add(self, found: float) -> None:
        """The median of the first few (of two the faster one), so that one slow step does not decide; then a running
        average.

        Of a kind that is measured anew the old factor stays until there are a few.
        """
        self.fresh += 1
        if len(self.first) < MEDIAN_OF:
            self.first.append(found)
            if self.count <= MEDIAN_OF or len(self.first) >= REFERENCE:
                self.factor = median_low(self.first)
        else:
            self.factor += max(SMOOTHING, 1.0 / self.fresh) * (min(found, OUTLIER * self.factor) - self.factor)

    @property
    def confirmed(self) -> float:
        """The factor; until a change is confirmed, the smaller one."""
        return min(self.factor, self.before) if self.doubted_since is not None and self.before else self.factor

    def agrees(self, found: float) -> bool:
        """Whether a new measurement is about what is known."""
        return len(self.first) >= REFERENCE and self.factor / AGREES <= found <= self.factor * AGREES

    def measure_anew(self) -> None:
        self.before, self.fresh = self.factor, 0
        self.first.clear()

    def doubt(self, step: int) -> None:
        """What was measured anew is to be confirmed if it is another number than before."""
        changed = not self.before / DRIFT <= self.factor <= self.before * DRIFT
        if self.before and self.fresh == REFERENCE and changed:
            self.doubted_since = step


class StepCosts:
    """A cost table that follows what steps really take.

    One level for all steps follows growing texts and a busy machine; factors by (batch, k) correct the table's shape.
    A kind of steps that has not run for a while is measured anew.
    """

    def __init__(self, table: CostTable = GUESSED) -> None:
        self.table = table
        self._level = 0.0  # 0: nothing was measured
        self._step = lru_cache(LOOKED_UP)(table.step)
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._steps = 0  # that ran, few of which are not measured

    @property
    def measured(self) -> bool:
        """Whether the table's shape can be trusted before a step of the kind has run."""
        return self.table.measured

    @property
    def compared(self) -> bool:
        """Whether a step has shown how fast this machine is, beside the table's."""
        return self._level > 0.0

    @property
    def in_seconds(self) -> bool:
        """Whether costs are times: a guessed table has a unit of its own until a step was measured."""
        return self.measured or self.compared

    def observe(self, batch: int, k: int, rows: int, seconds: float) -> None:
        cell = self._cells.get((bucket(batch), k))
        if cell is None:
            cell = self._cells[bucket(batch), k] = self._new_cell(batch, k)
        self._steps += 1
        cell.count += 1
        expected, seconds = self._step(batch, k, rows), max(SHORTEST, seconds)
        if self._level == 0.0:
            self._level = seconds / expected
        found = seconds / (expected * self._level)
        if cell.count == 1 and found > SLOW_START:
            return  # it may have compiled or captured something
        if self._stale(cell, k):
            if k or not cell.agrees(found):
                cell.measure_anew()
            cell.doubted_since = None
        elif len(cell.first) >= NEAR:
            self._level *= 1.0 + LEVELLING * (min(OUTLIER, found / cell.factor) - 1.0)
        cell.add(found)
        cell.last, cell.level = self._steps, self._level
        if k:
            self._doubt_plain(batch, expected * cell.factor)
        else:
            cell.doubt(self._steps)
            if not cell.host and cell.doubted_since is None and len(cell.first) >= REFERENCE:
                cell.host = max(1.0, self._level * cell.factor)

    def _new_cell(self, batch: int, k: int) -> _Cell:
        """For plain steps one whose time is to be confirmed; where the table has timed whole steps, only if what is
        measured differs from it."""
        if k:
            return _Cell()
        return _Cell(before=1.0) if self.table.captured(batch, 0) else _Cell(doubted_since=self._steps)

    def _doubt_plain(self, batch: int, drafted: float) -> None:
        """Plain steps were measured in a slow moment if they seem to take longer than drafted ones."""
        plain = self._cells.get((bucket(batch), 0))
        if plain is None or self._steps - plain.last < AGAIN:
            return
        if drafted < CHEAPER * plain.factor * self._step(batch, 0, None):
            self.ask_again(batch)

    def ask_again(self, batch: int) -> None:
        """Plain steps of this size are to be measured anew now, if any were."""
        plain = self._cells.get((bucket(batch), 0))
        if plain is not None and plain.doubted_since is None:
            plain.doubted_since = self._steps - STALE_NEW

    def count_unmeasured(self) -> None:
        """A step has run whose time is not looked at."""
        self._steps += 1

    def doubted(self, batch: int) -> bool:
        """Whether what plain steps take was measured at a time that may have been a slow one."""
        cell = self._cells.get((bucket(batch), 0))
        return cell is not None and cell.doubted_since is not None

    def known(self, batch: int, k: int) -> bool:
        """Whether enough steps of this kind were measured, and not too long ago."""
        cell = self._cells.get((bucket(batch), k))
        return cell is not None and len(cell.first) >= REFERENCE and not self._stale(cell, k)

    @property
    def as_expected(self) -> bool:
        """Whether steps take what the table says, or plain ones of some size have told how fast the device is."""
        plain = any(k == 0 and len(cell.first) >= REFERENCE for (_, k), cell in self._cells.items())
        return plain or 1.0 / DRIFT <= self.level <= DRIFT

    def _stale(self, cell: _Cell, k: int) -> bool:
        """Whether a kind has not run for so long that it should be measured anew."""
        if k == 0 and cell.doubted_since is not None:
            return self._steps - cell.doubted_since >= STALE_NEW
        return self._steps - cell.last >= (self._plain_stale_after(cell) if k == 0 else STALE)

    def _plain_stale_after(self, cell: _Cell) -> int:
        if cell.drifted(self._level):
            return STALE_DRIFTED
        return STALE_CAPTURED if self.table.steps else STALE

    def tried(self, batch: int, k: int) -> int:
        cell = self._cells.get((bucket(batch), k))
        return 0 if cell is None else cell.count

    def steps_of(self, batch: int) -> int:
        """Steps of this size of a batch that were measured, of any length."""
        return sum(cell.count for (size, _), cell in self._cells.items() if size == bucket(batch))

    def of(self, batch: int, k: int, rows: int | None = None) -> float:
        """Seconds of a step; before anything was measured, in the table's own unit.

        With drafts no less than without: measurements that say so are off.
        """
        return self.plain_and_drafted(batch, k, rows)[1]

    def plain_and_drafted(self, batch: int, k: int, rows: int | None = None) -> tuple[float, float]:
        """The same of a plain step and of this one."""
        size, level = bucket(batch), self.level
        plain = self._step(batch, 0, None) * self._factor(size, 0)
        if not k:
            return level * plain, level * plain
        drafted = None if self._told(size, k) else self._by_another(batch, k, rows, plain)
        if drafted is None:
            drafted = self._step(batch, k, rows) * self._factor(size, k)
        return level * plain, level * max(plain, drafted)

    def joined(self, batch: int, k: int) -> list[Joining]:
        """As the table's, corrected as steps without prompts are."""
        return [
            kind._replace(seconds=kind.seconds * self.of(batch, kind.k) / self._step(batch, kind.k, None))
            for kind in self.table.joined(batch, k)
        ]

    def scale(self, batch: int) -> float:
        """What the table's seconds take now. What plain steps took beyond them when they were confirmed is the host's
        work around a pass, and is no more for more rows."""
        kind = self._nearest(bucket(batch), 0, drafted=False)
        if kind is None:
            return self.level
        cell = self._cells[kind]
        whole = self.level * cell.confirmed
        return whole / (min(cell.host, max(1.0, whole)) if cell.host and self.measured else 1.0)

    def _by_another(self, batch: int, k: int, rows: int | None, plain: float) -> float | None:
        """A drafted step of a length that was not measured, by the nearest one that was in batches of this size, or by
        the table if none was in any. None: nothing can be said.

        What eager steps take beyond the table is the host's work around drafts, or a drafter that the table does not
        know: taken to be as much for any length. Else a table that is wrong in what drafts of one length add to a plain
        step is as many times wrong for others.
        """
        base = self._step(batch, 0, None)
        adds, scale = max(0.0, self._step(batch, k, rows) - base), self.scale(batch) / self.level
        eager = self.measured and not self.table.captured(batch, k)
        near = self._nearest_told(bucket(batch), k)
        if near is None:
            unseen = self._nearest(bucket(batch), k, drafted=True) is None
            return plain + adds * scale if eager and unseen else None
        says = self._step(batch, near, None) - base
        takes = max(0.0, self._step(batch, near, None) * self._factor(bucket(batch), near) - plain)
        if eager and takes > says * scale:
            return plain + adds * scale + takes - says * scale
        if says < NOTICED * base or (self.measured and takes < LOWEST * says):
            return None  # if much less than it says, more likely plain steps were measured in a slow moment
        return plain + takes / says * adds

    def _told(self, size: int, k: int) -> bool:
        """Whether steps of this kind say themselves what they take."""
        cell = self._cells.get((size, k))
        return cell is not None and cell.count > 0 and not self._forgotten(cell, k)

    def _forgotten(self, cell: _Cell, k: int) -> bool:
        """Of drafted steps: few ran, long ago, perhaps in a slow moment. Others of the size tell as much."""
        return k > 0 and cell.count <= FEW and self._steps - cell.last >= STALE

    def _nearest_told(self, size: int, k: int) -> int | None:
        """The nearest draft length that says itself what its steps take in batches of this size."""
        told = (length for at, length in self._cells if at == size and length and self._told(size, length))
        return min(told, key=lambda length: abs(length - k), default=None)

    @property
    def level(self) -> float:
        """What all passes take, over what the table says."""
        return self._level or 1.0

    def _factor(self, size: int, k: int) -> float:
        """Its own correction; else that of plain steps, and how much more drafts were off where both were measured."""
        own = self._cells.get((size, k))
        if own is not None and own.count and not (k and self._forgotten(own, k)):
            return own.factor if k else own.confirmed
        drafts = self._nearest(size, k, drafted=True) if k else None
        plain = self._nearest(size, 0, drafted=False)
        if drafts is None or plain is None:
            known = drafts or plain or self._nearest(size, k, drafted=True)
            return self._cells[known].confirmed if known else 1.0
        beside = self._nearest(drafts[0], 0, drafted=False) or plain
        return self._cells[plain].confirmed * self._cells[drafts].confirmed / self._cells[beside].confirmed

    def _nearest(self, size: int, k: int, drafted: bool) -> tuple[int, int] | None:
        """The kind of steps that were measured in the nearest size of a batch, with the nearest k."""
        kinds = [(kind, cell) for kind, cell in self._cells.items() if cell.first and (kind[1] > 0) == drafted]
        known = [kind for kind, cell in kinds if not self._forgotten(cell, kind[1])] or [kind for kind, _ in kinds]
        return min(known, key=lambda kind: (abs(math.log2(kind[0] / size)), abs(kind[1] - k)), default=None)


def bucket(batch: int) -> int:
    """Batches that share their times: the next power of two."""
    return 1 << max(0, batch - 1).bit_length()
