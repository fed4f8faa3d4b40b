"""faircopy: batch speculative decoding whose output is exactly what the target model alone would have written."""

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
from faircopy.llm import LLM, Answer, Completion
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
