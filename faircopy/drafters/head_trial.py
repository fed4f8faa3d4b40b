"""What drafts of a head take where whole steps are not timed beforehand: on a CPU, with texts of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from faircopy.costs import Curve
from faircopy.drafters.head_drafter import HeadDrafter
from faircopy.layout.paged import PagedLayout
from faircopy.model.runner import Result
from faircopy.model.trial import CONTEXT, PAGE, filled, plausible
from faircopy.types import Batch, Decision, Draft, Verdict
from faircopy.types import Sequence as Text

BATCHES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 3


@torch.no_grad()
def draft_curves(
    drafter: HeadDrafter,
    lengths: Sequence[int],
    most: int,
    room: Callable[[int, int], int],
    context: int,
    seconds: float,
) -> dict[int, Curve]:
    """Seconds of a batch's drafts by its sequences, for each number of nodes; measuring takes about `seconds`.

    lengths: numbers of nodes. most: sequences of a batch. room: nodes that one of them may have, see DraftLengths.room.
    context: tokens that the head can look back on.
    """
    found: dict[int, list[tuple[int, float]]] = {k: [] for k in lengths}
    tokens, end = min(CONTEXT, context // 2), time.perf_counter() + seconds
    for size, k in _cases(lengths, most):
        last = found[k][-1][1] if found[k] else 0.0
        if found[k] and time.perf_counter() + 2 * REPEATS * last > end:
            break
        found[k].append((size, _seconds(drafter, size, tokens, k, room)))
    return {k: Curve(tuple(plausible(times))) for k, times in _rising(found).items()}


def _rising(found: dict[int, list[tuple[int, float]]]) -> dict[int, list[tuple[int, float]]]:
    """Times by nodes without what slow moments have added: none is above that of more nodes."""
    at = {k: dict(times) for k, times in found.items()}
    return {
        k: [(size, min(more[size] for n, more in at.items() if n >= k and size in more)) for size, _ in times]
        for k, times in found.items()
    }


def _cases(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """(sequences, nodes) up to the first size that holds the largest batch."""
    for size in BATCHES:
        if size < 2 * most:
            yield from ((size, k) for k in lengths)


def _seconds(drafter: HeadDrafter, size: int, tokens: int, k: int, room: Callable[[int, int], int]) -> float:
    """The best time of a few drafts for texts that have been read but for the last token."""
    layout, texts = filled(drafter.cached_rows, size, tokens, 4 * (k + 1), PAGE)
    trial, nodes = drafter.over(layout), room(k, size)
    _keep_states(trial, layout, texts)
    batch = Batch(texts, [tokens] * size, [nodes] * size, shared_k=k if nodes > k else None)
    _timed(trial, layout, batch)  # what is allocated or compiled for the first time; later ones read zeros as states
    return min(_timed(trial, layout, batch) for _ in range(REPEATS))


def _keep_states(trial: HeadDrafter, layout: PagedLayout, texts: list[Text]) -> None:
    """Let the drafter have the target's states of the rows before the last tokens."""
    before, nothing = Batch(texts, [len(seq.tokens) - 1 for seq in texts], [0] * len(texts)), Draft.empty(len(texts))
    for seq in texts:
        layout.set_cached(seq, len(seq.tokens) - 2)
    packed, states = layout.pack(before, nothing), trial.empty_states(len(texts))
    verdict = Verdict([Decision([], []) for _ in texts])
    trial.observe(before, nothing, Result(packed, next(iter(states.values())), states=states), verdict)


def _timed(trial: HeadDrafter, layout: PagedLayout, batch: Batch) -> float:
    for seq in batch.seqs:
        layout.set_cached(seq, len(seq.tokens) - 1)
    begin = time.perf_counter()
    trial.propose(batch)
    return time.perf_counter() - begin
