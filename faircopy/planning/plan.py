"""From a budget to a configuration: what is chosen, what it takes, and why."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faircopy.errors import ConfigError
from faircopy.planning.devices import Device
from faircopy.planning.drafts import DraftShape
from faircopy.planning.ladder import AS_ASKED, LEAST_CHUNK, NONE, Candidate, Speed, climb, with_shorter_chunks
from faircopy.planning.memory import Item, Setup, memory_items, total, without_drafts
from faircopy.planning.roofline import BatchLaw, Roofline
from faircopy.progress import counted

SHARE = 10  # a prompt's pass may take this part of the budget
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration that fits a budget."""

    budget: int
    device: Device
    tried: list[Candidate]  # the ladder down to the chosen one, which is the last
    plain: Candidate
    lower_bound: int
    timed: bool = True  # whether speeds know how long steps take; else they count accepted tokens
    source: str = ""  # where speeds come from, in words

    @property
    def chosen(self) -> Candidate:
        return self.tried[-1]

    @property
    def setup(self) -> Setup:
        return self.chosen.setup

    @property
    def items(self) -> list[Item]:
        return memory_items(self.setup)

    @property
    def law(self) -> BatchLaw:
        return roofline(self.setup, self.device).law

    @property
    def reason(self) -> str:
        """What was chosen and why, in a sentence."""
        return f"{_what(self.chosen)}: {_why(self)}"


def make_plan(
    base: Setup,
    drafts: Seq[DraftShape],
    nodes: int,
    budget: int,
    device: Device,
    speed: Callable[[Setup], Speed] | None = None,
    asked: Any = None,
    timed: bool = True,
    source: str = "",
) -> Plan:
    """base: what is planned for, its draft left out. asked: the budget as the user wrote it, for errors.

    speed: what rungs are compared by. source: where it comes from, for the sentence that explains the plan.
    """
    base = with_shorter_chunks(without_drafts(base), lambda setup: _crowds(setup, budget))
    speed = speed or (lambda setup: estimate(setup, device))
    least = smallest(base)
    if least > budget:
        raise ConfigError(
            "memory",
            budget if asked is None else asked,
            f"below the {_mib(least)} that {base.target.name} needs for {_dialogue(base)}, without a drafter",
            f"pass at least {_mib(least)}, or plan fewer sequences or tokens"
            + (", or several devices" if base.target.whole else ", or more devices"),
        )
    tried = climb(base, drafts, nodes, budget, speed)
    plain = Candidate(NONE, base, total(memory_items(base)), 0, speed(base))
    return Plan(budget, device, tried, plain, least, timed, source)


def smallest(base: Setup) -> int:
    """The least memory in which the dialogue can be held at all: no drafter, the shortest prompt chunks."""
    return total(memory_items(replace(without_drafts(base), chunk=min(base.chunk, LEAST_CHUNK))))


def _crowds(setup: Setup, budget: int) -> bool:
    """Whether a prompt's pass takes too large a share of what weights and the dialogue leave."""
    items = {item.name: item.bytes for item in memory_items(setup)}
    free = max(0, budget - items["weights"] - items.get("keys and values", 0))
    return items.get("activations", 0) > free // SHARE or sum(items.values()) > budget


def with_all_pages(setup: Setup, budget: int, most: int) -> Setup:
    """As many pages as the budget holds, up to the most that could be used."""
    page = int(sum(setup.page_bytes()) * (1.0 + setup.margin)) + 1
    spare = budget - total(memory_items(setup))
    return replace(setup, pages=min(most, setup.pool_pages + max(0, spare) // page))


def roofline(setup: Setup, device: Device) -> Roofline:
    return Roofline(setup.target, device, setup.tokens)


def estimate(setup: Setup, device: Device, acceptance: float | None = None, accepted: float | None = None) -> Speed:
    """Tokens per step and per second by the roofline and the draft's measured or assumed acceptance.

    accepted: tokens per step beyond the target's own, if they were measured.
    """
    more = setup.draft.accepted(setup.nodes, setup.levels, acceptance) if accepted is None else accepted
    per_step = 1.0 + more
    stages = setup.target.stages  # each has a part of the sequences under way
    seqs, rows = -(-setup.batch // stages), -(-setup.rows // stages)
    seconds = stages * roofline(setup, device).seconds(seqs, rows) + _draft_seconds(setup, device)
    return Speed(per_step, setup.batch * per_step / seconds)


def _draft_seconds(setup: Setup, device: Device) -> float:
    draft, size = setup.draft, setup.target.dtype.itemsize
    if draft.model is not None:
        return setup.levels * Roofline(draft.model, device, setup.tokens).seconds(setup.batch, setup.batch)
    if draft.kind != "head":
        return 0.0
    spoken = setup.levels * setup.target.vocab * setup.target.hidden
    return (draft.parameters(setup.levels) + spoken) * size / device.bandwidth


def _dialogue(setup: Setup) -> str:
    if setup.pages is not None:
        return f"{setup.pages * setup.page} tokens and passes of {counted(setup.batch, 'sequence')}"
    return f"{counted(setup.batch, 'sequence')} of {counted(setup.tokens, 'token')}"


def _what(chosen: Candidate) -> str:
    setup = chosen.setup
    if chosen.rung == NONE:
        return "no drafter"
    shape = f" on {counted(setup.levels, 'level')}" if setup.draft.tree else ""
    return f"{counted(setup.nodes, 'draft token')}{shape} by {Path(setup.draft.name).name}"


def _why(plan: Plan) -> str:
    chosen, gain = plan.chosen, plan.chosen.speed.tokens_per_second / plan.plain.speed.tokens_per_second
    if len(plan.tried) == 1 and chosen.rung == NONE:
        return "none was asked for"
    first = plan.tried[0]
    expected = f"{gain:.2f} times plain decoding expected" if plan.timed else "whether it pays is measured later"
    expected += f", {plan.source}" if plan.timed and plan.source else ""
    if chosen.rung == AS_ASKED:
        return f"as asked for; {expected}"
    short = first.bytes - plan.budget
    missing = f"{_what(first)} would take {_mib(short)} too much" if short > 0 else f"{_what(first)} would not pay"
    if chosen.rung == NONE:
        return f"{missing}, and nothing smaller fits and is faster than plain decoding"
    return f"{chosen.rung}, because {missing}; {expected}"


def _mib(count: int) -> str:
    return f"{-(-count // MIB)}MiB"
