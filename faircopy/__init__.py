"""faircopy: batch speculative decoding whose output is exactly what the target model alone would have written."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from faircopy.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DraftError,
    FaircopyError,
    NumericsError,
    OutOfPages,
    RequestError,
    UnsupportedModel,
)

# Threads that spin while they wait take the processor from those that work: on a busy machine two of them were 40 times
# slower than one (LOG.md). OpenMP reads this once, when torch is loaded; whoever has set it is left alone.
# oneDNN keeps what it prepared for each number of rows, up to 1024 of them in each of two caches: under a server's
# mixed load that was 600 MiB for the bundled models. 128 cost no time (docs/serving.md).
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "128")

if TYPE_CHECKING:
    from faircopy.answers import Answer, Completion
    from faircopy.llm import LLM
    from faircopy.types import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Answer",
    "BatchError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DraftError",
    "FaircopyError",
    "NumericsError",
    "OutOfPages",
    "RequestError",
    "SamplingParams",
    "UnsupportedModel",
]

_LATER = {"LLM": "llm", "Answer": "answers", "Completion": "answers", "SamplingParams": "types"}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for: the command line answers wrong usage at once."""
    if name in _LATER:
        return getattr(import_module(f"faircopy.{_LATER[name]}"), name)
    raise AttributeError(f"module 'faircopy' has no attribute {name!r}")
