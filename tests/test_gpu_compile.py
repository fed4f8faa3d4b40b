"""Every kernel that the checks launch compiles for a GPU, with the types and constants they launch it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from faircopy.kernels.gpu.launch import INTERPRETED, Launcher
from faircopy.testing.kernel_checks import checks

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
PER_KERNEL = 2  # launches of a kernel that are compiled
SLOW = ("attention float32", "heads float32", "linear float32")  # the same kernels in another type


def described(launcher: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> dict[str, Any] | None:
    """A launch in JSON; None for those with descriptors, whose signature Triton makes from the descriptor."""
    function = launcher.kernel.fn
    names = launcher.kernel.arg_names
    types: dict[str, str] = {}
    for name, value in zip(names, args, strict=False):
        if isinstance(value, Tensor):
            types[name] = TYPES[value.dtype]
        elif isinstance(value, bool | int):
            types[name] = "i32"
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value is not None:
            return None
    constants = {name: value for name, value in meta.items() if name in names and name != "PDL"}
    options = {name: value for name, value in meta.items() if name not in names}
    return {
        "module": function.__module__, "kernel": function.__name__, "types": types, "constants": constants,
        "options": options,
    }  # fmt: skip


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the checks themselves compile")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: dict[str, list[str]] = {}

    def recorded(self: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        launch = described(self, args, meta)
        if launch is not None:
            kept = found.setdefault(launch["kernel"], [])
            line = json.dumps(launch, sort_keys=True)
            if line not in kept and len(kept) < PER_KERNEL:
                kept.append(line)

    monkeypatch.setattr(Launcher, "_launch", recorded)  # nothing runs: results are not looked at
    for name, run in checks():
        if not name.startswith(SLOW):
            with suppress(Exception):  # what kernels should have written is not there
                run(torch.device("cpu"))
    assert len(found) > 20
    file = tmp_path / "launches.jsonl"
    file.write_text("\n".join(line for lines in found.values() for line in lines))
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
