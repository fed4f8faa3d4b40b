"""Rejection sampling: keeps the target's distribution, accepts more often, and writes other text than plain decoding.

The rule below works on any numbers with + - * / and comparison, so the tests run this very code on fractions and
enumerate every outcome. In the engine a distribution is a row of a table on the device: the host reads the numbers of
all drafted tokens at once, walks, and lets the device compute what rejections left, for all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import isfinite, isnan
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from faircopy import rng
from faircopy.acceptance import children
from faircopy.errors import DraftError
from faircopy.kernels.transfer import received, rows_of, sent
from faircopy.model.runner import Result
from faircopy.sampling import chosen_tokens, probabilities
from faircopy.types import PICKED, Batch, Draft, Verdict
from faircopy.verify.base import Found, Judged, accepted_paths, unhealthy_feeds, verdict

BLOCK = 1024  # tokens whose probabilities the host reads at once
Distribution = Any  # non-negative, sums to one: a Row, what is Residual of one, or an array of fractions
Coin = Callable[[int, Any], bool]  # (node, probability) -> heads


@dataclass(slots=True, eq=False)
class Row:
    """A distribution in a table where the model runs; the host knows the numbers of the tokens drafted from it."""

    table: Tensor  # [R, V]
    place: int
    known: dict[int, float] = field(default_factory=dict)

    def __getitem__(self, token: int) -> float:
        return self.known[token]


@dataclass(slots=True, eq=False)
class Residual:
    """What a rejection left of a distribution: computed when a token is drawn from it.

    Or earlier, when a number is asked for: the rejected node has younger siblings.
    """

    p: Row | Residual
    q: Row | Residual | None
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
    return Residual(p, q, token) if isinstance(p, Row | Residual) else _left(p, q, token)


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


def numbers_of(rows: Seq[Row | Residual]) -> Tensor:
    """Distributions [n, V] in float64; rows of one kind are computed together."""
    kinds: dict[Callable[[list[Any]], Tensor], list[int]] = {}
    for n, row in enumerate(rows):
        kinds.setdefault(_kind(row), []).append(n)
    parts = [compute([rows[n] for n in places]) for compute, places in kinds.items()]
    order = [n for places in kinds.values() for n in places]
    return rows_of(torch.cat(parts) if len(parts) > 1 else parts[0], np.argsort(order).tolist())


def _kind(row: Row | Residual) -> Callable[[list[Any]], Tensor]:
    """How the numbers of rows like this one are computed."""
    if isinstance(row, Row):
        return _in_table
    if row.numbers is not None:
        return _computed
    return _after_picked if row.q is None else _after_drawn


def _in_table(rows: list[Row]) -> Tensor:
    return rows_of(rows[0].table, [row.place for row in rows]).double()


def _computed(rows: list[Residual]) -> Tensor:
    return torch.stack([row.numbers for row in rows if row.numbers is not None])


def _after_drawn(rows: list[Residual]) -> Tensor:
    left: Tensor = _left(numbers_of([row.p for row in rows]), numbers_of([row.q for row in rows if row.q]), None)
    return left


def _after_picked(rows: list[Residual]) -> Tensor:
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
        found = accepted_paths(draft, greedy, [int(choice) for choice in choices]) | drawing.found(*numbers)
        feeds = unhealthy_feeds(result.packed, healthy) if healthy else set()
        return verdict(batch, draft, result, found, feeds)


def _choices(greedy: Judged) -> Tensor:
    return chosen_tokens(greedy.logits, greedy.rows, strict=True) if greedy.rows else greedy.logits[:, 0]


def _health(result: Result) -> Tensor:
    return result.logits[:0, 0] if result.healthy is None else result.healthy


class _Drawing:
    """The sequences whose tokens are drawn: what the host must know of them, and what it finds when it does."""

    def __init__(self, draft: Draft, judged: Judged) -> None:
        self._walks: dict[int, _Walk] = {}
        self.asked = self._ask(draft, judged) if judged.rows else ()

    def _ask(self, draft: Draft, judged: Judged) -> tuple[Tensor, ...]:
        """The nodes' numbers by target and by drafter, and two of each row that show whether it is sound."""
        target = probabilities(judged.logits, judged.rows)
        source = _source_table(draft, target, [i for i, _ in judged.complete()])
        self._walks = {i: _Walk(draft, i, judged, target, source) for i, _ in judged.complete()}
        self._of_target = [number for walk in self._walks.values() for number in walk.of_target]
        self._of_source = [number for walk in self._walks.values() for number in walk.of_source]
        # numbers of a row in a table are NaN all together
        return _taken(target, self._of_target), _taken(source, self._of_source), judged.logits.amin(-1), target[:, 0]

    def found(self, *numbers: list[float]) -> dict[int, Found]:
        """Walk, then draw the token behind each walk; numbers: of what was asked."""
        if not numbers:
            return {}
        p, q, least, first = numbers
        for (row, token), number in zip([*self._of_target, *self._of_source], [*p, *q], strict=True):
            row.known[token] = number
        sound = [isfinite(low) and not isnan(number) for low, number in zip(least, first, strict=True)]
        walked = {i: walk.take(sound) for i, walk in self._walks.items()}
        drawn = self._draw([(i, len(nodes), left) for i, (nodes, left) in walked.items() if left is not None])
        return {i: (nodes, self._walks[i].tokens(nodes) + drawn.get(i, [])) for i, (nodes, _) in walked.items()}

    def _draw(self, ends: list[tuple[int, int, Row | Residual]]) -> dict[int, list[int]]:
        """A token for each (sequence, accepted nodes, distribution), by a number keyed by its place."""
        ends.sort(key=lambda end: isinstance(end[2], Residual))  # what is computed alike lies together
        seqs = [self._walks[i].seq for i, _, _ in ends]
        keyed = [(seq.seed, len(seq.tokens) + depth) for seq, (_, depth, _) in zip(seqs, ends, strict=True)]
        numbers = [rng.uniform(seed, position, rng.RESIDUAL) for seed, position in keyed]
        tokens = drawn_tokens(numbers_of([left for _, _, left in ends]), numbers) if ends else []
        return {i: [token] for (i, _, _), token in zip(ends, tokens, strict=True)}


class _Walk:
    """One sequence's walk: made while the target's pass runs, taken when the host knows the nodes' numbers."""

    def __init__(self, draft: Draft, i: int, judged: Judged, target: Tensor, source: Tensor) -> None:
        span, parents = judged.spans[i], draft.parents[i]
        rows = judged.rows[span.start : span.stop]
        self.seq, self._tokens, self._below = rows[0].seq, draft.tokens[i], children(parents)
        self._coins = [rng.uniform(row.seq.seed, row.position - 1, rng.COIN, n) for n, row in enumerate(rows[1:])]
        self._rows = [Row(target, place) for place in span]
        drawn = [None if row == PICKED else Row(source, row) for row in draft.source_rows(i)]
        self.of_target = [(self._rows[above + 1], token) for token, above in zip(self._tokens, parents, strict=True)]
        self.of_source = [(q, token) for token, q in zip(self._tokens, drawn, strict=True) if q is not None]
        self._sources = self._without_elders(drawn)

    def _without_elders(self, drawn: Seq[Row | None]) -> list[Row | Residual | None]:
        """A younger sibling was drawn when the tokens of its elders had been put aside."""
        sources: list[Row | Residual | None] = list(drawn)
        for siblings in self._below:
            for n, node in enumerate(siblings):
                for elder in siblings[:n] if drawn[node] is not None else ():
                    sources[node] = without(sources[node], self._tokens[elder])
        return sources

    def take(self, sound: list[bool]) -> tuple[list[int], Row | Residual | None]:
        """Accepted nodes, and what is left to draw from; the walk ends at a row that is not sound."""
        target = [row if sound[row.place] else None for row in self._rows]
        return walk(self._tokens, self._below, target, self._sources.__getitem__, self._coin)

    def _coin(self, node: int, probability: float) -> bool:
        return self._coins[node] < probability

    def tokens(self, nodes: list[int]) -> list[int]:
        return [self._tokens[node] for node in nodes]


def _source_table(draft: Draft, like: Tensor, seqs: list[int]) -> Tensor:
    """What the drafter drew from, where the target's table is; empty if it has drawn no node of these sequences."""
    last = max((row for i in seqs for row in draft.source_rows(i)), default=PICKED)
    if draft.sources is None or last == PICKED:
        return like[:0]
    table = draft.sources.table()
    if table.ndim != 2 or len(table) <= last or table.shape[1] != like.shape[1]:
        problem, remedy = f"a node was drawn from row {last}", f"give a row for each, over {like.shape[1]} tokens"
        raise DraftError("sources", f"a table {list(table.shape)}", problem, remedy)
    return table.to(like.device)


def _taken(table: Tensor, places: list[tuple[Row, int]]) -> Tensor:
    """The numbers of tokens in rows of a table."""
    flat = [row.place * table.shape[1] + token for row, token in places]
    return table.take(sent(flat, torch.int64, table.device))


def drawing_bytes(batch: int, rows: int, drawn: int, vocab: int, dtype: torch.dtype) -> int:
    """What judging `rows` rows of `batch` sequences allocates besides the logits, `drawn` nodes having a source.

    The logits of these nodes are kept, and copied when their table is made beside the target's, each from a copy of its
    own; later there are both tables, and in float64 what tokens are drawn from, with some intermediate results.
    """
    kept = dtype.itemsize * drawn
    making = max(8 * rows + kept, 4 * rows + 2 * kept + 8 * drawn)
    return vocab * max(making, 4 * rows + kept + 4 * drawn + 48 * batch)


def drawn_tokens(table: Tensor, numbers: list[float]) -> list[int]:
    """A token per distribution [n, V]: where the running sum passes a number in [0, 1).

    Sums over blocks are read first, then the block in which the number falls.
    """
    blocks = F.pad(table, (0, -table.shape[1] % BLOCK)).view(-1, BLOCK)
    sums = blocks.sum(-1).view(len(table), -1).cpu().numpy()
    chosen, before = _places(sums, np.array(numbers))
    inner = rows_of(blocks, (np.arange(len(sums)) * sums.shape[1] + chosen).tolist()).cpu().numpy()
    within, _ = _places(inner, np.array(numbers) - before)
    tokens: list[int] = (chosen * BLOCK + within).tolist()
    return tokens


def _places(weights: NDArray[np.float64], numbers: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Where each row's running sum passes its number, and the sum before; weights [n, m].

    The last weight that is not zero if rounding prevents it.
    """
    sums, last = weights.cumsum(1), weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(1)
    places = np.minimum((sums <= numbers[:, None]).sum(1), last)
    return places, np.where(places > 0, sums[np.arange(len(places)), places - 1], 0.0)
