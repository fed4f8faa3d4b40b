"""Cost tables of checkpoints on this machine: measured once and kept in the user's cache folder."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch

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


class KeptDrafts(NamedTuple):
    """What a head's drafts take, and with what that was measured."""

    about: str  # type and device
    levels: int  # tokens that it guesses ahead
    most: int  # sequences of a batch
    shared: bool  # whether batches share their nodes
    drafts: dict[int, Curve]  # by nodes: seconds over sequences


def _head_drafts(head: Head, drafter: HeadDrafter, config: EngineConfig, room: Room) -> dict[int, Curve]:
    """What a head's drafts take, measured unless it is known."""
    lengths = [k for k in LADDER if 0 < k <= config.k]
    shared = any(room(k, SHARED_FROM) > k for k in lengths)
    checkpoint = known_identity(head.name) if is_head(head.name) else None
    about = {"about": _kind(head.dtype, head.device), "levels": head.levels, "most": config.max_batch, "shared": shared}
    key = f"{checkpoint} {about} {lengths} {source_hash()}"
    known = None if checkpoint is None else _kept_drafts(_KEPT_DRAFTS.get(key))
    if known is not None:
        return known.drafts
    with doing(f"{head.name}: measuring what drafts cost"):
        drafts = draft_curves(drafter, lengths, config.max_batch, room, head.context, HEAD_TRIAL)
    if checkpoint is not None:
        times = {k: curve.points for k, curve in drafts.items()}
        _KEPT_DRAFTS.put(key, {"checkpoint": checkpoint, "source": source_hash(), **about, "drafts": times})
    return drafts


def kept_drafts(name: str) -> list[KeptDrafts]:
    """What a head's drafts take with the present code, as often as it was measured."""
    checkpoint = known_identity(name)
    dicts = [kept for kept in _KEPT_DRAFTS.values() if isinstance(kept, dict) and checkpoint is not None]
    mine = [kept for kept in dicts if (kept.get("checkpoint"), kept.get("source")) == (checkpoint, source_hash())]
    return [found for found in map(_kept_drafts, mine) if found is not None]


def drafts_for(name: str, levels: int, dtype: torch.dtype, device: torch.device) -> dict[int, Curve]:
    """Those of the largest batches, of this type, device and number of levels; empty if none were measured."""
    kind = _kind(dtype, device)
    fitting = [kept for kept in kept_drafts(name) if (kept.about, kept.levels) == (kind, levels)]
    return max(fitting, key=lambda kept: kept.most).drafts if fitting else {}


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}, {device_kind(device)}"


def _kept_drafts(kept: Any) -> KeptDrafts | None:
    """As they were kept; None: there are none, or the file was damaged."""
    with suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
        times = kept["drafts"].items()
        curves = {int(k): Curve(tuple((int(size), float(s)) for size, s in points)) for k, points in times}
        if curves and min(curves) > 0 and all(curve.valid for curve in curves.values()):
            return KeptDrafts(str(kept["about"]), int(kept["levels"]), int(kept["most"]), bool(kept["shared"]), curves)
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
