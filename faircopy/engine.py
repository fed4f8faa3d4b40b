"""The loop: plan, draft, run, judge, commit. Read this file first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from faircopy.costs import CostTable, Curve
from faircopy.draft_length import DraftLengths, NoLength
from faircopy.drafters.base import Drafter, NoDrafter, permitted
from faircopy.layout.base import Layout
from faircopy.layout.block_tables import BlockTables
from faircopy.measured_acceptance import HistoryKeeper
from faircopy.meter import Meter
from faircopy.model.runner import Passes, Result, Runner
from faircopy.pace import Pace
from faircopy.requests import check_request, replay_text, token_limit
from faircopy.scheduler import Scheduler
from faircopy.types import Draft, FinishedStep, Output, Request, SamplingParams, Sequence, StepPlan, check_draft
from faircopy.verify.base import Verifier

if TYPE_CHECKING:
    from faircopy.replay import CapturedRunner, InFlightStep


TRIED_PROMPT = 384  # tokens of the prompt of a warm-up: more than a captured step reads


class EagerStep(NamedTuple):
    """A step that has begun: its drafts, and what waits for the end of its pass."""

    plan: StepPlan
    draft: Draft
    wait: Callable[[], Result]
    begin: float


class Engine:
    """Knows every part; no part knows it."""

    def __init__(
        self,
        target: Runner,
        tables: BlockTables,
        drafter: Drafter,
        verifier: Verifier,
        scheduler: Scheduler,
        eos: frozenset[int] = frozenset(),
        captured: CapturedRunner | str = "none were built",
        draft_layouts: tuple[Layout, ...] = (),
        draft_lengths: DraftLengths | None = None,
        stages: int = 1,
        history: HistoryKeeper | None = None,
    ) -> None:
        """captured: captured steps, or why all steps are eager. draft_layouts: caches of a draft model or head.

        draft_lengths: the scheduler's, which is told what steps gave and how long they took.
        stages: of the target's pipeline; as many steps are under way, of different sequences.
        history: keeps what is learned of the drafter, as texts end.
        """
        self.target, self.tables, self.drafter, self.verifier = target, tables, drafter, verifier
        self.scheduler, self.eos = scheduler, eos
        self.captured = None if isinstance(captured, str) else captured
        self.eager_because = captured if isinstance(captured, str) else None
        self.layouts = (target.layout, *draft_layouts)
        self.meter = Meter()
        self.draft_lengths = draft_lengths or NoLength()
        self._in_flight: InFlightStep | None = None  # a captured step started and not collected
        self._stages, self._history = stages, history
        self._under_way: deque[EagerStep] = deque()  # eager steps that have begun, oldest first
        self._early: list[Output] = []  # of steps that had to end before they were asked for
        self._last_end = 0.0  # of an eager step's pass
        self._afterwards = 0.0  # seconds from there to the end of the step: committing, and learning from it
        self._rows_read = 0  # by the drafter, up to the end of the last eager step
        self._pace = Pace()
        self._next_id = 0
        self.failed: list[Sequence] = []  # those of the step that raised last, for a caller who goes on

    def warm_up(self) -> None:
        """On a GPU, compile all kernels and capture all graphs now, so that no request waits for one."""
        if self._passes and self.target.model.device.type == "cuda":
            from faircopy.kernels.gpu.launch import compiled_ahead

            with compiled_ahead():
                self.rehearse()
            self.drafter.rehearse()  # a head's kernels for many rows are in no graph, and are loaded when first run
        for passes in self._passes:
            passes.warm()
        if self.captured is not None:
            self.captured.warm(self.draft_lengths.lengths)
        if self.target.passes is not None:
            if not self.busy:
                self._try_out()
            self.draft_lengths.use(self.costs)

    def rehearse(self) -> None:
        """Make every launch once, of captured steps and eager ones; for kernels that are compiled ahead."""
        for passes in self._passes:
            passes.rehearse()
        self.drafter.rehearse()
        if self.captured is not None:
            self.captured.rehearse(self.draft_lengths.lengths)

    @property
    def _passes(self) -> list[Passes]:
        """Passes as graphs, of the target and of a draft model."""
        return [passes for passes in (self.target.passes, self.drafter.passes) if passes is not None]

    def _try_out(self) -> None:
        """Write a short text that nothing is counted of or learned from: libraries load kernels when first used.

        Its prompt takes an eager step, if there is room for a long one. A drafter that is asked on the host may be a
        user's: it is not.
        """
        room = min(self.target.model.context, self.tables.pool.pages * self.tables.page)
        prompt = (0,) * min(TRIED_PROMPT, room - 2 if room > 2 else room - 1)
        if not prompt:  # no request can be served
            return
        params = SamplingParams(max_tokens=min(2, room - len(prompt)), temperature=1.0, seed=0, ignore_eos=True)
        kept = self.meter, self.drafter, self.draft_lengths, self._next_id
        seq = self.add(Request(prompt, params, k=min(1, max(self.draft_lengths.lengths, default=0))))
        self.meter, self.draft_lengths = Meter(), NoLength()
        self.drafter = NoDrafter() if self.captured is None else self.drafter
        try:
            while self.busy:
                self.step()
        finally:
            self.abort(seq)
            self.meter, self.drafter, self.draft_lengths, self._next_id = kept
            self._rows_read = self.drafter.rows_read

    @property
    def costs(self) -> CostTable:
        """What passes and steps took when they were warmed."""
        target, draft = (
            Curve(tuple(sorted(passes.times.items())) if passes is not None else (), stepped=True)
            for passes in (self.target.passes, self.drafter.passes)
        )
        table = CostTable(target, draft)
        if self.captured is not None:
            graphs = self.captured.graphs
            table = replace(table, steps=dict(graphs.times), joining=graphs.joining_costs)
        return table.with_head(self.drafter.layers / max(1, len(self.target.model.layers)))

    @property
    def busy(self) -> bool:
        # a step in flight all of whose sequences have finished does not count
        return self.scheduler.busy or bool(self._early)

    def add(self, request: Request) -> Sequence:
        """Queue a request; one that can never be served is refused here."""
        check_request(request, self.target.model, self.tables)
        params = request.params
        self._next_id += 1
        seq = Sequence(
            id=self._next_id,
            request=request,
            tokens=[*request.prompt, *request.written],
            stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos),
            limit=token_limit(request, self.target.model),
            prompt_logprobs=[] if params.prompt_logprobs is None else [None],
            origins=[False] * len(request.written),
        )
        replay_text(request)
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        """End a request between steps; what it has written stays in the sequence."""
        try:
            while any(seq in step.plan.seqs for step in self._under_way):
                self._early += self._end(self._under_way.popleft())
        except BaseException:
            self._leave_pipeline()
            raise
        finally:
            self.scheduler.abort(seq)
            self._forget_departed()

    def linger(self) -> None:
        """Wait until the step in flight will soon end, for callers who add requests between steps.

        What is added before `step` plans the one behind it need not wait for that one.
        """
        if self._in_flight is not None and self._in_flight.done is not None:
            self._pace.wait(self._in_flight)

    def step(self) -> list[Output]:
        """Advance some sequences by at least one token each; return what is new."""
        if self._stages > 1:
            return self._pipelined_step()
        begin = time.perf_counter()
        plan = self._plan()
        self._forget_departed()
        if not plan.seqs:
            return []
        try:
            return self._captured_step(plan) if plan.captured else self._eager_step(plan, begin)
        except BaseException:  # an interrupt too: what was cached but not appended must not count as cached
            self._in_flight = None
            self._pace.stop()
            self._retreat(plan.seqs)
            if plan.captured:  # others may have joined in the step behind, whether or not it was started
                self.scheduler.retreat(self.scheduler.running)
            raise
        finally:
            self._forget_departed()

    def _retreat(self, seqs: list[Sequence]) -> None:
        self.failed = seqs
        self.scheduler.retreat(seqs)

    def _pipelined_step(self) -> list[Output]:
        """Begin steps of other sequences until every stage has one; then end the oldest.

        While stages verify the drafts of some sequences, those of others are proposed.
        """
        try:
            while len(self._under_way) < self._stages:
                plan = self._plan_beside()
                self._forget_departed()
                if not plan.seqs:
                    break
                self._under_way.append(self._begin(plan, time.perf_counter()))
            if self._under_way:
                self._early += self._end(self._under_way.popleft())
        except BaseException:
            self._leave_pipeline()
            raise
        finally:
            self._forget_departed()
        outputs, self._early = self._early, []
        return outputs

    def _plan_beside(self) -> StepPlan:
        """A step of an even share of the sequences, none of which takes part in another."""
        taking_part = {seq for step in self._under_way for seq in step.plan.seqs}
        return self.scheduler.schedule(taking_part, self.scheduler.share(self._stages))

    def _leave_pipeline(self) -> None:
        """A step failed. Results of passes that have begun are dropped: the next ones to arrive are the next step's."""
        self._retreat(self.scheduler.running)
        while self._under_way:
            with suppress(Exception):
                self._under_way.popleft().wait()

    def _plan(self) -> StepPlan:
        """The step to finish next: the one in flight, or a new one if all its sequences have finished meanwhile."""
        if self._in_flight is not None and self._in_flight.abandoned:
            self._in_flight = None  # the next step runs behind it
        return self.scheduler.schedule() if self._in_flight is None else self._in_flight.plan

    def _eager_step(self, plan: StepPlan, begin: float) -> list[Output]:
        """begin: of planning. What the engine did behind the pass of the step before is counted in this one's time."""
        outputs = self._end(self._begin(plan, begin - self._afterwards))
        self._afterwards = time.perf_counter() - self._last_end
        return outputs

    def _begin(self, plan: StepPlan, begin: float) -> EagerStep:
        batch = plan.batch
        idle = all(seq in batch.idle for seq in batch.seqs)
        draft = Draft.empty(len(batch)) if idle else self._drafted(plan)
        states = not (idle and self.drafter.skips_states and self.draft_lengths.off_for_long)
        wait = self.target.start(batch, draft, states)  # one packed pass over uncached tokens and nodes
        return EagerStep(plan, draft, wait, begin)

    def _drafted(self, plan: StepPlan) -> Draft:
        """What the drafter says, which may be empty and may be wrong."""
        ask = self.drafter.read if plan.before_capture else self.drafter.propose
        draft = ask(plan.batch)
        check_draft(draft, plan.batch, self.target.model.vocab)
        return permitted(draft, plan.batch)

    def _end(self, step: EagerStep) -> list[Output]:
        plan, batch, draft, result = step.plan, step.plan.batch, step.draft, step.wait()
        if plan.before_capture and not any(draft.tokens):
            self.drafter.settle(batch, result)  # replays no graph: the logits may lie in memory that graphs share
        verdict = self.verifier.judge(batch, draft, result)  # the first time the host reads results of the device
        verdict = self.target.layout.commit(batch, verdict)  # may keep fewer nodes, never more
        self.drafter.observe(batch, draft, result, verdict)
        decoding = all(fed == 1 for fed in result.packed.fed)
        self._pace.stop()
        end = time.perf_counter()
        seconds, self._last_end = end - max(step.begin, self._last_end), end
        read, self._rows_read = self.drafter.rows_read - self._rows_read, self.drafter.rows_read
        finished = FinishedStep(batch, draft, verdict, result.packed.size, result.packed.padded, read=read)
        # where steps are captured, the time of an eager one says nothing of them
        self.draft_lengths.observe(finished, seconds if decoding and self.captured is None else None)
        return self._commit(finished)

    def _captured_step(self, plan: StepPlan) -> list[Output]:
        """The same calls, made by the device; their results are committed one step late, when the next one runs."""
        assert self.captured is not None, "only a captured runner's plans are captured"
        step = self._in_flight or self.captured.start(plan)  # draft, run, judge
        begin = time.perf_counter()
        behind = self.scheduler.schedule_behind(plan)
        self._in_flight = self.captured.start(behind, after=step) if behind.seqs else None
        self._pace.started(begin)
        finished = self.captured.collect(step)
        seconds = self._pace.collected(step, more=self._in_flight is not None)
        self.draft_lengths.observe(finished, None if step.joined else seconds)  # decoding alone is compared
        return self._commit(finished, in_flight=behind.room + 1 if behind.seqs else 0)

    def _commit(self, step: FinishedStep, in_flight: int = 0) -> list[Output]:
        """Append what was decided; in_flight: tokens that a step started behind this one may add to each sequence."""
        self.target.layout.publish(step.batch, step.verdict)  # full pages may now be shared
        outputs = self.scheduler.commit(step, in_flight)
        self._record(step, outputs)
        return outputs

    def _forget_departed(self) -> None:
        departed = self.scheduler.departed()
        for seq in departed:
            self.drafter.forget(seq)
            self.target.layout.forget(seq)
            self.draft_lengths.forget(seq)
        if departed and self._history is not None:
            self._history.see(self.draft_lengths.history)

    def _record(self, step: FinishedStep, outputs: list[Output]) -> None:
        meter, held = self.meter, self.tables.held()
        meter.steps += 1
        meter.captured_steps += step.captured
        meter.prompt_rows += step.prompt_rows
        meter.drafter_rows += step.read
        meter.sequence_steps += sum(bool(output.tokens) for output in outputs)
        meter.tokens_fed += step.rows
        meter.tokens_padded += step.padding
        meter.rows_moved = sum(layout.moved for layout in self.layouts)
        meter.pages_held, meter.pages_peak = held, max(meter.pages_peak, held)
        meter.drafted += sum(map(len, step.draft.tokens))
        meter.accepted += sum(output.accepted for output in outputs)
        meter.emitted += sum(len(output.tokens) for output in outputs)
        meter.preemptions, meter.tokens_reused = self.scheduler.preemptions, self.scheduler.reused
        meter.grouped_steps = self.scheduler.grouped
