"""One graph's world: its slots, the rows of its passes, and what a drafter must be able to do in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from faircopy.kernels.gpu import step
from faircopy.kernels.gpu.attention import PATH, PagePlan, aim, block_length, even_plan, tree_plan
from faircopy.kernels.gpu.packing import Bale
from faircopy.kernels.gpu.suite import Suite
from faircopy.kernels.gpu.tree import Branches
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.types import Sequence


@dataclass(frozen=True, slots=True)
class Space:
    """One graph's world: the slots it advances and everything its passes read."""

    slots: step.Slots
    feed: step.Feed
    out: Tensor  # [B, 2 W + 2] what accept reports, or [B, 4 W + 1] what climb does
    suite: Suite
    page: int
    trash: int
    branches: Branches | None = None  # where drafts are trees

    @property
    def size(self) -> int:
        return int(self.feed.ids.shape[0])

    @property
    def k(self) -> int:
        return int(self.feed.ids.shape[1]) - 1

    def verify_rows(self, layout: PagedLayout) -> Packed:
        """The last token and all nodes of every slot."""
        feed, width = self.feed, self.k + 1
        return self.pack_rows(layout, width, feed.ids.view(-1), feed.positions.view(-1), feed.slots.view(-1))

    def tree_rows(self, rows: PathRows) -> Packed:
        """The same where nodes are trees."""
        feed = self.feed
        return self.pack(self.k + 1, feed.ids.view(-1), feed.positions.view(-1), feed.slots.view(-1), rows.plans)

    def catch_up_rows(self, layout: PagedLayout) -> Packed:
        """The last two tokens of every slot: what a draft model may not have read yet. Logits of the second."""
        ids, positions, slots = (line.view(-1) for line in self.feed.before)
        packed = self.pack_rows(layout, 2, ids, positions, slots)
        object.__setattr__(packed, "wanted", torch.arange(1, 2 * self.size, 2, device=ids.device))
        return packed

    def node_rows(self, layout: PagedLayout, node: int) -> Packed:
        """One node of every slot."""
        feed = self.feed
        positions, slots = feed.columns[0, node + 1], feed.columns[1, node + 1]
        return self.pack_rows(layout, 1, feed.ids[:, node + 1], positions, slots)

    def pack_rows(self, layout: PagedLayout, rows: int, ids: Tensor, positions: Tensor, slots: Tensor) -> Packed:
        """So many rows of every slot, wherever those tensors say; planned for all pages a sequence can have."""
        tables, reach = self._tables
        plans = {
            (shape.window, shape.group): even_plan(self.size, rows, tables, self.page, reach, *_widest(layout))
            for shape in layout.layers
        }
        return self.pack(rows, ids, positions, slots, plans)

    def path_rows(self, layout: PagedLayout, rows: int, paths: Tensor | None = None) -> PathRows:
        """So many rows of every slot behind the text, each with a path of its own [B, R, PATH]."""
        paths = self.feed.ids.new_zeros(self.size, rows, PATH) if paths is None else paths
        tables, reach = self._tables
        plans = {
            (shape.window, shape.group): tree_plan(paths, tables, self.page, reach, shape.group, *_widest(layout))
            for shape in layout.layers
        }
        step_ = max((block_length(shape.head_dim, layout.itemsize) for shape in layout.layers), default=1)
        return PathRows(self, paths, plans, step_)

    def first_rows(self, bale: Bale, layout: PagedLayout, rows: int) -> Packed:
        """So many rows of a bale, from the first on; whose they are is known to the device alone."""
        tables, reach = self._tables
        plans = {
            (shape.window, shape.group): bale.plan(tables, self.page, reach, *_widest(layout))
            for shape in layout.layers
        }
        wanted = torch.arange(rows, device=bale.ids.device)
        return Packed(bale.ids[:rows], bale.positions[:rows], bale.slots[:rows], plans, wanted, [], [], [])

    def places(self, index: Tensor) -> Tensor:
        """Where the keys of these positions [B, n] lie; behind the limit, in the trash."""
        tables, _ = self._tables
        pages = tables.gather(1, (index // self.page).clamp(max=tables.shape[1] - 1)).long()
        inside = index < self.slots.control[:, step.LIMIT, None]
        return torch.where(inside, pages * self.page + index % self.page, self.trash)

    @property
    def _tables(self) -> tuple[Tensor, int]:
        """Page tables, and how many tokens they reach."""
        tables = self.slots.control[:, step.PAGES :]
        return tables, tables.shape[1] * self.page

    def pack(self, rows: int, ids: Tensor, positions: Tensor, slots: Tensor, plans: dict[Any, PagePlan]) -> Packed:
        wanted = torch.arange(self.size * rows, device=ids.device)
        places = [range(n * rows, (n + 1) * rows) for n in range(self.size)]
        return Packed(ids, positions, slots, plans, wanted, [1] * self.size, [range(rows - 1)] * self.size, places)


@dataclass(frozen=True, slots=True)
class PathRows:
    """Rows of trees, planned once; where texts end and paths lead is told before each pass."""

    space: Space
    paths: Tensor  # [B, R, PATH] int32
    plans: dict[tuple[int, int], PagePlan]
    step: int  # keys per block of whichever layer has most

    def aim(self, base: Tensor) -> None:
        """Texts end at base [B] int32 now."""
        for plan in self.plans.values():
            aim(plan, base, self.step)

    def packed(self, ids: Tensor, positions: Tensor, base: Tensor, path: Tensor) -> Packed:
        """Rows [B, R] that see path [B, R, n] counted from base; the last place on it is their own.

        What lies behind the limit counts for nothing: it is written to the trash and looked for nowhere.
        """
        space, last = self.space, self.space.slots.control[:, step.LIMIT, None].long() - 1
        self.paths[..., : path.shape[-1]] = torch.minimum(path, (last - base[:, None])[..., None])
        self.aim(base.int())
        slots = space.places(base[:, None] + path[..., -1])
        where = torch.minimum(positions, last)
        return space.pack(ids.shape[1], ids.flatten(), where.flatten(), slots.flatten(), self.plans)


def _widest(layout: PagedLayout) -> tuple[int, int]:
    """The head size with the shortest, so the most, key blocks, and its item size: layers share their plans."""
    return max(shape.head_dim for shape in layout.layers), layout.itemsize


@runtime_checkable
class Fills(Protocol):
    """A drafter that can draft without the host.

    One with a true `varies` finds fewer nodes than asked for, -1 from there on: its rows are packed.
    """

    def plan_fill(self, space: Space) -> Callable[[], None]:
        """Everything that depends on shapes; the result fills space.feed's nodes and is captured."""

    def ready(self, seq: Sequence) -> bool:
        """Whether it has read all but the last two tokens."""

    def settle(self, seq: Sequence, length: int, accepted: int, k: int) -> None:
        """So many of k nodes were accepted behind so many tokens."""


@runtime_checkable
class Listens(Protocol):
    """A drafter that reads the target's states, aboard too."""

    wants: tuple[int, ...]
    longest: int  # nodes it can fill

    def levels(self, k: int) -> int:
        """How deep its trees of k nodes can be; 0: they are chains."""

    def board(self, seats: dict[Sequence, int]) -> None:
        """These sequences sit there now."""

    def keep(self, space: Space, states: dict[int, Tensor]) -> None:
        """The target's states of all rows of a step, once it is known which were accepted; captured."""

    @property
    def kept(self) -> list[Tensor]:
        """What a rehearsal must leave as it was."""
