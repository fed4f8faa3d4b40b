"""Queues, admission, preemption, commit and stop conditions. The only writer of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from faircopy.acceptance import nodes_that_fit
from faircopy.policy import Policy
from faircopy.types import Batch, Decision, Draft, FinishReason, Output, Sequence, Verdict

WORDY = 512  # prompt tokens fed at once of which every row's logits are wanted
Wish = Callable[[Sequence], int]  # how many draft nodes a sequence should get, room permitting


class Ledger(Protocol):
    """What the scheduler sees of memory."""

    def open(self, seq: Sequence) -> int: ...
    def reserve(self, seq: Sequence, length: int) -> bool: ...
    def trim(self, seq: Sequence, length: int) -> None: ...
    def close(self, seq: Sequence) -> None: ...


class Scheduler:
    """Decides who runs, and writes down what they gained."""

    def __init__(self, ledger: Ledger, cached: Callable[[Sequence], int], policy: Policy, chunk: int) -> None:
        self._ledger, self._cached = ledger, cached
        self._policy, self._chunk = policy, chunk
        self._waiting: list[Sequence] = []  # in order of arrival
        self._running: list[Sequence] = []
        self._departed: list[Sequence] = []
        self.preemptions = 0
        self.reused = 0  # tokens of newcomers that were known already
        self._crowded = False  # nobody could be let in, and nobody has left since
        self._ahead = 0  # tokens that a step in the air may add to each sequence

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def grouped(self) -> int:
        """Steps whose sequences were chosen for having one length."""
        return self._policy.grouped

    @property
    def running(self) -> list[Sequence]:
        return list(self._running)

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence between steps, wherever it is."""
        if seq.finished is None:
            self._finish(seq, "abort")

    def pick(self, wish: Wish) -> Batch:
        """Who runs now: whom the policy chooses, while pages and the prompt chunk last."""
        batch = self._pick(self._waiting, wish)
        return batch if batch.seqs or not self._running else self._pick([], wish)  # nobody new fits: the others go on

    def _pick(self, waiting: list[Sequence], wish: Wish) -> Batch:
        batch, chunk, before = Batch([], [], []), self._chunk, self.preemptions
        for seq in self._policy.choose(self._running, waiting, self._cached):
            if seq in self._running:
                chunk -= self._schedule(batch, seq, chunk, wish)
            elif chunk > 0 and self.preemptions == before:  # an older one may have taken somebody's pages
                used = self._admit(batch, seq, chunk, wish)
                if used is None:
                    self._crowded = True
                    break
                chunk -= used
        return batch

    def follow(self, seqs: list[Sequence], most: int) -> list[Sequence]:
        """Who of these goes on, before it is known what the step in the air gives them: at most so many tokens each.

        Nobody, if somebody else should run, or if there is no room for two steps: then the one in the air must land.
        """
        newcomers = [] if self._crowded else self._waiting
        chosen = self._policy.choose(self._running, newcomers, self._cached)
        unsure = [seq for seq in seqs if seq.finished is None and len(seq.tokens) + 1 < seq.limit]
        fits = set(chosen) <= set(seqs) and all(
            self._ledger.reserve(seq, min(seq.limit, len(seq.tokens) + 2 * most)) for seq in unsure
        )
        self._ahead = most if fits and unsure else 0
        return unsure if fits else []

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict) -> list[Output]:
        """Append what was decided, up to where plain decoding would have stopped."""
        outputs = []
        for seq, nodes, decision in zip(batch.seqs, draft.tokens, verdict.decisions, strict=True):
            seq.prompt_logprobs += decision.prompt_logprobs
            if decision.tokens or decision.error is not None:
                outputs.append(self._extend(seq, len(nodes), decision))
        return outputs

    def retreat(self, seqs: list[Sequence]) -> None:
        """A step broke off: its sequences give up their pages and come back as if preempted."""
        self._ahead = 0
        for seq in seqs:
            if seq in self._running:
                self._preempt(seq)

    def departed(self) -> list[Sequence]:
        """Who finished or was preempted since the last call."""
        departed, self._departed = self._departed, []
        return departed

    def _schedule(self, batch: Batch, seq: Sequence, chunk: int, wish: Wish) -> int:
        """Put a running sequence into the batch, taking pages from younger ones if it must; prompt tokens used."""
        upto, max_nodes = self._share(seq, chunk, wish)
        if upto == self._cached(seq):
            return 0  # the chunk is used up; it goes on next time
        while not self._ledger.reserve(seq, upto + max_nodes):
            if max_nodes:
                max_nodes = 0  # progress of any sequence comes before drafts
                continue
            youngest = max(self._running, key=lambda other: other.id)
            self._preempt(youngest)
            if youngest is seq:
                return 0
        return self._enter(batch, seq, upto, max_nodes)

    def _admit(self, batch: Batch, seq: Sequence, chunk: int, wish: Wish) -> int | None:
        """Let a newcomer in, if its first chunk fits without taking from others; prompt tokens used."""
        known = self._ledger.open(seq)
        upto, max_nodes = self._share(seq, chunk, wish)
        if not self._ledger.reserve(seq, upto + max_nodes):
            if self._running or not self._ledger.reserve(seq, upto):
                self._leave(seq)
                return None
            max_nodes = 0
        self._waiting.remove(seq)
        self._running.append(seq)
        self.reused += known
        return self._enter(batch, seq, upto, max_nodes)

    def _enter(self, batch: Batch, seq: Sequence, upto: int, max_nodes: int) -> int:
        batch.seqs.append(seq)
        batch.upto.append(upto)
        batch.max_nodes.append(max_nodes)
        pending = len(seq.tokens) - self._cached(seq)
        return upto - self._cached(seq) if pending > 1 else 0

    def _share(self, seq: Sequence, chunk: int, wish: Wish) -> tuple[int, int]:
        """How far to feed, and how many nodes. Guesses beyond the sequence's limit would be wasted."""
        length, cached = len(seq.tokens), self._cached(seq)
        if seq.params.prompt_logprobs is not None and cached < len(seq.prompt):
            chunk = min(chunk, WORDY)
        if length - cached > max(chunk, 1):
            return cached + chunk, 0
        return length, nodes_that_fit(wish(seq), length, seq.limit)

    def _extend(self, seq: Sequence, drafted: int, decision: Decision) -> Output:
        new: list[int] = []
        reason: FinishReason | None = None
        for place, token in enumerate(decision.tokens):
            new.append(token)
            seq.tokens.append(token)
            seq.origins.append(place < len(decision.nodes))
            reason = self._stop_reason(seq, token)
            if reason:
                break
        accepted = min(len(new), len(decision.nodes))
        seq.drafted += drafted
        seq.accepted += accepted
        seq.steps += 1
        seq.logprobs += decision.logprobs[: len(new)]
        if reason is None and decision.error is not None:
            seq.error, reason = decision.error, "error"
        if reason:
            self._finish(seq, reason)
        else:
            self._ledger.trim(seq, min(seq.limit, len(seq.tokens) + self._ahead))
        return Output(seq, new, accepted, reason)

    def _stop_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        """Why plain decoding would stop after this token, if it would."""
        long_enough = len(seq.tokens) - len(seq.prompt) >= seq.params.min_tokens
        text = seq.request.text
        stopped = text is not None and text.push(token, long_enough)
        if stopped or (token in seq.stops and long_enough):
            return "stop"
        return "length" if len(seq.tokens) >= seq.limit else None

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._leave(seq)
        self._waiting.insert(sum(other.id < seq.id for other in self._waiting), seq)
        self.preemptions += 1

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finished = reason
        for queue in (self._running, self._waiting):
            if seq in queue:
                queue.remove(seq)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        self._crowded = False
        self._ledger.close(seq)
        self._departed.append(seq)
