"""The rules of `trees.py` for many seats at once, as tensors that a captured step can grow without the host.

Every seat's tree has the same room, and shapes never depend on what is offered: a node that is not there has the token
-1, a path that is not there the value minus infinity.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from faircopy.drafters.trees import OFFERED, Reranked, Spent, Static, Tree


class Front(NamedTuple):
    """The nodes whose children are wanted next [B, F]."""

    tokens: Tensor
    above: Tensor  # which row of the front before each one continues


class Grove(ABC):
    """As many trees as there are seats. `straight` ones are chains."""

    straight = False
    offered = OFFERED  # tokens wanted of every row

    def __init__(self, seats: int, room: int, device: torch.device) -> None:
        self.seats, self.room, self.device = seats, room, device

    @abstractmethod
    def plant(self) -> None:
        """Begin anew."""

    @abstractmethod
    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        """One level more, from what each row in front offers [B, F, offered]; None: nothing more is wanted."""

    @abstractmethod
    def result(self) -> tuple[Tensor, Tensor]:
        """Tokens and parents [B, room] of the drafts, parents before children, -1 above the first level."""

    def _full(self, *shape: int, value: float, kind: torch.dtype = torch.int64) -> Tensor:
        return torch.full((self.seats, *shape), value, dtype=kind, device=self.device)


class Row(Grove):
    """Chains: the first token offered, again and again."""

    straight = True
    offered = 1

    def plant(self) -> None:
        self._tokens: list[Tensor] = []

    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        self._tokens.append(torch.where(scores[:, :, 0] > -torch.inf, ids[:, :, 0], -1))
        more = len(self._tokens) < self.room
        return Front(ids[:, :, 0], torch.zeros_like(ids[:, :, 0])) if more else None

    def result(self) -> tuple[Tensor, Tensor]:
        missing = self.room - len(self._tokens)
        tokens = torch.cat([*self._tokens, self._full(missing, value=-1)], 1)
        return tokens, torch.arange(-1, self.room - 1, device=self.device).expand(self.seats, -1)


class SpentGrove(Grove):
    """Clover's: see trees.Spent."""

    def __init__(self, seats: int, room: int, device: torch.device, top_p: float, floor: float) -> None:
        super().__init__(seats, room, device)
        self._top_p, self._floor = top_p, math.log(floor)

    def plant(self) -> None:
        room = self.room
        self._tokens, self._parents = self._full(room + 1, value=-1), self._full(room + 1, value=-1)
        self._used = self._full(1, value=0)
        self._nodes = self._full(1, value=-1)  # the front, as nodes
        self._values = self._full(1, value=0.0, kind=torch.float32)

    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        chances = scores.exp()
        likely = (chances.cumsum(-1) - chances < self._top_p) & (scores >= scores[..., :1] + self._floor)
        paths = torch.where(likely, scores + self._values[..., None], -torch.inf).flatten(1)
        count = min(self.room, paths.shape[1])
        values, places = paths.topk(count, -1)
        rank = torch.arange(count, device=self.device)
        kept = (values > -torch.inf) & (rank < self.room - self._used)
        nodes = torch.where(kept, self._used + rank, self.room)  # the last place is nobody's
        above, tokens = places // scores.shape[-1], ids.flatten(1).gather(1, places)
        self._tokens.scatter_(1, nodes, tokens)
        self._parents.scatter_(1, nodes, self._nodes.gather(1, above))
        self._used = self._used + kept.sum(1, keepdim=True)
        self._nodes, self._values = nodes, torch.where(kept, values, -torch.inf)
        return Front(tokens, above)

    def result(self) -> tuple[Tensor, Tensor]:
        return self._tokens[:, : self.room], self._parents[:, : self.room]


class RerankedGrove(Grove):
    """EAGLE-2's: see trees.Reranked."""

    def __init__(self, seats: int, room: int, device: torch.device, width: int) -> None:
        super().__init__(seats, room, device)
        self._width = width

    def plant(self) -> None:
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents, values of every level
        self._count = self._expanded = 0
        self._nodes = self._full(1, value=-1)
        self._values = self._full(1, value=0.0, kind=torch.float32)

    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        values = (scores + self._values[..., None]).flatten(1)
        tokens, parents = ids.flatten(1), self._nodes.repeat_interleave(scores.shape[-1], 1)
        self._levels.append((tokens, parents, values))
        width = min(self._width, self.room - self._expanded, values.shape[1])
        first, self._count = self._count, self._count + values.shape[1]
        if not width:
            return None
        self._expanded += width
        self._values, places = values.topk(width, -1)
        self._nodes = first + places
        return Front(tokens.gather(1, places), places // scores.shape[-1])

    def result(self) -> tuple[Tensor, Tensor]:
        tokens, parents, values = (torch.cat(parts, 1) for parts in zip(*self._levels, strict=True))
        count = min(self.room, values.shape[1])
        best = values.topk(count, -1).indices.sort(-1).values
        places = self._full(self._count + 1, value=-1)  # node -> its place in the result; the last: nobody's
        places.scatter_(1, best, torch.arange(count, device=self.device).expand(self.seats, -1))
        there = values.gather(1, best) > -torch.inf
        above = places.gather(1, torch.where(parents < 0, self._count, parents).gather(1, best))
        chosen = torch.where(there, tokens.gather(1, best), -1), torch.where(there, above, -1)
        spare = self._full(self.room - count, value=-1)
        return torch.cat([chosen[0], spare], 1), torch.cat([chosen[1], spare], 1)


class StaticGrove(Grove):
    """Medusa's: see trees.Static; one row stands for all nodes of a level."""

    def __init__(self, seats: int, room: int, device: torch.device, levels: list[list[tuple[int, int, int]]]) -> None:
        """levels: (node, parent, rank) of each."""
        super().__init__(seats, room, device)
        self._levels = [torch.tensor(level, device=device).T.contiguous() for level in levels]

    def plant(self) -> None:
        self._tokens, self._parents = self._full(self.room, value=-1), self._full(self.room, value=-1)
        self._depth = 0

    def grow(self, ids: Tensor, scores: Tensor) -> Front | None:
        nodes, parents, ranks = self._levels[self._depth]
        reached = (parents < 0) | (self._tokens.index_select(1, parents.clamp(min=0)) >= 0)
        there = reached & (scores[:, 0].index_select(1, ranks) > -torch.inf)
        tokens = torch.where(there, ids[:, 0].index_select(1, ranks), -1)
        self._tokens.index_copy_(1, nodes, tokens)
        self._parents.index_copy_(1, nodes, parents.expand(self.seats, -1))
        self._depth += 1
        more = self._depth < len(self._levels)
        return Front(tokens[:, -1:].clamp(min=0), self._full(1, value=0)) if more else None

    def result(self) -> tuple[Tensor, Tensor]:
        return self._tokens, self._parents


def grove_of(tree: Tree, seats: int, device: torch.device) -> Grove:
    """The same rule for so many seats, each with the room of this tree; a rule not known here grows chains."""
    common = (seats, tree.room, device)
    if isinstance(tree, Spent):
        return SpentGrove(*common, tree.top_p, tree.floor)
    if isinstance(tree, Reranked):
        return RerankedGrove(*common, tree.width)
    if isinstance(tree, Static):
        return StaticGrove(*common, tree.levels)
    return Row(*common)
