"""Cost tables of checkpoints on this machine: measured once and kept in the user's cache folder."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from faircopy.cache import KeptTable, device_kind, source_hash
from faircopy.config import EngineConfig
from faircopy.costs import CostTable, Curve
from faircopy.drafters.heads import Head
from faircopy.model.anatomy import known_identity
from faircopy.model.base import Model
from faircopy.model.trial import pass_curve
from faircopy.progress import doing

TARGET_TRIAL, DRAFT_TRIAL = 1.5, 0.5  # seconds that measuring takes
_KEPT = KeptTable("costs")


def cost_table(target: Model, draft: Model | Head | None, config: EngineConfig) -> CostTable | None:
    """What passes cost, measured unless it is known; None on a GPU, where warming up measures steps."""
    if target.device.type != "cpu":
        return None
    table = known_costs(target, draft) or _measured(target, draft, config)
    layers = len(draft.layers) if isinstance(draft, Head) else 0
    return table.with_head(layers / max(1, len(target.layers)))


def _measured(target: Model, draft: Model | Head | None, config: EngineConfig) -> CostTable:
    """What passes cost, measured now and kept."""
    most = config.max_batch * (config.k + 1)
    with doing(f"{target.name}: measuring what passes cost"):
        small = Curve() if draft is None or isinstance(draft, Head) else pass_curve(draft, most, DRAFT_TRIAL)
        table = CostTable(pass_curve(target, most, TARGET_TRIAL), small)
    keep_costs(target, draft, table)
    return table


def known_costs(target: Model, draft: Model | Head | None) -> CostTable | None:
    """What passes cost, if it was measured before."""
    return _table(_KEPT.get(_key(target, draft)))


def keep_costs(target: Model, draft: Model | Head | None, table: CostTable) -> None:
    """Keep what was measured, if both models were read from files."""
    checkpoint = known_identity(target.name)
    if checkpoint is not None:
        beside = "no draft model" if draft is None or isinstance(draft, Head) else draft.name
        about = f"{str(target.dtype).removeprefix('torch.')}, {beside}, {device_kind(target.device)}"
        _KEPT.put(_key(target, draft), {"checkpoint": checkpoint, "about": about, "table": table.as_json()})


def kept_costs(name: str) -> list[tuple[str, CostTable]]:
    """The tables of a checkpoint, each with what it was measured with."""
    checkpoint = known_identity(name)
    dicts = [kept for kept in _KEPT.values() if isinstance(kept, dict) and checkpoint is not None]
    found = [(str(kept.get("about")), _table(kept)) for kept in dicts if kept.get("checkpoint") == checkpoint]
    return [(about, table) for about, table in found if table is not None]


def _table(kept: Any) -> CostTable | None:
    """A table as it was kept; None: there is none, or the file was damaged, and it is measured again."""
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        table = CostTable.of_json(kept["table"])
        return table if table.target.points else None
    return None


def _key(target: Model, draft: Model | Head | None) -> str:
    small = None if draft is None or isinstance(draft, Head) else f"{known_identity(draft.name)} {draft.backend}"
    kind = f"{target.backend} {target.dtype} {device_kind(target.device)}"
    return f"{known_identity(target.name)} {small} {kind} {source_hash()}"
