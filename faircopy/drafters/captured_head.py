"""A draft head inside captured steps: it drafts without host synchronisation.

Row j of a batch slot's stored states belongs to position read + j, where `read` is the first position the head has not
read. How many of these rows are text is known on the device alone; rows beyond the text are computed too, and the next
step overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from faircopy.capture import CapturedDrafter, GraphState, HiddenStateReader, PathRows, Work
from faircopy.drafters.batched_trees import BatchedTrees, Frontier, batch_trees
from faircopy.drafters.heads import Head, Rows
from faircopy.drafters.states import SequenceStates
from faircopy.kernels.gumbel import BROKEN
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.types import Sequence

MAX_TREE_NODES = 64

RowsOf = Callable[[Packed], Rows]  # positions and attention of packed rows
Known = dict[Sequence, SequenceStates]  # states the host has and the head has not read


class CapturedHead(CapturedDrafter):
    """Reads the states that the last step stored, then grows a tree per batch slot."""

    def __init__(self, head: Head, layout: PagedLayout, rows_of: RowsOf, known: Known, num_slots: int) -> None:
        self._head, self._layout, self._rows_of, self._known = head, layout, rows_of, known
        self._states = self.reads_hidden_states = StoredStates(head, layout, known, num_slots)
        self._chains = batch_trees(head.tree(1), 1, torch.device("cpu")).is_chain
        self.max_nodes = head.levels if self._chains else MAX_TREE_NODES

    def tree_depth(self, k: int) -> int:
        return 0 if self._chains else min(self._head.levels, k)

    def ready(self, seq: Sequence) -> bool:
        """Whether what it has not read fits a batch slot, with known states. Sequences with k = 0 may share a captured
        step; what is drafted for them is ignored."""
        if seq.request.k == 0:
            return True
        known, unread = self._known.get(seq), len(seq.tokens) - self._layout.cached(seq)
        return known is not None and known.end == len(seq.tokens) - 1 and unread <= self._head.levels + 1

    def commit(self, seq: Sequence, length: int, accepted: int, k: int) -> None:
        """The head has read what there was when the step began; states of later rows stay on the device."""
        self._known.pop(seq, None)
        if k and seq.request.k != 0 and length - self._layout.cached(seq) <= self._head.levels + 1:
            self._layout.set_cached(seq, length)

    def plan_fill(self, graph: GraphState) -> Work:
        """Read, then draft level by level."""
        head, reading = self._head, _ReadRows(self._states, graph)
        packed = reading.packed(self._layout)
        trees = batch_trees(head.tree(graph.k), graph.size, self._states.read.device)
        growth = (_ChainGrowth if trees.is_chain else _TreeGrowth)(head, self._layout, self._rows_of, graph)

        def fill() -> None:
            reading.prepare()
            states = self._states.rows[: graph.size].flatten(0, 1)
            memory = head.read(states[None], packed.ids[None], self._rows_of(packed))[0]
            memory = memory.view(graph.size, reading.count, -1)[reading.batch_slots, reading.last]
            growth.run(trees, memory[:, None])

        return fill


class StoredStates(HiddenStateReader):
    """The target's states that the head has not read, per batch slot: levels + 1 rows at most."""

    def __init__(self, head: Head, layout: PagedLayout, known: Known, num_slots: int) -> None:
        self.wants, self._layout, self._known = head.wants, layout, known
        self.read = torch.zeros(num_slots, dtype=torch.int64, device=head.device)
        self.rows = torch.zeros(num_slots, head.levels + 1, head.input_size, dtype=head.dtype, device=head.device)

    def assign(self, batch_slots: dict[Sequence, int]) -> None:
        """Load what the head has not read of each sequence, and the states before those rows."""
        unknown = self.rows.new_zeros(1, self.rows.shape[-1])
        pieces: list[Tensor] = []
        slots: list[int] = []
        places: list[int] = []
        begins = []
        for seq, slot in batch_slots.items():
            known, end = self._known.get(seq, SequenceStates()), len(seq.tokens)
            first = end - self.rows.shape[1]  # of a head that was off for a while the step drafts nothing
            read = end - 1 if seq.request.k == 0 else max(first, self._layout.cached(seq))
            pieces += known.take(read - 1, end - 1, unknown)
            slots += [slot] * (end - read)
            places += range(end - read)
            begins.append(read)
        device = self.rows.device
        where = torch.tensor([*batch_slots.values()], device=device)
        self.read[where] = torch.tensor(begins, device=device)
        if pieces:
            at = torch.tensor([slots, places], device=device)
            self.rows[at[0], at[1]] = torch.cat(pieces).to(self.rows.dtype)

    def store(self, graph: GraphState, states: dict[int, Tensor]) -> None:
        """Keep the states of the rows that became text, in its order."""
        joined = torch.cat([states[layer] for layer in self.wants], -1).to(self.rows.dtype)
        rows = joined.view(graph.size, graph.k + 1, -1)
        if graph.trees is not None:
            taken = graph.trees.taken[:, : self.rows.shape[1]].long()
            rows = rows.gather(1, taken[..., None].expand(-1, -1, rows.shape[-1]))
        self.rows[: graph.size, : rows.shape[1]] = rows
        self.read[: graph.size] = graph.inputs.positions[:, 0].long() + 1

    def pretend(self, length: int) -> None:
        self.read.fill_(length - 1)

    def buffers(self) -> list[Tensor]:
        return [self.read, self.rows]


class _TreeGrowth:
    """The levels of one step's trees; each row of the frontier has a KV slot of its own behind the text."""

    def __init__(self, head: Head, layout: PagedLayout, rows_of: RowsOf, graph: GraphState) -> None:
        self._head, self._layout, self._rows_of, self._graph = head, layout, rows_of, graph
        self._planned: dict[int, PathRows] = {}  # by level, made in the trial run
        self._paths: Tensor | None = None
        self._expanded = 0

    def run(self, trees: BatchedTrees, memory: Tensor) -> None:
        """From what the head remembers of the last token [B, 1, M] to the nodes and parents in the graph's inputs."""
        graph = self._graph
        tokens, rows = graph.inputs.ids[:, :1].long(), None
        self._paths, self._expanded = None, 0
        trees.reset()
        last = min(self._head.levels, graph.k) - 1
        if self._head.independent:
            self._run_independent(trees, self._head.all_levels(memory.flatten(0, 1)[None], last + 1))
            return
        for level in range(last + 1):
            guess = self._head.step(level, memory.flatten(0, 1)[None], tokens.flatten()[None], rows)
            ids, scores = self._offers(trees, level, guess.logits[0])
            front = trees.grow(ids, scores)
            if front is None or level == last:
                break
            above = front.above[..., None]
            seen = guess.memory[0].view(graph.size, -1, guess.memory.shape[-1])
            memory, tokens = seen.gather(1, above.expand(-1, -1, seen.shape[-1])), front.tokens
            rows = self._rows(level + 1, front) if self._head.deep else None
        self._write(*trees.result())

    def _run_independent(self, trees: BatchedTrees, logits: list[Tensor]) -> None:
        """All nodes of a level have the same offers: they are made once per batch slot."""
        width = 1
        for level, mine in enumerate(logits):
            ids, scores = (part.expand(-1, width, -1) for part in self._offers(trees, level, mine[0]))
            front = trees.grow(ids, scores)
            if front is None:
                break
            width = front.tokens.shape[1]
        self._write(*trees.result())

    def _offers(self, trees: BatchedTrees, level: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens of each row, or for a sampled request the one that its noise picks."""
        inputs, size, count = self._graph.inputs, self._graph.size, trees.num_offered
        temperatures, keys = inputs.temperatures[:, level], inputs.keys[:, level]
        ids, scores = self._graph.suite.offer(logits.contiguous(), temperatures, keys, count, self._head.vocab)
        return ids.view(size, -1, count), scores.view(size, -1, count)

    def _rows(self, level: int, front: Frontier) -> Rows:
        """KV slots behind the nodes expanded before, and for each row the path of its ancestors' slots."""
        graph, base = self._graph, self._graph.batch_slots.lengths.long()
        own = self._expanded + torch.arange(front.tokens.shape[1], device=base.device)
        self._expanded += len(own)
        path = own[:, None].expand(graph.size, -1, 1)
        if self._paths is not None:
            before = self._paths.gather(1, front.above[..., None].expand(-1, -1, self._paths.shape[-1]))
            path = torch.cat([before, path], -1)
        self._paths = path
        positions = (base[:, None] + level - 1).expand(-1, len(own))
        if level not in self._planned:
            self._planned[level] = graph.path_rows(self._layout, len(own))
        return self._rows_of(self._planned[level].packed(front.tokens, positions, base, path))

    def _write(self, tokens: Tensor, parents: Tensor) -> None:
        assert self._graph.trees is not None, "a graph for trees is wanted"
        self._graph.inputs.ids[:, 1:] = tokens
        self._graph.trees.parents[:, 1:] = parents + 1


class _ChainGrowth(_TreeGrowth):
    """Chains: a node's KV slot is that of its place in the chain."""

    def __init__(self, head: Head, layout: PagedLayout, rows_of: RowsOf, graph: GraphState) -> None:
        super().__init__(head, layout, rows_of, graph)
        self._sampling = graph.row_sampling(graph.size)
        self._deeper = [graph.node_rows(layout, node) for node in range(graph.k)] if head.deep else []

    def _offers(self, trees: BatchedTrees, level: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The token that the request's parameters and noise choose, as the target does and a draft model."""
        graph, inputs, out = self._graph, self._graph.inputs, self._graph.inputs.ids[:, level + 1]
        temperatures, keys = inputs.temperatures[:, level], inputs.keys[:, level]
        graph.suite.describe(graph.batch_slots, inputs, self._sampling, level=level)
        graph.suite.pick(
            logits.contiguous(), temperatures, keys, vocab=self._head.vocab, out=out, sampling=self._sampling
        )
        ids = out.long()[:, None, None]
        return ids.clamp(min=0), torch.where(ids == BROKEN, -torch.inf, 0.0)

    def _rows(self, level: int, front: Frontier) -> Rows:
        return self._rows_of(self._deeper[level - 1])

    def _write(self, tokens: Tensor, parents: Tensor) -> None:
        self._graph.inputs.ids[:, 1:] = tokens


class _ReadRows:
    """The rows a head reads in a step, as tensors that keep their addresses."""

    def __init__(self, states: StoredStates, graph: GraphState) -> None:
        self._read, self._graph = states.read[: graph.size], graph
        self.count = states.rows.shape[1]
        device = states.read.device
        self._offsets = torch.arange(self.count, device=device)
        self.batch_slots = torch.arange(graph.size, device=device)
        rows = torch.zeros(3, graph.size, self.count, dtype=torch.int64, device=device)
        self._ids, self._positions, self._slots = rows
        self.last = torch.zeros(graph.size, dtype=torch.int64, device=device)  # which of the rows is the text's last

    def packed(self, layout: PagedLayout) -> Packed:
        ids, positions, slots = (part.view(-1) for part in (self._ids, self._positions, self._slots))
        return self._graph.pack_rows(layout, self.count, ids, positions, slots)

    def prepare(self) -> None:
        """Tokens, positions and KV slots of the rows from the first unread one on."""
        batch = self._graph.batch_slots
        positions = self._read[:, None] + self._offsets
        inside = positions < self._graph.limits[:, None]
        self._ids.copy_(batch.history.gather(1, positions.clamp(max=batch.history.shape[1] - 1)))
        self._slots.copy_(self._graph.kv_slots(positions))
        self._positions.copy_(torch.where(inside, positions, 0))
        self.last.copy_((batch.lengths - 1 - self._read).clamp(0, self.count - 1))
