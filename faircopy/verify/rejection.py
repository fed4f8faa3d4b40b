"""Rejection sampling: keeps the target's distribution, accepts more often, and writes other text than plain decoding.

The rule below works on any numbers with + - * / and comparison, so the tests run this very code on fractions and
enumerate every outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faircopy import rng
from faircopy.acceptance import children
from faircopy.model.runner import Result
from faircopy.sampling import probabilities
from faircopy.types import Batch, Decision, Draft, Sequence, Verdict
from faircopy.verify.base import (
    broken_feeds,
    broken_rows,
    decision,
    node_rows,
    numerics_error,
    prompt_logprobs,
)

Distribution = NDArray[Any]  # non-negative, sums to one; floats or fractions
Coin = Callable[[int, Any], bool]  # (node, probability) -> heads
Draw = Callable[[int, Distribution], int]  # (depth, distribution) -> token


def walk(
    tokens: Seq[int],
    below: Seq[Seq[int]],
    target: Seq[Distribution | None],
    source: Callable[[int], Distribution | None],
    coin: Coin,
    draw: Draw,
) -> tuple[list[int], list[int]]:
    """Accepted nodes, and their tokens plus one more. target[n + 1] is what follows node n, target[0] what follows the
    last token, None where that is not known (the walk ends there, without one more); source(n) is what node n was
    drawn from given its elder siblings' rejection, or None if it was picked.
    """
    nodes: list[int] = []
    here = 0
    while True:
        p, right = target[here], None
        if p is None:
            return nodes, [tokens[node] for node in nodes]
        for node in below[here]:
            q = source(node)
            if coin(node, accept_probability(p, q, tokens[node])):
                right = node
                break
            p = residual(p, q, tokens[node])
        if right is None:
            return nodes, [*(tokens[node] for node in nodes), draw(len(nodes), p)]
        nodes.append(right)
        here = right + 1


def accept_probability(p: Distribution, q: Distribution | None, token: int) -> Any:
    """min(1, p / q) for a drawn token, p for a picked one."""
    if q is None:
        return p[token]
    return p[token] / q[token] if p[token] < q[token] else p[token] / p[token]


def residual(p: Distribution, q: Distribution | None, token: int) -> Distribution:
    """What the next token must be drawn from once this one was rejected."""
    if q is None:
        left = p.copy()
        left[token] = p[token] - p[token]
    else:
        left = np.maximum(p - q, 0 * p)
    total = left.sum()
    return left / total if total > 0 else p  # all rejected with probability zero: rounding alone gets here


def without(q: Distribution, token: int) -> Distribution:
    """A source after one of its tokens was drawn and put aside."""
    left = q.copy()
    left[token] = q[token] - q[token]
    total = left.sum()
    return left / total if total > 0 else q


class RejectionVerifier:
    """Speculative sampling over chains and trees; siblings count as drawn without replacement."""

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict:
        broken, feeds = broken_rows(result), broken_feeds(result)
        return Verdict(
            [
                Decision(error=numerics_error(seq)) if i in feeds else self._decide(batch, draft, result, i, broken)
                for i, seq in enumerate(batch.seqs)
            ]
        )

    def _decide(self, batch: Batch, draft: Draft, result: Result, i: int, broken: list[bool]) -> Decision:
        seq = batch.seqs[i]
        prompt = prompt_logprobs(seq, batch, i, result)
        if not batch.complete(i):
            return Decision(prompt_logprobs=prompt)
        rows = node_rows(batch, draft, i)
        logits = result.of(i)[-len(rows) :]
        bad = broken[result.packed.rows[i].stop - len(rows) : result.packed.rows[i].stop]
        table = probabilities(logits, rows).double().cpu().numpy()
        target = [None if b else row for row, b in zip(table, bad, strict=True)]
        sources = _sources(draft, i)
        nodes, tokens = walk(
            draft.tokens[i], children(draft.parents[i]), target, sources.__getitem__, _coin(seq, draft, i), _draw(seq)
        )
        return decision(seq, logits, nodes, tokens, prompt)


def _sources(draft: Draft, i: int) -> list[Distribution | None]:
    """What each node was drawn from; a younger sibling's source lacks its elders' tokens."""
    if draft.sources is None:
        return [None] * len(draft.tokens[i])
    result: list[Distribution | None] = []
    for node, parent in enumerate(draft.parents[i]):
        q = draft.sources[i][node].double().cpu().numpy()
        for elder in range(node):
            if draft.parents[i][elder] == parent:
                q = without(q, draft.tokens[i][elder])
        result.append(q)
    return result


def _coin(seq: Sequence, draft: Draft, i: int) -> Coin:
    def coin(node: int, probability: Any) -> bool:
        position = len(seq.tokens) + len(draft.path(i, node)) - 1
        return bool(rng.uniform(seq.seed, position, rng.COIN, node) < probability)

    return coin


def _draw(seq: Sequence) -> Draw:
    def draw(depth: int, p: Distribution) -> int:
        u = rng.uniform(seq.seed, len(seq.tokens) + depth, rng.RESIDUAL)
        return min(int(np.searchsorted(np.cumsum(p), u, side="right")), int(np.flatnonzero(p)[-1]))

    return draw
