"""Captured steps: draft, verify and accept are replayed as one CUDA graph, and the host does not wait for the result.

The host starts a step, starts the next one behind it, and only then collects the first one's report. Which sequence is
in which batch slot, how long it may become and where its pages are is written to a control table before each start, so
sequences join, leave and grow between replays of the same graph. Steps of finished sequences are computed and ignored.

Where drafts vary in length a step is two graphs: the first drafts and packs the rows that were found end to end, the
host reads how many, and the second verifies just those. It is started before the host collects the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from faircopy.capture import CapturedDrafter, GraphState
from faircopy.draft_length import Room, own_room
from faircopy.kernels.gpu.records import MAX_WORD, Control, ReportColumns
from faircopy.kernels.gpu.sampler import SamplingSlots
from faircopy.kernels.gpu.state import BatchSlots
from faircopy.kernels.transfer import sent
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Model
from faircopy.replay.graphs import StepGraphs
from faircopy.replay.host_buffers import HostBuffers
from faircopy.replay.in_flight import InFlightStep, SlotReport
from faircopy.replay.passes import WANTED
from faircopy.replay.settings import Rows, fits_device, write_settings
from faircopy.replay.steps import Step, bucket_for
from faircopy.types import Batch, Decision, Draft, FinishedStep, Sequence, StepPlan, Verdict
from faircopy.verify.base import numerics_error

LATEST = MAX_WORD  # tokens at the end of a text that every step may read: its last two, and those of a bad word


class CapturedRunner:
    """Owns the batch slots on the device; starts captured steps and collects what they report."""

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
        self._model, self._layout, self._drafter, self._tables = model, layout, drafter, layout.tables
        self._expensive_drafts = expensive_drafts
        self._batch_slots = self._make_slots(num_slots)
        self._sampling = SamplingSlots.empty(num_slots, model.vocab, model.device)
        self._host = HostBuffers(layout.tables, self._batch_slots.control.shape, cuda=model.device.type == "cuda")
        self.graphs = StepGraphs(
            model, layout, drafter, self._batch_slots, self._sampling, self._host, max_nodes,
            pack_rows=pack_rows, room=room, pool=pool,
        )  # fmt: skip
        self._places: dict[Sequence, int] = {}  # batch slots of the step that was started last
        self._k = 0  # nodes per batch slot of the last step in which no sequences joined
        self._unread = 0  # rows per batch slot that it leaves unread at most
        self._settings: Rows = {}  # of the sequences in batch slots
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def max_nodes(self) -> int:
        return self.graphs.max_nodes

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
        return not _joins(seq) or len(seq.tokens) > self.graphs.longest_joining

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
        found = self.graphs.joining(slots, k, rows)
        return None if found is None else (found.k, found.prompts)

    def joining_price(self, slots: int, rows: int) -> float | None:
        """How much longer a step takes if it reads this many rows of prompts, in steps with as many nodes as the last
        one had in which no sequences joined; None: there is no such step."""
        return self.graphs.joining_price(slots, self._k, rows)

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
        self._host.next_turn()
        begun = self._host.mark()
        self._host.send_control(graph, slots, self._nodes_of(plan.batch, joining), new)
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
        report, logprobs = self._host.report_of(graph)
        report.copy_(graph.out, non_blocking=True)
        if any(seq.params.logprobs is not None for seq in slots):
            logprobs.copy_(graph.logprobs)
        self._k = self._k if joining else plan.k
        self._places, self._unread = slots, self.graphs.left_unread(graph.size, plan.k)
        return InFlightStep(
            plan, slots, graph, report, logprobs, self._host.mark(), rows, begun, None if after is None else after.done,
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

    def _graph_for(self, plan: StepPlan, slots: int, joining: list[Sequence], unread: int) -> tuple[GraphState, Step]:
        """The graph that this many batch slots run in, which reads the prompts of those that join.

        unread: rows of a batch slot that the drafter has to read.
        """
        if not joining:
            return self.graphs.get(self.graphs.decoding(slots, plan.k, unread))
        rows = sum(self.prompt_rows(seq, seq not in plan.batch.idle) or 0 for seq in joining)
        found = self.graphs.joining(slots, plan.k, rows, unread)
        assert found is not None and found.k == plan.k, "it was planned for a graph that there is"
        return self.graphs.get(found)

    def _assigned(self, seqs: list[Sequence], before: dict[Sequence, int]) -> dict[Sequence, int]:
        """Batch slots of these sequences: those that they had before, and for new ones the first free ones.

        Where a smaller graph has room for all, those that had batch slots behind its last one get free ones, too.
        """
        size = bucket_for(len(seqs), self.graphs.buckets, ())
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
        graph.prompts.write(listed, slots)
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
        rows = step.rows, step.rows - useful
        return FinishedStep(batch, draft, verdict, *rows, True, step.read, room, step.prompt_rows)

    def warm(self, lengths: Iterable[int]) -> None:
        """Capture and time all graphs for these draft lengths and for none now; from then on no others are captured."""
        self.graphs.warm(lengths)
        self._move([0], [0])  # changes nothing: kernels are loaded when first used

    def rehearse(self, lengths: Iterable[int]) -> None:
        """Make every launch of `warm` once, for kernels that are compiled ahead; nothing is captured."""
        self.graphs.rehearse(lengths)

    def nodes_for(self, k: int) -> int:
        """Drafts of k nodes run in a step of k, or once warmed in the smallest captured one that holds them."""
        return self.graphs.nodes_for(k)

    def around_steps(self, hook: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter hook() around the start of every later step, for example to time it on the device."""
        self._around = hook

    def follows(self, batch: Batch) -> bool:
        """Whether captured steps follow once this batch has been read."""
        return (
            len(batch) <= self.graphs.buckets[-1]
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

    def _make_slots(self, num_slots: int) -> BatchSlots:
        device, context = self._model.device, self._model.context
        columns = Control.PAGES + self._tables.pages_for(context)
        control = torch.zeros(num_slots, columns, dtype=torch.int32, device=device)
        lengths = torch.ones(num_slots, dtype=torch.int32, device=device)
        history = torch.zeros(num_slots, context + 128, dtype=torch.int32, device=device)
        return BatchSlots(control, lengths, history)

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


def _joins(seq: Sequence) -> bool:
    """Whether nothing of a new sequence's prompt needs the host."""
    return fits_device(seq) and seq.params.prompt_logprobs is None
