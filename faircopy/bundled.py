"""Where the models that come with faircopy are: beside the source, or where pip put them."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from faircopy.errors import CheckpointError


def folder() -> Path:
    """The folder with the bundled target, draft and held-out prompts."""
    installed = {sysconfig.get_path("data", scheme) for scheme in sysconfig.get_scheme_names()}  # for all, for a user
    places = [
        Path(__file__).resolve().parents[1] / "models",
        *(Path(data) / "share" / "faircopy" / "models" for data in (sys.prefix, *sorted(installed - {None}))),
    ]
    for place in places:
        if (place / "target" / "config.json").exists():
            return place
    raise CheckpointError("models", str(places[0]), "the bundled models are not there", "pass --target with a folder")


def target() -> str:
    return str(folder() / "target")


def draft() -> str:
    return str(folder() / "draft")


def named(draft: str | None) -> str:
    """A draft by its name on the command line: "draft" (if none is given) or "clover" for ours, else what was given."""
    ours = {place.parent.name for place in folder().glob("*/config.json")} - {"target"}
    return str(folder() / (draft or "draft")) if draft is None or draft in ours else draft


def draft_for(target: str | None, draft: str | None) -> str | None:
    """What LLM takes for a draft of the command line: the bundled target has one of its own, "none" is none."""
    draft = named(draft) if target is None else draft
    return None if draft == "none" else draft


def prompts() -> list[str]:
    """Beginnings of stories that neither model was trained on."""
    return [json.loads(line)["prompt"] for line in (folder() / "prompts.jsonl").read_text().splitlines()]
