"""Result files that say where their numbers come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from faircopy import __version__
from faircopy.errors import CheckpointError
from faircopy.files import append_line, replace_text

RESULT = {"commit", "device", "settings", "workload", "name", "batch", "counters", "phases", "identical", "of"}


@cache
def origin() -> dict[str, Any]:
    """Commit, versions and device of the numbers this process makes; the commit is the one it began with."""
    return {
        "commit": _commit(),
        "versions": {
            "faircopy": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": _device(),
    }


def write(path: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One JSON file: origin, settings, rows."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_text("--out", Path(path), json.dumps({**origin(), "settings": settings, "rows": rows}, indent=1) + "\n")


def collect(path: str, settings: dict[str, Any], rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pass rows on and write the file after each: a run that is cut short leaves what it had."""
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(row)
        write(path, settings, found)
        yield row


def append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One line per record; what is in the file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for record in records:
        append_line("--out", path, json.dumps(record))


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file that `append` made."""
    try:
        return [_record(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({error})"
        raise CheckpointError("results", str(path), problem, "pass a file that `faircopy bench run` wrote") from error


def _record(line: str) -> dict[str, Any]:
    """One line; it is a result if it has what every result has."""
    record = json.loads(line)
    if not isinstance(record, dict) or not record.keys() >= RESULT:
        raise ValueError(f"no result of a benchmark: {line[:40]}")
    return record


def _commit() -> str:
    """The commit of the clone that this package lies in; the package's version where it is no clone."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # a folder of installed packages may lie in somebody else's repository
        return f"faircopy {__version__}"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return f"faircopy {__version__}"
    return run.stdout.strip() or f"faircopy {__version__}"


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    kind = platform.processor() or platform.machine()
    return f"CPU {kind}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
