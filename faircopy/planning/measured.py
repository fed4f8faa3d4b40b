"""Speeds of setups by what was measured before: accepted tokens over the time of measured passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from faircopy.cache import device_kind
from faircopy.costs import CostTable, Curve
from faircopy.measured_acceptance import History, known_history
from faircopy.measured_costs import drafts_for, kept_costs
from faircopy.model.anatomy import is_head
from faircopy.planning.drafts import NO_DRAFT, DraftShape
from faircopy.planning.ladder import Speed
from faircopy.planning.memory import Setup, without_drafts

ENOUGH_ROWS = 1024  # passes of more rows lie on the line through those measured


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a target and some drafters on one device."""

    costs: dict[str, CostTable]  # by drafter; none where passes were not measured with it
    histories: dict[str, History]  # by drafter

    @classmethod
    def of(
        cls, target: str, drafts: list[DraftShape], dtype: torch.dtype, device: torch.device | None, rows: int
    ) -> Measured:
        """device: None if it is not one of this machine, and no times are known. rows: that passes have at most."""
        found = {} if device is None else _tables(target, dtype, device)
        tables = {name: table for name, table in found.items() if table.target.points[-1][0] >= min(rows, ENOUGH_ROWS)}
        drafted = {draft.name: _drafts(draft, dtype, device) for draft in drafts if found}
        costs = {draft.name: _table(tables, draft, drafted.get(draft.name, {})) for draft in (NO_DRAFT, *drafts)}
        histories = {draft.name: known_history(target, draft.name) for draft in drafts if draft.kind != "own"}
        return cls(
            {name: table for name, table in costs.items() if table is not None},
            {name: history for name, history in histories.items() if history is not None},
        )

    def knows(self, draft: DraftShape) -> bool:
        """Whether its accepted tokens were measured, in runs or when a head was trained, and its passes timed."""
        return self.times([draft]) and (draft.name in self.histories or bool(draft.accuracy))

    def times(self, drafts: list[DraftShape]) -> bool:
        """Whether the passes of plain decoding and of all these drafters were measured."""
        return all(draft.name in self.costs for draft in (NO_DRAFT, *drafts))

    def accepted(self, setup: Setup, acceptance: float | None = None) -> float:
        """Tokens per step beyond the target's own: as asked for, by history, or as the drafter's files say."""
        history = self.histories.get(setup.draft.name) if acceptance is None else None
        found = history.accepted(setup.nodes) if history is not None and setup.nodes else None
        return setup.draft.accepted(setup.nodes, setup.levels, acceptance) if found is None else found

    def speed(self, setup: Setup, acceptance: float | None = None) -> Speed:
        """Accepted tokens over the time of measured passes."""
        per_step = 1.0 + self.accepted(setup, acceptance)
        return Speed(per_step, setup.batch * per_step / self._seconds(setup))

    def alone_and_full(self, setup: Setup) -> Speed:
        """As if half of the tokens were written alone and half in a full batch; drafts that do not pay are left out."""
        speed, plain = self.speed, without_drafts(setup)
        gains = [
            max(
                1.0, speed(replace(setup, batch=n)).tokens_per_second / speed(replace(plain, batch=n)).tokens_per_second
            )
            for n in (1, setup.batch)
        ]
        full = speed(plain).tokens_per_second
        return Speed(speed(setup).tokens_per_step, full * sum(gains) / len(gains))

    def source(self, draft: DraftShape, acceptance: float | None = None) -> str:
        """Where expectations come from, in words."""
        times = "measured passes" if self.times([draft]) else "the roofline"
        history = self.histories.get(draft.name)
        if acceptance is not None:
            return f"by {times} and the acceptance given"
        if history is not None:
            return f"by {times} and {history.drafts} drafts that were measured"
        told = "the head's saved accuracy" if draft.accuracy else "an assumed acceptance"
        return f"by {times} and {told}"

    def _seconds(self, setup: Setup) -> float:
        """A head's levels take what was measured, else the share of a pass that its numbers are of the target's."""
        costs, batch, draft = self.costs[setup.draft.name], setup.batch, setup.draft
        all_levels = setup.levels == min(setup.nodes, draft.levels)
        if draft.kind != "head" or (costs.drafts and all_levels):
            return costs.step(batch, setup.nodes)
        numbers = draft.parameters(setup.levels) + setup.levels * setup.target.vocab * setup.target.hidden
        return costs.target(setup.rows) + costs.target(batch) * numbers / setup.target.read


def _tables(target: str, dtype: torch.dtype, device: torch.device) -> dict[str, CostTable]:
    """Tables of this type and device by the draft model they were measured with."""
    kind, place = str(dtype).removeprefix("torch."), device_kind(device)
    parts = [(about.split(", ", 2), table) for about, table in kept_costs(target)]
    return {_place(about[1]): table for about, table in parts if about[0] == kind and about[2] == place}


def _place(name: str) -> str:
    """A folder by its whole path, and a hub id as it is."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.exists() else name


def _drafts(draft: DraftShape, dtype: torch.dtype, device: torch.device | None) -> dict[int, Curve]:
    """What a head's drafts take, if that was measured in this type and on this device."""
    if draft.kind != "head" or device is None or not is_head(draft.name):
        return {}
    return drafts_for(draft.name, draft.levels, dtype, device)


def _table(tables: dict[str, CostTable], draft: DraftShape, drafts: dict[int, Curve]) -> CostTable | None:
    """The target's passes are the same beside any drafter; those of a draft model must have been measured."""
    if draft.kind == "model":
        return tables.get(_place(draft.name))
    found = next(iter(tables.values()), None)
    if found is None:
        return None
    return CostTable(found.target, steps={k: s for k, s in found.steps.items() if not k[1]}, drafts=drafts)
