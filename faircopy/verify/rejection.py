"""Rejection sampling: keeps the target's distribution, accepts more often, and writes other text than plain decoding.

The rule below works on any numbers with + - * / and comparison, so the tests run this very code on fractions and
enumerate every outcome. In the engine a distribution is a row of a table on the device: the host reads the numbers of
all drafted tokens at once, walks, and lets the device compute what rejections left, for all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy import rng
from faircopy.acceptance import accept_path, children
from faircopy.errors import DraftError
from faircopy.kernels.gumbel import BROKEN
from faircopy.kernels.transfer import received, rows_of, sent
from faircopy.model.runner import Result
from faircopy.sampling import chosen_tokens, probabilities
from faircopy.types import PICKED, Batch, Decision, Draft, Sequence, Verdict
from faircopy.verify.base import Judged, decision, numerics_error, prompt_logprobs, unhealthy_feeds

BLOCK = 1024  # tokens whose probabilities the host reads at once
Distribution = Any  # non-negative, sums to one: a Row, what is Left of one, or an array of fractions
Coin = Callable[[int, Any], bool]  # (node, probability) -> heads
Found = tuple[list[int], list[int]]  # accepted nodes, and their tokens plus one more, unless its row is broken


@dataclass(slots=True, eq=False)
class Row:
    """A distribution in a table where the model runs; the host knows the numbers of the tokens drafted from it."""

    table: Tensor  # [R, V]
    place: int
    known: dict[int, float]

    def __getitem__(self, token: int) -> float:
        return self.known[token]


@dataclass(slots=True, eq=False)
class Left:
    """What a rejection left of a distribution: computed when a token is drawn from it.

    Or earlier, when a number is asked for: the rejected node has younger siblings.
    """

    p: Row | Left
    q: Row | Left | None
    token: int
    numbers: Tensor | None = None

    def __getitem__(self, token: int) -> float:
        if self.numbers is None:
            self.numbers = numbers_of([self])[0]
        return float(self.numbers[token])


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
    return Left(p, q, token) if isinstance(p, Row | Left) else _left(p, q, token)


def without(q: Distribution, token: int) -> Distribution:
    """A source after one of its tokens was drawn and put aside."""
    return residual(q, None, token)


def _left(p: Any, q: Any | None, rejected: Any) -> Any:
    """Arrays of fractions or tensors of floats [..., V]; rejected: the tokens' places in the flattened p."""
    if q is None:
        left = 1 * p
        left.reshape(-1)[rejected] = 0
    else:
        left = (p - q) * (p > q)
    total = left.sum(-1, keepdims=True)
    none = total == 0  # all rejected with probability zero: rounding alone gets here
    return (left + none * p) / (total + none)


def numbers_of(rows: Seq[Row | Left]) -> Tensor:
    """Distributions [n, V] in float64; rows of one kind are computed together."""
    kinds: dict[Callable[[list[Any]], Tensor], list[int]] = {}
    for n, row in enumerate(rows):
        kinds.setdefault(_kind(row), []).append(n)
    parts = [compute([rows[n] for n in places]) for compute, places in kinds.items()]
    order = [n for places in kinds.values() for n in places]
    return rows_of(torch.cat(parts) if len(parts) > 1 else parts[0], np.argsort(order).tolist())


def _kind(row: Row | Left) -> Callable[[list[Any]], Tensor]:
    """How the numbers of rows like this one are computed."""
    if isinstance(row, Row):
        return _in_table
    if row.numbers is not None:
        return _computed
    return _after_picked if row.q is None else _after_drawn


def _in_table(rows: list[Row]) -> Tensor:
    return rows_of(rows[0].table, [row.place for row in rows]).double()


def _computed(rows: list[Left]) -> Tensor:
    return torch.stack([row.numbers for row in rows if row.numbers is not None])


def _after_drawn(rows: list[Left]) -> Tensor:
    left: Tensor = _left(numbers_of([row.p for row in rows]), numbers_of([row.q for row in rows if row.q]), None)
    return left


def _after_picked(rows: list[Left]) -> Tensor:
    p = numbers_of([row.p for row in rows])
    rejected = [n * p.shape[1] + row.token for n, row in enumerate(rows)]
    left: Tensor = _left(p, None, sent(rejected, torch.int64, p.device))
    return left


class RejectionVerifier:
    """Speculative sampling over chains and trees; siblings count as drawn without replacement.

    A greedy request has nothing to draw: its nodes are right or they are not, as in exact verification.
    """

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict:
        judged = Judged.of(batch, draft, result)
        greedy, drawing = judged.part(greedy=True), _Drawing(draft, judged.part(greedy=False))
        # up to here the host has only launched; now it waits for the target's pass
        choices, healthy, *numbers = received(_choices(greedy), _health(result), *drawing.asked)
        found = _accepted(draft, greedy, choices) | drawing.found(*numbers)
        feeds = unhealthy_feeds(result.packed, healthy) if healthy else set()
        return Verdict(
            [
                Decision(error=numerics_error(seq)) if i in feeds else _decide(batch, draft, result, i, found.get(i))
                for i, seq in enumerate(batch.seqs)
            ]
        )


def _choices(greedy: Judged) -> Tensor:
    return chosen_tokens(greedy.logits, greedy.rows, strict=True) if greedy.rows else greedy.logits[:, 0]


def _health(result: Result) -> Tensor:
    return result.logits[:0, 0] if result.healthy is None else result.healthy


def _accepted(draft: Draft, greedy: Judged, choices: list[float]) -> dict[int, Found]:
    """The paths of greedy sequences."""
    found = {}
    for i, span in greedy.complete():
        chosen = [int(choice) for choice in choices[span.start : span.stop]]
        broken = [token == BROKEN for token in chosen]
        found[i] = accept_path(draft.tokens[i], draft.parents[i], chosen, broken)
    return found


def _decide(batch: Batch, draft: Draft, result: Result, i: int, found: Found | None) -> Decision:
    seq, prompt = batch.seqs[i], prompt_logprobs(batch.seqs[i], batch, i, result)
    if found is None:
        return Decision(prompt_logprobs=prompt)
    return decision(seq, result.of(i)[-1 - len(draft.tokens[i]) :], *found, prompt)


class _Drawing:
    """The sequences whose tokens are drawn, and the tables of what target and drafter draw them from."""

    def __init__(self, draft: Draft, judged: Judged) -> None:
        self._draft, self._judged = draft, judged
        self.asked = self._ask() if judged.rows else ()

    def _ask(self) -> tuple[Tensor, ...]:
        """What the host must know: the nodes' numbers in both tables, and of which rows the numbers are sound."""
        logits = self._judged.logits
        self._target = probabilities(logits, self._judged.rows)
        wanted, drawn = self._places()
        self._source = _source_table(self._draft, self._target, drawn)
        # the numbers of a row are NaN all together
        return _taken(self._target, wanted), _taken(self._source, drawn), logits.amin(-1), self._target[:, 0]

    def _places(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Row and token of each node in the target's table, and of each drawn one in the drafter's."""
        wanted, drawn = [], []
        for i, span in self._judged.complete():
            nodes = list(zip(self._draft.tokens[i], self._draft.parents[i], strict=True))
            wanted += [(span.start + parent + 1, token) for token, parent in nodes]
            sources = _source_rows(self._draft, i)
            drawn += [(row, token) for row, (token, _) in zip(sources, nodes, strict=True) if row != PICKED]
        return wanted, drawn

    def found(self, *numbers: list[float]) -> dict[int, Found]:
        """Walk, and draw the token behind each walk; numbers: what was asked."""
        if not numbers:
            return {}
        walks = self._walks(*numbers)
        seqs = {i: self._judged.rows[span.start].seq for i, span in self._judged.complete()}
        ends = [(i, len(nodes), p) for i, (nodes, p) in walks.items() if p is not None]
        drawn = dict(zip((i for i, _, _ in ends), _drawn([(seqs[i], n, p) for i, n, p in ends]), strict=True))
        return {
            i: (nodes, [self._draft.tokens[i][node] for node in nodes] + ([drawn[i]] if i in drawn else []))
            for i, (nodes, _) in walks.items()
        }

    def _walks(
        self, wanted: list[float], drawn: list[float], least: list[float], first: list[float]
    ) -> dict[int, tuple[list[int], Distribution | None]]:
        p, q, walks = iter(wanted), iter(drawn), {}
        for i, span in self._judged.complete():
            rows = [Row(self._target, place, {}) for place in span]
            for token, parent in zip(self._draft.tokens[i], self._draft.parents[i], strict=True):
                rows[parent + 1].known[token] = next(p)
            sources = self._sources(i, q)
            target = [row if isfinite(least[row.place]) and not isnan(first[row.place]) else None for row in rows]
            seq = self._judged.rows[span.start].seq
            below = children(self._draft.parents[i])
            walks[i] = walk(self._draft.tokens[i], below, target, sources.__getitem__, _coin(seq, self._draft, i))
        return walks

    def _sources(self, i: int, q: Iterator[float]) -> list[Row | Left | None]:
        """What each node was drawn from; a younger sibling's source lacks its elders' tokens."""
        tokens, found = self._draft.tokens[i], []
        for node, row in enumerate(_source_rows(self._draft, i)):
            source: Any = None if row == PICKED else Row(self._source, row, {tokens[node]: next(q)})
            for elder in self._elders(i, node) if source is not None else ():
                source = without(source, tokens[elder])
            found.append(source)
        return found

    def _elders(self, i: int, node: int) -> list[int]:
        parents = self._draft.parents[i]
        return [elder for elder in range(node) if parents[elder] == parents[node]]


def _source_rows(draft: Draft, i: int) -> list[int]:
    return [PICKED] * len(draft.tokens[i]) if draft.sources is None else draft.sources.rows[i]


def _source_table(draft: Draft, like: Tensor, drawn: list[tuple[int, int]]) -> Tensor:
    """What the drafter drew from, where the target's table is; empty if it has drawn nothing."""
    if draft.sources is None or not drawn:
        return like[:0]
    table, rows = draft.sources.table(), max(row for row, _ in drawn) + 1
    if table.ndim != 2 or len(table) < rows or table.shape[1] != like.shape[1]:
        remedy = f"at least {rows} rows over the target's {like.shape[1]} tokens"
        raise DraftError("sources", f"a table {list(table.shape)}", "does not have the nodes' rows", remedy)
    return table.to(like.device)


def _taken(table: Tensor, places: list[tuple[int, int]]) -> Tensor:
    """The numbers at (row, token) of a table."""
    flat = [row * table.shape[1] + token for row, token in places]
    return table.take(sent(flat, torch.int64, table.device))


def _coin(seq: Sequence, draft: Draft, i: int) -> Coin:
    def coin(node: int, probability: Any) -> bool:
        position = len(seq.tokens) + len(draft.path(i, node)) - 1
        return bool(rng.uniform(seq.seed, position, rng.COIN, node) < probability)

    return coin


def _drawn(ends: list[tuple[Sequence, int, Row | Left]]) -> list[int]:
    """A token for each (sequence, accepted nodes, distribution): where the running sum passes a number keyed by place.

    Sums over blocks are read first, then the block in which the number falls.
    """
    if not ends:
        return []
    table = numbers_of([p for _, _, p in ends])
    blocks = F.pad(table, (0, -table.shape[1] % BLOCK)).view(-1, BLOCK)
    sums = blocks.sum(-1).view(len(ends), -1).cpu().numpy()
    numbers = [rng.uniform(seq.seed, len(seq.tokens) + depth, rng.RESIDUAL) for seq, depth, _ in ends]
    chosen = [_place(line, number) for line, number in zip(sums, numbers, strict=True)]
    inner = rows_of(blocks, [n * sums.shape[1] + block for n, block in enumerate(chosen)]).cpu().numpy()
    left = [number - line[:block].sum() for number, line, block in zip(numbers, sums, chosen, strict=True)]
    return [block * BLOCK + _place(line, rest) for block, line, rest in zip(chosen, inner, left, strict=True)]


def _place(weights: Any, number: float) -> int:
    """Where the running sum of weights passes a number; the last weight that is not zero if rounding prevents it."""
    return min(int(np.searchsorted(np.cumsum(weights), number, side="right")), int(np.flatnonzero(weights)[-1]))
