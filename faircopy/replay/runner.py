"""Captured steps: draft, verify and accept are replayed as one CUDA graph, and the host does not wait for the result.

The host starts a step, starts the next one behind it, and only then collects the first one's report. Which sequence is
in which batch slot, how long it may become and where its pages are is written to a control table before each start, so
sequences join, leave and grow between replays of the same graph. Steps of finished sequences are computed and ignored.

Where drafts vary in length a step is two graphs: the first drafts and packs the rows that were found end to end, the
host reads how many, and the second verifies just those. It is started before the host collects the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, chain, product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faircopy import rng
from faircopy.capture import CapturedDrafter, GraphState, SharedNodes, Work
from faircopy.draft_length import Room, own_room
from faircopy.kernels.gpu.launch import compiling_ahead
from faircopy.kernels.gpu.logprobs import LogprobReport
from faircopy.kernels.gpu.packing import PackedRows
from faircopy.kernels.gpu.pages import PATH
from faircopy.kernels.gpu.records import EMPTY_SLOT, MAX_WORD, Control, ReportColumns, control_columns
from faircopy.kernels.gpu.sampler import SamplingSlots
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.gpu.tables import TILE_ROWS
from faircopy.kernels.gpu.tree import TreeNodes
from faircopy.kernels.transfer import sent
from faircopy.layout.base import LayerShape
from faircopy.layout.paged import PagedLayout
from faircopy.layout.rows import page_grid
from faircopy.model.base import Model
from faircopy.replay.in_flight import InFlightStep, SlotReport
from faircopy.replay.passes import WANTED
from faircopy.replay.settings import Rows, fits_device, write_settings
from faircopy.replay.steps import OneGraphStep, Step, Steps, TwoGraphStep, bucket_for
from faircopy.types import Batch, Decision, Draft, FinishedStep, Sequence, StepPlan, Verdict
from faircopy.verify.base import numerics_error

TILE = 128  # query rows times heads per key head that a captured step verifies in one tile
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # batch slots that graphs are made for
TIMED_TOKENS = 512  # of the texts that steps are timed with
LATEST = MAX_WORD  # tokens at the end of a text that every step may read: its last two, and those of a bad word
FEW_ROWS = 64  # up to here more rows cost the target no more time: they are not packed
FEW_READ = 128  # the same of a draft head's reading, which is a small share of a step: no graphs are made for fewer
# Steps in which sequences join: rows of prompts, at least, beside those of the batch slots, and nodes per slot at most.
JOINING = {40: 5, 160: 2}
JOINING_BUCKETS = (8, 16, 32, 64, 128, 256)  # their batch slots: fewer sizes, since each is a graph more
OWN_ROWS = 192  # of their batch slots at most, if that leaves a node for each: more would need larger tiles


class Joining(NamedTuple):
    """What graph a step has in which sequences join."""

    size: int  # batch slots
    k: int
    prompts: int  # rows of prompts

    @property
    def rows(self) -> int:
        return self.size * (self.k + 1) + self.prompts


def joining_graph(size: int, k: int, rows: int, captured: Collection[int]) -> Joining | None:
    """The smallest graph for this many batch slots and rows of prompts, where k nodes are wanted; None: too many rows.

    captured: numbers of nodes that graphs are made for; empty: any.
    """
    for least, most in JOINING.items():
        nodes = _nodes_beside(k, min(most, max(1, OWN_ROWS // size - 1)), captured)
        own = size * (nodes + 1)
        found = Joining(size, nodes, next((n for n in TILE_ROWS if n >= own + least), own + least) - own)
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


class CapturedRunner:
    """Owns the batch slots, the graphs and the host's side of both."""

    def __init__(
        self,
        model: Model,
        layout: PagedLayout,
        drafter: CapturedDrafter,
        num_slots: int,
        max_nodes: int,
        *,
        pack_rows: bool = True,
        expensive_drafts: bool = False,
        room: Room = own_room,
        pool: Any = None,
    ) -> None:
        """For num_slots sequences of max_nodes nodes each, as memory was counted for; longer drafts run eagerly.

        pack_rows: verify only the nodes that were found, where the drafter's number of nodes varies.
        expensive_drafts: each level of a draft costs the host a pass of a network.
        room: nodes that one sequence may have of k for each of a batch, where the drafter ranks nodes.
        pool: memory of graphs, which may be shared with others that are replayed on the same stream.
        """
        assert layout.suite is not None, "captured steps are made of kernels"
        self._model, self._layout, self._drafter, self._tables = model, layout, drafter, layout.tables
        self._suite, self._graphs = layout.suite, model.device.type == "cuda"
        self._steps = Steps(model, layout, drafter)
        self.max_nodes = min(max_nodes, _most_nodes(drafter, layout))
        self._packs = pack_rows and drafter.variable_length and drafter.reads_hidden_states is None
        self._expensive_drafts, self._room = expensive_drafts, room
        self._buckets = [size for size in BUCKETS if size < num_slots] + [num_slots]
        self._batch_slots = self._make_slots(num_slots)
        self._sampling = SamplingSlots.empty(num_slots, model.vocab, model.device)
        self._captured: dict[tuple[int, int], tuple[GraphState, Step]] = {}  # by (batch slots, k)
        self._following: dict[tuple[int, int], tuple[GraphState, Step]] = {}  # the same, for few unread rows
        self._joining: dict[Joining, tuple[GraphState, Step]] = {}  # steps that read prompts, too
        self._joining_buckets = [size for size in JOINING_BUCKETS if size < num_slots] + [num_slots]
        self._places: dict[Sequence, int] = {}  # batch slots of the step that was started last
        self._unread = 0  # rows per batch slot that it leaves unread at most
        self._settings: Rows = {}  # of the sequences in batch slots
        self.times: dict[tuple[int, int], float] = {}  # (batch slots, k) -> seconds of the steps that were warmed
        self._warmed: list[int] = []  # numbers of nodes that all graphs exist for
        self._alive: list[Work] = []  # what graphs read must outlive them
        self._pool = pool
        self._controls = [self._on_host(self._batch_slots.control.shape) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._reports: dict[tuple[int, int, int], tuple[Tensor, LogprobReport]] = {}
        self._num_rows = self._on_host(torch.Size([1]))
        self._turn = 0  # which of the two host buffers the next step uses
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext

    def takes(self, batch: Batch) -> bool:
        """Whether this batch can run as a captured step: one token to feed each, or a prompt to its end, and nothing
        that needs the host."""
        ready = all(
            batch.complete(i) and (not self._steady(seq) or seq in batch.idle or self._drafter.ready(seq))
            for i, seq in enumerate(batch.seqs)
        )
        return ready and self.follows(batch)

    def interrupts(self, seq: Sequence) -> bool:
        """Whether captured steps have to stop for this new sequence, whose prompt is too long or needs the host."""
        return not _joins(seq) or len(seq.tokens) > max(JOINING, default=0)

    def prompt_rows(self, seq: Sequence, drafted: bool) -> int | None:
        """Rows of a new sequence's prompt, of the target or of the drafter; None: captured steps do not read it.

        drafted: whether the drafter reads it.
        """
        if not _joins(seq):
            return None
        own = self._drafter.prompt_rows(seq) if drafted else 0
        return None if own is None else max(own, len(seq.tokens) - 1 - self._layout.cached(seq))

    def joining_step(self, k: int, slots: int, rows: int) -> tuple[int, int] | None:
        """Nodes per sequence, where k are wanted, and rows of prompts of the captured step that reads `rows` of them;
        None: there is none."""
        found = self._joining_of(slots, k, rows)
        return None if found is None else (found.k, found.prompts)

    def _joining_of(self, slots: int, k: int, rows: int) -> Joining | None:
        """The graph for this many batch slots and rows of prompts, where k nodes are wanted; None: too many rows."""
        return joining_graph(bucket_for(slots, self._joining_buckets, ()), k, rows, self._warmed)

    def slots_behind(self, seqs: list[Sequence]) -> int:
        """Batch slots up to the highest one of a step of these sequences behind the one started last."""
        return max(self._assigned(seqs, self._places).values(), default=0) + 1

    def eager_nodes(self, k: int, sequences: int) -> int:
        """Draft nodes per sequence of an eager step: one if each costs the host a pass, for captured steps follow.

        No more than the graph of a pass computes logits for: a larger pass is launched kernel by kernel.
        """
        return min(k, 1 if self._expensive_drafts else max(0, WANTED // sequences - 1))

    def start(self, plan: StepPlan, after: InFlightStep | None = None) -> InFlightStep:
        """Start a captured step. After another one, lengths are the device's, and sequences keep their batch slots or
        move to lower ones, see _assigned.

        Sequences whose prompts are not cached join: the step reads those, too. Behind another step so do those of whose
        prompts the target knows all, and the drafter not.
        """
        before = {} if after is None else after.batch_slots
        slots = self._assigned(plan.seqs, before)
        new = {seq: slot for seq, slot in slots.items() if seq not in before}
        moved = {seq: before[seq] for seq, slot in slots.items() if before.get(seq, slot) != slot}
        unread = [] if after is None else [seq for seq in new if self.prompt_rows(seq, seq not in plan.batch.idle)]
        joining = {seq: slots[seq] for seq in slots if not self._steady(seq) or seq in unread}
        graph, captured = self._graph_for(plan, max(slots.values()) + 1, [*joining], self._most_unread(slots, before))
        self._turn = 1 - self._turn
        begun = self._mark()
        self._write_control(graph, slots, self._nodes_of(plan.batch, joining), new)
        if moved:
            self._move([*moved.values()], [slots[seq] for seq in moved])
        if new:
            self._write_history(new)
        if new or moved:
            self._settings = write_settings(self._sampling, slots, new, moved, self._settings)
        if new and self._drafter.reads_hidden_states is not None:
            self._drafter.reads_hidden_states.assign(new)
        read = self._join(graph, joining, plan.batch.idle) if joining else 0
        with self._around():
            rows = captured.start()
        report, logprobs = self._report(graph)
        report.copy_(graph.out, non_blocking=True)
        if any(seq.params.logprobs is not None for seq in slots):
            logprobs.copy_(graph.logprobs)
        self._places, self._unread = slots, self._left_unread(graph.size, plan.k)
        return InFlightStep(
            plan, slots, graph, report, logprobs, self._mark(), rows, begun, None if after is None else after.done,
            prompt_rows=self._note_joined(joining), read=read,
        )  # fmt: skip

    def _move(self, sources: list[int], places: list[int]) -> None:
        """Bring what the device keeps of these batch slots to others, behind the step in flight."""
        slots, reader = self._batch_slots, self._drafter.reads_hidden_states
        kept = [slots.lengths, slots.history, *(reader.buffers() if reader is not None else [])]
        old, new = sent([sources, places], torch.int64, slots.lengths.device)
        for tensor in kept:
            tensor.index_copy_(0, new, tensor.index_select(0, old))

    def _most_unread(self, seqs: Iterable[Sequence], before: Collection[Sequence]) -> int:
        """Rows of one of these sequences whose hidden states the drafter has not read, at most; before: those that
        were in the step that was started last."""
        reader = self._drafter.reads_hidden_states
        if reader is None:
            return 0
        return max(self._unread if seq in before else reader.unread(seq) for seq in seqs)

    def _left_unread(self, size: int, k: int) -> int:
        """Rows per batch slot that a step of k nodes leaves unread at most: its last token, and a path of its draft."""
        reader = self._drafter.reads_hidden_states
        if reader is None:
            return 0
        room, depth = self._room_and_depth(size, k)
        return min(reader.most, 1 + (depth or room))

    def _graph_for(self, plan: StepPlan, slots: int, joining: list[Sequence], unread: int) -> tuple[GraphState, Step]:
        """The graph that this many batch slots run in, which reads the prompts of those that join.

        unread: rows of a batch slot that the drafter has to read.
        """
        if not joining:
            size = self._bucket(slots, plan.k)
            few = self._few_unread(size, plan.k)
            return self._graph(size, plan.k) if few is None or unread > few else self._following_graph(size, plan.k)
        rows = sum(self.prompt_rows(seq, seq not in plan.batch.idle) or 0 for seq in joining)
        found = self._joining_of(slots, plan.k, rows)
        assert found is not None and found.k == plan.k, "it was planned for a graph that there is"
        return self._joining_graph(found)

    def _assigned(self, seqs: list[Sequence], before: dict[Sequence, int]) -> dict[Sequence, int]:
        """Batch slots of these sequences: those that they had before, and for new ones the first free ones.

        Where a smaller graph has room for all, those that had batch slots behind its last one get free ones, too.
        """
        size = bucket_for(len(seqs), self._buckets, ())
        kept = {seq: before[seq] for seq in seqs if before.get(seq, size) < size}
        free = iter(sorted({*range(size)} - {*kept.values()}))
        return {seq: kept[seq] if seq in kept else next(free) for seq in seqs}

    def _nodes_of(self, batch: Batch, joining: dict[Sequence, int]) -> list[int]:
        """Draft nodes of each sequence; a drafter that reads hidden states has read nothing of those that join."""
        if self._drafter.reads_hidden_states is None:
            return batch.max_nodes
        return [0 if seq in joining else nodes for seq, nodes in zip(batch.seqs, batch.max_nodes, strict=True)]

    def _join(self, graph: GraphState, joining: dict[Sequence, int], idle: Set[Sequence]) -> int:
        """Write the prompts of these sequences to the step's inputs; returns how many rows the drafter reads."""
        assert graph.prompts is not None, "the step reads prompts"
        seqs, slots = [*joining], [*joining.values()]
        listed = self._layout.list_rows(
            Batch(seqs, [len(seq.tokens) - 1 for seq in seqs], [0] * len(seqs)), Draft.empty(len(seqs))
        )
        graph.prompts.write(listed, slots, graph.rows)
        ends = [*accumulate(listed.fed)]
        rows = {seq: range(end - fed, end) for seq, fed, end in zip(seqs, listed.fed, ends, strict=True)}
        drafted = {seq: slot for seq, slot in joining.items() if seq not in idle}
        return self._drafter.join(graph, drafted, rows) if graph.k else 0

    def _note_joined(self, joining: Iterable[Sequence]) -> int:
        """These sequences' prompts are cached once the step that was started has run; how many rows they are."""
        rows = 0
        for seq in joining:
            rows += len(seq.tokens) - 1 - self._layout.cached(seq)
            self._layout.set_cached(seq, len(seq.tokens) - 1)
        return rows

    def collect(self, step: InFlightStep) -> FinishedStep:
        """Wait for a step and return its results for the sequences that have not finished meanwhile."""
        if step.done is not None:
            step.done.synchronize()
        reports: list[list[int]] = step.report.numpy().tolist()
        k = step.graph.k
        columns = ReportColumns(k + 1, step.graph.trees is not None)
        batch = Batch([], [], [], shared_k=step.plan.batch.shared_k)
        draft, decisions = Draft([], []), []
        for seq, slot in step.batch_slots.items():
            if seq.finished is None:
                report = SlotReport.of(reports[slot], columns)
                batch.add(seq, len(seq.tokens), report.max_nodes)
                draft.tokens.append(report.nodes)
                draft.parents.append(report.parents)
                self._note_cached(seq, report, k)
                error = None if report.finite else numerics_error(seq)
                logprobs = step.logprobs_of(seq, slot, report)
                decisions.append(Decision(report.path, report.tokens, logprobs, error=error))
        useful = sum(len(nodes) + 1 for nodes in draft.tokens) + step.prompt_rows
        verdict, room = Verdict(decisions), 0 if step.graph.prompts is None else step.graph.prompts.count
        return FinishedStep(batch, draft, verdict, step.rows, step.rows - useful, True, step.read, room)

    def warm(self, lengths: Iterable[int]) -> None:
        """Capture and time all graphs for these draft lengths and for none now; from then on no others are captured."""
        for nodes in self._sizes(lengths):
            for size in reversed(self._buckets):
                graph, step = self._graph(self._bucket(size, nodes), nodes)
                step.warm()
                if self._few_unread(size, nodes) is not None:
                    graph, step = self._following_graph(size, nodes)  # most steps are of this kind
                if isinstance(step, OneGraphStep):
                    self.times[size, nodes] = self._time(graph, step)
            self._warmed.append(nodes)
        for joining in self._all_joining(lengths):
            self._joining_graph(joining)
        self._move([0], [0])  # changes nothing: kernels are loaded when first used

    def _all_joining(self, lengths: Iterable[int]) -> list[Joining]:
        """All graphs of steps that read prompts, largest first."""
        sizes = self._sizes(lengths)
        asked = product(self._joining_buckets, sizes, (0, max(JOINING, default=0)))
        found = {joining_graph(size, k, rows, sizes) for size, k, rows in asked}
        return sorted((joining for joining in found if joining is not None), key=lambda one: one.rows, reverse=True)

    def rehearse(self, lengths: Iterable[int]) -> None:
        """Make every launch of `warm` once, for kernels that are compiled ahead; nothing is captured."""
        for nodes in self._sizes(lengths):
            for size in self._buckets:
                self._make_step(self._make_state(size, nodes)).warm()
                if self._few_unread(size, nodes) is not None:
                    self._make_step(self._following_state(size, nodes))
        for joining in self._all_joining(lengths):
            self._make_step(self._joining_state(joining))

    def _sizes(self, lengths: Iterable[int]) -> list[int]:
        """Nodes per sequence of the graphs for these draft lengths, largest first."""
        return sorted({min(k, self.max_nodes) for k in (0, *lengths)}, reverse=True)

    def _time(self, graph: GraphState, step: Step) -> float:
        """Seconds of a step with a text in every batch slot, the best of three."""
        if not self._graphs:
            return 0.0
        with self._kept(graph):
            self._pretend(graph)
            return min(self._timed(step) for _ in range(3))

    def _timed(self, step: Step) -> float:
        torch.cuda.synchronize(self._model.device)
        begin = time.perf_counter()
        step.start()
        torch.cuda.synchronize(self._model.device)
        return time.perf_counter() - begin

    def _pretend(self, graph: GraphState) -> None:
        """Let every batch slot have a text of TIMED_TOKENS or so, whose keys are whatever the pages hold.

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

    def nodes_for(self, k: int) -> int:
        """Drafts of k nodes run in a step of k, or once warmed in the smallest captured one that holds them."""
        return min((nodes for nodes in self._warmed if nodes >= k), default=k)

    def around_steps(self, hook: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter hook() around the start of every later step, for example to time it on the device."""
        self._around = hook

    @property
    def captured_sizes(self) -> dict[tuple[int, int], set[int]]:
        """(batch slots, k) of all graphs made so far; of steps in two graphs, the numbers of rows of the second."""
        return {size: set(step.captured_rows) for size, (_, step) in self._captured.items()}

    def follows(self, batch: Batch) -> bool:
        """Whether captured steps follow once this batch has been read."""
        return (
            len(batch) <= self._buckets[-1]
            and max(batch.max_nodes) <= self.max_nodes
            and all(fits_device(seq) for seq in batch.seqs)
        )

    def _steady(self, seq: Sequence) -> bool:
        return self._layout.cached(seq) == len(seq.tokens) - 1

    def _note_cached(self, seq: Sequence, report: SlotReport, k: int) -> None:
        """Note what the caches hold after a step of k nodes."""
        length, accepted = len(seq.tokens), len(report.path)
        self._layout.set_cached(seq, length + accepted)
        self._layout.moved += report.moved
        self._drafter.commit(seq, length, accepted, k)

    def _bucket(self, size: int, k: int) -> int:
        """The number of batch slots a step runs with."""
        made = {*self._captured, *self._following}
        return bucket_for(size, self._buckets, [known for known, nodes in made if nodes == k])

    def _make_slots(self, num_slots: int) -> BatchSlots:
        device, context = self._model.device, self._model.context
        columns = Control.PAGES + self._tables.pages_for(context)
        control = torch.zeros(num_slots, columns, dtype=torch.int32, device=device)
        lengths = torch.ones(num_slots, dtype=torch.int32, device=device)
        history = torch.zeros(num_slots, context + 128, dtype=torch.int32, device=device)
        return BatchSlots(control, lengths, history)

    def _joining_graph(self, joining: Joining) -> tuple[GraphState, Step]:
        if joining not in self._joining:
            graph = self._joining_state(joining)
            self._joining[joining] = (graph, self._make_step(graph))
        return self._joining[joining]

    def _joining_state(self, joining: Joining) -> GraphState:
        graph, rows = self._make_state(joining.size, joining.k), joining.prompts
        prompts = graph.prompt_rows(self._layout, rows)
        drafter = self._drafter.prompt_inputs(graph, rows) if joining.k else None
        return replace(graph, prompts=prompts, drafter_prompts=drafter)

    def _graph(self, size: int, k: int) -> tuple[GraphState, Step]:
        if (size, k) not in self._captured:
            graph = self._make_state(size, k)
            self._captured[size, k] = (graph, self._make_step(graph))
        return self._captured[size, k]

    def _few_unread(self, size: int, k: int) -> int | None:
        """Rows per batch slot that the drafter has to read behind a step of k nodes, if a graph of its own is made for
        that; None: reading as many rows as batch slots hold takes no longer."""
        reader, few = self._drafter.reads_hidden_states, self._left_unread(size, k)
        return few if k and reader is not None and few < reader.most and size * reader.most > FEW_READ else None

    def _following_graph(self, size: int, k: int) -> tuple[GraphState, Step]:
        """A step behind one of no more nodes: the drafter has few rows to read."""
        if (size, k) not in self._following:
            graph = self._following_state(size, k)
            self._following[size, k] = (graph, self._make_step(graph))
        return self._following[size, k]

    def _following_state(self, size: int, k: int) -> GraphState:
        return replace(self._make_state(size, k), unread=self._left_unread(size, k))

    def _room_and_depth(self, size: int, k: int) -> tuple[int, int]:
        """Nodes that one batch slot can have in a step of k per batch slot, and the levels of its tree; 0: a chain."""
        room = min(self._room(k, size), self.max_nodes) if k and self._drafter.tree_depth(k) else k
        return room, self._drafter.tree_depth(k, room) if k else 0

    def _make_state(self, size: int, k: int) -> GraphState:
        device, (room, depth) = self._model.device, self._room_and_depth(size, k)
        shared = SharedNodes.empty(size, room, size * k, device) if room > k else None
        inputs = StepInputs.empty(size, room + 1, device)
        trees = TreeNodes.over(self._layout.all_pools(), size, room + 1, depth) if depth else None
        out = torch.zeros(size, ReportColumns(room + 1, bool(depth)).total, dtype=torch.int32, device=device)
        slots, sampling = self._batch_slots.part(size), self._sampling.part(size)
        logprobs = LogprobReport.empty(size * (room + 1), device)
        places, reader = (self._tables.page, self._layout.scratch), self._drafter.reads_hidden_states
        unread = 0 if reader is None else reader.most
        return GraphState(slots, sampling, inputs, out, logprobs, self._suite, *places, trees, shared, unread=unread)

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

        return TwoGraphStep(first, lambda: self._read(packed_rows.total), make, packed_rows.ids.shape[0])

    def _read(self, number: Tensor) -> int:
        """A number on the device, once everything started before has run."""
        self._num_rows.copy_(number, non_blocking=True)
        done = self._mark()
        if done is not None:
            done.synchronize()
        return int(self._num_rows)

    def _try(self, graph: GraphState, *parts: Work) -> None:
        """Run once with empty batch slots, which write to the scratch page, and leave the state of steps in flight."""
        with self._kept(graph):
            graph.sampling.settings.zero_()
            self._write_control(graph, {}, [], {})
            for prompts in (graph.prompts, graph.drafter_prompts):
                if prompts is not None:
                    prompts.clear()
            for work in parts:
                work()

    @contextmanager
    def _kept(self, graph: GraphState) -> Iterator[None]:
        """Behind it the state of steps in flight is what it was."""
        slots, reader = graph.batch_slots, self._drafter.reads_hidden_states
        state = [slots.control, slots.lengths, slots.history, graph.sampling.settings]
        state += reader.buffers() if reader is not None else []
        saved = [tensor.clone() for tensor in state]
        yield
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)

    def _capture(self, work: Work) -> Work:
        """The same work as a graph, where there are graphs."""
        if not self._graphs or compiling_ahead():
            return work
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording, pool=self._pool):
            work()
        self._alive.append(work)
        return recording.replay

    def _write_control(
        self, graph: GraphState, slots: dict[Sequence, int], max_nodes: list[int], new: Collection[Sequence]
    ) -> None:
        """Write the control rows of all batch slots of a graph, empty ones included. new: in their slots since now."""
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        control = self._controls[self._turn]
        table = control.numpy()[: graph.size]
        table[:, : Control.PAGES] = EMPTY_SLOT
        table[:, Control.PAGES :] = graph.scratch // graph.page
        if slots:
            rows, pages = self._control_rows(slots, max_nodes, new), self._pages_of(slots, graph)
            where = [*slots.values()]
            table[where, : Control.PAGES], table[where, Control.PAGES : Control.PAGES + pages.shape[1]] = rows, pages
        graph.batch_slots.control.copy_(control[: graph.size], non_blocking=True)
        self._copied[self._turn] = self._mark()

    @staticmethod
    def _control_rows(slots: Iterable[Sequence], max_nodes: list[int], new: Collection[Sequence]) -> list[list[int]]:
        """What control rows hold before the page tables."""
        return [
            control_columns(seq in new, len(seq.tokens), seq.limit, nodes, seq.params.temperature, rng.mix(seq.seed))
            for seq, nodes in zip(slots, max_nodes, strict=True)
        ]

    def _pages_of(self, slots: Iterable[Sequence], graph: GraphState) -> NDArray[np.int32]:
        return page_grid([self._tables.table(seq) for seq in slots], graph.scratch // graph.page)

    def _write_history(self, slots: dict[Sequence, int]) -> None:
        """Write what is read of the texts so far to the device: n-gram lookup reads all, others the latest tokens."""
        latest, history = self._drafter.latest, self._batch_slots.history
        least = 0 if latest is None else -max(latest, LATEST)
        texts = [seq.tokens[least:] for seq in slots]
        counts = np.array([len(text) for text in texts])
        ends, rows = np.cumsum(counts), np.repeat(np.array([*slots.values()]), counts)
        behind = np.array([len(seq.tokens) for seq in slots]) - ends  # from a token's place here to that in its text
        cols = np.arange(ends[-1]) + np.repeat(behind, counts)
        table = sent(np.stack([rows, cols, np.fromiter(chain(*texts), np.int64)]), torch.int64, history.device)
        history.index_put_((table[0], table[1]), table[2].to(history.dtype))

    def _report(self, graph: GraphState) -> tuple[Tensor, LogprobReport]:
        """Host memory for what a step reports."""
        key = (graph.size, graph.k, self._turn)
        if key not in self._reports:
            logprobs = LogprobReport.empty(graph.size * (graph.k + 1), "cpu", pinned=self._graphs)
            self._reports[key] = (self._on_host(graph.out.shape), logprobs)
        return self._reports[key]

    def _on_host(self, shape: torch.Size) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=self._graphs)

    def _mark(self) -> torch.cuda.Event | None:
        """An event behind everything started so far; None without a GPU."""
        if not self._graphs:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _joins(seq: Sequence) -> bool:
    """Whether nothing of a new sequence's prompt needs the host."""
    return fits_device(seq) and seq.params.prompt_logprobs is None


def nodes_in_a_tile(layers: Iterable[LayerShape]) -> int:
    """Nodes that a chain can have in captured steps: its rows are one tile."""
    return max(1, TILE // max(shape.group for shape in layers) - 1)


def _most_nodes(drafter: CapturedDrafter, layout: PagedLayout) -> int:
    """Nodes that a captured step can have: those of a chain, or of a tree whose paths fit their table."""
    in_a_tile = nodes_in_a_tile(layout.layers)
    if drafter.max_nodes is None:
        return in_a_tile
    return min(drafter.max_nodes, PATH if drafter.tree_depth(drafter.max_nodes) else in_a_tile)
