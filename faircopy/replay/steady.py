"""The steady state on the device: draft, verify and accept replay as one graph, and nobody waits for the host.

The host launches a step, launches the next one behind it, and only then looks at what the first one said. Who sits in
which slot, how far each may go and where its pages lie is written to a control table before each launch, so sequences
join, leave and grow between replays of the same graph. What a finished sequence still computes is thrown away.

Where drafts vary in length a step is two graphs: the first drafts and packs the rows there are end to end, the host
reads how many, and the second verifies just those. It is on its way before the host looks at the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from faircopy import rng
from faircopy.kernels.gpu import step
from faircopy.kernels.gpu.attention import PATH
from faircopy.kernels.gpu.packing import PackedRows
from faircopy.kernels.gpu.records import EMPTY_SLOT, Control, ReportColumns, control_columns
from faircopy.kernels.gpu.tree import TreeNodes
from faircopy.layout.paged import PagedLayout
from faircopy.layout.tables import Tables
from faircopy.model.runner import Runner
from faircopy.replay.flight import Flight, Told
from faircopy.replay.space import Fills, Listens, Space
from faircopy.replay.steps import Halves, Run, Steps, counted, roomy
from faircopy.types import Batch, Decision, Draft, Sequence, Verdict
from faircopy.verify.base import numerics_error

TILE = 128  # query rows times heads per key head that a captured step verifies in one piece
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FEW = 64  # rows up to here cost the target about the same: they are not worth counting


class Replay:
    """Owns the slots, the graphs and the host's side of both."""

    def __init__(self, target: Runner, drafter: Fills, tables: Tables, capacity: int, most: int) -> None:
        """For so many sequences of so many nodes each, as memory was counted for; larger drafts stay on the ground."""
        layout = cast(PagedLayout, target.layout)
        assert layout.suite is not None, "graphs are made of kernels"
        self._target, self._layout, self._drafter, self._tables = target, layout, drafter, tables
        self._suite, self._graphs = layout.suite, target.model.device.type == "cuda"
        self._context, self._steps = target.model.context, Steps(target, layout, drafter)
        widest = max(shape.group for shape in layout.layers)
        far = max(1, TILE // widest - 1)  # all rows of a chain are one tile
        self._longest = min(most, _most(drafter, far))
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
        """Whether this batch is in its steady state: one token to inputs each, and nothing that needs the host."""
        ready = all(self._steady(batch, i) and self._drafter.ready(seq) for i, seq in enumerate(batch.seqs))
        return ready and self.soon(batch)

    def soon(self, batch: Batch) -> bool:
        """Whether this batch will be, once it has been read."""
        return (
            len(batch) <= self._buckets[-1]
            and max(batch.max_nodes) <= self._longest
            and all(_plain(seq) for seq in batch.seqs)
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
            told = Told.of(reports[seat], ReportColumns(k + 1, flight.space.trees is not None))
            length, accepted = len(seq.tokens), len(told.path)
            self._layout.settle(seq, length + accepted)
            self._layout.moved += told.moved
            self._drafter.settle(seq, length, accepted, k)
            decisions.append(Decision(told.path, told.tokens, error=None if told.sound else numerics_error(seq)))
            batch.seqs.append(seq)
            batch.upto.append(length)
            batch.max_nodes.append(told.max_nodes)
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
        seq = batch.seqs[i]
        return _plain(seq) and batch.complete(i) and self._layout.cached(seq) == len(seq.tokens) - 1

    def _bucket(self, size: int, k: int) -> int:
        """The seats a step runs with."""
        return roomy(size, self._buckets, [known for known, width in self._spaces if width == k])

    def _make_slots(self, capacity: int) -> step.BatchSlots:
        device = self._target.model.device
        columns = Control.PAGES + self._tables.pages_for(self._context)
        control = torch.zeros(capacity, columns, dtype=torch.int32, device=device)
        lengths = torch.ones(capacity, dtype=torch.int32, device=device)
        history = torch.zeros(capacity, self._context + 128, dtype=torch.int32, device=device)
        return step.BatchSlots(control, lengths, history)

    def _space(self, size: int, k: int) -> tuple[Space, Run]:
        if (size, k) not in self._spaces:
            self._spaces[size, k] = self._make_space(size, k)
        return self._spaces[size, k]

    def _make_space(self, size: int, k: int) -> tuple[Space, Run]:
        device, page = self._target.model.device, self._tables.page
        inputs, drafter = step.StepInputs.empty(size, k + 1, device), self._drafter
        deepest = drafter.levels(k) if isinstance(drafter, Listens) and k else 0
        trees = TreeNodes.over(self._layout.all_pools(), size, k + 1, deepest) if deepest else None
        out = torch.zeros(size, ReportColumns(k + 1, bool(deepest)).total, dtype=torch.int32, device=device)
        space = Space(self._slots.part(size), inputs, out, self._suite, page, self._layout.scratch, trees)
        if self.packs and size * (k + 1) > FEW:
            return space, self._halves(space)
        if trees is not None and isinstance(drafter, Listens):
            run = self._steps.tree(space, trees, drafter)
        else:
            run = self._steps.whole(space)
        self._rehearse(space, run)
        return space, counted(self._captured(run), size * (k + 1))

    def _halves(self, space: Space) -> Halves:
        """A step in two graphs; the second is made for each number of rows when it is first needed."""
        packed_rows = PackedRows.empty(space.size, space.k + 1, space.out.device)
        draft = self._steps.draft(space, packed_rows)
        self._rehearse(space, draft)
        first = self._captured(draft)

        def make(rows: int) -> Callable[[], None]:
            verify = self._steps.verify(space, packed_rows, rows)
            self._rehearse(space, draft, verify)
            return self._captured(verify)

        return Halves(first, lambda: self._read(packed_rows.total), make, packed_rows.ids.shape[0])

    def _read(self, total: Tensor) -> int:
        """A number of the device's, as soon as all that was sent off before has run."""
        self._total.copy_(total, non_blocking=True)
        ready = self._mark()
        if ready is not None:
            ready.synchronize()
        return int(self._total)

    def _rehearse(self, space: Space, *parts: Callable[[], None]) -> None:
        """Run once on empty seats, which write to the scratch; those who fly meanwhile find their state as it was."""
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
        """Who sits where, and how far each may go; an empty seat feeds one token into the scratch, for ever."""
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        control = self._controls[self._turn]
        table = control.numpy()[: space.size]
        table[:, : Control.PAGES] = EMPTY_SLOT
        table[:, Control.PAGES :] = space.scratch // space.page
        for (seq, seat), width in zip(seats.items(), widths, strict=True):
            self._write_seat(table[seat], seq, width, fresh)
        space.slots.control.copy_(control[: space.size], non_blocking=True)
        self._copied[self._turn] = self._mark()

    def _write_seat(self, row: Any, seq: Sequence, width: int, fresh: bool) -> None:
        row[: Control.PAGES] = control_columns(
            fresh, len(seq.tokens), seq.limit, width, seq.params.temperature, rng.mix(seq.seed)
        )
        pages = self._tables.table(seq)
        row[Control.PAGES : Control.PAGES + len(pages)] = pages

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


def _plain(seq: Sequence) -> bool:
    """Whether its tokens can be chosen without the host."""
    params = seq.params
    return not (seq.adjusts or params.top_k or params.top_p < 1.0 or params.min_p or params.logprobs is not None)


def _most(drafter: Fills, far: int) -> int:
    """Nodes that a captured step can have: a chain's rows are one tile, a tree's paths fit their table."""
    if not isinstance(drafter, Listens):
        return far
    return min(drafter.longest, PATH if drafter.levels(drafter.longest) else far)
