"""The steady state on the device: draft, verify and accept replay as one graph, and nobody waits for the host.

The host launches a step, launches the next one behind it, and only then looks at what the first one said. Who sits in
which slot, how far each may go and where its pages lie is written to a control table before each launch, so sequences
join, leave and grow between replays of the same graph. What a finished sequence still computes is thrown away.

Where drafts vary in length a step is two graphs: the first drafts and packs the rows there are end to end, the host
reads how many, and the second verifies just those. It is on its way before the host looks at the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from faircopy import rng
from faircopy.kernels.gpu import step
from faircopy.kernels.gpu.attention import PATH, PagePlan, aim, block_length, even_plan, tree_plan
from faircopy.kernels.gpu.packing import Bale
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
ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # of packed steps
FEW = 64  # rows up to here cost the target about the same: they are not worth counting
Run = Callable[[], int]  # sends a step off; how many rows the target computes


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
            (shape.window, shape.group): even_plan(self.size, rows, tables, self.page, reach, shape.head_dim)
            for shape in layout.layers
        }
        return self.pack(rows, ids, positions, slots, plans)

    def path_rows(self, layout: PagedLayout, rows: int, paths: Tensor | None = None) -> PathRows:
        """So many rows of every slot behind the text, each with a path of its own [B, R, PATH]."""
        paths = self.feed.ids.new_zeros(self.size, rows, PATH) if paths is None else paths
        tables, reach = self._tables
        plans = {
            (shape.window, shape.group): tree_plan(paths, tables, self.page, reach, shape.group, shape.head_dim)
            for shape in layout.layers
        }
        step_ = max((block_length(shape.head_dim) for shape in layout.layers), default=1)
        return PathRows(self, paths, plans, step_)

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


@dataclass(slots=True)
class Flight:
    """A step in the air."""

    seats: dict[Sequence, int]
    space: Space
    report: Tensor  # where out lands on the host
    landed: torch.cuda.Event | None
    rows: int  # that the target computes, those that stand for nothing included

    @property
    def seqs(self) -> list[Sequence]:
        return list(self.seats)


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
        rows = _roomy(self._count(), self._buckets, self._made)
        if rows not in self._made:
            self._made[rows] = self._make(rows)
            self._draft()  # once more: the rehearsal has packed something else
        self._made[rows]()
        return rows

    def warm(self) -> None:
        for rows in reversed(self._buckets):  # the largest first: the others find room in its memory
            self._made[rows] = self._made.get(rows) or self._make(rows)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a step reports of one seat."""

    tokens: list[int]
    room: int
    sound: bool
    nodes: list[int]
    parents: list[int]
    path: list[int]  # accepted nodes
    moved: int  # rows of keys that were not in line

    @classmethod
    def of(cls, row: Any, width: int, tree: bool) -> _Told:
        count, room, sound = (int(number) for number in row[:3])
        accepted = count - 1 if sound else count
        nodes = [int(n) for n in row[3 + width : 3 + width + room]]
        tokens = [int(n) for n in row[3 : 3 + count]]
        there = [place for place, node in enumerate(nodes) if node >= 0]
        parents, path = list(range(-1, room - 1)), list(range(accepted))
        if tree:
            parents = [int(n) for n in row[2 + 2 * width : 2 + 2 * width + room]]
            path = [int(n) - 1 for n in row[2 + 3 * width : 2 + 3 * width + accepted]]
        moved = sum(node != place for place, node in enumerate(path))
        new = {old: place for place, old in enumerate(there)} | {-1: -1}
        nodes, parents = [nodes[n] for n in there], [new[parents[n]] for n in there]
        return cls(tokens, room, bool(sound), nodes, parents, [new[node] for node in path], moved)


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
        # whether rows are packed; benchmarks that compare set it before the first step
        self.packs = bool(getattr(drafter, "varies", False)) and not isinstance(drafter, Listens)
        self._buckets = [size for size in BUCKETS if size < capacity] + [capacity]
        self._slots = self._make_slots(capacity)
        self._spaces: dict[tuple[int, int], tuple[Space, Run]] = {}
        self._alive: list[Callable[[], None]] = []
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self._controls = [self._on_host(self._slots.control.shape) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._reports: dict[tuple[int, int, int], Tensor] = {}
        self._total = self._on_host(torch.Size([1]))
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
        rows = run()
        report = self._report(space)
        report.copy_(space.out, non_blocking=True)
        landed = self._mark()
        return Flight(seats, space, report, landed, rows)

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
            self._layout.moved += told.moved
            self._drafter.settle(seq, length, accepted, k)
            decisions.append(Decision(told.path, told.tokens, error=None if told.sound else numerics_error(seq)))
            batch.seqs.append(seq)
            batch.upto.append(length)
            batch.room.append(told.room)
            draft.tokens.append(told.nodes)
            draft.parents.append(told.parents)
        return batch, draft, Verdict(decisions)

    def warm(self, k: int) -> None:
        """Capture a graph for every size of batch, and every number of packed rows, now rather than when needed."""
        k = min(k, self._longest)
        for size in reversed(self._buckets):
            _, run = self._space(self._bucket(size, k), k)
            if isinstance(run, Halves):
                run.warm()

    def _steady(self, batch: Batch, i: int) -> bool:
        seq, params = batch.seqs[i], batch.seqs[i].params
        plain = not (seq.adjusts or params.top_k or params.top_p < 1.0 or params.min_p or params.logprobs is not None)
        return plain and batch.complete(i) and self._layout.cached(seq) == len(seq.tokens) - 1

    def _bucket(self, size: int, k: int) -> int:
        """The seats a step runs with."""
        return _roomy(size, self._buckets, [known for known, width in self._spaces if width == k])

    def _make_slots(self, capacity: int) -> step.Slots:
        device = self._target.model.device
        columns = step.PAGES + self._tables.pages_for(self._context)
        control = torch.zeros(capacity, columns, dtype=torch.int32, device=device)
        lengths = torch.ones(capacity, dtype=torch.int32, device=device)
        history = torch.zeros(capacity, self._context + 128, dtype=torch.int32, device=device)
        return step.Slots(control, lengths, history)

    def _space(self, size: int, k: int) -> tuple[Space, Run]:
        if (size, k) not in self._spaces:
            self._spaces[size, k] = self._make_space(size, k)
        return self._spaces[size, k]

    def _make_space(self, size: int, k: int) -> tuple[Space, Run]:
        device, page = self._target.model.device, self._tables.page
        feed, drafter = step.Feed.empty(size, k + 1, device), self._drafter
        deepest = drafter.levels(k) if isinstance(drafter, Listens) and k else 0
        branches = Branches.over(self._layout.all_pools(), size, k + 1, deepest) if deepest else None
        out = torch.zeros(size, 4 * k + 5 if deepest else 2 * k + 4, dtype=torch.int32, device=device)
        space = Space(self._slots.part(size), feed, out, self._suite, page, self._layout.trash, branches)
        if self.packs and size * (k + 1) > FEW:
            return space, self._halves(space)
        if branches is not None and isinstance(drafter, Listens):
            run = self._plan_tree_step(space, branches, drafter)
        else:
            run = self._plan_step(space)
        self._rehearse(space, run)
        return space, _counted(self._captured(run), size * (k + 1))

    def _plan_step(self, space: Space) -> Callable[[], None]:
        """One whole step as a function of no arguments."""
        suite, feed, slots = space.suite, space.feed, space.slots
        packed = space.verify_rows(self._layout)
        fill = self._drafter.plan_fill(space) if space.k else lambda: None

        def run() -> None:
            suite.prepare(slots, feed, space.page, space.trash)
            fill()
            logits, states = self._listen(packed)
            chosen = suite.pick(logits, feed.heat.view(-1), feed.keys.view(-1), strict=True)
            suite.accept(slots, feed, chosen, space.out)
            if isinstance(self._drafter, Listens):
                self._drafter.keep(space, states)

        return torch.no_grad()(run)

    def _plan_tree_step(self, space: Space, trees: Branches, drafter: Listens) -> Callable[[], None]:
        """The same with a tree per seat: grown, verified, judged, and its accepted path moved into line."""
        suite, feed, slots = space.suite, space.feed, space.slots
        rows = space.path_rows(self._layout, space.k + 1, trees.paths)
        packed, fill = space.tree_rows(rows), self._drafter.plan_fill(space)

        def run() -> None:
            suite.prepare(slots, feed, space.page, space.trash)
            fill()
            suite.graft(slots, feed, trees)
            rows.aim(trees.base)
            logits, states = self._listen(packed)
            chosen = suite.pick(logits, feed.heat.view(-1), feed.keys.view(-1), strict=True)
            suite.climb(slots, feed, trees, chosen, space.out)
            suite.compact(slots, trees, space.out, space.page)
            drafter.keep(space, states)

        return torch.no_grad()(run)

    def _halves(self, space: Space) -> Halves:
        """A step in two graphs; the second is made for each number of rows when it is first needed."""
        bale = Bale.empty(space.size, space.k + 1, space.out.device)
        draft = self._plan_draft(space, bale)
        self._rehearse(space, draft)
        first = self._captured(draft)

        def make(rows: int) -> Callable[[], None]:
            verify = self._plan_verify(space, bale, rows)
            self._rehearse(space, draft, verify)
            return self._captured(verify)

        return Halves(first, lambda: self._read(bale.total), make, bale.ids.shape[0])

    def _plan_draft(self, space: Space, bale: Bale) -> Callable[[], None]:
        """The first half of a step: find nodes and pack them."""
        suite, fill = space.suite, self._drafter.plan_fill(space)

        def run() -> None:
            suite.prepare(space.slots, space.feed, space.page, space.trash)
            fill()
            suite.pack(space.slots, space.feed, bale, space.trash)

        return torch.no_grad()(run)

    def _plan_verify(self, space: Space, bale: Bale, rows: int) -> Callable[[], None]:
        """The second half: so many packed rows through the target, and what is accepted."""
        suite, packed = space.suite, _first_rows(space, bale, self._layout, rows)

        def run() -> None:
            logits = self._target.model.forward(packed, self._layout)
            chosen = suite.pick(logits, bale.heat[:rows], bale.keys[:rows], strict=True)
            suite.accept(space.slots, space.feed, chosen, space.out, bale.starts)

        return torch.no_grad()(run)

    def _read(self, total: Tensor) -> int:
        """A number of the device's, as soon as all that was sent off before has run."""
        self._total.copy_(total, non_blocking=True)
        ready = self._mark()
        if ready is not None:
            ready.synchronize()
        return int(self._total)

    def _listen(self, packed: Packed) -> tuple[Tensor, dict[int, Tensor]]:
        """The target's pass, overheard by a drafter that wants to."""
        if not isinstance(self._drafter, Listens):
            return self._target.model.forward(packed, self._layout), {}
        taps = Taps(self._drafter.wants)
        return self._target.model.forward(packed, self._layout, taps), taps.states

    def _rehearse(self, space: Space, *parts: Callable[[], None]) -> None:
        """Run once on empty seats, which write to the trash; those who fly meanwhile find their state as it was."""
        state = [space.slots.control, space.slots.lengths, space.slots.history]
        state += self._drafter.kept if isinstance(self._drafter, Listens) else []
        saved = [tensor.clone() for tensor in state]
        self._write_control(space, {}, [], fresh=True)
        for run in parts:
            run()
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """What runs as a graph, where there are graphs; what it reads must outlive it."""
        if not self._graphs:
            return run
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


def _roomy(size: int, buckets: list[int], made: Iterable[int]) -> int:
    """The bucket that size runs in: a captured graph with some to spare rather than a new one that fits."""
    fitting = next(bucket for bucket in buckets if bucket >= size)
    return min((known for known in made if fitting <= known < 2 * fitting), default=fitting)


def _counted(run: Callable[[], None], rows: int) -> Run:
    """A step that always has so many rows."""

    def counted() -> int:
        run()
        return rows

    return counted


def _first_rows(space: Space, bale: Bale, layout: PagedLayout, rows: int) -> Packed:
    """So many rows of a bale, from the first on; whose they are is known to the device alone."""
    tables = space.slots.control[:, step.PAGES :]
    reach = tables.shape[1] * space.page
    plans = {
        (shape.window, shape.group): bale.plan(tables, space.page, reach, shape.head_dim) for shape in layout.layers
    }
    wanted = torch.arange(rows, device=bale.ids.device)
    return Packed(bale.ids[:rows], bale.positions[:rows], bale.slots[:rows], plans, wanted, [], [], [])
