"""Host memory of captured steps: the control rows that a step is started with, and the report rows that it ends with.

There are two of each: while a step is in flight, the next one is written. On a GPU all of it is pinned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faircopy import rng
from faircopy.capture import GraphState
from faircopy.kernels.gpu.logprobs import LogprobReport
from faircopy.kernels.gpu.records import EMPTY_SLOT, Control, control_columns
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.rows import page_grid
from faircopy.types import Sequence


class HostBuffers:
    """Sends control rows to the device, and says where reports arrive."""

    def __init__(self, tables: BlockTables, control: torch.Size, cuda: bool) -> None:
        """control: shape of the control rows of all batch slots."""
        self._tables, self._cuda = tables, cuda
        self._controls = [self._zeros(control) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._reports: dict[tuple[int, int, int], tuple[Tensor, LogprobReport]] = {}
        self._number = self._zeros(torch.Size([1]))
        self._turn = 0  # which of the two is used

    def next_turn(self) -> None:
        """A step is about to be started: it uses the buffers that the step in flight does not."""
        self._turn = 1 - self._turn

    def send_control(
        self, graph: GraphState, slots: dict[Sequence, int], max_nodes: list[int], new: Collection[Sequence]
    ) -> None:
        """Write the control rows of all batch slots of a graph, empty ones included. new: in their slots since now."""
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        control = self._controls[self._turn]
        table = control.numpy()[: graph.size]
        table[:, : Control.PAGES] = EMPTY_SLOT
        table[:, Control.PAGES :] = graph.scratch // graph.page
        if slots:
            rows, pages = _control_rows(slots, max_nodes, new), self._pages_of(slots, graph)
            where = [*slots.values()]
            table[where, : Control.PAGES], table[where, Control.PAGES : Control.PAGES + pages.shape[1]] = rows, pages
        graph.batch_slots.control.copy_(control[: graph.size], non_blocking=True)
        self._sent[self._turn] = self.mark()

    def report_of(self, graph: GraphState) -> tuple[Tensor, LogprobReport]:
        """Memory for what a step reports."""
        key = (graph.size, graph.k, self._turn)
        if key not in self._reports:
            logprobs = LogprobReport.empty(graph.size * (graph.k + 1), "cpu", pinned=self._cuda)
            self._reports[key] = (self._zeros(graph.out.shape), logprobs)
        return self._reports[key]

    def read(self, number: Tensor) -> int:
        """A number on the device, once everything started before has run."""
        self._number.copy_(number, non_blocking=True)
        done = self.mark()
        if done is not None:
            done.synchronize()
        return int(self._number)

    def mark(self) -> torch.cuda.Event | None:
        """An event behind everything started so far; None without a GPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _pages_of(self, slots: Iterable[Sequence], graph: GraphState) -> NDArray[np.int32]:
        return page_grid([self._tables.table(seq) for seq in slots], graph.scratch // graph.page)

    def _zeros(self, shape: torch.Size) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=self._cuda)


def _control_rows(slots: Iterable[Sequence], max_nodes: list[int], new: Collection[Sequence]) -> list[list[int]]:
    """What control rows hold before the page tables."""
    return [
        control_columns(seq in new, len(seq.tokens), seq.limit, nodes, seq.params.temperature, rng.mix(seq.seed))
        for seq, nodes in zip(slots, max_nodes, strict=True)
    ]
