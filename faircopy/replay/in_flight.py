"""A captured step that was started and not collected yet, and what it reports when it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from faircopy.capture import GraphState
from faircopy.kernels.gpu.logprobs import LogprobReport
from faircopy.kernels.gpu.records import Report, ReportColumns
from faircopy.types import Logprobs, Sequence, StepPlan


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was started; its report is on the host once `done` has happened."""

    plan: StepPlan
    batch_slots: dict[Sequence, int]
    graph: GraphState
    report: Tensor  # report rows, on the host
    logprobs: LogprobReport  # on the host, if a sequence wants them
    done: torch.cuda.Event | None  # None: there is no GPU and it is done already
    rows: int  # rows the target computes, padding rows included
    begun: torch.cuda.Event | None = None  # when the device began
    after: torch.cuda.Event | None = None  # `done` of the step before, if this one was started behind it
    prompt_rows: int = 0  # of these rows those of prompts of sequences that joined
    read: int = 0  # rows of prompts that the drafter reads in it

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Batch slots, draft nodes, and whether it reads prompts: steps of one kind take about as long."""
        return self.graph.size, self.plan.k, self.joined

    @property
    def joined(self) -> bool:
        """Whether sequences joined in it."""
        return self.graph.prompts is not None

    @property
    def idle(self) -> float:
        """Seconds that the device had nothing to do between the step before and this one, which is done."""
        if self.begun is None or self.after is None:
            return 0.0
        return max(0.0, float(self.after.elapsed_time(self.begun))) / 1e3

    @property
    def abandoned(self) -> bool:
        """Whether all its sequences have finished meanwhile."""
        return all(seq.finished for seq in self.batch_slots)

    def logprobs_of(self, seq: Sequence, slot: int, report: SlotReport) -> list[Logprobs]:
        """The log probabilities of the tokens that a sequence gained, if it wants them."""
        best = seq.params.logprobs
        if best is None:
            return []
        first = slot * (self.graph.k + 1)
        gained = zip(report.rows, report.tokens, strict=True)
        return [self.logprobs.of(first + row, token, best) for row, token in gained]


class SlotReport(NamedTuple):
    """What a step reports of one batch slot."""

    tokens: list[int]
    max_nodes: int
    finite: bool
    nodes: list[int]
    parents: list[int]
    path: list[int]  # accepted nodes
    rows: list[int]  # the row that each token was chosen in
    moved: int  # rows of keys that had to be moved into line

    @classmethod
    def of(cls, row: list[int], columns: ReportColumns) -> SlotReport:
        def numbers(first: int, count: int) -> list[int]:
            return row[first : first + count]

        count, max_nodes, finite = numbers(0, Report.TOKENS)
        accepted = count - 1 if finite else count
        tokens, nodes = numbers(Report.TOKENS, count), numbers(columns.guesses, max_nodes)
        if not max_nodes:
            return cls(tokens, 0, bool(finite), [], [], [], [0] * count, 0)
        parents, path, rows = list(range(-1, max_nodes - 1)), list(range(accepted)), list(range(count))
        if columns.tree:
            parents = numbers(columns.parents, max_nodes)
            path = [place - 1 for place in numbers(columns.path + 1, accepted)]
            rows = numbers(columns.path, count)
        moved = sum(node != place for place, node in enumerate(path))
        found, above, places = _present(nodes, parents)
        return cls(tokens, max_nodes, bool(finite), found, above, [places[node] for node in path], rows, moved)


def _present(nodes: list[int], parents: list[int]) -> tuple[list[int], list[int], dict[int, int]]:
    """The nodes that were drafted (not -1) and whose parents were, their new parents, and old node -> new node."""
    places: dict[int, int] = {-1: -1}
    found: list[int] = []
    above: list[int] = []
    for old, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
        if node >= 0 and parent in places:
            places[old] = len(found)
            found.append(node)
            above.append(places[parent])
    return found, above, places
