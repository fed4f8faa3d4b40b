"""CUDA graphs: whole steps (draft, verify and accept, see `runner`) and single passes (see `passes`)."""

from faircopy.replay.in_flight import InFlightStep
from faircopy.replay.passes import CapturedPasses
from faircopy.replay.runner import CapturedRunner, nodes_in_a_tile

__all__ = ["CapturedPasses", "CapturedRunner", "InFlightStep", "nodes_in_a_tile"]
