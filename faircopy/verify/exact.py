"""Exact verification: at every place the target chooses as it would alone; a draft is right or it is not.

With temperature the choice uses noise keyed by (seed, position), so sampled text, too, is the same with any drafter.
"""

from __future__ import annotations

from faircopy.acceptance import accept_path
from faircopy.kernels.gumbel import BROKEN
from faircopy.model.runner import Result
from faircopy.sampling import SamplingRow, choose
from faircopy.types import Batch, Decision, Draft, Verdict
from faircopy.verify.base import (
    broken_feeds,
    decision,
    node_rows,
    numerics_error,
    prompt_logprobs,
)


class ExactVerifier:
    """Chains and trees are one walk: step to the child whose token the target chose, while there is one."""

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict:
        choices, feeds = self._choices(batch, draft, result), broken_feeds(result)
        return Verdict(
            [
                Decision(error=numerics_error(seq)) if i in feeds else self._decide(batch, draft, result, i, choices[i])
                for i, seq in enumerate(batch.seqs)
            ]
        )

    def _choices(self, batch: Batch, draft: Draft, result: Result) -> list[list[int]]:
        """The target's token after each sequence's last token and after each of its nodes, in one call."""
        rows: list[SamplingRow] = []
        places: list[int] = []
        spans = []
        for i, span in enumerate(result.packed.rows):
            mine = node_rows(batch, draft, i) if batch.complete(i) else []
            spans.append((len(rows), len(rows) + len(mine)))
            rows += mine
            places += range(span.stop - len(mine), span.stop)
        logits = result.logits if len(places) == result.logits.shape[0] else result.logits[places]
        chosen = choose(logits, rows, strict=True) if rows else []
        return [chosen[start:stop] for start, stop in spans]

    def _decide(self, batch: Batch, draft: Draft, result: Result, i: int, choices: list[int]) -> Decision:
        seq = batch.seqs[i]
        prompt = prompt_logprobs(seq, batch, i, result)
        if not choices:
            return Decision(prompt_logprobs=prompt)
        bad = [token == BROKEN for token in choices]
        nodes, tokens = accept_path(draft.tokens[i], draft.parents[i], choices, bad)
        return decision(seq, result.of(i)[-len(choices) :], nodes, tokens, prompt)
