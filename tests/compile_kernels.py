"""Compiles kernels for a GPU on a machine without one: the interpreter accepts code that the compiler refuses.

python -m tests.compile_kernels FILE: FILE holds launches, one JSON object per line, as
tests/test_gpu_compile.py records them. The kernels for Hopper alone, which have no interpreter, are compiled with the
constants below.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from faircopy.kernels.gpu import flash, pending_norm, pipelined, stream, tables

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
SHARED = 232_448  # bytes of a block on Hopper
Kernel = tuple[Any, dict[str, Any], dict[str, str], dict[str, Any]]


def compile_launch(launch: dict[str, Any]) -> None:
    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"]).kernel
    names = [param.name for param in kernel.params]
    constants = {**launch["constants"], "PDL": True}
    signature = {name: launch["types"].get(name) or "constexpr" for name in names}
    values = {(names.index(name),): constants.get(name) for name, kind in signature.items() if kind == "constexpr"}
    options = {name: value for name, value in launch["options"].items() if name in OPTIONS}
    triton.compile(ASTSource(kernel, signature, values), target=HOPPER, options=options)


def described(height: int, depth: int) -> str:
    """The type of a descriptor of bfloat16 tiles."""
    shape = [height, depth]
    return f"tensordesc<bf16{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"


POINTERS = {"q": "*bf16", "out": "*bf16", "parts": "*fp32", "stats": "*fp32", "scale": "fp32", "cap": "fp32"}
PAGES = dict.fromkeys(("keys", "values"), described(32, 64))
TABLES = dict.fromkeys(("counters", "rows", "ranges", "seqs", "tables", "positions"), "*i32")
FLASH = {
    "HEADS": 32, "KV": 8, "D": 128, "Q": 32, "QP": 32, "BM": 64, "BN": 128, "SPAN": 4, "BLOCKS": 4, "PAGE": 32,
    "LINE": 64, "TILES": 128, "SLOTS": 4, "EVEN": False, "CAPPED": False, "WINDOWED": False, "SINKS": False,
    "PARTS": True, "TALL": True, "TREE": False, "EARLY": False, "CHUNK": flash.MERGED_TALL[0],
    "TOGETHER": flash.MERGED_TALL[1], "WARPS": 4, "PDL": True,
    "sinks": None, "key_pool": None, "value_pool": None, "lane_slots": None, "lanes": None, "about": None,
}  # fmt: skip
FEW_ROWS = FLASH | {
    "Q": 8, "QP": 8, "TALL": False, "EVEN": True, "EARLY": True, "CHUNK": flash.MERGED[0], "TOGETHER": flash.MERGED[1],
}  # fmt: skip
TREE_TABLES = {"key_pool": "*bf16", "value_pool": "*bf16"} | dict.fromkeys(("lane_slots", "lanes", "about"), "*i32")
TREE = {name: value for name, value in FEW_ROWS.items() if name not in TREE_TABLES} | {"TREE": True}
PACKED = {
    "EVEN": False, "EARLY": False, "D": 64, "HEADS": 16, "KV": 2, "CAPPED": True, "WINDOWED": True, "PARTS": False,
    "BLOCKS": 1 << 30,
}  # fmt: skip
STREAM = {
    "BN": 64, "BM": 8, "SECOND": 0, "THIRD": 0, "WARPGROUPS": 1, "BK": 64, "STAGES": 8, "EACH": 2, "GATE": "silu",
    "BIASED": False, "WARPS": 4, "PDL": True, "bias": None, "x2": None, "x3": None,
}  # fmt: skip
PIPELINED = {
    "BN": 128, "BK": 64, "STAGES": 6, "GROUPS": 4, "GATE": "none", "BIASED": False, "ROWS": 64, "WIDTH": 128,
    "ABREAST": 8, "PDL": True, "bias": None,
}  # fmt: skip
BROAD = PIPELINED | {"BN": 256, "STAGES": 4, "GROUPS": 1}
PIPELINE_TYPES = {"w": described(128, 64), "x": described(64, 64), "out": described(64, 128)}
PENDING_NORM = {
    "R": 1, "N": 4096, "BLOCK": 4096, "PARTS": 4, "AFTER": False, "WATCH": True, "BN": 64, "BK": 64, "TILE": 8,
    "STAGES": 12, "GATE": "silu", "BIASED": False, "PDL": True, "after": None, "bias": None,
}  # fmt: skip
NORM = {name: PENDING_NORM[name] for name in ("N", "PARTS", "AFTER", "WATCH", "BLOCK", "PDL", "after")}
PENDING_NORMS = dict.fromkeys(("x", "weight", "kept", "out", "y"), "*bf16") | {
    "parts": "*fp32", "healthy": "*i1", "multiplier": "fp32", "eps": "fp32", "w": described(64, 64),
}  # fmt: skip
HOPPER_ALONE = (
    (pending_norm._normed_stream, PENDING_NORM, PENDING_NORMS, {}),
    (pending_norm._add_norm, NORM, PENDING_NORMS, {}),
    (pipelined._pipelined, PIPELINED, PIPELINE_TYPES, {}),
    (pipelined._pipelined, BROAD, PIPELINE_TYPES | {"w": described(256, 64)}, {}),
    (flash._flash, FLASH, POINTERS | PAGES | TABLES | {"positions": "*i64"}, {}),
    (flash._flash, FEW_ROWS, POINTERS | PAGES | TABLES, {}),
    (flash._flash, TREE, POINTERS | PAGES | TABLES | TREE_TABLES, {}),
    (flash._flash, TREE | PACKED, POINTERS | PAGES | TABLES | TREE_TABLES | {"positions": "*i64"}, {}),
    (stream._stream, STREAM, {"out": "*bf16", "w": described(64, 64), "x": described(8, 64)}, {"maxnreg": 96}),
)  # fmt: skip


def tall_streams() -> Iterator[Kernel]:
    """The streamed tiles of most rows, by warpgroups, with the largest results."""
    for tile in (tile for rows in (192, 224, 256) for tile in tables.tall_tiles(rows)):
        constants = STREAM | {
            "BM": tile.bm, "SECOND": tile.second, "THIRD": tile.third, "BN": tile.bn,
            "STAGES": stream.stages_that_fit(tile, 4, torch.device("cpu")),
            "WARPGROUPS": tile.warpgroups, "EACH": stream.columns_each(tile, "none", 4), "GATE": "none",
        }  # fmt: skip
        types = {"out": "*fp32", "w": described(tile.bn // tile.warpgroups, 64), "x": described(tile.bm, 64)}
        types |= {name: described(rows, 64) for name, rows in (("x2", tile.second), ("x3", tile.third)) if rows}
        options = {"maxnreg": stream.MANY[tile.bn]} if tile.warpgroups == 1 else {}
        yield stream._stream, {name: value for name, value in constants.items() if name not in types}, types, options


def compile_gluon(launcher: Any, constants: dict[str, Any], types: dict[str, str], options: dict[str, Any]) -> None:
    """Numbers are 32-bit integers where no type is given; pointers are aligned, as all that are launched with."""
    names = [param.name for param in launcher.kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if str(signature[name]).startswith("*")}
    compiled = triton.compile(
        GluonASTSource(launcher.kernel, signature, values, aligned), target=HOPPER, options={"num_warps": 4, **options}
    )
    assert compiled.metadata.shared <= SHARED, (constants, compiled.metadata.shared)


def main(file: str) -> int:
    failures = 0
    for kernel in (*HOPPER_ALONE, *tall_streams()):
        compile_gluon(*kernel)
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
