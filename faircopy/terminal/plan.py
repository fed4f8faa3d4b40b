"""`faircopy plan`: what fits into a device's memory and what pays there, from configurations alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from faircopy.config import GPU_RESERVE, EngineConfig, parse_bytes
from faircopy.costs import CostTable
from faircopy.measured_costs import KeptDrafts, kept_costs, kept_drafts
from faircopy.model.anatomy import is_head
from faircopy.model.shape import shape_of_checkpoint
from faircopy.model.shape_share import WHOLE, Split
from faircopy.planning.devices import Device, named_device
from faircopy.planning.drafts import NO_DRAFT, DraftShape, check_head, shape_of_draft
from faircopy.planning.ladder import Candidate, Speed
from faircopy.planning.measured import Measured
from faircopy.planning.memory import MARGIN, Setup
from faircopy.planning.plan import Plan, estimate, make_plan
from faircopy.planning.roofline import best_k
from faircopy.progress import counted

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_K = 16  # of the best draft length, in tables and pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user plans for."""

    target: str
    drafts: list[str]
    k: int
    batch: int
    turns: int
    turn_tokens: int
    memory: str | None = None
    gpu: str | None = None
    dtype: str = "auto"
    acceptance: float | None = None
    split: Split = WHOLE


def split_of(tensor_parallel: int, pipeline_parallel: int) -> Split:
    """How many devices share the target, refused as the engine would."""
    EngineConfig(device="cpu", tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    return Split(tensor_parallel, pipeline_parallel)


def plan_for(wish: Wish) -> Plan:
    """The plan for a wish; an impossible budget is refused with the smallest that works."""
    device = named_device(wish.gpu)
    place, kind = device.torch_device, EngineConfig(device="cpu", dtype=wish.dtype).torch_dtype()
    shape = shape_of_checkpoint(wish.target, kind, place, wish.split)
    for draft in wish.drafts:
        check_head(draft, shape)
    drafts = [shape_of_draft(draft, shape.dtype, place) for draft in wish.drafts]
    base = Setup(
        target=shape,
        draft=NO_DRAFT,
        nodes=0,
        levels=0,
        batch=wish.batch,
        tokens=min(wish.turns * wish.turn_tokens, shape.context),
        device=place,
        chunk=EngineConfig(device="cpu").chunk_on(place),
        margin=MARGIN,
    )
    here = place if wish.gpu is None and wish.split == WHOLE else None
    known = Measured.of(wish.target, drafts, shape.dtype, here, wish.batch * (wish.k + 1))
    source = known.source(drafts[0], wish.acceptance) if drafts else ""
    speed, budget = _speed(known, drafts, device, wish.acceptance), _budget(wish, device)
    asked = wish.memory or f"all of {device.name}: {_whole(budget)} MiB"
    return make_plan(base, drafts, wish.k, budget, device, speed, asked, source=source)


def _speed(
    known: Measured, drafts: list[DraftShape], device: Device, acceptance: float | None
) -> Callable[[Setup], Speed]:
    """Tokens per second by measured passes where all were measured, else by the roofline; accepted tokens likewise."""
    if known.times(drafts):
        return lambda setup: known.speed(setup, acceptance)
    return lambda setup: estimate(setup, device, accepted=known.accepted(setup, acceptance))


def show(plan: Plan, wish: Wish, explain: bool, console: Console) -> None:
    """Tables of what takes memory and of what was tried, and a sentence."""
    console.print(_items(plan))
    console.print(_bounds(plan, wish), highlight=False, soft_wrap=True)
    if explain:
        console.print(_ladder(plan))
        console.print(f"Rows per sequence that cost no time: {plan.law.shared:.0f} / batch + {plan.law.own:.1f}")
        console.print(_law(plan, wish))
        console.print(_sources(plan), style="dim", highlight=False, soft_wrap=True)
        for about, costs in kept_costs(wish.target):
            console.print(_passes(about, costs))
            if costs.steps:
                console.print(_steps(costs))
        for draft in filter(is_head, wish.drafts):
            for kept in kept_drafts(draft):
                console.print(_drafts(draft, kept))


def as_json(plan: Plan, wish: Wish) -> str:
    """The same for programs; bytes everywhere."""
    setup, law = plan.setup, plan.law
    content = {
        "device": plan.device.name,
        "devices": wish.split.devices,
        "budget": plan.budget,
        "lower_bound": plan.lower_bound,
        "total": plan.chosen.bytes,
        "items": {item.name: item.bytes for item in plan.items},
        "chosen": {
            "draft": setup.draft.name, "k": setup.nodes, "levels": setup.levels, "batch": setup.batch,
            "tokens": setup.tokens, "pages": setup.pool_pages, "page": setup.page, "chunk": setup.chunk,
        },
        "why": plan.reason,
        "ladder": [_entry(candidate, plan) for candidate in plan.tried],
        "plain": _entry(plan.plain, plan),
        "batch_law": {"shared_rows": law.shared, "own_rows": law.own, "table": _law_rows(plan, wish)},
    }  # fmt: skip
    return json.dumps(content, indent=1)


def plot(plan: Plan, wish: Wish, file: Path) -> None:
    """Draft tokens over batch sizes: the law, and the fastest by roofline and acceptance."""
    from faircopy.bench.plots import plot_lengths

    rows = _law_rows(plan, wish)
    free, best = ([(row["batch"], row[name]) for row in rows] for name in ("free_k", "best_k"))
    law = f"free: {plan.law.shared:.0f} / batch + {plan.law.own - 1:.1f}"
    title = f"{_short(plan.setup.target.name)} on {plan.device.name}, {plan.setup.tokens} tokens per sequence"
    fastest = f"fastest, {_short(plan.tried[0].setup.draft.name)}"
    plot_lengths(file, title, {law: free, fastest: best})


def _budget(wish: Wish, device: Device) -> int:
    if wish.memory is not None:
        return parse_bytes(wish.memory)
    return device.memory - (GPU_RESERVE if device.kind == "cuda" else 0)


def _items(plan: Plan) -> Table:
    target = plan.setup.target
    devices = counted(target.ranks * target.stages, "device")
    where = plan.device.name if target.whole else f"the first of {devices} ({plan.device.name}), which holds most"
    table = Table(title=f"{_short(target.name)} on {where}, MiB", title_justify="left")
    for name, side in (("what", "left"), ("MiB", "right"), ("of", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for item in plan.items:
        table.add_row(item.name, _mib(item.bytes), item.why)
    table.add_section()
    table.add_row("together", _mib(plan.chosen.bytes), "")
    table.add_row("left over", _mib(plan.budget - plan.chosen.bytes), "for more pages: more sequences, reused prefixes")
    return table


def _bounds(plan: Plan, wish: Wish) -> str:
    setup = plan.setup
    turns = f"{counted(wish.turns, 'turn')} of {counted(wish.turn_tokens, 'token')}"
    dialogue = f"{counted(setup.batch, 'dialogue')} of {turns}"
    if setup.tokens < wish.turns * wish.turn_tokens:
        dialogue += f", cut to the context of {setup.tokens}"
    return f"Chosen for {dialogue}: {plan.reason}.\nBelow {_mib(plan.lower_bound)} MiB nothing can run."


def _ladder(plan: Plan) -> Table:
    title = "What was tried, in this order; the last is chosen. Memory in MiB"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1))
    for name in ("rung", "drafter", "k", "levels", "all", "drafts", "per step", "x plain", "fits"):
        table.add_column(name, justify="left" if name in ("rung", "drafter", "fits") else "right")
    for candidate in plan.tried:
        entry = _entry(candidate, plan)
        table.add_row(
            entry["rung"], _short(entry["draft"]), str(entry["k"]), str(entry["levels"]), _whole(entry["bytes"]),
            _whole(entry["speculation_bytes"]), f"{entry['tokens_per_step']:.2f}", f"{entry['times_plain']:.2f}",
            "yes" if entry["fits"] else "no",
        )  # fmt: skip
    return table


def _entry(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    setup, speed = candidate.setup, candidate.speed
    return {
        "rung": candidate.rung,
        "draft": setup.draft.name,
        "k": setup.nodes,
        "levels": setup.levels,
        "bytes": candidate.bytes,
        "speculation_bytes": candidate.speculation,
        "tokens_per_step": round(speed.tokens_per_step, 3),
        "tokens_per_second": round(speed.tokens_per_second, 1),
        "times_plain": round(speed.tokens_per_second / plan.plain.speed.tokens_per_second, 3),
        "fits": candidate.bytes <= plan.budget,
    }


def _law(plan: Plan, wish: Wish) -> Table:
    table = Table(title="Draft tokens over batch sizes", title_justify="left")
    for name in ("batch", "free draft tokens", "fastest k"):
        table.add_column(name, justify="right")
    for row in _law_rows(plan, wish):
        table.add_row(str(row["batch"]), f"{row['free_k']:.1f}", str(row["best_k"]))
    return table


def _law_rows(plan: Plan, wish: Wish) -> list[dict[str, Any]]:
    return [{"batch": batch, "free_k": plan.law.k(batch), "best_k": _fastest(plan, wish, batch)} for batch in BATCHES]


def _fastest(plan: Plan, wish: Wish, batch: int) -> int:
    """The k with the most tokens per second by the roofline, of the first drafter that was tried."""
    draft: DraftShape = plan.tried[0].setup.draft
    levels = draft.levels or MOST_K

    def rate(k: int) -> float:
        setup = replace(plan.setup, batch=batch, draft=draft, nodes=k, levels=min(k, levels))
        return estimate(setup, plan.device, wish.acceptance).tokens_per_second

    return best_k(rate, lambda k: 1.0, MOST_K) if draft.kind != "none" else 0


def _passes(about: str, costs: CostTable) -> Table:
    """Measured passes; what steps took since is not in it."""
    table = Table(title=f"Measured passes, ms ({about})", title_justify="left")
    for name in ("rows", "target", "draft model"):
        table.add_column(name, justify="right")
    for rows, seconds in costs.target.points:
        small = f"{1e3 * costs.draft(rows):.2f}" if costs.draft.points else "-"
        table.add_row(str(rows), f"{1e3 * seconds:.2f}", small)
    return table


def _steps(costs: CostTable) -> Table:
    lengths = sorted({k for _, k in costs.steps})
    table = Table(title="Measured captured steps, ms, by draft tokens", title_justify="left")
    for name in ("batch", *map(str, lengths)):
        table.add_column(name, justify="right")
    for size in sorted({size for size, _ in costs.steps}):
        times = [costs.steps.get((size, k)) for k in lengths]
        table.add_row(str(size), *("-" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in times))
    return table


def _drafts(head: str, kept: KeptDrafts) -> Table:
    drafts, shared = kept.drafts, ", nodes shared by a batch" if kept.shared else ""
    what = f"{counted(kept.levels, 'level')}, batches of up to {kept.most}{shared}, {kept.about}"
    table = Table(title=f"Measured drafts of {_short(head)}, ms, by nodes ({what})", title_justify="left")
    for name in ("sequences", *map(str, sorted(drafts))):
        table.add_column(name, justify="right")
    for size in sorted({size for curve in drafts.values() for size, _ in curve.points}):
        table.add_row(str(size), *(f"{1e3 * drafts[k](size):.2f}" for k in sorted(drafts)))
    return table


def _sources(plan: Plan) -> str:
    told = f" Tokens per second: {plan.source}." if plan.source else ""
    return f"Device: {plan.device.source}.{told} The batch law: roofline, no overheads."


def _whole(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def _short(name: str) -> str:
    return Path(name).name


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
