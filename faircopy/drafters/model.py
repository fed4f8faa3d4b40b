"""A small causal language model drafts a chain, at the same slots as the target's own cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy.drafters.base import Drafter
from faircopy.drafters.sources import SourceTable
from faircopy.kernels.gumbel import BROKEN
from faircopy.kernels.transfer import received, rows_of
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Model
from faircopy.model.runner import Result, Runner
from faircopy.sampling import SamplingRow, chosen_tokens
from faircopy.types import Batch, Confidence, Draft, Sequence, Sources, Verdict

if TYPE_CHECKING:
    from faircopy.capture import CapturedDrafter


class ModelDrafter(Drafter):
    """Feeds the tokens it has not cached, then drafts token by token with the target's own parameters and noise.

    A prompt, a rejection and a full acceptance look the same to it: uncached tokens.
    """

    expensive = True  # a pass per node

    def __init__(self, runner: Runner, vocab: int, chunk: int, sampled: bool = False) -> None:
        self._runner, self._vocab, self._chunk = runner, vocab, chunk
        self.passes = runner.passes
        self._sampled = sampled  # rejection sampling wants to know what each node was drawn from
        self._mute: set[Sequence] = set()  # sequences it cannot read any further
        self._fed: dict[Sequence, tuple[int, int]] = {}  # how far, and the nodes it may have, until the step has ended

    @property
    def model(self) -> Model:
        return self._runner.model

    def propose(self, batch: Batch) -> Draft:
        count, asked = len(batch), batch.confidence
        drawn = SourceTable() if self._sampled else None
        draft = Draft.chains(
            [[] for _ in range(count)],
            None if drawn is None else Sources([[] for _ in range(count)], drawn),
            None if asked is None else [[] for _ in range(count)],
        )
        places = {seq: i for i, seq in enumerate(batch.seqs)}
        part = self._noted(self._readable(batch))
        paths = dict.fromkeys(part.seqs, 1.0)  # how likely each draft is accepted as a whole
        waits, depth = self._waits(part, asked), 0
        ids: Tensor | None = None  # tokens that the host has not read
        unread: list[_Level] = []
        while part.seqs:
            chains = Draft.chains([draft.tokens[places[seq]] if waits else [0] * depth for seq in part.seqs])
            result = self._runner.forward(part, chains, max(depth - 1, 0), ids)
            self.rows_read += result.packed.size if depth == 0 else 0
            live = [n for n in range(len(part)) if part.complete(n) and part.max_nodes[n] > depth]
            if live:
                rows = [SamplingRow(part.seqs[n], chains.tokens[n]) for n in live]
                level = self._guess([places[row.seq] for row in rows], rows, _last_rows(result, live), drawn, asked)
                unread.append(level)
            depth += 1
            more = [n for n in live if part.max_nodes[n] > depth]
            if waits:
                self._read(draft, unread)
                more = [n for n in more if self._goes_on(draft, places[part.seqs[n]], part.seqs[n], paths, asked)]
            elif more:
                ids = rows_of(level.tokens, [live.index(n) for n in more]).clamp(min=0)
            part = _part(part, more)
        self._read(draft, unread)
        return Draft.chains(draft.tokens, draft.sources, draft.confidence)

    def _waits(self, part: Batch, asked: Confidence | None) -> bool:
        """Whether the host reads each token before the next pass: parameters and confidence may depend on it.

        Else all passes run one behind the other, and the host reads once.
        """
        paged = isinstance(self._runner.layout, PagedLayout)  # rows of a pass are the sequences, in order
        return not paged or asked is not None or any(seq.adjusts for seq in part.seqs)

    def _goes_on(
        self, draft: Draft, i: int, seq: Sequence, paths: dict[Sequence, float], asked: Confidence | None
    ) -> bool:
        return seq not in self._mute and (asked is None or self._sure(draft, i, seq, paths, asked))

    def _sure(self, draft: Draft, i: int, seq: Sequence, paths: dict[Sequence, float], asked: Confidence) -> bool:
        """Whether the draft so far is likely enough to go on; a last token that makes it unlikely is taken back.

        Not with rejection sampling, where whether a token is verified must not depend on which one it is.
        """
        assert draft.confidence is not None, "confidence is asked for"
        paths[seq] = asked.extended(paths[seq], draft.confidence[i][-1])
        if paths[seq] < asked.least and not self._sampled:
            draft.tokens[i].pop()
            draft.confidence[i].pop()
            return False
        return paths[seq] >= asked.more

    def read(self, batch: Batch) -> Draft:
        """Read what is new and draft nothing: the host need not wait for a token.

        A sequence that gets no draft is read too: a captured step with drafts waits until all have been. A latest token
        alone is left to that step, which reads two.
        """
        part = self._readable(batch, undrafted=True)
        cached = self._runner.layout.cached
        part = self._noted(_part(part, [n for n, seq in enumerate(part.seqs) if len(seq.tokens) - cached(seq) > 1]))
        if part.seqs:
            self.rows_read += self._runner.forward(part, Draft.empty(len(part))).packed.size
        return Draft.empty(len(batch))

    def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:
        """Keep the keys of accepted nodes; the last node of a chain never had any."""
        if not self._fed:
            return
        fed, decisions = Batch([], [], []), []
        for seq, decision in zip(batch.seqs, verdict.decisions, strict=True):
            if seq in self._fed:
                fed.add(seq, *self._fed.pop(seq))
                decisions.append(decision)
        self._runner.layout.commit(fed, Verdict(decisions))

    def forget(self, seq: Sequence) -> None:
        self._mute.discard(seq)
        self._fed.pop(seq, None)
        self._runner.layout.forget(seq)

    def capture(self, num_slots: int) -> CapturedDrafter | None:
        from faircopy.capture import eager_because
        from faircopy.drafters.captured import CapturedModel

        layout = self._runner.layout
        if not isinstance(layout, PagedLayout) or eager_because(self.model, layout):
            return None
        return CapturedModel(self.model, layout, self._vocab, self._is_idle)

    def _is_idle(self, seq: Sequence) -> bool:
        """Whether it drafts nothing for this sequence, now or later."""
        return seq in self._mute or seq.request.k == 0

    def _noted(self, part: Batch) -> Batch:
        """What is fed now; several steps may be under way, of different sequences."""
        self._fed |= dict(zip(part.seqs, zip(part.upto, part.max_nodes, strict=True), strict=True))
        return part

    def _readable(self, batch: Batch, undrafted: bool = False) -> Batch:
        """What of the batch this model reads now: a chunk at a time, and nothing beyond its vocabulary or context.

        undrafted: also of sequences that are fed to their end and get no draft now.
        """
        part = Batch([], [], [])
        for seq, upto, max_nodes in zip(batch.seqs, batch.upto, batch.max_nodes, strict=True):
            waits = max_nodes == 0 and upto == len(seq.tokens) and not undrafted
            if waits or seq in batch.idle or seq in self._mute or seq.request.k == 0:
                continue
            cached = self._runner.layout.cached(seq)
            upto = min(upto, cached + self._chunk)
            max_nodes = min(max_nodes, self._runner.model.context - upto)
            if max_nodes < 0 or max(seq.tokens[cached:upto], default=0) >= self._runner.model.vocab:
                self._mute.add(seq)
            elif upto > cached:
                part.add(seq, upto, max_nodes)
        return part

    def _guess(
        self,
        places: list[int],
        rows: list[SamplingRow],
        logits: Tensor,
        drawn: SourceTable | None,
        asked: Confidence | None,
    ) -> _Level:
        """One more token for each chain; drawn: to be told what it is drawn from."""
        logits = self._fit(logits)
        sources = [] if drawn is None else drawn.add(logits, rows)
        tokens = chosen_tokens(logits, rows)
        sure = logits[:0, 0] if asked is None else _confidence(logits, tokens)
        return _Level(places, [row.seq for row in rows], tokens, sources, sure)

    def _read(self, draft: Draft, levels: list[_Level]) -> None:
        """Wait for the tokens of these levels, and append them; a draft ends where there is none."""
        numbers = received(*(part for level in levels for part in (level.tokens, level.sure))) if levels else []
        for level, tokens, sure in zip(levels, numbers[::2], numbers[1::2], strict=True):
            for n, (i, seq) in enumerate(zip(level.places, level.seqs, strict=True)):
                if seq in self._mute or tokens[n] == BROKEN:
                    self._mute.add(seq)
                    continue
                draft.tokens[i].append(int(tokens[n]))
                if draft.confidence is not None:
                    draft.confidence[i].append(sure[n])
                if draft.sources is not None:
                    draft.sources.rows[i].append(level.sources[n])
        levels.clear()

    def _fit(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: heads of one tokenizer may be padded to different sizes."""
        missing = self._vocab - logits.shape[1]
        return logits[:, : self._vocab] if missing <= 0 else F.pad(logits, (0, missing), value=-torch.inf)


class _Level(NamedTuple):
    """One more token for some chains, where the model runs."""

    places: list[int]  # of the sequences in the draft
    seqs: list[Sequence]
    tokens: Tensor  # [n]
    sources: list[int]  # what each was drawn from, if that is wanted
    sure: Tensor  # [n], or empty


def _confidence(logits: Tensor, tokens: Tensor) -> Tensor:
    """The probability of each row's token before any parameter acts."""
    scores, chosen = logits.float(), tokens.long().clamp(min=0)
    return (scores.gather(1, chosen[:, None])[:, 0] - scores.logsumexp(-1)).exp()


def _last_rows(result: Result, live: list[int]) -> Tensor:
    """The last row of logits of these sequences."""
    return rows_of(result.logits, [result.packed.rows[n].stop - 1 for n in live])


def _part(batch: Batch, places: list[int]) -> Batch:
    return Batch([batch.seqs[n] for n in places], [batch.upto[n] for n in places], [batch.max_nodes[n] for n in places])
