"""The graphs of captured steps: which there are, which one a step runs in, and how each is made, tried and timed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from faircopy.capture import CapturedDrafter, GraphState, SharedNodes, Work
from faircopy.costs import Joining
from faircopy.draft_length import Room
from faircopy.kernels.gpu.launch import compiling_ahead
from faircopy.kernels.gpu.logprobs import LogprobReport
from faircopy.kernels.gpu.packing import PackedRows
from faircopy.kernels.gpu.pages import PATH
from faircopy.kernels.gpu.records import Control, ReportColumns, control_columns
from faircopy.kernels.gpu.sampler import SamplingSlots
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.gpu.tables import TILE_ROWS
from faircopy.kernels.gpu.tree import TreeNodes
from faircopy.layout.base import LayerShape
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Model
from faircopy.replay.host_buffers import HostBuffers
from faircopy.replay.steps import OneGraphStep, Step, Steps, TwoGraphStep, bucket_for

TILE = 128  # query rows times heads per key head that a captured step verifies in one tile
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # batch slots that graphs are made for
TIMED_TOKENS = 512  # of the texts that steps are timed with
FEW_ROWS = 64  # up to here more rows cost the target no more time: they are not packed
FEW_READ = 128  # the same of a draft head's reading, which is a small share of a step: no graphs are made for fewer
# Steps in which sequences join: rows of prompts, at least, beside those of the batch slots, and nodes per slot at most.
JOINING = {40: 5, 160: 2}
JOINING_BUCKETS = (8, 16, 32, 64, 128, 256)  # their batch slots: fewer sizes, since each is a graph more
UNTIMED = 256  # rows of prompts that are taken to cost as much as a step, where steps were not timed
LIKELY = 0.7  # acceptance that is assumed where two numbers of nodes are compared
OWN_ROWS = 192  # of their batch slots at most, if that leaves a node for each: more would need larger tiles


class GraphKey(NamedTuple):
    """Steps with the same key are replays of one graph, or of two (TwoGraphStep)."""

    size: int  # batch slots
    k: int  # draft nodes per batch slot
    prompts: int = 0  # rows of the prompts of sequences that join
    unread: int = 0  # rows per batch slot that a draft head reads; 0: as many as a batch slot can hold

    @property
    def rows(self) -> int:
        return self.size * (self.k + 1) + self.prompts


def joining_key(size: int, k: int, rows: int, captured: Collection[int]) -> GraphKey | None:
    """The smallest graph for this many batch slots and rows of prompts, where k nodes are wanted; None: too many rows.

    captured: numbers of nodes that graphs are made for; empty: any.
    """
    for least, most in JOINING.items():
        nodes = _nodes_beside(k, min(most, max(1, OWN_ROWS // size - 1)), captured)
        own = size * (nodes + 1)
        found = GraphKey(size, nodes, next((n for n in TILE_ROWS if n >= own + least), own + least) - own)
        if rows <= found.prompts:
            return found
    return None


def _nodes_beside(k: int, most: int, captured: Collection[int]) -> int:
    """Nodes per batch slot where k are wanted and `most` allowed; if any are wanted some, more than `most` if need be:
    a drafter that is on has to read in every step."""
    known = [nodes for nodes in captured if nodes]
    if k == 0 or not known:
        return min(k, most)
    return max((nodes for nodes in known if nodes <= min(k, most)), default=min(known))


def likely_tokens(k: int) -> float:
    """Tokens that a step of k nodes writes for each sequence, of a drafter of which nothing is known."""
    return sum(LIKELY**place for place in range(k + 1))


class StepGraphs:
    """Owns the graphs of captured steps of one target and drafter."""

    def __init__(
        self,
        model: Model,
        layout: PagedLayout,
        drafter: CapturedDrafter,
        slots: BatchSlots,
        sampling: SamplingSlots,
        host: HostBuffers,
        max_nodes: int,
        *,
        pack_rows: bool,
        room: Room,
        pool: Any = None,
    ) -> None:
        """slots, sampling: of all batch slots, which graphs use a part of. The rest: see CapturedRunner."""
        assert layout.suite is not None, "captured steps are made of kernels"
        self._model, self._layout, self._drafter = model, layout, drafter
        self._slots, self._sampling, self._host = slots, sampling, host
        self._suite, self._cuda, self._pool = layout.suite, model.device.type == "cuda", pool
        self._steps, self._room = Steps(model, layout, drafter), room
        self._packs = pack_rows and drafter.variable_length and drafter.reads_hidden_states is None
        num_slots = len(slots.control)
        self.buckets = [size for size in BUCKETS if size < num_slots] + [num_slots]
        self._joining_buckets = [size for size in JOINING_BUCKETS if size < num_slots] + [num_slots]
        self.max_nodes = min(max_nodes, _most_nodes(drafter, layout))
        self.times: dict[tuple[int, int], float] = {}  # (batch slots, k) -> seconds of the steps that were warmed
        self.joining_times: dict[GraphKey, float] = {}  # of those that read prompts, with as many as they have room for
        self._prices: dict[tuple[int, int, int], float | None] = {}  # of joining_price
        self._made: dict[GraphKey, tuple[GraphState, Step]] = {}
        self._warmed: list[int] = []  # numbers of nodes that all graphs exist for
        self._alive: list[Work] = []  # what graphs read must outlive them

    @property
    def keys(self) -> set[GraphKey]:
        """Of all graphs made so far."""
        return {*self._made}

    @property
    def captured_sizes(self) -> dict[tuple[int, int], set[int]]:
        """(batch slots, k) of all graphs of steps that can follow any other; of steps in two graphs, the numbers of
        rows of the second."""
        return {key[:2]: set(step.captured_rows) for key, (_, step) in self._made.items() if key == GraphKey(*key[:2])}

    @property
    def joining_costs(self) -> dict[tuple[int, int], list[Joining]]:
        """The warmed steps that read prompts, by batch slots and the nodes wanted."""
        found: dict[tuple[int, int], list[Joining]] = {}
        for size, k, rows in product(self._joining_buckets, self._warmed, (1, self.longest_joining)):
            key = joining_key(size, k, rows, self._warmed)
            if key is not None and key in self.joining_times:
                found.setdefault((size, k), []).append(Joining(key.k, key.prompts, self.joining_times[key]))
        return found

    @property
    def longest_joining(self) -> int:
        """Tokens of a text that a captured step reads, at most."""
        return max(JOINING, default=0)

    def nodes_for(self, k: int) -> int:
        """Drafts of k nodes run in a step of k, or once warmed in the smallest captured one that holds them."""
        return min((nodes for nodes in self._warmed if nodes >= k), default=k)

    def joining(self, slots: int, k: int, rows: int, unread: int | None = None) -> GraphKey | None:
        """The graph for this many batch slots and rows of prompts, where k nodes are wanted; None: too many rows.

        unread: rows of a batch slot that the drafter has to read; None: as many as there may be.
        """
        found = joining_key(bucket_for(slots, self._joining_buckets, ()), k, rows, self._warmed)
        return found if found is None or unread is None else self._reading(found, unread)

    def decoding(self, slots: int, k: int, unread: int) -> GraphKey:
        """The graph for this many batch slots, in which sequences do not join. unread: see joining."""
        return self._reading(GraphKey(self._bucket(slots, k), k), unread)

    def joining_price(self, slots: int, k: int, rows: int) -> float | None:
        """How much longer a step of k nodes takes if it reads this many rows of prompts, in steps; None: there is no
        such step."""
        asked = slots, k, rows
        if asked not in self._prices:
            self._prices[asked] = self._price(self.joining(*asked), slots, k)
        return self._prices[asked]

    def _price(self, found: GraphKey | None, slots: int, k: int) -> float | None:
        if found is None:
            return None
        taken, alone = self.joining_times.get(found, 0.0), self.times.get((self._bucket(slots, k), k), 0.0)
        lost = 1.0 - likely_tokens(found.k) / likely_tokens(k)
        return lost + (taken / alone - 1.0 if taken and alone else found.prompts / UNTIMED)

    def left_unread(self, size: int, k: int) -> int:
        """Rows per batch slot that a step of k nodes leaves unread at most: its last token, and a path of its draft."""
        reader = self._drafter.reads_hidden_states
        if reader is None:
            return 0
        room, depth = self._room_and_depth(size, k)
        return min(reader.most, 1 + (depth or room))

    def get(self, key: GraphKey) -> tuple[GraphState, Step]:
        if key not in self._made:
            graph = self.make_state(key)
            self._made[key] = (graph, self._make_step(graph))
        return self._made[key]

    def time(self, key: GraphKey) -> float:
        """Seconds of a step with a text in every batch slot, and prompts in all rows for them, the best of three."""
        graph, step = self.get(key)
        if not self._cuda:
            return 0.0
        with self.kept(graph):
            self.pretend(graph)
            return min(self._timed(step) for _ in range(3))

    def warm(self, lengths: Iterable[int]) -> None:
        """Capture and time all graphs for these draft lengths and for none now; from then on no others are captured."""
        for nodes in self._sizes(lengths):
            for size in reversed(self.buckets):
                keys = self._variants(GraphKey(self._bucket(size, nodes), nodes))
                for key in keys:
                    self.get(key)[1].warm()
                if isinstance(self.get(keys[-1])[1], OneGraphStep):
                    self.times[size, nodes] = self.time(keys[-1])
            self._warmed.append(nodes)
        for key in self._all_joining(lengths):
            variants = self._variants(key)
            for variant in variants:
                self.get(variant)
            self.joining_times[key] = self.time(variants[-1])
        self._prices.clear()

    def rehearse(self, lengths: Iterable[int]) -> None:
        """Make every launch of `warm` once, for kernels that are compiled ahead; nothing is captured."""
        for nodes in self._sizes(lengths):
            for size in self.buckets:
                for key in self._variants(GraphKey(size, nodes)):
                    self._make_step(self.make_state(key)).warm()
        for joining in self._all_joining(lengths):
            for key in self._variants(joining):
                self._make_step(self.make_state(key))

    def make_state(self, key: GraphKey) -> GraphState:
        """The tensors that a graph of this kind reads and writes."""
        (size, k), device, (room, depth) = key[:2], self._model.device, self._room_and_depth(key.size, key.k)
        shared = SharedNodes.empty(size, room, size * k, device) if room > k else None
        inputs = StepInputs.empty(size, room + 1, device)
        trees = TreeNodes.over(self._layout.all_pools(), size, room + 1, depth) if depth else None
        out = torch.zeros(size, ReportColumns(room + 1, bool(depth)).total, dtype=torch.int32, device=device)
        slots, sampling = self._slots.part(size), self._sampling.part(size)
        logprobs = LogprobReport.empty(size * (room + 1), device)
        places, reader = (self._layout.tables.page, self._layout.scratch), self._drafter.reads_hidden_states
        unread = 0 if reader is None else key.unread or reader.most
        graph = GraphState(slots, sampling, inputs, out, logprobs, self._suite, *places, trees, shared, unread=unread)
        return self._with_prompts(graph, key) if key.prompts else graph

    @contextmanager
    def kept(self, graph: GraphState) -> Iterator[None]:
        """Behind it the state of steps in flight is what it was."""
        slots, reader = graph.batch_slots, self._drafter.reads_hidden_states
        state = [slots.control, slots.lengths, slots.history, graph.sampling.settings]
        state += reader.buffers() if reader is not None else []
        saved = [tensor.clone() for tensor in state]
        yield
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)

    def pretend(self, graph: GraphState) -> None:
        """Let every batch slot have a text of TIMED_TOKENS or so, whose keys are whatever the pages hold, and where
        sequences join let there be as many rows of prompts as there is room for.

        Those pages are read and never written: the last ones of each text are the scratch page.
        """
        page, scratch = graph.page, graph.scratch // graph.page
        count = max(0, min(TIMED_TOKENS, self._model.context) // page - 3)
        length = min((count + 1) * page + page // 2, self._model.context - 1)
        control = torch.full(graph.batch_slots.control.shape, scratch, dtype=torch.int32)
        columns = control_columns(True, length, self._model.context, graph.k, temperature=0.0, seed=0)
        control[:, : Control.PAGES] = torch.tensor(columns, dtype=torch.int32)
        pages = torch.arange(graph.size * count, dtype=torch.int32) % max(1, scratch)
        control[:, Control.PAGES : Control.PAGES + count] = pages.view(graph.size, count)
        graph.batch_slots.control.copy_(control)
        graph.sampling.settings.zero_()
        if self._drafter.reads_hidden_states is not None:
            self._drafter.reads_hidden_states.pretend(length)
        for prompts in (graph.prompts, graph.drafter_prompts):
            if prompts is not None:
                prompts.pretend(graph.scratch, self._model.context)

    def _bucket(self, size: int, k: int) -> int:
        """The number of batch slots a step runs with."""
        return bucket_for(size, self.buckets, {key.size for key in self._made if key.k == k and not key.prompts})

    def _variants(self, key: GraphKey) -> list[GraphKey]:
        """The graphs for steps of this kind: the last one is that of most steps."""
        few = self._few_unread(key.size, key.k)
        return [key] if few is None else [key, key._replace(unread=few)]

    def _reading(self, key: GraphKey, unread: int) -> GraphKey:
        """The graph for steps of this kind in which the drafter has to read this many rows of a batch slot."""
        few = self._few_unread(key.size, key.k)
        return key if few is None or unread > few else key._replace(unread=few)

    def _few_unread(self, size: int, k: int) -> int | None:
        """Rows per batch slot that the drafter has to read behind a step of k nodes, if a graph of its own is made for
        that; None: reading as many rows as batch slots hold takes no longer."""
        reader, few = self._drafter.reads_hidden_states, self.left_unread(size, k)
        return few if k and reader is not None and few < reader.most and size * reader.most > FEW_READ else None

    def _room_and_depth(self, size: int, k: int) -> tuple[int, int]:
        """Nodes that one batch slot can have in a step of k per batch slot, and the levels of its tree; 0: a chain."""
        room = min(self._room(k, size), self.max_nodes) if k and self._drafter.tree_depth(k) else k
        return room, self._drafter.tree_depth(k, room) if k else 0

    def _sizes(self, lengths: Iterable[int]) -> list[int]:
        """Nodes per sequence of the graphs for these draft lengths, largest first."""
        return sorted({min(k, self.max_nodes) for k in (0, *lengths)}, reverse=True)

    def _all_joining(self, lengths: Iterable[int]) -> list[GraphKey]:
        """All graphs of steps that read prompts, largest first."""
        sizes = self._sizes(lengths)
        asked = product(self._joining_buckets, sizes, (0, self.longest_joining))
        found = {joining_key(size, k, rows, sizes) for size, k, rows in asked}
        return sorted((key for key in found if key is not None), key=lambda key: key.rows, reverse=True)

    def _with_prompts(self, graph: GraphState, key: GraphKey) -> GraphState:
        """The same with inputs for the prompts of sequences that join."""
        prompts = graph.prompt_rows(self._layout, key.prompts, graph.rows, chains=graph.trees is None)
        drafter = self._drafter.prompt_inputs(graph, key.prompts) if key.k else None
        return replace(graph, prompts=prompts, drafter_prompts=drafter)

    def _make_step(self, graph: GraphState) -> Step:
        if self._packs and graph.k and graph.rows > FEW_ROWS and graph.prompts is None:
            return self._two_graphs(graph)
        work = self._work(graph)
        self._try(graph, work)
        return OneGraphStep(self._capture(work), graph.rows + (0 if graph.prompts is None else graph.prompts.count))

    def _work(self, graph: GraphState) -> Work:
        if graph.trees is None:
            return self._steps.chains(graph)
        if graph.shared is None:
            return self._steps.trees(graph, graph.trees)
        return self._steps.shared_trees(graph, graph.trees, graph.shared)

    def _two_graphs(self, graph: GraphState) -> TwoGraphStep:
        """A step in two graphs; the second is made for each number of rows when it is first needed."""
        packed_rows = PackedRows.empty(graph.size, graph.k + 1, graph.out.device)
        draft = self._steps.draft(graph, packed_rows)
        self._try(graph, draft)
        first = self._capture(draft)

        def make(rows: int) -> Work:
            verify = self._steps.verify(graph, packed_rows, rows)
            self._try(graph, draft, verify)
            return self._capture(verify)

        return TwoGraphStep(first, lambda: self._host.read(packed_rows.total), make, packed_rows.ids.shape[0])

    def _try(self, graph: GraphState, *parts: Work) -> None:
        """Run once with empty batch slots, which write to the scratch page, and leave the state of steps in flight."""
        with self.kept(graph):
            graph.sampling.settings.zero_()
            self._host.send_control(graph, {}, [], {})
            for prompts in (graph.prompts, graph.drafter_prompts):
                if prompts is not None:
                    prompts.clear()
            for work in parts:
                work()

    def _capture(self, work: Work) -> Work:
        """The same work as a graph, where there are graphs."""
        if not self._cuda or compiling_ahead():
            return work
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording, pool=self._pool):
            work()
        self._alive.append(work)
        return recording.replay

    def _timed(self, step: Step) -> float:
        torch.cuda.synchronize(self._model.device)
        begin = time.perf_counter()
        step.start()
        torch.cuda.synchronize(self._model.device)
        return time.perf_counter() - begin


def nodes_in_a_tile(layers: Iterable[LayerShape]) -> int:
    """Nodes that a chain can have in captured steps: its rows are one tile."""
    return max(1, TILE // max(shape.group for shape in layers) - 1)


def _most_nodes(drafter: CapturedDrafter, layout: PagedLayout) -> int:
    """Nodes that a captured step can have: those of a chain, or of a tree whose paths fit their table."""
    in_a_tile = nodes_in_a_tile(layout.layers)
    if drafter.max_nodes is None:
        return in_a_tile
    return min(drafter.max_nodes, PATH if drafter.tree_depth(drafter.max_nodes) else in_a_tile)
