"""What a verifier is, and what every verifier does alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from faircopy.acceptance import accept_path
from faircopy.errors import NumericsError
from faircopy.kernels.gumbel import BROKEN
from faircopy.kernels.transfer import rows_of, sent
from faircopy.layout.base import Packed
from faircopy.model.runner import Result
from faircopy.sampling import SamplingRow, logprobs
from faircopy.types import Batch, Decision, Draft, Logprobs, Sequence, Verdict

Found = tuple[list[int], list[int]]  # accepted nodes, and their tokens plus one more, unless its row is broken


class Verifier(Protocol):
    """Decides, from the target's logits, which nodes stand and what comes after them."""

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict: ...


def node_rows(batch: Batch, draft: Draft, i: int) -> list[SamplingRow]:
    """Where tokens of sequence i are chosen: after its last token, and after each node."""
    seq, tokens = batch.seqs[i], draft.tokens[i]
    paths = [[tokens[n] for n in draft.path(i, node)] for node in range(len(tokens))]
    return [SamplingRow(seq), *(SamplingRow(seq, path) for path in paths)]


def verdict(batch: Batch, draft: Draft, result: Result, found: dict[int, Found], broken: set[int]) -> Verdict:
    """What was found for the sequences that were fed to their end; an error for those of broken feeds."""
    return Verdict(
        [
            Decision(error=numerics_error(seq)) if i in broken else _decision(batch, draft, result, i, found.get(i))
            for i, seq in enumerate(batch.seqs)
        ]
    )


def _decision(batch: Batch, draft: Draft, result: Result, i: int, found: Found | None) -> Decision:
    """What sequence i gained; None: it was not fed to its end.

    A token fewer than usual means that the row it should come from is broken: plain decoding would end there too.
    """
    seq = batch.seqs[i]
    prompt, wanted = prompt_logprobs(seq, batch, i, result), seq.params.logprobs
    if found is None:
        return Decision(prompt_logprobs=prompt)
    nodes, tokens = found
    chosen: list[Logprobs] = []
    if wanted is not None and tokens:
        last = result.packed.rows[i].stop - 1 - len(draft.tokens[i])  # the row of its last token
        rows = sent([last, *(last + 1 + node for node in nodes)][: len(tokens)], torch.int64, result.logits.device)
        chosen = logprobs(result.logits.index_select(0, rows), tokens, wanted)
    return Decision(nodes, tokens, chosen, prompt, numerics_error(seq) if len(tokens) == len(nodes) else None)


def numerics_error(seq: Sequence) -> NumericsError:
    problem, remedy = "the target produced NaN or infinite logits", "check the checkpoint, or run it in float32"
    if seq.params.min_tokens or seq.request.bad_words or seq.request.constraint is not None:
        problem += ", or its parameters exclude every token"
        remedy += ", or allow more tokens"
    return NumericsError("logits", f"request {seq.id}", problem, remedy)


def prompt_logprobs(seq: Sequence, batch: Batch, i: int, result: Result) -> list[Logprobs]:
    """Log probabilities of the prompt tokens whose predecessors were fed in this step and not before."""
    wanted = seq.params.prompt_logprobs
    if wanted is None or len(seq.prompt_logprobs) >= len(seq.prompt):
        return []
    start = batch.upto[i] - result.packed.fed[i]
    count = max(0, min(batch.upto[i], len(seq.prompt) - 1) - start)
    skip = max(0, len(seq.prompt_logprobs) - 1 - start)  # known from before a preemption
    if count <= skip:
        return []
    return logprobs(result.of(i)[skip:count], seq.prompt[start + 1 + skip : start + 1 + count], wanted)


@dataclass(frozen=True, slots=True)
class Judged:
    """The rows in which tokens are chosen: after each sequence's last token and after its nodes."""

    logits: Tensor  # [R, V]
    rows: list[SamplingRow]
    spans: list[range]  # of each sequence; empty for a chunk that has not reached the end

    @classmethod
    def of(cls, batch: Batch, draft: Draft, result: Result) -> Judged:
        rows: list[SamplingRow] = []
        places: list[int] = []
        spans = []
        for i, span in enumerate(result.packed.rows):
            mine = node_rows(batch, draft, i) if batch.complete(i) else []
            spans.append(range(len(rows), len(rows) + len(mine)))
            rows += mine
            places += range(span.stop - len(mine), span.stop)
        return cls(rows_of(result.logits, places), rows, spans)

    def part(self, greedy: bool) -> Judged:
        """The rows of greedy sequences alone, or of the others; spans of the rest are empty."""
        places: list[int] = []
        spans = []
        for span in self.spans:
            mine = span if span and self.rows[span.start].seq.params.greedy == greedy else range(0)
            spans.append(range(len(places), len(places) + len(mine)))
            places += mine
        return Judged(rows_of(self.logits, places), [self.rows[n] for n in places], spans)

    def complete(self) -> list[tuple[int, range]]:
        """The sequences that were fed to their end, each with its span."""
        return [(i, span) for i, span in enumerate(self.spans) if span]


def accepted_paths(draft: Draft, judged: Judged, choices: list[int]) -> dict[int, Found]:
    """Of each sequence that was fed to its end: the path of nodes that the target chose in these rows."""
    found = {}
    for i, span in judged.complete():
        chosen = choices[span.start : span.stop]
        broken = [token == BROKEN for token in chosen]
        found[i] = accept_path(draft.tokens[i], draft.parents[i], chosen, broken)
    return found


def broken_feeds(result: Result) -> set[int]:
    """Sequences one of whose own tokens has no finite state: what follows it would be made up."""
    if result.healthy is None or bool(result.healthy.all()):
        return set()
    return unhealthy_feeds(result.packed, result.healthy.tolist())


def unhealthy_feeds(packed: Packed, healthy: Seq[float]) -> set[int]:
    """The same, where the host has read which rows are healthy."""
    start, broken = 0, set()
    for i, (fed, nodes) in enumerate(zip(packed.fed, packed.nodes, strict=True)):
        if not all(healthy[start : start + fed]):
            broken.add(i)
        start += fed + len(nodes)
    return broken
