"""A draft head inside captured steps: it drafts without host synchronisation.

Row j of a batch slot's stored states belongs to position read + j, where `read` is the first position the head has not
read. How many of these rows are text is known on the device alone; rows beyond the text are computed too, and the next
step overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from faircopy.capture import CapturedDrafter, GraphState, HiddenStateReader, LevelRows, PromptRows, Work
from faircopy.drafters.batched_trees import batch_trees
from faircopy.drafters.heads import Head, Rows
from faircopy.drafters.states import KnownRows, SequenceStates, gather_into
from faircopy.drafters.trees import shared_depth
from faircopy.kernels.gpu.growth import UnreadRows
from faircopy.kernels.gpu.records import Control
from faircopy.kernels.gumbel import BROKEN
from faircopy.kernels.transfer import Field, sent
from faircopy.kernels.tree_growth import Front, Nodes
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.types import Batch, Draft, Sequence

MAX_TREE_NODES = 64
NO_STATE = -1  # of a row before which no state is known: it is read as zeros

RowsOf = Callable[[Packed], Rows]  # positions and attention of packed rows
Known = dict[Sequence, SequenceStates]  # states the host has and the head has not read


class CapturedHead(CapturedDrafter):
    """Reads the states that the last step stored, then grows a tree per batch slot."""

    def __init__(
        self, head: Head, layout: PagedLayout, rows_of: RowsOf, known: Known, num_slots: int, chains: int = 0
    ) -> None:
        """chains: drafts of at most this number of nodes are chains, whatever trees the head has."""
        self._head, self._layout, self._rows_of, self._known = head, layout, rows_of, known
        self._states = self.reads_hidden_states = StoredStates(head, layout, rows_of, known, num_slots)
        self.latest = self._states.most
        self._chains = chains if head.grows_trees else head.levels  # nodes up to which drafts are chains
        self.max_nodes = MAX_TREE_NODES if head.grows_trees else head.levels

    def tree_depth(self, k: int, room: int | None = None) -> int:
        return 0 if k <= self._chains else min(self._head.levels, k if room in (None, k) else shared_depth(k))

    def ready(self, seq: Sequence) -> bool:
        """Whether what it has not read fits a batch slot, with known states. Sequences with k = 0 may share a captured
        step; what is drafted for them is ignored."""
        if seq.request.k == 0:
            return True
        known, unread = self._known.get(seq), len(seq.tokens) - self._layout.cached(seq)
        return known is not None and known.end == len(seq.tokens) - 1 and unread <= self._head.levels + 1

    def prompt_rows(self, seq: Sequence) -> int | None:
        """All that it has not read, the last token included: the state before that one is a prompt's."""
        return 0 if seq.request.k == 0 or not self._head.layers else len(seq.tokens) - self._layout.cached(seq)

    def prompt_inputs(self, graph: GraphState, count: int) -> PromptRows | None:
        if not self._head.layers:
            return None
        return graph.prompt_rows(self._layout, count, more=[Field("sources", torch.int64, (count,), NO_STATE)])

    def join(self, graph: GraphState, slots: dict[Sequence, int], rows: dict[Sequence, range]) -> int:
        read = [seq for seq in slots if seq.request.k != 0]
        ends = [len(seq.tokens) for seq in read]
        count = self._write_prompts(graph, {seq: slots[seq] for seq in read}, rows) if graph.drafter_prompts else 0
        for seq, end in zip(read, ends, strict=True):
            self._layout.set_cached(seq, end)
        return count

    def _write_prompts(self, graph: GraphState, slots: dict[Sequence, int], rows: dict[Sequence, range]) -> int:
        """Each row reads its token and the target's state of the position before, where this step computes one."""
        assert graph.drafter_prompts is not None, "prompts are read"
        sources: list[int] = []
        for seq in slots:
            first = len(seq.tokens) - 1 - len(rows[seq])  # position of the first row that the target computes
            before = range(self._layout.cached(seq) - 1, len(seq.tokens) - 1)
            sources += [graph.rows + rows[seq][at - first] if at >= first else NO_STATE for at in before]
        read, ends = [*slots], [len(seq.tokens) for seq in slots]
        listed = self._layout.list_rows(Batch(read, ends, [0] * len(read)), Draft.empty(len(read)))
        more = {"sources": np.array(sources, np.int64)}
        graph.drafter_prompts.write(listed, [*slots.values()], more)
        return len(listed.ids)

    def commit(self, seq: Sequence, length: int, accepted: int, k: int) -> None:
        """The head has read what there was when the step began; states of later rows stay on the device."""
        self._known.pop(seq, None)
        if k and seq.request.k != 0 and length - self._layout.cached(seq) <= self._head.levels + 1:
            self._layout.set_cached(seq, length)

    def plan_fill(self, graph: GraphState) -> Work:
        """Read, draft level by level, and where all trees share their nodes leave the surest."""
        grow, shared, nodes = self.plan_growth(graph), graph.shared, _nodes(graph)
        if shared is None:
            return grow
        count, allowed = shared.nodes, graph.batch_slots.control[:, Control.MAX_NODES]

        def fill() -> None:
            grow()
            graph.suite.trees.share(nodes, count, allowed)

        return fill

    def plan_growth(self, graph: GraphState) -> Work:
        """Read, and draft level by level."""
        head, count = self._head, graph.unread
        unread = UnreadRows.over(self._states.read[: graph.size], count)
        parts = (part.view(-1) for part in (unread.ids, unread.positions, unread.slots))
        packed = graph.pack_rows(self._layout, count, *parts)
        growth = self._growth(graph)

        def grow() -> None:
            graph.suite.place_unread(graph.batch_slots, unread, graph.page, graph.scratch)
            states = self._states.rows[: graph.size, :count].flatten(0, 1)
            memory = head.read(states[None], packed.ids[None], self._rows_of(packed))[0]
            growth.run(memory.index_select(0, unread.last))

        return grow

    def _growth(self, graph: GraphState) -> _ChainGrowth | _TreeGrowth:
        if graph.trees is None:
            return _ChainGrowth(self._head, self._layout, self._rows_of, graph)
        return _TreeGrowth(self._head, self._layout, self._rows_of, graph)


def _nodes(graph: GraphState) -> Nodes:
    """Where drafts are written; the parents of chains are not read."""
    parents = torch.zeros_like(graph.inputs.ids) if graph.trees is None else graph.trees.parents
    return Nodes(graph.inputs.ids[:, 1:], parents[:, 1:], None if graph.shared is None else graph.shared.values)


class StoredStates(HiddenStateReader):
    """The target's states that the head has not read, per batch slot: levels + 1 rows at most."""

    def __init__(self, head: Head, layout: PagedLayout, rows_of: RowsOf, known: Known, num_slots: int) -> None:
        self.wants, self._head, self._layout, self._rows_of, self._known = head.wants, head, layout, rows_of, known
        self.most = head.levels + 1
        self.read = torch.zeros(num_slots, dtype=torch.int64, device=head.device)
        self.rows = torch.zeros(num_slots, self.most, head.input_size, dtype=head.dtype, device=head.device)

    def unread(self, seq: Sequence) -> int:
        if seq.request.k == 0:
            return 1
        return min(self.most, len(seq.tokens) - self._layout.cached(seq))

    def assign(self, batch_slots: dict[Sequence, int]) -> None:
        """Load what the head has not read of each sequence, and the states before those rows."""
        begins, found, most = [], KnownRows(), self.most
        for n, seq in enumerate(batch_slots):
            known, end = self._known.get(seq), len(seq.tokens)
            begins.append(end - self.unread(seq))  # of a head that was off for a while the step drafts nothing
            if known is not None:
                known.find(begins[-1] - 1, end - 1, n * most, found)
        rows = gather_into(self.rows.new_empty(len(begins) * most, self.rows.shape[-1]), found)
        places, read = sent([[*batch_slots.values()], begins], torch.int64, self.read.device)
        self.rows.index_copy_(0, places, rows.view(-1, *self.rows.shape[1:]))
        self.read.index_copy_(0, places, read)

    def store(self, graph: GraphState, states: dict[int, Tensor]) -> None:
        """Keep the states of the rows that became text, in its order."""
        rows = _accepted_rows(graph, self._joined(states), self.most)
        self.rows[: graph.size, : rows.shape[1]] = rows
        self.read[: graph.size] = graph.inputs.positions[:, 0].long() + 1

    def read_prompts(self, graph: GraphState, states: dict[int, Tensor]) -> None:
        """What the head reads of prompts is in its cache afterwards; nothing of it is drafted behind in this step."""
        if graph.drafter_prompts is None:
            return
        packed, sources = graph.drafter_prompts.alone(), graph.drafter_prompts.inputs.tensors["sources"]
        found = self._joined(states).index_select(0, sources.clamp(min=0))
        known = torch.where((sources >= 0)[:, None], found, 0.0)
        self._head.read(known[None], packed.ids[None], self._rows_of(packed))

    def _joined(self, states: dict[int, Tensor]) -> Tensor:
        return torch.cat([states[layer] for layer in self.wants], -1).to(self.rows.dtype)

    def pretend(self, length: int) -> None:
        self.read.fill_(length - 1)

    def buffers(self) -> list[Tensor]:
        return [self.read, self.rows]


def _accepted_rows(graph: GraphState, states: Tensor, most: int) -> Tensor:
    """Those of a step's rows [R, F] that became text, by batch slot [B, n, F]; of a chain all that can have."""
    if graph.shared is not None and graph.trees is not None:
        starts, last = graph.shared.table.starts[:-1, None], graph.shared.rows - 1  # a slot without rows has any
        return states[(starts + graph.trees.taken[:, :most]).clamp(max=last).long()]
    rows = states.view(graph.size, graph.k + 1, -1)
    if graph.trees is None:
        return rows[:, :most]
    taken = graph.trees.taken[:, :most].long()
    return rows.gather(1, taken[..., None].expand(-1, -1, rows.shape[-1]))


def _words(head: Head, logits: Tensor) -> Tensor | None:
    """The token of each column, of a head that guesses some of the vocabulary; None: all."""
    return head.words if logits.shape[-1] < head.vocab else None


class _ChainGrowth:
    """The levels of one step's chains: a node's KV slot is that of its place in the chain."""

    def __init__(self, head: Head, layout: PagedLayout, rows_of: RowsOf, graph: GraphState) -> None:
        self._head, self._rows_of, self._graph = head, rows_of, graph
        self._sampling = graph.row_sampling(graph.size)
        self._levels = min(head.levels, graph.k)
        self._deeper = [graph.node_rows(layout, node) for node in range(graph.k)] if head.deep else []

    def run(self, memory: Tensor) -> None:
        """From what the head remembers of the last token [B, M] to the nodes in the graph's inputs."""
        head, ids = self._head, self._graph.inputs.ids
        ids[:, 1 + self._levels :] = BROKEN
        if head.independent:
            for level, logits in enumerate(head.all_levels(memory[None], self._levels)):
                self._choose(level, logits[0])
            return
        for level in range(self._levels):
            tokens = ids[:, level].clamp(min=0)  # behind a row that chose none
            rows = self._rows_of(self._deeper[level - 1]) if level and head.deep else None
            guess = head.step(level, memory[None], tokens[None], rows)
            self._choose(level, guess.logits[0])
            memory = guess.memory[0]

    def _choose(self, level: int, logits: Tensor) -> None:
        """The token that the request's parameters and noise choose, as the target does and a draft model."""
        graph, inputs = self._graph, self._graph.inputs
        graph.suite.describe(graph.batch_slots, inputs, self._sampling, level=level)
        graph.suite.pick(
            logits.contiguous(), inputs.temperatures[:, level], inputs.keys[:, level], vocab=self._head.vocab,
            out=inputs.ids[:, level + 1], sampling=self._sampling, words=_words(self._head, logits),
        )  # fmt: skip


class _TreeGrowth:
    """The levels of one step's trees; each row of the front has a KV slot of its own behind the text."""

    def __init__(self, head: Head, layout: PagedLayout, rows_of: RowsOf, graph: GraphState) -> None:
        self._head, self._layout, self._rows_of, self._graph = head, layout, rows_of, graph
        self._planned: dict[int, LevelRows] = {}  # by level, made in the trial run
        self._trees = batch_trees(
            head.tree(graph.k), graph.size, graph.inputs.ids.device, graph.suite.trees, _nodes(graph)
        )

    def run(self, memory: Tensor) -> None:
        """From what the head remembers of the last token [B, M] to the nodes and parents in the graph's inputs."""
        graph, trees, memory = self._graph, self._trees, memory[:, None]
        tokens, rows, expanded = graph.inputs.ids[:, :1], None, 0
        trees.reset()
        assert graph.trees is not None, "chains grow otherwise"
        last = min(self._head.levels, graph.trees.deepest) - 1
        if self._head.independent:
            self._run_independent(self._head.all_levels(memory.flatten(0, 1)[None], last + 1))
            return
        for level in range(last + 1):
            guess = self._head.step(level, memory.flatten(0, 1)[None], tokens.flatten()[None], rows)
            ids, scores = self._offers(level, guess.logits[0])
            front = trees.grow(ids, scores)
            if front is None or level == last:
                break
            memory, tokens = self._continued(guess.memory[0], front), front.tokens
            rows = self._rows(level + 1, front, expanded) if self._head.deep else None
            expanded += tokens.shape[1]
        trees.finish()

    def _run_independent(self, logits: list[Tensor]) -> None:
        """All nodes of a level have the same offers: they are made once per batch slot."""
        trees, width = self._trees, 1
        for level, mine in enumerate(logits):
            ids, scores = (part.expand(-1, width, -1) for part in self._offers(level, mine[0]))
            front = trees.grow(ids, scores)
            if front is None:
                break
            width = front.tokens.shape[1]
        trees.finish()

    def _continued(self, memory: Tensor, front: Front) -> Tensor:
        """What was remembered of the row above each row of the front [B, F, M]."""
        seen = memory.view(self._graph.size, -1, memory.shape[-1])
        if seen.shape[1] == front.tokens.shape[1] == 1:
            return seen
        return seen.gather(1, front.above[..., None].expand(-1, -1, seen.shape[-1]))

    def _offers(self, level: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens of each row, or for a sampled request the one that its noise picks."""
        inputs, size, count = self._graph.inputs, self._graph.size, self._trees.num_offered
        temperatures, keys = inputs.temperatures[:, level], inputs.keys[:, level]
        words = _words(self._head, logits)
        ids, scores = self._graph.suite.offer(
            logits.contiguous(), temperatures, keys, count, self._head.vocab, words=words
        )
        return ids.view(size, -1, count), scores.view(size, -1, count)

    def _rows(self, level: int, front: Front, expanded: int) -> Rows:
        """KV slots behind the `expanded` rows of the levels before, and for each row the path of its ancestors'."""
        if level not in self._planned:
            self._planned[level] = self._graph.level_rows(self._layout, front.tokens.shape[1])
        packed = self._planned[level].placed(front, self._planned.get(level - 1), level, expanded)
        return self._rows_of(packed)
