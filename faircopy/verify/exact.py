"""Exact verification: at every place the target chooses as it would alone; a draft is right or it is not.

With temperature the choice uses noise keyed by (seed, position), so sampled text, too, is the same with any drafter.
"""

from __future__ import annotations

from faircopy.model.runner import Result
from faircopy.sampling import Row, choose
from faircopy.types import Batch, Decision, Draft, Verdict
from faircopy.verify.base import broken, children, decision, node_rows, prompt_logprobs


class ExactVerifier:
    """Chains and trees are one walk: follow the node that says what the target says, while there is one."""

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict:
        failed = broken(result, batch)
        choices = self._choices(batch, draft, result)
        return Verdict([failed.get(i) or self._decide(batch, draft, result, i, choices[i]) for i in range(len(batch))])

    def _choices(self, batch: Batch, draft: Draft, result: Result) -> list[list[int]]:
        """The target's token after each sequence's last token and after each of its nodes, in one call."""
        rows: list[Row] = []
        places: list[int] = []
        spans = []
        for i, span in enumerate(result.packed.rows):
            mine = node_rows(batch, draft, i) if batch.complete(i) else []
            spans.append((len(rows), len(rows) + len(mine)))
            rows += mine
            places += range(span.stop - len(mine), span.stop)
        logits = result.logits if len(places) == result.logits.shape[0] else result.logits[places]
        chosen = choose(logits, rows) if rows else []
        return [chosen[start:stop] for start, stop in spans]

    def _decide(self, batch: Batch, draft: Draft, result: Result, i: int, choices: list[int]) -> Decision:
        seq = batch.seqs[i]
        prompt = prompt_logprobs(seq, batch, i, result)
        if not choices:
            return Decision(prompt_logprobs=prompt)
        nodes = walk(draft.tokens[i], children(draft, i), choices)
        tokens = [choices[0], *(choices[node + 1] for node in nodes)]
        return decision(seq, result.of(i)[-len(choices) :], nodes, tokens, prompt)


def walk(tokens: list[int], below: list[list[int]], choices: list[int]) -> list[int]:
    """Accepted nodes: from the last token, step to the child that says what the target chose there."""
    nodes: list[int] = []
    here = 0
    while True:
        right = next((node for node in below[here] if tokens[node] == choices[here]), None)
        if right is None:
            return nodes
        nodes.append(right)
        here = right + 1
