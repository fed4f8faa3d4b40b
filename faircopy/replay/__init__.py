"""The captured steady state: what it is in `steady`, what its graphs see and do in the other files."""

from faircopy.replay.flight import Flight
from faircopy.replay.space import Fills, Listens, Space
from faircopy.replay.steady import Replay

__all__ = ["Fills", "Flight", "Listens", "Replay", "Space"]
