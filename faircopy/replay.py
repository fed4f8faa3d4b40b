"""The steady state on the device: draft, verify and accept replay as one graph, and nobody waits for the host.

The host launches a step, launches the next one behind it, and only then looks at what the first one said. Who sits in
which slot, how far each may go and where its pages lie is written to a control table before each launch, so sequences
join, leave and grow between replays of the same graph. What a finished sequence still computes is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy import rng
from faircopy.kernels.gpu import step
from faircopy.kernels.gpu.attention import PATH, PagePlan, block_length, even_plan, tree_plan
from faircopy.kernels.gpu.suite import Suite
from faircopy.kernels.gpu.tree import Branches
from faircopy.layout.base import Packed
from faircopy.layout.paged import PagedLayout
from faircopy.layout.tables import Tables
from faircopy.model.base import Taps
from faircopy.model.runner import Runner
from faircopy.types import Batch, Decision, Draft, Sequence, Verdict
from faircopy.verify.base import numerics_error

TILE = 128  # query rows times heads per key head that a captured step verifies in one piece
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


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
        feed, trees = self.feed, self.branches
        rows = (feed.ids.view(-1), feed.positions.view(-1), feed.slots.view(-1))
        if trees is None:
            return self.pack_rows(layout, self.k + 1, *rows)
        return self._pack(self.k + 1, *rows, self._tree_plans(layout, trees.base, trees.paths))

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
            (shape.window, shape.group): even_plan(self.size, rows, tables, self.page, reach, shape.head_dim)
            for shape in layout.layers
        }
        return self._pack(rows, ids, positions, slots, plans)

    def pack_paths(self, layout: PagedLayout, ids: Tensor, positions: Tensor, base: Tensor, path: Tensor) -> Packed:
        """Rows [B, R] behind the text at base [B], each seeing its path [B, R, n]: the last place on it is its own.

        What lies behind the limit counts for nothing: it is written to the trash and looked for nowhere.
        """
        last = self.slots.control[:, step.LIMIT, None].long() - 1
        slots = self.places(base[:, None] + path[..., -1])
        seen = torch.minimum(path, (last - base[:, None])[..., None]).int()
        plans = self._tree_plans(layout, base.int(), F.pad(seen, (0, PATH - seen.shape[-1])))
        return self._pack(ids.shape[1], ids.flatten(), torch.minimum(positions, last).flatten(), slots.flatten(), plans)

    def places(self, index: Tensor) -> Tensor:
        """Where the keys of these positions [B, n] lie; behind the limit, in the trash."""
        tables = self.slots.control[:, step.PAGES :]
        pages = tables.gather(1, (index // self.page).clamp(max=tables.shape[1] - 1)).long()
        inside = index < self.slots.control[:, step.LIMIT, None]
        return torch.where(inside, pages * self.page + index % self.page, self.trash)

    @property
    def _tables(self) -> tuple[Tensor, int]:
        """Page tables, and how many tokens they reach."""
        tables = self.slots.control[:, step.PAGES :]
        return tables, tables.shape[1] * self.page

    def _tree_plans(self, layout: PagedLayout, base: Tensor, paths: Tensor) -> dict[tuple[int, int], PagePlan]:
        tables, reach = self._tables
        longest = max((block_length(shape.head_dim) for shape in layout.layers), default=1)
        return {
            (shape.window, shape.group): tree_plan(
                base, paths, tables, self.page, reach, shape.group, longest, shape.head_dim
            )
            for shape in layout.layers
        }

    def _pack(self, rows: int, ids: Tensor, positions: Tensor, slots: Tensor, plans: dict[Any, PagePlan]) -> Packed:
        wanted = torch.arange(self.size * rows, device=ids.device)
        places = [range(n * rows, (n + 1) * rows) for n in range(self.size)]
        return Packed(ids, positions, slots, plans, wanted, [1] * self.size, [range(rows - 1)] * self.size, places)


@runtime_checkable
class Fills(Protocol):
    """A drafter that can draft without the host."""

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


@dataclass(slots=True)
class Flight:
    """A step in the air."""

    seats: dict[Sequence, int]
    space: Space
    report: Tensor  # where out lands on the host
    landed: torch.cuda.Event | None

    @property
    def seqs(self) -> list[Sequence]:
        return list(self.seats)

    @property
    def rows(self) -> int:
        """Rows the target computed, those of empty seats included."""
        return self.space.size * (self.space.k + 1)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a step reports of one seat."""

    tokens: list[int]
    room: int
    sound: bool
    nodes: list[int]
    parents: list[int]
    path: list[int]  # accepted nodes

    @classmethod
    def of(cls, row: Any, width: int, tree: bool) -> _Told:
        count, room, sound = (int(number) for number in row[:3])
        accepted = count - 1 if sound else count
        nodes = [int(n) for n in row[3 + width : 3 + width + room]]
        tokens = [int(n) for n in row[3 : 3 + count]]
        if not tree:
            nodes = [n for n in nodes if n >= 0]
            return cls(tokens, room, bool(sound), nodes, list(range(-1, len(nodes) - 1)), list(range(accepted)))
        parents = [int(n) for n in row[2 + 2 * width : 2 + 2 * width + room]]
        path = [int(n) - 1 for n in row[2 + 3 * width : 2 + 3 * width + accepted]]
        return cls(tokens, room, bool(sound), nodes, parents, path)


class Replay:
    """Owns the slots, the graphs and the host's side of both."""

    def __init__(self, target: Runner, drafter: Fills, tables: Tables, capacity: int, graphs: bool = True) -> None:
        layout = cast(PagedLayout, target.layout)
        assert layout.suite is not None, "graphs are made of kernels"
        self._target, self._layout, self._drafter, self._tables = target, layout, drafter, tables
        self._suite, self._graphs = layout.suite, graphs and target.model.device.type == "cuda"
        self._context = target.model.context
        widest = max(shape.group for shape in layout.layers)
        far = max(1, TILE // widest - 1)  # all rows of a chain are one tile
        self._longest = _most(drafter, far)
        self._buckets = [size for size in BUCKETS if size < capacity] + [capacity]
        self._slots = self._make_slots(capacity)
        self._spaces: dict[tuple[int, int], tuple[Space, Callable[[], None]]] = {}
        self._alive: list[Callable[[], None]] = []
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self._controls = [self._on_host(self._slots.control.shape) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._reports: dict[tuple[int, int, int], Tensor] = {}
        self._turn = 0

    def takes(self, batch: Batch) -> bool:
        """Whether this batch is in its steady state: one token to feed each, chains to guess, tokens to choose."""
        return (
            len(batch) <= self._buckets[-1]
            and max(batch.room) <= self._longest
            and all(self._steady(batch, i) and self._drafter.ready(seq) for i, seq in enumerate(batch.seqs))
        )

    def launch(self, seqs: list[Sequence], widths: list[int], k: int, after: Flight | None = None) -> Flight:
        """Send a step of k nodes off, of which each sequence may use so many.

        Behind another one, sequences keep their seats and their lengths are the device's.
        """
        seats = {seq: n if after is None else after.seats[seq] for n, seq in enumerate(seqs)}
        k = min(k, self._longest)
        space, run = self._space(self._bucket(max(seats.values()) + 1, k), k)
        self._turn = 1 - self._turn
        self._write_control(space, seats, widths, fresh=after is None)
        if after is None:
            self._write_history(seats)
            if isinstance(self._drafter, Listens):
                self._drafter.board(seats)
        run()
        report = self._report(space)
        report.copy_(space.out, non_blocking=True)
        landed = self._mark()
        return Flight(seats, space, report, landed)

    def land(self, flight: Flight) -> tuple[Batch, Draft, Verdict]:
        """Wait for a step and say what it gave those who still want it."""
        if flight.landed is not None:
            flight.landed.synchronize()
        reports, k = flight.report.numpy(), flight.space.k
        batch, draft, decisions = Batch([], [], []), Draft([], []), []
        for seq, seat in flight.seats.items():
            if seq.finished is not None:
                continue
            told = _Told.of(reports[seat], k + 1, flight.space.branches is not None)
            length, accepted = len(seq.tokens), len(told.path)
            self._layout.settle(seq, length + accepted)
            self._layout.moved += sum(node != place for place, node in enumerate(told.path))
            self._drafter.settle(seq, length, accepted, k)
            decisions.append(Decision(told.path, told.tokens, error=None if told.sound else numerics_error(seq)))
            batch.seqs.append(seq)
            batch.upto.append(length)
            batch.room.append(told.room)
            draft.tokens.append(told.nodes)
            draft.parents.append(told.parents)
        return batch, draft, Verdict(decisions)

    def warm(self, k: int) -> None:
        """Capture a graph for every size of batch now rather than when it is first needed."""
        for size in reversed(self._buckets):
            self._space(self._bucket(size, k), min(k, self._longest))

    def _steady(self, batch: Batch, i: int) -> bool:
        seq, params = batch.seqs[i], batch.seqs[i].params
        plain = not (seq.adjusts or params.top_k or params.top_p < 1.0 or params.min_p or params.logprobs is not None)
        return plain and batch.complete(i) and self._layout.cached(seq) == len(seq.tokens) - 1

    def _bucket(self, size: int, k: int) -> int:
        """The seats a step runs with: a captured graph with some to spare rather than a new one that fits."""
        fitting = next(bucket for bucket in self._buckets if bucket >= size)
        return min(
            (known for known, width in self._spaces if width == k and fitting <= known < 2 * fitting), default=fitting
        )

    def _make_slots(self, capacity: int) -> step.Slots:
        device = self._target.model.device
        columns = step.PAGES + self._tables.pages_for(self._context)
        control = torch.zeros(capacity, columns, dtype=torch.int32, device=device)
        lengths = torch.ones(capacity, dtype=torch.int32, device=device)
        history = torch.zeros(capacity, self._context + 128, dtype=torch.int32, device=device)
        return step.Slots(control, lengths, history)

    def _space(self, size: int, k: int) -> tuple[Space, Callable[[], None]]:
        if (size, k) not in self._spaces:
            self._spaces[size, k] = self._make_space(size, k)
        return self._spaces[size, k]

    def _make_space(self, size: int, k: int) -> tuple[Space, Callable[[], None]]:
        device, page = self._target.model.device, self._tables.page
        feed = step.Feed.empty(size, k + 1, device)
        deepest = self._drafter.levels(k) if isinstance(self._drafter, Listens) and k else 0
        branches = Branches.over(self._layout.all_pools(), size, k + 1, deepest) if deepest else None
        out = torch.zeros(size, 4 * k + 5 if deepest else 2 * k + 4, dtype=torch.int32, device=device)
        space = Space(self._slots.part(size), feed, out, self._suite, page, self._layout.trash, branches)
        run = self._plan_step(space)
        self._rehearse(space, run)
        return space, self._captured(run) if self._graphs else run

    def _plan_step(self, space: Space) -> Callable[[], None]:
        """One whole step as a function of no arguments."""
        suite, feed, slots, trees = space.suite, space.feed, space.slots, space.branches
        fill = self._drafter.plan_fill(space) if space.k else lambda: None

        def run() -> None:
            suite.prepare(slots, feed, space.page, space.trash)
            fill()
            if trees is not None:
                suite.graft(slots, feed, trees)
            logits, states = self._listen(space.verify_rows(self._layout))
            chosen = suite.pick(logits, feed.heat.view(-1), feed.keys.view(-1), strict=True)
            if trees is not None:
                suite.climb(slots, feed, trees, chosen, space.out)
                suite.compact(slots, trees, space.out, space.page)
            else:
                suite.accept(slots, feed, chosen, space.out)
            if isinstance(self._drafter, Listens):
                self._drafter.keep(space, states)

        return torch.no_grad()(run)

    def _listen(self, packed: Packed) -> tuple[Tensor, dict[int, Tensor]]:
        """The target's pass, overheard by a drafter that wants to."""
        if not isinstance(self._drafter, Listens):
            return self._target.model.forward(packed, self._layout), {}
        taps = Taps(self._drafter.wants)
        return self._target.model.forward(packed, self._layout, taps), taps.states

    def _rehearse(self, space: Space, run: Callable[[], None]) -> None:
        """Run once on empty seats, which write to the trash; those who fly meanwhile find their state as it was."""
        state = [space.slots.control, space.slots.lengths, space.slots.history]
        state += self._drafter.kept if isinstance(self._drafter, Listens) else []
        saved = [tensor.clone() for tensor in state]
        self._write_control(space, {}, [], fresh=True)
        run()
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """The step as a graph; what it reads must outlive it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._alive.append(run)
        return graph.replay

    def _write_control(self, space: Space, seats: dict[Sequence, int], widths: list[int], fresh: bool) -> None:
        """Who sits where, and how far each may go; an empty seat feeds one token into the trash, for ever."""
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        control = self._controls[self._turn]
        table = control.numpy()[: space.size]
        table[:, : step.PAGES] = (1, 1, 1, 0, 0, 0, 0)
        table[:, step.PAGES :] = space.trash // space.page
        for (seq, seat), width in zip(seats.items(), widths, strict=True):
            self._write_seat(table[seat], seq, width, fresh)
        space.slots.control.copy_(control[: space.size], non_blocking=True)
        self._copied[self._turn] = self._mark()

    def _write_seat(self, row: Any, seq: Sequence, width: int, fresh: bool) -> None:
        seed = rng.mix(seq.seed)
        heat = np.float32(seq.params.temperature).view(np.int32)
        low, high = (np.uint32(part).astype(np.int32) for part in (seed & 0xFFFFFFFF, seed >> 32))
        row[: step.PAGES] = (fresh, len(seq.tokens), seq.limit, width, heat, low, high)
        pages = self._tables.table(seq)
        row[step.PAGES : step.PAGES + len(pages)] = pages

    def _write_history(self, seats: dict[Sequence, int]) -> None:
        """The texts so far, for whoever looks things up; two tokens are enough for everybody else."""
        rows = np.concatenate([np.full(len(seq.tokens), seat) for seq, seat in seats.items()])
        cols = np.concatenate([np.arange(len(seq.tokens)) for seq in seats])
        text = np.concatenate([np.array(seq.tokens, np.int32) for seq in seats])
        history = self._slots.history
        where = tuple(torch.from_numpy(part).to(history.device) for part in (rows, cols))
        history.index_put_(where, torch.from_numpy(text).to(history.device))

    def _report(self, space: Space) -> Tensor:
        key = (space.size, space.k, self._turn)
        if key not in self._reports:
            self._reports[key] = self._on_host(space.out.shape)
        return self._reports[key]

    def _on_host(self, shape: torch.Size) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=self._graphs)

    def _mark(self) -> torch.cuda.Event | None:
        if not self._graphs:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def _most(drafter: Fills, far: int) -> int:
    """Nodes that a captured step can have: a chain's rows are one tile, a tree's paths fit their table."""
    if not isinstance(drafter, Listens):
        return far
    return min(drafter.longest, PATH if drafter.levels(drafter.longest) else far)
