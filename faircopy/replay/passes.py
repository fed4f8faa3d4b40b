"""Passes from the host as CUDA graphs: a graph per number of rows, into whose inputs the host writes a batch's rows.

Whatever captured steps do not take (prompts, drafters and verifiers on the host) runs pass by pass. Launched kernel by
kernel a pass costs the host more time than the device; as a graph it is one copy and one launch. Rows beyond a batch's
own write to the scratch page and are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faircopy.capture import RowInputs
from faircopy.kernels.gpu.pages import GRAPH_ROWS, SPAN
from faircopy.kernels.gpu.tables import TILE_ROWS
from faircopy.kernels.transfer import Field
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout, RowList
from faircopy.model.base import Model, Taps
from faircopy.model.trial import tree_scene
from faircopy.types import Batch, Draft

# Rows of graphs; larger passes take the device longer than the host.
ROWS = (16, 32, 64, 96, 128, 144, 160, 192, 256, 320, 384, 512, 768, GRAPH_ROWS)
UNTIMED = 384  # rows of a pass with prompts and running texts while nothing is known of its time
WANTED = 128  # rows whose logits a graph computes at most
LARGER = tuple(rows for rows in TILE_ROWS if rows > WANTED)  # of passes that are launched kernel by kernel, or logits
UNCAPTURED = 2 * GRAPH_ROWS  # rows of a pass without a graph
MOST_WANTED = 1024  # rows whose logits are rehearsed at most: they take memory


class CapturedPasses:
    """Runs the passes of one model over one cache, as graphs where they fit."""

    def __init__(
        self,
        model: Model,
        layout: PagedLayout,
        max_seqs: int,
        wants: tuple[int, ...] = (),
        pool: Any = None,
        most_rows: int = TILE_ROWS[-1],
        most_wanted: int = MOST_WANTED,
    ) -> None:
        """pool: memory of graphs, which may be shared with others that are replayed on the same stream.

        most_rows: of a pass, and most_wanted: of those the rows whose logits are computed: no more is rehearsed, for
        it takes memory.
        """
        self._model, self._layout, self._wants = model, layout, wants
        self._most_rows, self._most_wanted = most_rows, most_wanted
        self._tables = _Tables(layout, max_seqs, model.context)
        self._graphs: dict[int, _PassGraph] = {}
        self._pool = pool
        self.times: dict[int, float] = {}  # rows -> seconds, of the graphs that were warmed

    def run(
        self, batch: Batch, draft: Draft, done: int, ids: Tensor | None
    ) -> tuple[Packed, Tensor, dict[int, Tensor]]:
        """The packed rows, the logits of the wanted ones and the hidden states of all. ids: see Runner.forward."""
        listed = self._layout.list_rows(batch, draft, done)
        size = self._size(listed, batch)
        if size is not None:
            return self._graph(size).run(listed, ids)
        packed = self._layout.place(listed, like_graphs=True).with_ids(ids)
        return packed, *self._forward(packed, self._layout)

    @torch.no_grad()
    def _forward(self, packed: Packed, layout: PagedLayout) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass kernel by kernel."""
        taps = Taps(self._wants)
        return self._model.forward(packed, layout, *([taps] if self._wants else [])), taps.states

    def warm(self) -> None:
        """Capture all graphs now, the largest first, so that the others reuse its memory, and time them."""
        for rows in sorted(self._sizes(), reverse=True):
            self.times[rows] = self._graph(rows).measure()
        if self._pool is not None and self._most_rows > GRAPH_ROWS:
            # its kernels are loaded now, not by the first request with a long prompt
            self._make(min(UNCAPTURED, self._most_rows))

    def rehearse(self) -> None:
        """Make every launch once, those of passes without a graph too; for kernels that are compiled ahead."""
        for rows in self._sizes():
            self._make(rows)
        for rows in sorted({min(rows, self._most_rows) for rows in LARGER}):
            self._make(rows, wanted=min(rows, self._most_wanted))
        room = self._model.context - 1  # of a text with a node behind it: models may know no later position
        for context in {min(room, SPAN // 2), min(room, SPAN + 1)} - {0} if self._wants else ():
            layout, packed = tree_scene(self._model, context, self._tables.page)  # heads draft trees in eager steps too
            self._forward(packed, layout)

    def mixed_step_rows(self, step_ms: float | None) -> int:
        """Rows of a step in which texts go on and prompts are read: the most of a pass that takes no longer."""
        if not self.times:
            return UNTIMED
        allowed = 2.5 * min(self.times.values()) if step_ms is None else step_ms / 1e3
        return max((rows for rows, taken in self.times.items() if taken <= allowed), default=min(self.times))

    def _sizes(self) -> Iterator[int]:
        context = self._model.context * self._tables.max_seqs
        return (rows for n, rows in enumerate(ROWS) if n == 0 or ROWS[n - 1] < context)

    def _size(self, listed: RowList, batch: Batch) -> int | None:
        """The graph that takes these rows; None: they run kernel by kernel."""
        trees = any(len(lane.path) or lane.first for lane in listed.pages)
        if trees or len(listed.wanted) > WANTED or len(batch) > self._tables.max_seqs:
            return None
        return next((rows for rows in ROWS if len(listed.ids) <= rows), None)

    def _graph(self, rows: int) -> _PassGraph:
        if rows not in self._graphs:
            self._graphs[rows] = self._make(rows, self._pool)
        return self._graphs[rows]

    def _make(self, rows: int, pool: Any = None, wanted: int | None = None) -> _PassGraph:
        """Without a pool nothing is captured. wanted: rows whose logits are computed at most; None: WANTED."""
        most = WANTED if wanted is None else wanted
        return _PassGraph(self._model, self._layout, self._tables, rows, self._wants, pool, most)


class _Tables:
    """What all graphs of a model share: the page tables of a batch."""

    def __init__(self, layout: PagedLayout, max_seqs: int, context: int) -> None:
        self.max_seqs, self.page = max_seqs, layout.tables.page
        self.pages = layout.tables.pages_for(context)
        self.scratch_page = layout.scratch // self.page


class _PassGraph:
    """A pass over a fixed number of rows."""

    def __init__(
        self, model: Model, layout: PagedLayout, tables: _Tables, rows: int, wants: tuple[int, ...], pool: Any,
        wanted: int,
    ) -> None:  # fmt: skip
        """wanted: rows whose logits are computed at most; of no more rows than that all are."""
        self._model, self._layout, self._tables, self._rows, self._wants = model, layout, tables, rows, wants
        self._most_wanted = wanted
        self._inputs = RowInputs(layout, rows, tables.max_seqs, self._more_fields())
        self._packed = self._pack()
        self._write(RowList())
        self._replay = self._capture(pool)

    @torch.no_grad()
    def run(self, listed: RowList, ids: Tensor | None) -> tuple[Packed, Tensor, dict[int, Tensor]]:
        self._write(listed)
        if ids is not None:
            self._inputs.tensors["ids"][: len(ids)].copy_(ids)
        self._replay()
        count, inputs = len(listed.ids), self._inputs.tensors
        packed = Packed(
            inputs["ids"][:count], inputs["positions"][:count], inputs["slots"][:count], {},
            inputs["wanted"][: len(listed.wanted)], listed.fed, listed.nodes, listed.rows,
        )  # fmt: skip
        self._layout.watch(self._healthy[:count])
        # states outlive the pass, and the next one writes over these
        return packed, self._wanted_logits(listed), {n: rows[:count].clone() for n, rows in self._states.items()}

    def _wanted_logits(self, listed: RowList) -> Tensor:
        count = len(listed.wanted)
        first = self._rows > self._most_wanted or listed.wanted == list(range(count))
        return self._logits[:count] if first else self._logits[self._inputs.tensors["wanted"][:count]]

    def measure(self) -> float:
        """Seconds that one pass of padding rows takes, the best of three."""
        taken = []
        for _ in range(3):
            _wait(self._model.device)
            begin = time.perf_counter()
            self._replay()
            _wait(self._model.device)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    def _more_fields(self) -> list[Field]:
        most, tables = min(self._rows, self._most_wanted), self._tables  # of few rows all logits are computed
        return [
            Field("wanted", torch.int64, (most,), 0),
            Field("tables", torch.int32, (tables.max_seqs, tables.pages), tables.scratch_page),
        ]

    def _write(self, listed: RowList) -> None:
        pages = np.zeros((0, 0), np.int32) if listed.grid is None else listed.grid
        more: dict[str, NDArray[Any]] = {
            "wanted": np.array(listed.wanted, np.int64),
            "tables": pages[:, : self._tables.pages],  # a draft model's context may be shorter
        }
        self._inputs.write(listed, more)

    def _pack(self) -> Packed:
        inputs, reach = self._inputs.tensors, self._tables.pages * self._tables.page
        wanted = (
            inputs["wanted"] if self._rows > self._most_wanted else torch.arange(self._rows, device=self._model.device)
        )
        plans = self._inputs.plans(inputs["tables"], reach)
        return Packed(inputs["ids"], inputs["positions"], inputs["slots"], plans, wanted, [], [], [])

    @torch.no_grad()
    def _capture(self, pool: Any) -> Any:
        """Run once, which compiles what is missing, then record; without a GPU, the pass itself."""
        self._pass()
        if pool is None:
            return self._pass
        torch.cuda.synchronize(self._model.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._pass()
        return graph.replay

    @torch.no_grad()
    def _pass(self) -> None:
        taps = Taps(self._wants)
        self._logits = self._model.forward(self._packed, self._layout, *([taps] if self._wants else []))
        assert self._layout.healthy is not None, "every pass checks its states"
        self._healthy, self._states = self._layout.healthy, taps.states


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
