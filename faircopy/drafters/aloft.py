"""A head's part of a captured step: it reads what the last step kept and guesses a chain, and nobody looks.

Row j of a seat's kept states belongs to position read + j, where `read` is the first position the head has not read.
How many of them count is known only on the device; rows beyond the text are computed too, and the next step's land on
top of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from faircopy.drafters.heads import Head, Rows
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout

LIMIT, PAGES = 2, 7  # columns of the control table: how far a seat may go, and where its pages begin


class Aloft:
    """What a head remembers of every seat between steps, and the passes that use it."""

    def __init__(self, head: Head, layout: PagedLayout, rows_of: Callable[[Packed], Rows], seats: int) -> None:
        self._head, self._layout, self._rows_of = head, layout, rows_of
        like = head._like()
        self.read = torch.zeros(seats, dtype=torch.int64, device=like.device)
        self.states = like.new_zeros(seats, head.levels + 1, head.width)

    def board(self, seat: int, read: int, states: Tensor) -> None:
        """A sequence takes a seat: what it has not read, and the states before those rows."""
        self.read[seat] = read
        self.states[seat, : len(states)] = states

    def keep(self, space: Any, states: dict[int, Tensor]) -> None:
        """After the target's pass: the states of all its rows, for whichever of them are accepted."""
        joined = torch.cat([states[layer] for layer in self._head.wants], -1)
        self.states[: space.size, : space.k + 1] = joined.view(space.size, space.k + 1, -1).to(self.states.dtype)
        self.read[: space.size] = space.slots.lengths.long()

    def plan_fill(self, space: Any) -> Callable[[], None]:
        """Read, then guess node by node."""
        reading = _Reading(self, space)
        packed = reading.packed(self._layout)
        deeper = [space.node_rows(self._layout, node) for node in range(space.k - 1)]

        def fill() -> None:
            reading.prepare()
            states = self.states[: space.size].flatten(0, 1)
            memory = self._head.read(states[None], packed.ids[None], self._rows_of(packed))[0]
            memory = memory.view(space.size, reading.count, -1)[reading.seats, reading.last]
            for node in range(space.k):
                memory = self._guess(space, node, memory, deeper)

        return fill

    def _guess(self, space: Any, node: int, memory: Tensor, deeper: list[Packed]) -> Tensor:
        """One more node for every seat, chosen with the requests' own noise."""
        feed, head = space.feed, self._head
        rows = self._rows_of(deeper[node - 1]) if node and head.deep else None
        guess = head.step(node, memory[None], feed.ids[:, node].long()[None], rows)
        logits = torch.nan_to_num(guess.logits[0], neginf=-torch.inf).contiguous()
        space.suite.pick(logits, feed.heat[:, node], feed.keys[:, node], vocab=head.vocab, out=feed.ids[:, node + 1])
        return guess.memory[0]


class _Reading:
    """The rows a head reads in a step, as tensors that keep their places."""

    def __init__(self, aloft: Aloft, space: Any) -> None:
        self._read, self._space = aloft.read[: space.size], space
        self.count = aloft.states.shape[1]
        device = aloft.read.device
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
        slots, page = self._space.slots, self._space.page
        positions = self._read[:, None] + self._ahead
        inside = positions < slots.control[:, LIMIT, None]
        positions = positions.clamp(max=slots.history.shape[1] - 1)
        self._ids.copy_(slots.history.gather(1, positions))
        tables = slots.control[:, PAGES:]
        pages = tables.gather(1, (positions // page).clamp(max=tables.shape[1] - 1)).long()
        self._slots.copy_(torch.where(inside, pages * page + positions % page, self._space.trash))
        self._positions.copy_(torch.where(inside, positions, 0))
        self.last.copy_((slots.lengths - 1 - self._read).clamp(0, self.count - 1))
