"""What is measured once per machine and kept: small JSON tables in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FOLDER = "FAIRCOPY_CACHE"  # environment variable: another folder, or an empty string for none
_ISA = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")  # they choose another set of instructions


class KeptTable:
    """Values by text key in one file of the cache folder. Lost or unreadable files cost time, never results."""

    def __init__(self, name: str, changes: bool = False) -> None:
        """changes: values of a key may change, by other processes too, so that none is held here."""
        self._name, self._changes = name, changes
        self._known: dict[str, Any] | None = None

    def get(self, key: str) -> Any | None:
        if self._known is None or self._changes:
            self._known = self._read()
        return self._known.get(key)

    def values(self) -> list[Any]:
        return list(self._read().values())

    def put(self, key: str, value: Any) -> None:
        """Keep a value, beside what other processes have kept meanwhile."""
        held = {} if self._changes else self._known or {}
        self._known = {**self._read(), **held, key: value}
        file = self._file()
        if file is None:
            return
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
                json.dump(self._known, new, indent=1)
            os.replace(new.name, file)

    def _read(self) -> dict[str, Any]:
        file = self._file()
        with suppress(OSError, ValueError):
            content = json.loads(file.read_text()) if file is not None else {}
            return content if isinstance(content, dict) else {}
        return {}

    def _file(self) -> Path | None:
        folder = cache_folder()
        return None if folder is None else folder / f"{self._name}.json"


def cache_folder() -> Path | None:
    """$FAIRCOPY_CACHE, or faircopy's folder in the user's cache; None: nothing is kept."""
    chosen = os.environ.get(FOLDER)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "faircopy"


def cpu_kind() -> str:
    """What the bits and the speed of CPU arithmetic depend on: processor, instruction set, torch."""
    limits = [f"{name}={os.environ[name]}" for name in _ISA if name in os.environ]
    return " ".join([_processor(), torch.backends.cpu.get_cpu_capability(), f"torch {torch.__version__}", *limits])


def device_kind(device: torch.device) -> str:
    """The same for any device."""
    if device.type != "cuda":
        return f"{cpu_kind()} threads={torch.get_num_threads()}"
    return f"{torch.cuda.get_device_name(device)} torch {torch.__version__}"


@cache
def library_versions() -> str:
    """The libraries whose code runs a model beside ours."""
    found = []
    for name in ("transformers", "triton"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return " ".join(found)


@cache
def source_hash() -> str:
    """What tells one state of this package's code from another: a kept result is one of this very code."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
