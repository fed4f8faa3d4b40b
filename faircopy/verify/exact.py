"""Exact verification: at every place the target chooses as it would alone; a draft is right or it is not.

With temperature the choice uses noise keyed by (seed, position), so sampled text, too, is the same with any drafter.
"""

from __future__ import annotations

from faircopy.acceptance import accept_path
from faircopy.kernels.gumbel import BROKEN
from faircopy.model.runner import Result
from faircopy.sampling import choose
from faircopy.types import Batch, Decision, Draft, Verdict
from faircopy.verify.base import Judged, broken_feeds, decision, numerics_error, prompt_logprobs


class ExactVerifier:
    """Chains and trees are one walk: step to the child whose token the target chose, while there is one."""

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict:
        judged = Judged.of(batch, draft, result)
        chosen = choose(judged.logits, judged.rows, strict=True) if judged.rows else []
        feeds = broken_feeds(result)
        return Verdict(
            [
                Decision(error=numerics_error(seq))
                if i in feeds
                else self._decide(batch, draft, result, i, chosen[span.start : span.stop])
                for i, (seq, span) in enumerate(zip(batch.seqs, judged.spans, strict=True))
            ]
        )

    def _decide(self, batch: Batch, draft: Draft, result: Result, i: int, choices: list[int]) -> Decision:
        seq = batch.seqs[i]
        prompt = prompt_logprobs(seq, batch, i, result)
        if not choices:
            return Decision(prompt_logprobs=prompt)
        bad = [token == BROKEN for token in choices]
        nodes, tokens = accept_path(draft.tokens[i], draft.parents[i], choices, bad)
        return decision(seq, result.of(i)[-len(choices) :], nodes, tokens, prompt)
