"""Rejection sampling: keeps the target's distribution, accepts more often, and writes other text than plain decoding.

The rule below works on any numbers with + - * / and comparison, so the tests run this very code on fractions and
enumerate every outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy import rng
from faircopy.acceptance import children
from faircopy.model.runner import Result
from faircopy.sampling import not_finite, probabilities
from faircopy.types import Batch, Decision, Draft, Sequence, Verdict
from faircopy.verify.base import Judged, broken_feeds, decision, numerics_error, prompt_logprobs

BLOCK = 1024  # tokens whose probabilities the host reads at once
Distribution = Any  # non-negative, sums to one: a Row, or an array of fractions
Coin = Callable[[int, Any], bool]  # (node, probability) -> heads


@dataclass(slots=True)
class Row:
    """A distribution in float64 where the model runs; the host reads single numbers of it."""

    numbers: Tensor
    known: dict[int, float] = field(default_factory=dict)

    def __getitem__(self, token: int) -> float:
        if token not in self.known:
            self.known[token] = float(self.numbers[token])
        return self.known[token]


def walk(
    tokens: Seq[int],
    below: Seq[Seq[int]],
    target: Seq[Distribution | None],
    source: Callable[[int], Distribution | None],
    coin: Coin,
) -> tuple[list[int], Distribution | None]:
    """Accepted nodes, and what the token behind them is drawn from.

    target[n + 1] is what follows node n, target[0] what follows the last token, None where that is not known: the walk
    ends there, and nothing is drawn. source(n) is what node n was drawn from given its elder siblings' rejection, or
    None if it was picked.
    """
    nodes: list[int] = []
    here = 0
    while True:
        p, right = target[here], None
        if p is None:
            return nodes, None
        for node in below[here]:
            q = source(node)
            if coin(node, accept_probability(p, q, tokens[node])):
                right = node
                break
            p = residual(p, q, tokens[node])
        if right is None:
            return nodes, p
        nodes.append(right)
        here = right + 1


def accept_probability(p: Distribution, q: Distribution | None, token: int) -> Any:
    """min(1, p / q) for a drawn token, p for a picked one."""
    if q is None:
        return p[token]
    return p[token] / q[token] if p[token] < q[token] else p[token] / p[token]


def residual(p: Distribution, q: Distribution | None, token: int) -> Distribution:
    """What the next token must be drawn from once this one was rejected."""
    if isinstance(p, Row):
        return Row(_left(p.numbers, None if q is None else q.numbers, token))
    return _left(p, q, token)


def without(q: Distribution, token: int) -> Distribution:
    """A source after one of its tokens was drawn and put aside."""
    return residual(q, None, token)


def _left(p: Any, q: Any | None, token: int) -> Any:
    """Arrays of fractions or tensors of floats."""
    if q is None:
        left = 1 * p
        left[token] = 0 * left[token]
    else:
        left = (p - q) * (p > q)
    total = left.sum()
    return left / total if total > 0 else p  # all rejected with probability zero: rounding alone gets here


class RejectionVerifier:
    """Speculative sampling over chains and trees; siblings count as drawn without replacement."""

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict:
        judged, feeds = Judged.of(batch, draft, result), broken_feeds(result)
        walks = self._walks(batch, draft, judged)
        drawing = [(batch.seqs[i], len(nodes), p) for i, (nodes, p) in walks.items() if p is not None]
        drawn = dict(zip((seq for seq, _, _ in drawing), _drawn(drawing), strict=True))
        return Verdict(
            [
                Decision(error=numerics_error(seq))
                if i in feeds
                else self._decide(batch, draft, result, i, walks, drawn)
                for i, seq in enumerate(batch.seqs)
            ]
        )

    def _walks(self, batch: Batch, draft: Draft, judged: Judged) -> dict[int, tuple[list[int], Row | None]]:
        """The walk of each sequence that was fed to its end."""
        if not judged.rows:
            return {}
        table = probabilities(judged.logits, judged.rows).double()
        rows = [Row(row) for row in table]
        sources = [_sources(draft, i, judged.logits.device) for i in range(len(batch))]
        _read(rows, sources, draft, judged.spans)
        broken = (not_finite(judged.logits, True) | table.isnan().any(-1)).tolist()
        return {
            i: walk(
                draft.tokens[i], children(draft.parents[i]), [None if broken[n] else rows[n] for n in span],
                sources[i].__getitem__, _coin(batch.seqs[i], draft, i),
            )
            for i, span in enumerate(judged.spans) if span
        }  # fmt: skip

    def _decide(
        self,
        batch: Batch,
        draft: Draft,
        result: Result,
        i: int,
        walks: dict[int, tuple[list[int], Row | None]],
        drawn: dict[Sequence, int],
    ) -> Decision:
        seq, prompt = batch.seqs[i], prompt_logprobs(batch.seqs[i], batch, i, result)
        if i not in walks:
            return Decision(prompt_logprobs=prompt)
        nodes, _ = walks[i]
        tokens = [draft.tokens[i][node] for node in nodes] + ([drawn[seq]] if seq in drawn else [])
        return decision(seq, result.of(i)[-1 - len(draft.tokens[i]) :], nodes, tokens, prompt)


def _sources(draft: Draft, i: int, device: torch.device) -> list[Row | None]:
    """What each node was drawn from; a younger sibling's source lacks its elders' tokens."""
    if draft.sources is None:
        return [None] * len(draft.tokens[i])
    found: list[Row | None] = []
    for node, parent in enumerate(draft.parents[i]):
        q = Row(draft.sources[i][node].to(device).double())
        for elder in range(node):
            if draft.parents[i][elder] == parent:
                q = without(q, draft.tokens[i][elder])
        found.append(q)
    return found


def _read(rows: list[Row], sources: list[list[Row | None]], draft: Draft, spans: list[range]) -> None:
    """Read the probabilities of all nodes, of the target and of the drafter, at once."""
    asked: list[tuple[Row, int]] = []
    for i, span in enumerate(spans):
        for token, parent, q in zip(draft.tokens[i], draft.parents[i], sources[i], strict=True):
            if span:
                asked += [(rows[span.start + parent + 1], token), *([] if q is None else [(q, token)])]
    if asked:
        for (row, token), value in zip(asked, torch.stack([r.numbers[t] for r, t in asked]).tolist(), strict=True):
            row.known[token] = value


def _coin(seq: Sequence, draft: Draft, i: int) -> Coin:
    def coin(node: int, probability: Any) -> bool:
        position = len(seq.tokens) + len(draft.path(i, node)) - 1
        return bool(rng.uniform(seq.seed, position, rng.COIN, node) < probability)

    return coin


def _drawn(drawing: list[tuple[Sequence, int, Row]]) -> list[int]:
    """A token for each (sequence, accepted nodes, distribution): where the running sum passes a number keyed by place.

    Sums over blocks are read first, then the block in which the number falls.
    """
    if not drawing:
        return []
    table = torch.stack([p.numbers for _, _, p in drawing])
    blocks = F.pad(table, (0, -table.shape[1] % BLOCK)).view(len(drawing), -1, BLOCK)
    sums = blocks.sum(-1).cpu().numpy()
    numbers = [rng.uniform(seq.seed, len(seq.tokens) + depth, rng.RESIDUAL) for seq, depth, _ in drawing]
    chosen = [_place(line, number) for line, number in zip(sums, numbers, strict=True)]
    where = torch.tensor(chosen, device=table.device)
    inner = blocks[torch.arange(len(drawing), device=table.device), where].cpu().numpy()
    left = [number - line[:block].sum() for number, line, block in zip(numbers, sums, chosen, strict=True)]
    return [block * BLOCK + _place(line, rest) for block, line, rest in zip(chosen, inner, left, strict=True)]


def _place(weights: Any, number: float) -> int:
    """Where the running sum of weights passes a number; the last weight that is not zero if rounding prevents it."""
    return min(int(np.searchsorted(np.cumsum(weights), number, side="right")), int(np.flatnonzero(weights)[-1]))
