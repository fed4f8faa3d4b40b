"""What a verifier is, and what every verifier does alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faircopy.errors import NumericsError
from faircopy.kernels.transfer import rows_of
from faircopy.layout.base import Packed
from faircopy.model.runner import Result
from faircopy.sampling import SamplingRow, logprobs
from faircopy.types import Batch, Decision, Draft, Logprobs, Sequence, Verdict


class Verifier(Protocol):
    """Decides, from the target's logits, which nodes stand and what comes after them."""

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict: ...


def node_rows(batch: Batch, draft: Draft, i: int) -> list[SamplingRow]:
    """Where tokens of sequence i are chosen: after its last token, and after each node."""
    seq, tokens = batch.seqs[i], draft.tokens[i]
    paths = [[tokens[n] for n in draft.path(i, node)] for node in range(len(tokens))]
    return [SamplingRow(seq), *(SamplingRow(seq, path) for path in paths)]


def decision(seq: Sequence, rows: Tensor, nodes: list[int], tokens: list[int], prompt: list[Logprobs]) -> Decision:
    """Accepted nodes and their tokens; rows [1 + nodes, V] are the sequence's logits.

    A token fewer than usual means that the row it should come from is broken: plain decoding would end there too.
    """
    wanted = seq.params.logprobs
    chosen: list[Logprobs] = []
    if wanted is not None and tokens:
        chosen = logprobs(rows_of(rows, [0, *(node + 1 for node in nodes)][: len(tokens)]), tokens, wanted)
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
