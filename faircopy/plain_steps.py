"""When plain steps run between drafted ones to be measured: k="auto" knows what drafts gain against those alone."""

from __future__ import annotations

from faircopy.costs import REFERENCE, StepCosts, bucket

SETTLED = 64  # steps of a batch size after which plain ones are measured, where a table has timed whole steps
APART = 64  # steps between plain ones that are measured again, of whatever size of the batch
ATTEMPTS = 4 * REFERENCE  # plain steps that run at a time until enough were measured,
RETRY = 2048  # and steps after which it is tried again: where all steps read prompts, none can be measured


class PlainSteps:
    """Asks for plain steps in batches of a size where none were measured, not for long, or in a slow moment."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._asked: dict[int, int] = {}  # choices since plain steps were first asked for, by size of the batch
        self._last = 0  # number of the choice at which one was wanted

    def pending(self, batch: int) -> bool:
        """Whether plain steps of this size were asked for and not enough have been measured."""
        return bucket(batch) in self._asked

    def wanted(self, batch: int, choice: int) -> bool:
        """Whether the next step should be a plain one. choice: the number of this choice."""
        size = bucket(batch)
        if self._costs.known(batch, 0) or self._may_wait(batch, choice):
            self._asked.pop(size, None)
            return False
        self._asked[size] = self._asked.get(size, 0) + 1
        wanted = self._asked[size] % RETRY <= ATTEMPTS
        self._last = choice if wanted else self._last
        return wanted

    def _may_wait(self, batch: int, choice: int) -> bool:
        """Where a table has timed whole steps a batch size begins with drafts, and plain steps follow; at once if none
        of any size were measured and drafted ones do not take what the table says."""
        if self._costs.tried(batch, 0) < REFERENCE:
            new = self._costs.steps_of(batch) < SETTLED
            return new and self._costs.table.captured(batch, 0) and self._costs.as_expected
        soon = choice - self._last < APART and not self.pending(batch)
        return soon and not self._costs.doubted(batch)
