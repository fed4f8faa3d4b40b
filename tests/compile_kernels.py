"""Compiles kernels for a GPU on a machine without one: the interpreter accepts code that the compiler refuses.

python -m tests.compile_kernels FILE: FILE holds launches, one JSON object per line, as
tests/test_gpu_compile.py records them.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")


def compile_launch(launch: dict[str, Any]) -> None:
    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"]).kernel
    names = [param.name for param in kernel.params]
    constants = {**launch["constants"], "PDL": True}
    signature = {name: launch["types"].get(name) or "constexpr" for name in names}
    values = {(names.index(name),): constants.get(name) for name, kind in signature.items() if kind == "constexpr"}
    options = {name: value for name, value in launch["options"].items() if name in OPTIONS}
    triton.compile(ASTSource(kernel, signature, values), target=HOPPER, options=options)


def main(file: str) -> int:
    failures = 0
    for line in Path(file).read_text().splitlines():
        launch = json.loads(line)
        try:
            compile_launch(launch)
        except Exception as error:
            failures += 1
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            print(launch["module"], launch["kernel"], launch["constants"], repr(cause)[:800])
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1])))
