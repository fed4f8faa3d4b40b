"""A step in the air, and what it tells when it lands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faircopy.kernels.gpu.records import Report, ReportColumns
from faircopy.replay.space import Space
from faircopy.types import Sequence


@dataclass(slots=True)
class Flight:
    """A step in the air."""

    seats: dict[Sequence, int]
    space: Space
    report: Tensor  # where out lands on the host
    landed: torch.cuda.Event | None
    rows: int  # that the target computes, those that stand for nothing included

    @property
    def seqs(self) -> list[Sequence]:
        return list(self.seats)


@dataclass(frozen=True, slots=True)
class Told:
    """What a step reports of one seat."""

    tokens: list[int]
    max_nodes: int
    sound: bool
    nodes: list[int]
    parents: list[int]
    path: list[int]  # accepted nodes
    moved: int  # rows of keys that were not in line

    @classmethod
    def of(cls, row: Any, columns: ReportColumns) -> Told:
        def numbers(first: int, count: int) -> list[int]:
            return [int(number) for number in row[first : first + count]]

        count, max_nodes, sound = numbers(0, Report.TOKENS)
        accepted = count - 1 if sound else count
        tokens, nodes = numbers(Report.TOKENS, count), numbers(columns.guesses, max_nodes)
        parents, path = list(range(-1, max_nodes - 1)), list(range(accepted))
        if columns.tree:
            parents = numbers(columns.parents, max_nodes)
            path = [place - 1 for place in numbers(columns.path + 1, accepted)]
        moved = sum(node != place for place, node in enumerate(path))
        new: dict[int, int] = {-1: -1}
        kept: list[int] = []
        above: list[int] = []
        for old, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
            if node >= 0 and parent in new:  # what hangs on a missing node is missing too
                new[old] = len(kept)
                kept.append(node)
                above.append(new[parent])
        return cls(tokens, max_nodes, bool(sound), kept, above, [new[node] for node in path], moved)
