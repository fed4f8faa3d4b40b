"""The contract for captured steps: the tensors one CUDA graph reads and writes, and what a drafter can do inside it.

Engine, captured steps (`replay`) and drafters lie above this module and know each other only through it: a drafter's
`capture` returns a CapturedDrafter, whose work reads and fills a GraphState.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faircopy.kernels.gpu.growth import FrontRows
from faircopy.kernels.gpu.logprobs import LogprobReport
from faircopy.kernels.gpu.packing import PackedRows
from faircopy.kernels.gpu.pages import (
    PATH,
    PageLane,
    PagePlan,
    TileList,
    block_length,
    chain_height,
    even_plan,
    packed_tree_plan,
    set_base,
    shared_height,
    tree_plan,
)
from faircopy.kernels.gpu.records import Control
from faircopy.kernels.gpu.sampler import RowSampling, SamplingSlots
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.gpu.suite import Suite
from faircopy.kernels.gpu.tree import TreeNodes
from faircopy.kernels.transfer import Field, HostInputs
from faircopy.kernels.tree_growth import Front
from faircopy.layout.base import LayerShape, Layout, Packed
from faircopy.layout.paged import PagedLayout, RowList
from faircopy.model.base import Model
from faircopy.model.capture_trial import capture_problem
from faircopy.model.fused import Fused
from faircopy.model.transformers_backend import TransformersModel
from faircopy.types import MOST_JOINING, Sequence

LANES_FROM = 4  # batch slots from which on Hopper's one launch for trees takes less time than the two of attention.py

PRETENDED = 32  # tokens of a prompt that stands for one of a sequence that joins
Work = Callable[[], None]  # part of a step without arguments, so that it can be captured
Plans = dict[tuple[int, int], PagePlan]  # by (window, group) of the layers


class HiddenStateReader(ABC):
    """The part of a captured drafter that reads the target's hidden states."""

    wants: tuple[int, ...]  # layers whose states it reads, see model.base.Taps
    most: int  # rows per batch slot that can be unread

    @abstractmethod
    def unread(self, seq: Sequence) -> int:
        """How many rows of a sequence are unread when it gets a batch slot."""

    @abstractmethod
    def assign(self, batch_slots: dict[Sequence, int]) -> None:
        """These sequences are in these batch slots from the next step on: load what the host knows of their states.

        What is stored of others stays as it is.
        """

    @abstractmethod
    def store(self, graph: GraphState, states: dict[int, Tensor]) -> None:
        """Keep the states of the rows that a step accepted, of the states of its batch slots' rows; captured."""

    @abstractmethod
    def read_prompts(self, graph: GraphState, states: dict[int, Tensor]) -> None:
        """Read the prompts of sequences that join, from the states of all rows of the step; captured."""

    @abstractmethod
    def pretend(self, length: int) -> None:
        """Let texts in all batch slots be this long, and all but their last tokens be read; for timing."""

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The tensors it keeps between steps, a row per batch slot. A trial run before capturing must leave them as
        they were."""


class CapturedDrafter(ABC):
    """A drafter that drafts inside captured steps, without the host."""

    variable_length = False  # true: it may find fewer nodes than allowed, -1 from there on, and rows are packed
    max_nodes: int | None = None  # nodes it can fill per sequence; None: any number
    latest: int | None = None  # tokens at the end of a text that it reads; None: all
    reads_hidden_states: HiddenStateReader | None = None  # None: it reads none

    @abstractmethod
    def plan_fill(self, graph: GraphState) -> Work:
        """Do what depends on shapes alone; the result fills the nodes in graph.inputs and is captured."""

    def tree_depth(self, k: int, room: int | None = None) -> int:
        """How many levels its trees of k nodes can have; 0: it drafts chains.

        room: more nodes than k that a tree may have before the surest k per tree are left.
        """
        return 0

    def ready(self, seq: Sequence) -> bool:
        """Whether it has read enough of the sequence to draft for it in a captured step."""
        return True

    def prompt_rows(self, seq: Sequence) -> int | None:
        """Rows that it reads of a sequence that joins in a captured step; None: the host must let it read."""
        return 0

    def prompt_inputs(self, graph: GraphState, count: int) -> PromptRows | None:
        """Room for this many such rows; None: it reads none."""
        return None

    def join(self, graph: GraphState, slots: dict[Sequence, int], rows: dict[Sequence, range]) -> int:
        """The next step reads the prompts of these sequences, which are in these batch slots: write what it reads, and
        return how many rows that is. rows: of the target's prompt rows those of each sequence."""
        return 0

    def commit(self, seq: Sequence, length: int, accepted: int, k: int) -> None:  # noqa: B027
        """After a step of k nodes behind the first `length` tokens of a sequence, `accepted` of them were accepted."""


def eager_because(model: Model, layout: Layout) -> str | None:
    """Why passes of this model over this cache cannot be part of a captured step; None: they can."""
    if not isinstance(layout, PagedLayout):
        return "the strategy's cache is not paged"
    if layout.suite is None:
        return f"there are no graphs on {model.device.type}"
    if isinstance(model, TransformersModel):
        return capture_problem(model)
    return None if isinstance(model, Fused) else f"the {model.backend} runs from the host"


class RowInputs:
    """Rows that the host writes before a graph is started: tokens, positions, KV slots, and the tiles that they attend
    in. Rows beyond those written write to the scratch page and belong to no tile."""

    def __init__(
        self, layout: PagedLayout, rows: int, seqs: int, more: Seq[Field] = (), beside: int | None = None
    ) -> None:
        """seqs: that the rows belong to at most. more: fields beside them.

        beside: rows of each batch slot, a chain, in whose pass they are; None: they have one of their own.
        """
        self._layout, self.seqs = layout, seqs
        heights = {shape.group: self._height(shape) for shape in layout.layers}
        shared = {shape.group: self._shared_height(beside, shape) for shape in layout.layers}
        found = {group: height for group, height in shared.items() if height is not None}
        self.one_launch = beside is not None and len(found) == len(heights)  # with the tiles of the batch slots
        self._heights = found if self.one_launch else heights
        self._inputs = HostInputs([*self._fields(rows, seqs), *more], layout.device)
        self.tensors = self._inputs.tensors

    def _height(self, shape: LayerShape) -> int:
        layout = self._layout
        return chain_height(shape.group, _widest(layout)[0], layout.itemsize, layout.tables.page, layout.device)

    def _shared_height(self, rows: int | None, shape: LayerShape) -> int | None:
        layout = self._layout
        if rows is None:
            return None
        return shared_height(rows, shape.group, *_widest(layout), layout.tables.page, layout.device)

    def _fields(self, rows: int, seqs: int) -> Iterator[Field]:
        yield Field("slots", torch.int64, (rows,), self._layout.scratch)
        yield Field("ids", torch.int32, (rows,), 0)
        yield Field("positions", torch.int32, (rows,), 0)
        for group, height in self._heights.items():
            tiles = rows // height + seqs
            yield Field(f"rows {group}", torch.int32, (tiles, height), -1)
            yield Field(f"ranges {group}", torch.int32, (tiles, 2), 0)
            yield Field(f"seqs {group}", torch.int32, (tiles,), 0)

    def write(self, listed: RowList, more: dict[str, NDArray[Any]] | None = None) -> None:
        """Bring these rows to the device, and what the fields beside them hold."""
        values: dict[str, NDArray[Any]] = {
            "slots": np.concatenate(listed.slots) if listed.slots else np.zeros(0, np.int64),
            "ids": np.array(listed.ids, np.int32),
            "positions": np.array(listed.positions, np.int32),
            **(more or {}),
        }
        for group, height in self._heights.items():
            tiles = TileList.cut(listed.pages, height)
            values |= {f"rows {group}": tiles.rows, f"ranges {group}": tiles.ranges, f"seqs {group}": tiles.seqs}
        self._inputs.write(values)

    def plans(self, tables: Tensor, reach: int) -> Plans:
        """How the rows attend, over page tables that reach this many tokens."""
        layers, page = self._layout.layers, self._layout.tables.page
        shortest = min((block_length(shape.head_dim, self._layout.itemsize) for shape in layers), default=1)

        def plan(group: int) -> PagePlan:
            rows, ranges, seqs = (self.tensors[f"{name} {group}"] for name in ("rows", "ranges", "seqs"))
            return PagePlan(rows, ranges, seqs, tables, page, -(-reach // shortest))

        return {(shape.window, shape.group): plan(shape.group) for shape in layers}


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of prompts that a step reads beside the rows of its batch slots, without logits.

    A sequence that joins gets a batch slot, whose first row is its last token. All tokens before that which are not
    cached are rows here. They attend by the page table in the batch slot's control row.
    """

    inputs: RowInputs
    plans: Plans
    count: int
    first: int  # rows that the pass has before them

    def write(self, listed: RowList, slots: Seq[int], more: dict[str, NDArray[Any]] | None = None) -> None:
        """Bring listed rows to the device. slots: of their sequences."""
        first = self.first
        lanes = [
            PageLane(slots[lane.seq], range(first + lane.rows[0], first + lane.rows[-1] + 1)) for lane in listed.pages
        ]
        self.inputs.write(replace(listed, pages=lanes), more)

    def pretend(self, scratch: int, context: int) -> None:
        """Prompts of about PRETENDED tokens in the first batch slots; their keys are written to `scratch`. context: the
        model's, in which each of them fits."""
        prompts = min(self.inputs.seqs, -(-self.count // PRETENDED))
        count = min(self.count, prompts * (context - 1))
        ends = [count * n // prompts for n in range(prompts + 1)]
        parts = [range(first, end) for first, end in pairwise(ends)]
        positions = [row - part.start for part in parts for row in part]
        pages = [PageLane(slot, part) for slot, part in enumerate(parts) if part]
        listed = RowList([0] * count, positions, [np.full(count, scratch)], pages=pages)
        self.write(listed, range(len(parts)))

    def clear(self) -> None:
        """No rows at all."""
        self.inputs.write(RowList())

    def behind(self, packed: Packed) -> Packed:
        """The rows of a pass, and these behind them."""
        tensors = self.inputs.tensors

        def joined(name: str, before: Tensor) -> Tensor:
            return torch.cat([before, tensors[name].to(before.dtype)])

        plans = {key: self._plan_behind(plan, self.plans[key]) for key, plan in packed.plans.items()}
        ids, positions, slots = (joined(name, getattr(packed, name)) for name in ("ids", "positions", "slots"))
        return Packed(ids, positions, slots, plans, packed.wanted, [], [], [])

    def _plan_behind(self, plan: PagePlan, own: PagePlan) -> PagePlan:
        return plan.with_tiles(own) if self.inputs.one_launch else replace(plan, beside=own)

    def alone(self) -> Packed:
        """These rows as a pass of their own."""
        tensors = self.inputs.tensors
        none = torch.zeros(0, dtype=torch.int64, device=tensors["ids"].device)
        return Packed(tensors["ids"], tensors["positions"], tensors["slots"], self.plans, none, [], [], [])


@dataclass(frozen=True, slots=True)
class GraphState:
    """The tensors of one graph: the batch slots it advances and everything its passes read."""

    batch_slots: BatchSlots
    sampling: SamplingSlots
    inputs: StepInputs
    out: Tensor  # [B, columns] report rows, see records.ReportColumns
    logprobs: LogprobReport  # of B (k + 1) rows
    suite: Suite
    page: int
    scratch: int
    trees: TreeNodes | None = None  # where drafts are trees
    shared: SharedNodes | None = None  # where all trees share their nodes
    prompts: PromptRows | None = None  # where sequences join: what the target reads of their prompts
    drafter_prompts: PromptRows | None = None  # and the drafter, if it reads anything
    unread: int = 0  # rows per batch slot that a reader of hidden states has room for in this step

    @property
    def size(self) -> int:
        """Batch slots."""
        return int(self.inputs.ids.shape[0])

    @property
    def k(self) -> int:
        """Draft nodes per batch slot at most."""
        return int(self.inputs.ids.shape[1]) - 1

    def verify_rows(self, layout: PagedLayout) -> Packed:
        """The last token and all nodes of every batch slot, as chains."""
        return self.pack_rows(layout, self.k + 1, *self._verified())

    def tree_rows(self, rows: PathRows) -> Packed:
        """The last token and all nodes of every batch slot, as trees."""
        return self.pack(self.k + 1, *self._verified(), rows.plans)

    def catch_up_rows(self, layout: PagedLayout) -> Packed:
        """The last two tokens of every batch slot, which a draft model may not have read yet. Logits of the second."""
        ids, positions, slots = (line.view(-1) for line in self.inputs.before)
        packed = self.pack_rows(layout, 2, ids, positions, slots)
        return replace(packed, wanted=torch.arange(1, 2 * self.size, 2, device=ids.device))

    def node_rows(self, layout: PagedLayout, node: int) -> Packed:
        """One node of every batch slot."""
        positions, slots = self.inputs.columns[0, node + 1], self.inputs.columns[1, node + 1]
        return self.pack_rows(layout, 1, self.inputs.ids[:, node + 1], positions, slots)

    def pack_rows(self, layout: PagedLayout, rows: int, ids: Tensor, positions: Tensor, slots: Tensor) -> Packed:
        """`rows` rows of every batch slot, read from these tensors; planned for all pages a sequence can have."""
        tables, reach = self._tables
        plans = {
            (shape.window, shape.group): even_plan(self.size, rows, tables, self.page, reach, *_widest(layout))
            for shape in layout.layers
        }
        return self.pack(rows, ids, positions, slots, plans)

    def path_rows(self, layout: PagedLayout, rows: int, paths: Tensor | None = None, depth: int = PATH) -> PathRows:
        """`rows` rows of every batch slot behind the text, each with a path of its own [B, R, PATH].

        depth: nodes on a path at most, where all paths are those of a tree whose rows these are.
        """
        paths = self.inputs.ids.new_zeros(self.size, rows, PATH) if paths is None else paths
        tables, reach = self._tables
        most = depth if self.size >= LANES_FROM else PATH
        plans = {
            (shape.window, shape.group): tree_plan(paths, tables, self.page, reach, shape.group, *_widest(layout), most)
            for shape in layout.layers
        }
        block = max((block_length(shape.head_dim, layout.itemsize) for shape in layout.layers), default=1)
        return PathRows(paths, plans, block)

    def level_rows(self, layout: PagedLayout, rows: int) -> LevelRows:
        """`rows` rows of every batch slot for one level of draft trees."""
        planned = self.path_rows(layout, rows)
        front = FrontRows.over(planned.paths)
        ids = torch.zeros_like(front.positions).view(-1)
        packed = self.pack(rows, ids, front.positions.view(-1), front.slots.view(-1), planned.plans)
        return LevelRows(self, planned, front, packed)

    def first_rows(self, packed_rows: PackedRows, layout: PagedLayout, rows: int) -> Packed:
        """The first `rows` packed rows; which sequence each belongs to is known on the device alone."""
        tables, reach = self._tables
        plans = {
            (shape.window, shape.group): packed_rows.plan(tables, self.page, reach, *_widest(layout))
            for shape in layout.layers
        }
        wanted = torch.arange(rows, device=packed_rows.ids.device)
        ids, positions, slots = (part[:rows] for part in (packed_rows.ids, packed_rows.positions, packed_rows.slots))
        return Packed(ids, positions, slots, plans, wanted, [], [], [])

    def shared_rows(self, layout: PagedLayout, shared: SharedNodes, depth: int) -> SharedRows:
        """The last token and the nodes that were left of every batch slot's tree, end to end. depth: see path_rows."""
        tables, reach = self._tables
        plans = {
            (shape.window, shape.group): packed_tree_plan(
                self.size, self.k + 1, shared.rows, tables, self.page, reach, shape.group, *_widest(layout), depth
            )
            for shape in layout.layers
        }
        block = max((block_length(shape.head_dim, layout.itemsize) for shape in layout.layers), default=1)
        table, rows = shared.table, shared.rows
        wanted = torch.arange(rows, device=table.ids.device)
        packed = Packed(table.ids[:rows], table.positions[:rows], table.slots[:rows], plans, wanted, [], [], [])
        return SharedRows(shared, plans, block, packed)

    @property
    def rows(self) -> int:
        """Rows of its batch slots."""
        return self.size * (self.k + 1) if self.shared is None else self.shared.rows

    def prompt_rows(
        self, layout: PagedLayout, count: int, first: int = 0, more: Seq[Field] = (), *, chains: bool = True
    ) -> PromptRows:
        """Room for this many rows of prompts, behind the `first` rows of a pass over all batch slots. more: fields
        beside them. chains: those of a batch slot are one."""
        tables, reach = self._tables
        beside = first // self.size if first and chains else None
        inputs = RowInputs(layout, count, min(self.size, MOST_JOINING), more, beside)
        return PromptRows(inputs, inputs.plans(tables, reach), count, first)

    def row_sampling(self, rows: int) -> RowSampling:
        """Room for what this many rows are chosen with."""
        return RowSampling.empty(self.sampling, rows, self.k)

    def pack(self, rows: int, ids: Tensor, positions: Tensor, slots: Tensor, plans: Plans) -> Packed:
        wanted = torch.arange(self.size * rows, device=ids.device)
        places = [range(n * rows, (n + 1) * rows) for n in range(self.size)]
        return Packed(ids, positions, slots, plans, wanted, [1] * self.size, [range(rows - 1)] * self.size, places)

    def _verified(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs.ids.view(-1), self.inputs.positions.view(-1), self.inputs.slots.view(-1)

    @property
    def _tables(self) -> tuple[Tensor, int]:
        """Page tables, and how many tokens they reach."""
        tables = self.batch_slots.control[:, Control.PAGES :]
        return tables, tables.shape[1] * self.page


@dataclass(frozen=True, slots=True)
class SharedNodes:
    """The nodes of a step that all trees share: the surest ones are left and packed end to end."""

    nodes: int  # in all
    table: PackedRows
    values: Tensor  # [B, k] float32: how sure the drafter is of each path

    @classmethod
    def empty(cls, size: int, room: int, nodes: int, device: torch.device) -> SharedNodes:
        values = torch.zeros(size, room, dtype=torch.float32, device=device)
        return cls(nodes, PackedRows.empty(size, room + 1, device), values)

    @property
    def rows(self) -> int:
        """The last token of every batch slot, and the nodes."""
        return int(self.values.shape[0]) + self.nodes


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Packed rows of trees, planned once; where they lie is written before each pass."""

    shared: SharedNodes
    plans: Plans
    block: int  # keys per block, of the layer that has most
    packed: Packed

    def place(self, graph: GraphState, trees: TreeNodes) -> None:
        graph.suite.pack(graph.batch_slots, graph.inputs, self.shared.table, graph.scratch)
        for plan in self.plans.values():
            graph.suite.pack_paths(self.shared.table, trees, plan, self.block)
            if plan.lanes is not None:
                graph.suite.place_lanes(plan, self.shared.table.positions)


@dataclass(frozen=True, slots=True)
class PathRows:
    """Rows of trees, planned once; the lengths of the texts and the paths are set before each pass."""

    paths: Tensor  # [B, R, PATH] int32
    plans: Plans
    block: int  # keys per block, of the layer that has most

    def place(self, graph: GraphState, trees: TreeNodes) -> None:
        """Rows are those of trees whose nodes have been placed."""
        for plan in self.plans.values():
            set_base(plan, trees.base, self.block)
            if plan.lanes is not None:
                graph.suite.place_lanes(plan, graph.inputs.positions.view(-1))


@dataclass(frozen=True, slots=True)
class LevelRows:
    """Rows of one level of draft trees, behind the text; planned once."""

    graph: GraphState
    planned: PathRows
    front: FrontRows
    packed: Packed  # reads what `front` says

    def placed(self, front: Front, before: LevelRows | None, level: int, expanded: int) -> Packed:
        """The rows of a front at this depth, behind those of the level before; see kernels.gpu.growth.place_front."""
        graph, paths = self.graph, None if before is None else before.planned.paths
        for plan in self.planned.plans.values():
            graph.suite.place_front(
                graph.batch_slots, front.above, self.front, paths, plan, self.planned.block, level, expanded,
                graph.page, graph.scratch,
            )  # fmt: skip
        return self.packed.with_ids(front.tokens.view(-1))


def _widest(layout: PagedLayout) -> tuple[int, int]:
    """The largest head size, which has the shortest key blocks, so the most of them, and the bytes of a number.

    Layers share their plans.
    """
    return max(shape.head_dim for shape in layout.layers), layout.itemsize
