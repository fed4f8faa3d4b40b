"""Queues, admission, preemption, step plans, commit and stop conditions. The only writer of sequences."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from faircopy.acceptance import nodes_that_fit
from faircopy.draft_length import DraftLengths
from faircopy.policy import Policy, reading
from faircopy.types import MOST_JOINING, Batch, Decision, FinishedStep, FinishReason, Output, Sequence, StepPlan

LEAST_SHARE = 4  # prompts get at least one in this many rows of a step, however many the running texts need
FEW_WAITING = 3  # new sequences up to which they join in several small captured steps instead of a large one
LOGPROBS_CHUNK = 512  # prompt tokens fed at once if every row's logits are wanted


class Ledger(Protocol):
    """What the scheduler sees of memory."""

    def open(self, seq: Sequence) -> int: ...
    def reserve(self, seq: Sequence, length: int) -> bool: ...
    def trim(self, seq: Sequence, length: int) -> None: ...
    def close(self, seq: Sequence) -> None: ...


class CaptureRule(Protocol):
    """What the scheduler sees of captured steps."""

    @property
    def max_nodes(self) -> int:
        """Draft nodes per sequence of a captured step, at most."""

    def nodes_for(self, k: int) -> int:
        """Nodes per sequence of the captured step that drafts of k nodes run in: k or more."""

    def takes(self, batch: Batch) -> bool:
        """Whether this batch can run as a captured step, if that reads what has not been read of new sequences."""

    def joining_step(self, k: int, slots: int, rows: int) -> tuple[int, int] | None:
        """The captured step with this number of batch slots that reads this number of rows of prompts, where k nodes
        are wanted: its nodes per sequence, and the rows of prompts that it has room for. None: there is none."""

    def prompt_rows(self, seq: Sequence, drafted: bool) -> int | None:
        """Rows of a new sequence's prompt; None: captured steps do not read it. drafted: if the drafter does, too."""

    def slots_behind(self, seqs: list[Sequence]) -> int:
        """Batch slots up to the highest one of a step of these sequences behind the one started last."""

    def eager_nodes(self, k: int, sequences: int) -> int:
        """Draft nodes per sequence of an eager step, of k that are wanted, while captured steps follow."""

    def follows(self, batch: Batch) -> bool:
        """Whether captured steps follow once this batch has been read."""


class _Joining(NamedTuple):
    """New sequences that join in a captured step, and its nodes per sequence."""

    seqs: list[Sequence]
    k: int


NOTHING = StepPlan(Batch([], [], []))


class Scheduler:
    """Plans steps, and appends what sequences gained."""

    def __init__(
        self,
        ledger: Ledger,
        cached: Callable[[Sequence], int],
        policy: Policy,
        draft_lengths: DraftLengths,
        chunk: int,
        capture: CaptureRule | None = None,
        mixed_rows: Callable[[], int] | None = None,
    ) -> None:
        """capture: None if all steps are eager.

        policy: may be exchanged for another one between steps.
        mixed_rows: rows of a step in which texts go on and prompts are read, at most; None: only `chunk` bounds it.
        """
        self._ledger, self._cached, self.policy = ledger, cached, policy
        self._draft_lengths, self._chunk, self._capture = draft_lengths, chunk, capture
        self._mixed_rows = mixed_rows
        self._waiting: list[Sequence] = []  # in order of arrival
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._departed: list[Sequence] = []
        self.preemptions = 0
        self.reused = 0  # tokens of new sequences that were cached already
        self._full = False  # the last new sequence did not fit, and no sequence has left since

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def grouped(self) -> int:
        """Steps whose sequences were chosen for having one length."""
        return self.policy.grouped

    @property
    def running(self) -> list[Sequence]:
        return list(self._running)

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    def share(self, parts: int) -> int:
        """Sequences of each step, if `parts` steps run side by side."""
        chosen = self.policy.choose(self.running, self._waiting, self._cached)
        return -(-len(chosen) // parts)

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence between steps, wherever it is."""
        if seq.finished is None:
            self._finish(seq, "abort")

    def schedule(self, under_way: Set[Sequence] = frozenset(), most: int | None = None) -> StepPlan:
        """The next step: the sequences the policy chooses, while pages and the prompt chunk last.

        under_way: sequences of steps that have not ended, which are neither chosen nor preempted.
        most: sequences of this step at most.
        """
        plan = self._schedule(self._waiting, under_way, most)
        if plan.seqs or not self._running:
            return plan
        return self._schedule([], under_way, most)  # no new one fits: the others go on

    def schedule_behind(self, plan: StepPlan) -> StepPlan:
        """The captured step behind one in flight, before it is known what that one gives: at most k + 1 tokens each.

        New sequences join in it if it can read their prompts. Empty if another sequence should run, or if pages for
        two steps are missing: then the one in flight must be collected first.
        """
        new = [] if self._full else self._waiting
        chosen = self.policy.choose(self.running, new, self._cached)
        going_on = [seq for seq in plan.seqs if seq.finished is None and len(seq.tokens) + 1 < seq.limit]
        others = [seq for seq in chosen if seq not in plan.batch.seqs]
        candidates = [*going_on, *others]
        wanted = dict(zip(candidates, self._draft_lengths.choose(candidates), strict=True))
        if any(wanted[seq] and seq in plan.batch.idle for seq in going_on) or any(
            seq in self._running for seq in others
        ):
            return NOTHING  # a drafter that was off, or a sequence that waited for pages, has tokens to read first
        k = self._nodes_of_graph(max(wanted.values(), default=0))
        room = self._draft_lengths.room(k, len(candidates))
        most = plan.room + 1 + room + 1
        if not all(self._ledger.reserve(seq, min(seq.limit, len(seq.tokens) + most)) for seq in going_on):
            return NOTHING
        joining = self._join(going_on, others, wanted, k, room)
        if others and not joining.seqs and not self._full:
            return NOTHING  # a prompt that captured steps do not read
        return self._planned_behind([*going_on, *joining.seqs], wanted, joining.k)

    def _planned_behind(self, seqs: list[Sequence], wanted: dict[Sequence, int], k: int) -> StepPlan:
        """A captured step of k nodes of these sequences, behind one in flight."""
        if not seqs:
            return NOTHING
        lengths, room = [wanted[seq] for seq in seqs], self._draft_lengths.room(k, len(seqs))
        rooms = [min(nodes, room) for nodes in self._rooms(seqs, lengths)]
        batch = Batch(seqs, [len(seq.tokens) for seq in seqs], rooms, idle=_idle(seqs, lengths))
        return StepPlan(_sharing(batch, wanted), True, k, room)

    def _join(
        self, going_on: list[Sequence], waiting: list[Sequence], wanted: dict[Sequence, int], k: int, room: int
    ) -> _Joining:
        """Let new sequences in, in order, as long as pages and the captured step's rows of prompts last.

        A larger step than the first one needs is taken only if many wait: a row of it costs more.
        """
        assert self._capture is not None, "captured steps are planned"
        joined, step, used = list[Sequence](), (k, 0), 0
        for seq in waiting[:MOST_JOINING]:
            known = self._ledger.open(seq)
            rows = self._capture.prompt_rows(seq, bool(wanted[seq]))
            slots = self._capture.slots_behind([*going_on, *joined, seq])
            found = None if rows is None else self._capture.joining_step(k, slots, used + rows)
            if found is not None and joined and found[1] > step[1] and len(waiting) <= FEW_WAITING:
                found = None
            fits = found is not None and self._ledger.reserve(seq, min(seq.limit, len(seq.tokens) + room + 1))
            if rows is None or found is None or not fits:
                self._leave(seq)
                self._full = found is not None
                break
            self._start(seq, known)
            joined.append(seq)
            step, used = found, used + rows
        return _Joining(joined, step[0])

    def commit(self, step: FinishedStep, in_flight: int = 0) -> list[Output]:
        """Append what was decided, up to where plain decoding would have stopped.

        in_flight: tokens that a step started behind this one may add to each sequence; pages for them are kept.
        """
        outputs = []
        for seq, nodes, decision in zip(step.batch.seqs, step.draft.tokens, step.verdict.decisions, strict=True):
            seq.prompt_logprobs += decision.prompt_logprobs
            if decision.tokens or decision.error is not None:
                outputs.append(self._extend(seq, len(nodes), decision, in_flight))
        return outputs

    def retreat(self, seqs: list[Sequence]) -> None:
        """A step failed: its sequences give up their pages and come back as if preempted."""
        for seq in seqs:
            if seq in self._running:
                self._preempt(seq)

    def departed(self) -> list[Sequence]:
        """The sequences that finished or were preempted since the last call."""
        departed, self._departed = self._departed, []
        return departed

    def _schedule(self, waiting: list[Sequence], under_way: Set[Sequence], most: int | None) -> StepPlan:
        chosen = self.policy.choose(self.running, waiting, self._cached)
        candidates = [seq for seq in chosen if seq not in under_way][:most]
        lengths = self._draft_lengths.choose(candidates)
        batch = self._fill(candidates, lengths, under_way)
        if not batch.seqs or self._capture is None:
            return StepPlan(batch)
        wanted = dict(zip(candidates, lengths, strict=True))
        k = self._nodes_for(batch, max(wanted[seq] for seq in batch.seqs), self._capture)
        if k is None:
            return self._before_capture(batch, len(candidates), self._capture)
        room = self._draft_lengths.room(k, len(batch))
        return StepPlan(replace(batch, max_nodes=[min(nodes, room) for nodes in batch.max_nodes]), True, k, room)

    def _nodes_for(self, batch: Batch, k: int, capture: CaptureRule) -> int | None:
        """Nodes per sequence of the captured step for this batch, where k are wanted; None: it cannot be captured."""
        if not capture.takes(batch):
            return None
        new = [seq for seq in batch.seqs if reading(seq, self._cached)]
        if not new:
            return self._nodes_of_graph(k)
        rows = [capture.prompt_rows(seq, seq not in batch.idle) for seq in new]
        if None in rows or len(new) > MOST_JOINING:
            return None
        step = capture.joining_step(min(k, capture.max_nodes), len(batch), sum(count or 0 for count in rows))
        return None if step is None else step[0]

    def _nodes_of_graph(self, k: int) -> int:
        """Draft nodes per sequence of the captured step that drafts of k nodes run in."""
        assert self._capture is not None, "captured steps are planned"
        return self._capture.nodes_for(min(k, self._capture.max_nodes))

    @staticmethod
    def _before_capture(batch: Batch, candidates: int, capture: CaptureRule) -> StepPlan:
        """A batch as an eager step: if captured steps follow, with no more draft nodes than `_prompt_chunk` left room
        for."""
        if not capture.follows(batch):
            return StepPlan(batch)
        max_nodes = [capture.eager_nodes(nodes, candidates) for nodes in batch.max_nodes]
        return StepPlan(replace(batch, max_nodes=max_nodes, shared_k=None), before_capture=True)

    def _fill(self, candidates: list[Sequence], lengths: list[int], under_way: Set[Sequence]) -> Batch:
        """Put candidates into a batch while pages and the prompt chunk last."""
        batch = Batch([], [], [], self._draft_lengths.confidence, _idle(candidates, lengths))
        before, chunk = self.preemptions, self._prompt_chunk(candidates, lengths)
        for seq, length in zip(candidates, self._rooms(candidates, lengths), strict=True):
            if seq in self._running:
                chunk -= self._continue(batch, seq, chunk, length, under_way)
            elif chunk > 0 and self.preemptions == before:  # no new one takes the pages of one just preempted
                used = self._admit(batch, seq, chunk, length)
                if used is None:
                    self._full = True
                    break
                chunk -= used
        return _sharing(batch, dict(zip(candidates, lengths, strict=True)))

    def _rooms(self, seqs: list[Sequence], lengths: list[int]) -> list[int]:
        """Nodes that each sequence may have; a length that a request has asked for is its own."""
        room = self._draft_lengths.room
        return [
            room(length, len(seqs)) if length and seq.request.k is None else length
            for seq, length in zip(seqs, lengths, strict=True)
        ]

    def _prompt_chunk(self, candidates: list[Sequence], lengths: list[int]) -> int:
        """Prompt tokens of this step at most: fewer if texts go on in it, whose tokens and nodes are rows too."""
        nodes = lengths
        if self._capture is not None:
            nodes = [self._capture.eager_nodes(length, len(candidates)) for length in lengths]
        goes_on = [seq in self._running and len(seq.tokens) - self._cached(seq) == 1 for seq in candidates]
        if self._mixed_rows is None or not any(goes_on):
            return self._chunk
        bound = self._mixed_rows()
        left = bound - sum(1 + count for count, on in zip(nodes, goes_on, strict=True) if on)
        read = 0
        for seq, count, on in zip(candidates, nodes, goes_on, strict=True):
            if not on and read < left:  # a prompt that ends in this step gets nodes too
                read += len(seq.tokens)
                left -= count
        return max(1, min(self._chunk, max(left, bound // LEAST_SHARE)))

    def _continue(self, batch: Batch, seq: Sequence, chunk: int, length: int, under_way: Set[Sequence]) -> int:
        """Put a running sequence into the batch, taking pages from younger ones if it must; prompt tokens used."""
        cached = self._cached(seq)
        upto, max_nodes = self._share(seq, cached, chunk, length)
        if upto == cached:
            return 0  # the chunk is used up; it goes on in the next step
        while not self._ledger.reserve(seq, upto + max_nodes):
            if max_nodes:
                max_nodes = 0  # every sequence's progress comes before drafts
                continue
            youngest = max(self._running, key=lambda other: other.id)
            if youngest in under_way:
                return 0  # it waits until that one's step has ended, and then takes its pages
            self._preempt(youngest)
            if youngest is seq:
                return 0
        batch.add(seq, upto, max_nodes)
        return _prompt_tokens(seq, cached, upto)

    def _admit(self, batch: Batch, seq: Sequence, chunk: int, length: int) -> int | None:
        """Let a new sequence in, if its first chunk fits without taking pages from others; prompt tokens used."""
        known = self._ledger.open(seq)
        cached = self._cached(seq)
        upto, max_nodes = self._share(seq, cached, chunk, length)
        if not self._ledger.reserve(seq, upto + max_nodes):
            if self._running or not self._ledger.reserve(seq, upto):
                self._leave(seq)
                return None
            max_nodes = 0
        self._start(seq, known)
        batch.add(seq, upto, max_nodes)
        return _prompt_tokens(seq, cached, upto)

    def _start(self, seq: Sequence, known: int) -> None:
        """A waiting sequence runs from now on; known: tokens of it that were cached already."""
        self._waiting.remove(seq)
        self._running[seq] = None
        self.reused += known

    def _share(self, seq: Sequence, cached: int, chunk: int, length: int) -> tuple[int, int]:
        """How far to feed, and how many nodes, of a draft of this length. A prompt chunk gets no nodes."""
        tokens = len(seq.tokens)
        if seq.params.prompt_logprobs is not None and cached < len(seq.prompt):
            chunk = min(chunk, LOGPROBS_CHUNK)
        if tokens - cached > max(chunk, 1):
            return cached + chunk, 0
        return tokens, nodes_that_fit(length, tokens, seq.limit)

    def _extend(self, seq: Sequence, drafted: int, decision: Decision, in_flight: int) -> Output:
        new: list[int] = []
        reason: FinishReason | None = None
        right = len(decision.nodes)
        for place, token in enumerate(decision.tokens):
            new.append(token)
            seq.tokens.append(token)
            seq.origins.append(place < right)
            reason = self._stop_reason(seq, token)
            if reason:
                break
        accepted, logprobs = min(len(new), right), decision.logprobs[: len(new)]
        seq.drafted += drafted
        seq.accepted += accepted
        seq.steps += 1
        seq.logprobs += logprobs
        if reason is None and decision.error is not None:
            seq.error, reason = decision.error, "error"
        if reason:
            self._finish(seq, reason)
        else:
            self._ledger.trim(seq, min(seq.limit, len(seq.tokens) + in_flight))
        frozen = tuple(map(MappingProxyType, logprobs)) if logprobs else ()
        return Output(seq.id, tuple(new), frozen, reason, accepted)

    def _stop_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        """Why plain decoding would stop after this token, if it would."""
        long_enough = len(seq.tokens) - len(seq.prompt) >= seq.params.min_tokens
        text, constraint = seq.request.text, seq.request.constraint
        stopped = text is not None and text.push(token, long_enough)
        if stopped or (token in seq.stops and long_enough):
            return "stop"
        if constraint is not None and constraint.complete(seq.output):
            return "stop"
        return "length" if len(seq.tokens) >= seq.limit else None

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq]
        self._leave(seq)
        self._waiting.insert(sum(other.id < seq.id for other in self._waiting), seq)
        self.preemptions += 1

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finished = reason
        if seq in self._running:
            del self._running[seq]
        elif seq in self._waiting:
            self._waiting.remove(seq)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        self._full = False
        self._ledger.close(seq)
        self._departed.append(seq)


def _sharing(batch: Batch, lengths: dict[Sequence, int]) -> Batch:
    """The same batch; if sequences may have more nodes than were chosen for them, they share what was chosen."""
    sharing = [lengths[seq] for seq, nodes in zip(batch.seqs, batch.max_nodes, strict=True) if nodes > lengths[seq]]
    return replace(batch, shared_k=max(sharing)) if sharing else batch


def _idle(seqs: list[Sequence], lengths: list[int]) -> frozenset[Sequence]:
    """The sequences for which no drafts are wanted."""
    return frozenset(seq for seq, length in zip(seqs, lengths, strict=True) if not length)


def _prompt_tokens(seq: Sequence, cached: int, upto: int) -> int:
    """How much of the prompt chunk feeding a sequence to `upto` uses; a latest token alone uses none."""
    return upto - cached if len(seq.tokens) - cached > 1 else 0
