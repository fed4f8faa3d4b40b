"""Captured steps: draft, verify and accept replayed as CUDA graphs, see `runner`."""

from faircopy.replay.in_flight import InFlightStep
from faircopy.replay.runner import CapturedRunner

__all__ = ["CapturedRunner", "InFlightStep"]
