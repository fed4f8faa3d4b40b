"""Writes a result file that says where its numbers come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import faircopy


def write(path: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    record = {
        "commit": _commit(),
        "versions": {
            "faircopy": faircopy.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": _device(),
        "settings": settings,
        "rows": rows,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def _commit() -> str:
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    kind = platform.processor() or platform.machine()
    return f"CPU {kind}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
