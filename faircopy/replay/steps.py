"""Captured steps as functions without arguments: everything that depends on shapes is decided before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from faircopy.capture import CapturedDrafter, GraphState, SharedNodes, Work
from faircopy.kernels.gpu.packing import PackedRows
from faircopy.kernels.gpu.sampler import RowSampling
from faircopy.kernels.gpu.tree import TreeNodes
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Model, Taps

# Numbers of packed rows that graphs are made for.
ROWS = (8, 16, 32, 48, 64, 96, 128, 144, 160, 192, 256, 384, 512, 768, 1024, 1536, *(2048 << n for n in range(6)))


class Step(Protocol):
    """A step that can be started again and again."""

    captured_rows: set[int]  # numbers of packed rows that graphs exist for; empty if rows are not packed

    def start(self) -> int:
        """Start it; returns how many rows the target computes."""

    def warm(self) -> None:
        """Capture now what would be captured when it is first needed."""


class Steps:
    """Makes the steps of one target and drafter."""

    def __init__(self, model: Model, layout: PagedLayout, drafter: CapturedDrafter) -> None:
        self._model, self._layout, self._drafter = model, layout, drafter

    def chains(self, graph: GraphState) -> Work:
        """One whole step with a chain per batch slot."""
        suite, inputs, batch = graph.suite, graph.inputs, graph.batch_slots
        packed, fill = graph.verify_rows(self._layout), self._fill(graph)
        sampling = graph.row_sampling(packed.size)

        def run() -> None:
            suite.prepare(batch, inputs, graph.page, graph.scratch)
            fill()
            suite.describe(batch, inputs, sampling)
            logits, states = self._forward(graph, packed)
            chosen = _choose(graph, logits, inputs.temperatures.view(-1), inputs.keys.view(-1), sampling)
            suite.accept(batch, inputs, chosen, graph.out)
            suite.count_tokens(graph.sampling, graph.out, graph.k + 1)
            self._store(graph, states)

        return torch.no_grad()(run)

    def trees(self, graph: GraphState, trees: TreeNodes) -> Work:
        """One whole step with a tree per batch slot; the keys of its accepted path are moved into line."""
        suite, inputs, batch = graph.suite, graph.inputs, graph.batch_slots
        rows = graph.path_rows(self._layout, graph.k + 1, trees.paths, trees.deepest)
        packed, fill = graph.tree_rows(rows), self._fill(graph)
        sampling = graph.row_sampling(packed.size)

        def run() -> None:
            suite.prepare(batch, inputs, graph.page, graph.scratch)
            fill()
            suite.place_nodes(batch, inputs, trees)
            rows.place(graph, trees)
            suite.describe(batch, inputs, sampling, paths=trees.paths)
            logits, states = self._forward(graph, packed)
            chosen = _choose(graph, logits, inputs.temperatures.view(-1), inputs.keys.view(-1), sampling)
            suite.accept_tree(batch, inputs, trees, chosen, graph.out)
            suite.count_tokens(graph.sampling, graph.out, graph.k + 1)
            suite.compact(batch, trees, graph.out, graph.page)
            self._store(graph, states)

        return torch.no_grad()(run)

    def shared_trees(self, graph: GraphState, trees: TreeNodes, shared: SharedNodes) -> Work:
        """One whole step with a tree per batch slot, of whose nodes the surest of all trees are verified."""
        suite, inputs, batch, table = graph.suite, graph.inputs, graph.batch_slots, shared.table
        rows, fill = graph.shared_rows(self._layout, shared, trees.deepest), self._fill(graph)
        sampling = graph.row_sampling(table.ids.shape[0])

        def run() -> None:
            suite.prepare(batch, inputs, graph.page, graph.scratch)
            fill()
            suite.place_nodes(batch, inputs, trees)
            rows.place(graph, trees)
            suite.describe(batch, inputs, sampling, places=table.rows, paths=trees.paths)
            logits, states = self._forward(graph, rows.packed)
            temperatures, keys = table.temperatures[: shared.rows], table.keys[: shared.rows]
            chosen = _choose(graph, logits, temperatures, keys, sampling.part(shared.rows))
            suite.accept_tree(batch, inputs, trees, chosen, graph.out, table.starts)
            suite.count_tokens(graph.sampling, graph.out, graph.k + 1)
            suite.compact(batch, trees, graph.out, graph.page)
            self._store(graph, states)

        return torch.no_grad()(run)

    def draft(self, graph: GraphState, packed_rows: PackedRows) -> Work:
        """The first graph of a step in two: draft, and pack the rows of the nodes that were found."""
        suite, fill = graph.suite, self._fill(graph)

        def run() -> None:
            suite.prepare(graph.batch_slots, graph.inputs, graph.page, graph.scratch)
            fill()
            suite.pack(graph.batch_slots, graph.inputs, packed_rows, graph.scratch)

        return torch.no_grad()(run)

    def verify(self, graph: GraphState, packed_rows: PackedRows, rows: int) -> Work:
        """The second graph of a step in two: run `rows` packed rows through the target and accept."""
        suite, packed = graph.suite, graph.first_rows(packed_rows, self._layout, rows)
        sampling = graph.row_sampling(packed_rows.ids.shape[0])

        def run() -> None:
            suite.describe(graph.batch_slots, graph.inputs, sampling, places=packed_rows.rows)
            logits = self._model.forward(packed, self._layout)
            temperatures, keys = packed_rows.temperatures[:rows], packed_rows.keys[:rows]
            chosen = _choose(graph, logits, temperatures, keys, sampling.part(rows))
            suite.accept(graph.batch_slots, graph.inputs, chosen, graph.out, packed_rows.starts)
            suite.count_tokens(graph.sampling, graph.out, graph.k + 1)

        return torch.no_grad()(run)

    def _fill(self, graph: GraphState) -> Work:
        return self._drafter.plan_fill(graph) if graph.k else lambda: None

    def _forward(self, graph: GraphState, packed: Packed) -> tuple[Tensor, dict[int, Tensor]]:
        """The target's pass, over prompts of sequences that join too, and the hidden states the drafter wants."""
        reader = self._drafter.reads_hidden_states
        rows = packed if graph.prompts is None else graph.prompts.behind(packed)
        if reader is None:
            return self._model.forward(rows, self._layout), {}
        taps = Taps(reader.wants)
        return self._model.forward(rows, self._layout, taps), taps.states

    def _store(self, graph: GraphState, states: dict[int, Tensor]) -> None:
        reader = self._drafter.reads_hidden_states
        if reader is None:
            return
        reader.store(graph, {layer: rows[: graph.rows] for layer, rows in states.items()})
        if graph.prompts is not None and graph.k:
            reader.read_prompts(graph, states)


def _choose(graph: GraphState, logits: Tensor, temperatures: Tensor, keys: Tensor, sampling: RowSampling) -> Tensor:
    """The target's token for each row, and the log probabilities that are wanted."""
    chosen = graph.suite.pick(logits, temperatures, keys, strict=True, sampling=sampling)
    graph.suite.report_logprobs(logits, chosen, sampling.logprobs, sampling.places, graph.logprobs)
    return chosen


class OneGraphStep:
    """A step in one graph, which always computes the same number of rows."""

    def __init__(self, work: Work, rows: int) -> None:
        self._work, self._rows = work, rows
        self.captured_rows: set[int] = set()

    def start(self) -> int:
        self._work()
        return self._rows

    def warm(self) -> None:
        """There is nothing else to capture."""


class TwoGraphStep:
    """A step in two graphs: draft and pack, read the number of rows, then verify that many."""

    def __init__(self, draft: Work, count: Callable[[], int], make: Callable[[int], Work], most: int) -> None:
        self._draft, self._count, self._make = draft, count, make
        self._buckets = [rows for rows in ROWS if rows < most] + [most]
        self._verify: dict[int, Work] = {}  # second graphs by their number of rows
        self.captured_rows: set[int] = set()

    def start(self) -> int:
        self._draft()
        rows = bucket_for(self._count(), self._buckets, self._verify)
        if rows not in self._verify:
            self._add(rows)
            self._draft()  # again: the trial run before capturing has packed other rows
        self._verify[rows]()
        return rows

    def warm(self) -> None:
        """Make all second graphs; the largest first, so that the others reuse its memory."""
        for rows in reversed(self._buckets):
            if rows not in self._verify:
                self._add(rows)

    def _add(self, rows: int) -> None:
        self._verify[rows] = self._make(rows)
        self.captured_rows.add(rows)


def bucket_for(size: int, buckets: list[int], captured: Iterable[int]) -> int:
    """The bucket that size runs in: a captured graph less than twice as large rather than a new one that fits."""
    fitting = next(bucket for bucket in buckets if bucket >= size)
    return min((known for known in captured if fitting <= known < 2 * fitting), default=fitting)
