"""Cost tables of checkpoints on this machine: measured once and kept in the user's cache folder."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from faircopy.cache import KeptTable, device_kind, source_hash
from faircopy.config import EngineConfig
from faircopy.costs import CostTable, Curve
from faircopy.draft_length import LADDER, SHARED_FROM, Room, own_room
from faircopy.drafters.base import Drafter
from faircopy.drafters.head_drafter import HeadDrafter
from faircopy.drafters.head_trial import draft_curves
from faircopy.drafters.heads import Head
from faircopy.model.anatomy import is_head, known_identity
from faircopy.model.base import Model
from faircopy.model.trial import pass_curve
from faircopy.progress import doing

TARGET_TRIAL, DRAFT_TRIAL, HEAD_TRIAL = 1.5, 0.5, 0.8  # seconds that measuring takes
_KEPT, _KEPT_DRAFTS = KeptTable("costs"), KeptTable("drafts")


def cost_table(
    target: Model,
    draft: Model | Head | None,
    config: EngineConfig,
    drafter: Drafter | None = None,
    room: Room = own_room,
) -> CostTable | None:
    """What passes cost, measured unless it is known; None on a GPU, where warming up measures steps.

    drafter: what makes the drafts of a head. room: nodes that a sequence may have, see DraftLengths.room.
    """
    if target.device.type != "cpu":
        return None
    table = known_costs(target, draft) or _measured(target, draft, config)
    if isinstance(draft, Head):
        table = table.with_head(len(draft.layers) / max(1, len(target.layers)))
    if isinstance(draft, Head) and isinstance(drafter, HeadDrafter):
        table = table.with_drafts(_head_drafts(draft, drafter, config, room))
    return table


def _head_drafts(head: Head, drafter: HeadDrafter, config: EngineConfig, room: Room) -> dict[int, Curve]:
    """What a head's drafts take, measured unless it is known."""
    lengths = [k for k in LADDER if 0 < k <= config.k]
    rooms = [room(k, SHARED_FROM) for k in lengths]
    checkpoint = known_identity(head.name) if is_head(head.name) else None
    about = f"{str(head.dtype).removeprefix('torch.')}, {device_kind(head.device)}"
    key = f"{checkpoint} {about} {rooms} up to {config.max_batch} {source_hash()}"
    known = None if checkpoint is None else _curves(_KEPT_DRAFTS.get(key))
    if known is None:
        with doing(f"{head.name}: measuring what drafts cost"):
            known = draft_curves(drafter, lengths, config.max_batch, room, head.context, HEAD_TRIAL)
        if checkpoint is not None:
            times = {k: curve.points for k, curve in known.items()}
            _KEPT_DRAFTS.put(key, {"checkpoint": checkpoint, "about": about, "drafts": times})
    return known


def kept_drafts(name: str) -> list[tuple[str, dict[int, Curve]]]:
    """What a head's drafts take, each with the type and device that they were measured with."""
    checkpoint = known_identity(name)
    dicts = [kept for kept in _KEPT_DRAFTS.values() if isinstance(kept, dict) and checkpoint is not None]
    found = [(str(kept.get("about")), _curves(kept)) for kept in dicts if kept.get("checkpoint") == checkpoint]
    return [(about, curves) for about, curves in found if curves is not None]


def _curves(kept: Any) -> dict[int, Curve] | None:
    """As they were kept; None: there are none, or the file was damaged."""
    with suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
        times = kept["drafts"].items()
        curves = {int(k): Curve(tuple((int(size), float(s)) for size, s in points)) for k, points in times}
        return curves if curves and all(curve.valid for curve in curves.values()) else None
    return None


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
