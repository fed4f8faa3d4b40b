"""CUDA graphs: whole steps (draft, verify and accept, see `runner`) and single passes (see `passes`)."""

from faircopy.replay.graphs import nodes_in_a_tile
from faircopy.replay.in_flight import InFlightStep
from faircopy.replay.passes import CapturedPasses
from faircopy.replay.runner import CapturedRunner

__all__ = ["CapturedPasses", "CapturedRunner", "InFlightStep", "nodes_in_a_tile"]
