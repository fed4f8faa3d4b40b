"""Steps as functions of no arguments: what depends on shapes is settled before, so that they can be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from faircopy.kernels.gpu.packing import PackedRows
from faircopy.kernels.gpu.tree import TreeNodes
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Taps
from faircopy.model.runner import Runner
from faircopy.replay.space import Fills, Listens, Space

ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, *(2048 << n for n in range(6)))  # packed
Run = Callable[[], int]  # sends a step off; how many rows the target computes


class Steps:
    """Makes the steps of one target and drafter."""

    def __init__(self, target: Runner, layout: PagedLayout, drafter: Fills) -> None:
        self._target, self._layout, self._drafter = target, layout, drafter

    def whole(self, space: Space) -> Callable[[], None]:
        """One whole step as a function of no arguments."""
        suite, inputs, slots = space.suite, space.inputs, space.slots
        packed = space.verify_rows(self._layout)
        fill = self._drafter.plan_fill(space) if space.k else lambda: None

        def run() -> None:
            suite.prepare(slots, inputs, space.page, space.scratch)
            fill()
            logits, states = self._listen(packed)
            chosen = suite.pick(logits, inputs.temperatures.view(-1), inputs.keys.view(-1), strict=True)
            suite.accept(slots, inputs, chosen, space.out)
            if isinstance(self._drafter, Listens):
                self._drafter.keep(space, states)

        return torch.no_grad()(run)

    def tree(self, space: Space, trees: TreeNodes, drafter: Listens) -> Callable[[], None]:
        """The same with a tree per seat: grown, verified, judged, and its accepted path moved into line."""
        suite, inputs, slots = space.suite, space.inputs, space.slots
        rows = space.path_rows(self._layout, space.k + 1, trees.paths)
        packed, fill = space.tree_rows(rows), self._drafter.plan_fill(space)

        def run() -> None:
            suite.prepare(slots, inputs, space.page, space.scratch)
            fill()
            suite.place_nodes(slots, inputs, trees)
            rows.set_base(trees.base)
            logits, states = self._listen(packed)
            chosen = suite.pick(logits, inputs.temperatures.view(-1), inputs.keys.view(-1), strict=True)
            suite.accept_tree(slots, inputs, trees, chosen, space.out)
            suite.compact(slots, trees, space.out, space.page)
            drafter.keep(space, states)

        return torch.no_grad()(run)

    def draft(self, space: Space, packed_rows: PackedRows) -> Callable[[], None]:
        """The first half of a step: find nodes and pack them."""
        suite, fill = space.suite, self._drafter.plan_fill(space)

        def run() -> None:
            suite.prepare(space.slots, space.inputs, space.page, space.scratch)
            fill()
            suite.pack(space.slots, space.inputs, packed_rows, space.scratch)

        return torch.no_grad()(run)

    def verify(self, space: Space, packed_rows: PackedRows, rows: int) -> Callable[[], None]:
        """The second half: so many packed rows through the target, and what is accepted."""
        suite, packed = space.suite, space.first_rows(packed_rows, self._layout, rows)

        def run() -> None:
            logits = self._target.model.forward(packed, self._layout)
            chosen = suite.pick(logits, packed_rows.temperatures[:rows], packed_rows.keys[:rows], strict=True)
            suite.accept(space.slots, space.inputs, chosen, space.out, packed_rows.starts)

        return torch.no_grad()(run)

    def _listen(self, packed: Packed) -> tuple[Tensor, dict[int, Tensor]]:
        """The target's pass, overheard by a drafter that wants to."""
        if not isinstance(self._drafter, Listens):
            return self._target.model.forward(packed, self._layout), {}
        taps = Taps(self._drafter.wants)
        return self._target.model.forward(packed, self._layout, taps), taps.states


class Halves:
    """A step whose rows are counted in the middle: draft and pack, read how many rows there are, verify those."""

    def __init__(
        self, draft: Callable[[], None], count: Callable[[], int], make: Callable[[int], Callable[[], None]], most: int
    ) -> None:
        self._draft, self._count, self._make = draft, count, make
        self._buckets = [rows for rows in ROWS if rows < most] + [most]
        self._made: dict[int, Callable[[], None]] = {}  # second halves, by how many rows they verify

    def __call__(self) -> int:
        self._draft()
        rows = roomy(self._count(), self._buckets, self._made)
        if rows not in self._made:
            self._made[rows] = self._make(rows)
            self._draft()  # once more: the rehearsal has packed something else
        self._made[rows]()
        return rows

    def warm(self) -> None:
        for rows in reversed(self._buckets):  # the largest first: the others find room in its memory
            self._made[rows] = self._made.get(rows) or self._make(rows)


def roomy(size: int, buckets: list[int], made: Iterable[int]) -> int:
    """The bucket that size runs in: a captured graph with some to spare rather than a new one that fits."""
    fitting = next(bucket for bucket in buckets if bucket >= size)
    return min((known for known in made if fitting <= known < 2 * fitting), default=fitting)


def counted(run: Callable[[], None], rows: int) -> Run:
    """A step that always has so many rows."""

    def told() -> int:
        run()
        return rows

    return told
