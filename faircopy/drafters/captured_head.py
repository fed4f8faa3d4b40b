"""A head's part of a captured step: it reads what the last step kept and grows a tree per seat, and nobody looks.

Row j of a seat's kept states belongs to position read + j, where `read` is the first position the head has not read.
How many of them count is known only on the device; rows beyond the text are computed too, and the next step's land on
top of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from faircopy.drafters.batched_trees import BatchedTrees, Frontier, batch_trees
from faircopy.drafters.heads import Head, Rows
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout


class CapturedHead:
    """What a head remembers of every seat between steps, and the passes that use it."""

    def __init__(self, head: Head, layout: PagedLayout, rows_of: Callable[[Packed], Rows], seats: int) -> None:
        self.head, self.layout, self.rows_of = head, layout, rows_of
        like = head._like()
        self.read = torch.zeros(seats, dtype=torch.int64, device=like.device)
        self.states = like.new_zeros(seats, head.levels + 1, head.width)

    def board(self, seat: int, read: int, states: Tensor) -> None:
        """A sequence takes a seat: what it has not read, and the states before those rows."""
        self.read[seat] = read
        self.states[seat, : len(states)] = states

    def keep(self, space: Any, states: dict[int, Tensor]) -> None:
        """After a step: the states of the rows that became text, in its order."""
        joined = torch.cat([states[layer] for layer in self.head.wants], -1).to(self.states.dtype)
        rows = joined.view(space.size, space.k + 1, -1)
        if space.trees is not None:
            taken = space.trees.taken[:, : self.states.shape[1]].long()
            rows = rows.gather(1, taken[..., None].expand(-1, -1, rows.shape[-1]))
        self.states[: space.size, : rows.shape[1]] = rows
        self.read[: space.size] = space.inputs.positions[:, 0].long() + 1

    def plan_fill(self, space: Any) -> Callable[[], None]:
        """Read, then guess level by level."""
        reading = _Reading(self, space)
        packed = reading.packed(self.layout)
        trees = batch_trees(self.head.tree(space.k), space.size, self.read.device)
        growing: _Growing = _Straight(self, space) if trees.is_chain else _Growing(self, space)

        def fill() -> None:
            reading.prepare()
            states = self.states[: space.size].flatten(0, 1)
            memory = self.head.read(states[None], packed.ids[None], self.rows_of(packed))[0]
            memory = memory.view(space.size, reading.count, -1)[reading.seats, reading.last]
            growing.run(trees, memory[:, None])

        return fill


class _Growing:
    """The levels of one step's trees; each row in front has a slot of its own behind the text."""

    def __init__(self, captured: CapturedHead, space: Any) -> None:
        self._captured, self._space, self._head = captured, space, captured.head
        self._known: dict[int, Any] = {}  # plans of each level's rows, made at the rehearsal

    def run(self, trees: BatchedTrees, memory: Tensor) -> None:
        """From what the head remembers of the last token [B, 1, M] to nodes and parents in the space."""
        space = self._space
        tokens, rows = space.inputs.ids[:, :1].long(), None
        self._begin()
        trees.reset()
        last = min(self._head.levels, space.k) - 1
        for level in range(last + 1):
            guess = self._head.step(level, memory.flatten(0, 1)[None], tokens.flatten()[None], rows)
            ids, scores = self._offers(trees, level, guess.logits[0])
            front = trees.grow(ids, scores)
            if front is None or level == last:
                break
            above = front.above[..., None]
            seen = guess.memory[0].view(space.size, -1, guess.memory.shape[-1])
            memory, tokens = seen.gather(1, above.expand(-1, -1, seen.shape[-1])), front.tokens
            rows = self._rows(level + 1, front) if self._head.deep else None
        self._write(*trees.result())

    def _offers(self, trees: BatchedTrees, level: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens of each row, or the one that the request's noise picks."""
        inputs, size = self._space.inputs, self._space.size
        ids, scores = self._space.suite.offer(
            logits.contiguous(),
            inputs.temperatures[:, level],
            inputs.keys[:, level],
            trees.num_offered,
            self._head.vocab,
        )
        return ids.view(size, -1, trees.num_offered), scores.view(size, -1, trees.num_offered)

    def _begin(self) -> None:
        self._paths: Tensor | None = None
        self._expanded = 0

    def _rows(self, level: int, front: Frontier) -> Rows:
        """Slots behind the nodes expanded before, and for each row the path of its ancestors' slots."""
        space, base = self._space, self._space.slots.lengths.long()
        own = self._expanded + torch.arange(front.tokens.shape[1], device=base.device)
        self._expanded += len(own)
        path = own[:, None].expand(space.size, -1, 1)
        if self._paths is not None:
            before = self._paths.gather(1, front.above[..., None].expand(-1, -1, self._paths.shape[-1]))
            path = torch.cat([before, path], -1)
        self._paths = path
        positions = (base[:, None] + level - 1).expand(-1, len(own))
        if level not in self._known:
            self._known[level] = space.path_rows(self._captured.layout, len(own))
        return self._captured.rows_of(self._known[level].packed(front.tokens, positions, base, path))

    def _write(self, tokens: Tensor, parents: Tensor) -> None:
        self._space.inputs.ids[:, 1:] = tokens
        self._space.trees.parents[:, 1:] = parents + 1


class _Straight(_Growing):
    """Chains: a node stands where its place in the chain is."""

    def __init__(self, captured: CapturedHead, space: Any) -> None:
        super().__init__(captured, space)
        self._deeper = [space.node_rows(captured.layout, node) for node in range(space.k)] if captured.head.deep else []

    def _rows(self, level: int, front: Frontier) -> Rows:
        packed = self._deeper[level - 1]
        self._space.inputs.ids[:, level] = front.tokens[:, 0]
        return self._captured.rows_of(packed)

    def _write(self, tokens: Tensor, parents: Tensor) -> None:
        self._space.inputs.ids[:, 1:] = tokens


class _Reading:
    """The rows a head reads in a step, as tensors that keep their places."""

    def __init__(self, captured: CapturedHead, space: Any) -> None:
        self._read, self._space = captured.read[: space.size], space
        self.count = captured.states.shape[1]
        device = captured.read.device
        self._ahead, self.seats = torch.arange(self.count, device=device), torch.arange(space.size, device=device)
        rows = torch.zeros(3, space.size, self.count, dtype=torch.int64, device=device)
        self._ids, self._positions, self._slots = rows
        self.last = torch.zeros(space.size, dtype=torch.int64, device=device)  # which of the rows is the text's last

    def packed(self, layout: PagedLayout) -> Packed:
        ids, positions, slots = (part.view(-1) for part in (self._ids, self._positions, self._slots))
        result: Packed = self._space.pack_rows(layout, self.count, ids, positions, slots)
        return result

    def prepare(self) -> None:
        """Where the text has come to: tokens, positions and slots of the rows from the first unread one on."""
        slots = self._space.slots
        positions = self._read[:, None] + self._ahead
        inside = positions < self._space.limits[:, None]
        self._ids.copy_(slots.history.gather(1, positions.clamp(max=slots.history.shape[1] - 1)))
        self._slots.copy_(self._space.places(positions))
        self._positions.copy_(torch.where(inside, positions, 0))
        self.last.copy_((slots.lengths - 1 - self._read).clamp(0, self.count - 1))
