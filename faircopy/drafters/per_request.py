"""Drafts from where each request wants them: the engine's drafter, another one by name, or its predicted output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from faircopy.drafters.base import Drafter, captured_drafter, chains
from faircopy.model.runner import Result
from faircopy.types import PICKED, Batch, Draft, Sequence, Verdict

if TYPE_CHECKING:
    from faircopy.capture import CapturedDrafter

SHORTEST_MATCH = 3  # written tokens that must be found in a prediction before drafts are taken from behind them


class PredictionDrafter(Drafter):
    """Proposes what follows, in a request's predicted output, the tokens written last.

    As long as the output is the prediction, its continuation stands at the same place. After a difference the last few
    written tokens are looked up in the prediction, from that place on.
    """

    def __init__(self) -> None:
        self._places: dict[Sequence, tuple[int, int]] = {}  # output length, and the place in the prediction behind it

    def propose(self, batch: Batch) -> Draft:
        return chains(batch, self._chain)

    def forget(self, seq: Sequence) -> None:
        self._places.pop(seq, None)

    def _chain(self, seq: Sequence, max_nodes: int) -> list[int]:
        prediction, output = seq.request.prediction, seq.output
        place = self._place(prediction, output, *self._places.get(seq, (0, 0)))
        if place is None:
            return []
        self._places[seq] = len(output), place
        return list(prediction[place : place + max_nodes])

    def _place(self, prediction: tuple[int, ...], output: list[int], length: int, place: int) -> int | None:
        """Where the prediction goes on, given that it did at `place` when the output had `length` tokens."""
        new = tuple(output[length:])
        if prediction[place : place + len(new)] == new:
            return place + len(new)
        tail = tuple(output[-SHORTEST_MATCH:])
        later = range(place, len(prediction) - len(tail))
        return next((at + len(tail) for at in later if prediction[at : at + len(tail)] == tail), None)


class PerRequestDrafter(Drafter):
    """Asks the engine's drafter, and others for the requests that name one or bring a prediction."""

    def __init__(self, default: Drafter, others: Mapping[str, Drafter]) -> None:
        self.default, self._others = default, dict(others)
        self._prediction = PredictionDrafter()
        self.wants, self.expensive, self.passes = default.wants, default.expensive, default.passes
        self.layers, self.skips_states, self.ranks_nodes = default.layers, default.skips_states, default.ranks_nodes

    @property
    def rows_read(self) -> int:  # type: ignore[override]
        return self.default.rows_read

    @property
    def names(self) -> list[str]:
        """What a request may put into `drafter`."""
        return sorted(self._others)

    def propose(self, batch: Batch) -> Draft:
        return self._ask(batch, self.default.propose)

    def read(self, batch: Batch) -> Draft:
        return self._ask(batch, self.default.read)

    def _ask(self, batch: Batch, default: Callable[[Batch], Draft]) -> Draft:
        """Drafts of the others, and of the default drafter."""
        owners = [self._owner(seq) for seq in batch.seqs]
        draft = default(_only(batch, owners, self.default))
        for drafter in dict.fromkeys(owners):
            if drafter is not self.default:
                draft = self._merged(draft, drafter.propose(_only(batch, owners, drafter)))
        return draft

    def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:
        """The others draft from the text alone."""
        self.default.observe(batch, draft, result, verdict)

    def settle(self, batch: Batch, result: Result) -> None:
        owners = [self._owner(seq) for seq in batch.seqs]
        self.default.settle(_only(batch, owners, self.default), result)

    def forget(self, seq: Sequence) -> None:
        for drafter in (self.default, self._prediction, *self._others.values()):
            drafter.forget(seq)

    def rehearse(self) -> None:
        self.default.rehearse()

    def capture(self, num_slots: int) -> CapturedDrafter | None:
        """Captured steps hold no request whose drafts come from elsewhere (`Sequence.drafts_itself`)."""
        return captured_drafter(self.default, num_slots)

    def _owner(self, seq: Sequence) -> Drafter:
        if seq.request.prediction:
            return self._prediction
        return self.default if seq.request.drafter is None else self._others[seq.request.drafter]

    def _merged(self, draft: Draft, more: Draft) -> Draft:
        """Both drafts; no sequence has nodes in more than one."""
        sources = draft.sources
        if sources is not None:
            rows = [[*mine, *[PICKED] * len(theirs)] for mine, theirs in zip(sources.rows, more.tokens, strict=True)]
            sources = replace(sources, rows=rows)
        return Draft(
            [[*mine, *theirs] for mine, theirs in zip(draft.tokens, more.tokens, strict=True)],
            [[*mine, *theirs] for mine, theirs in zip(draft.parents, more.parents, strict=True)],
            sources,
            draft.confidence,
        )


def _only(batch: Batch, owners: list[Drafter], drafter: Drafter) -> Batch:
    """The same batch, with no draft nodes for the sequences of other drafters."""
    nodes = [n if owner is drafter else 0 for n, owner in zip(batch.max_nodes, owners, strict=True)]
    if batch.shared_k is not None and not drafter.ranks_nodes:
        nodes = [min(n, batch.shared_k) for n in nodes]
    others = {seq for seq, owner in zip(batch.seqs, owners, strict=True) if owner is not drafter}
    return replace(batch, max_nodes=nodes, idle=batch.idle | others)


def drafter_names(drafter: Drafter) -> list[str]:
    """The names that requests may use for a drafter of their own."""
    return drafter.names if isinstance(drafter, PerRequestDrafter) else []
