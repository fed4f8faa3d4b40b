"""What drafting has saved or cost against plain decoding, and how far it may be behind: k="auto" keeps to it."""

from __future__ import annotations

ALLOWANCE = 0.01  # share of the time that drafting may have cost without return
START = 4  # plain steps that it may have cost besides, in trials: in large batches in the first one alone
SURE = 4  # plain steps that it may have cost besides while measured acceptance and costs say that it pays
PAYBACK = 128  # steps in which a drafter that was off must bring in what reading all texts costs
SLOW = 2.0  # time of a step beyond this many times the expected one is taken for the machine's, not the drafter's
FORGIVEN = 32  # plain steps of such time that are lent, in all
LENT = 1024  # plain steps within which they must be made up for
PAUSE = 64  # plain steps at most that count of one step which took longer than what is left of FORGIVEN


class Ledger:
    """Seconds. Plain: what a plain step of the present batch takes."""

    def __init__(self) -> None:
        self.saved, self.elapsed = 0.0, 0.0  # against plain decoding, and in all
        self.behind = False  # drafting has cost too much and must wait
        self._reading = 0.0  # what reading texts has cost and is to be paid back
        self._forgiven = 0.0  # plain steps that slow moments have cost
        self._paused = False  # one step took longer than what was left of that
        self._loan, self._lent_at = 0.0, 0.0  # what slow moments have cost, and when the last one ended

    def drafted(self, seconds: float, expected: float, gained: float, plain: float) -> None:
        """A drafted step; gained: what plain decoding would have taken for its tokens.

        One slow step at the beginning would keep a good drafter off for long, so it is lent for a while: as far as
        FORGIVEN allows, and once beyond that, as when the process was stopped.
        """
        slow = max(0.0, seconds - SLOW * expected)
        pause = slow > (FORGIVEN - self._forgiven) * plain and not self._paused
        if pause:
            counted = min(slow, PAUSE * plain)
            seconds, slow = seconds - slow + counted, counted
        self.book(gained - seconds, seconds)
        if pause:
            self._paused = True
        elif 0.0 < slow <= (FORGIVEN - self._forgiven) * plain:
            self._forgiven += slow / plain
        else:
            return
        self._loan, self._lent_at = self._lent(plain) + slow, self.elapsed

    def book(self, saved: float, seconds: float) -> None:
        """Something took these seconds, and drafting has saved so much in it, or cost."""
        self.saved, self.elapsed = self.saved + saved, self.elapsed + seconds

    def invest(self, seconds: float) -> None:
        """Reading texts is about to cost this, which drafts are to pay back."""
        self._reading = seconds

    def allowed(self, plain: float, steps: int) -> float:
        """What drafting may still cost, if it may cost this many plain steps besides its share of the time."""
        return self.saved + self._lent(plain) + ALLOWANCE * self.elapsed + steps * plain

    def lost(self, plain: float, drafting: bool) -> bool:
        """Whether drafting has cost too much although it promised to pay, and that is not made up for yet. Once a
        step."""
        self._reading *= 1.0 - 1.0 / PAYBACK
        allowed = self.allowed(plain, START) if self.behind else self.allowed(plain, SURE) + self._reading
        self.behind = allowed < 0 and (self.behind or drafting)
        return self.behind

    def _lent(self, plain: float) -> float:
        return self._loan * max(0.0, 1.0 - (self.elapsed - self._lent_at) / (LENT * plain))
