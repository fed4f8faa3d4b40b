"""From LLVM's text form to functions of this process, for the processor it runs on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Processor:
    """What kernels need to know of a processor."""

    lanes: int  # float32 numbers in a vector register
    rows: int  # rows of a tile: as many as its registers hold beside two vectors of weights
    bfloat16: bool  # whether it has a dot product of 16-bit numbers


@cache
def processor() -> Processor | None:
    """This machine's, or None where there is no LLVM or no vector instructions that the kernels know."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    features = llvm.get_host_cpu_features()
    level = torch.backends.cpu.get_cpu_capability()  # what ATEN_CPU_CAPABILITY leaves of it
    if level.startswith("AVX512") and features.get("avx512f"):
        return Processor(16, 8, bool(features.get("avx512bf16")))
    if level.startswith("AVX") and features.get("avx2") and features.get("fma"):
        return Processor(8, 6, False)
    return None


class Library:
    """The compiled functions of one module; they live as long as this object."""

    def __init__(self, text: str) -> None:
        import llvmlite.binding as llvm

        module = llvm.parse_assembly(text)
        module.verify()
        machine = _target_machine()
        passes = llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0)))
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()

    def function(self, name: str, pointers: int, numbers: int) -> Any:
        """A function of n addresses and then 64-bit numbers. Calls release Python's global lock."""
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * numbers)
        found = kind(self._engine.get_function_address(name))
        found.library = self  # type: ignore[attr-defined]
        return found


def _target_machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    known = processor()
    assert known is not None, "kernels are compiled only for processors they know"
    features = llvm.get_host_cpu_features().flatten()
    features += ",-prefer-256-bit" if known.lanes == 16 else ",-avx512f"
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3)


@cache
def has_openmp() -> bool:
    """Whether kernels can share work among torch's own threads; makes its functions known to them."""
    import llvmlite.binding as llvm

    for file in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        library = ctypes.CDLL(str(file))
        for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        return True
    return False
