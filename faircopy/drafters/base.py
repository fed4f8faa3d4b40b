"""What a drafter is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from faircopy.model.runner import Result
from faircopy.types import Batch, Draft, Sequence, Verdict


@runtime_checkable
class Drafter(Protocol):
    """Guesses what the target will say. May be wrong, may be late, can never change the output.

    One with a `wants` names hidden states of the target (see model.base.Taps) and finds them in `result.states`.
    """

    def propose(self, batch: Batch) -> Draft:
        """At most batch.max_nodes[i] nodes for sequence i, continuing its tokens; none for one not fed to its end."""

    def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:
        """Once per step, before the verdict is appended."""

    def forget(self, seq: Sequence) -> None:
        """The sequence finished or was preempted."""


class NoDrafter:
    """Plain decoding."""

    wants: tuple[int, ...] = ()

    def propose(self, batch: Batch) -> Draft:
        return Draft.empty(len(batch))

    def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def plan_fill(self, space: Any) -> Callable[[], None]:
        return lambda: None

    def ready(self, seq: Sequence) -> bool:
        return True

    def settle(self, seq: Sequence, length: int, accepted: int, k: int) -> None:
        pass
