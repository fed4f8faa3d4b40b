"""What draft heads are trained on: the target's pass over a text, and each method's loss against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy.drafters.heads import Guess, Head
from faircopy.drafters.networks.eagle3 import Eagle3
from faircopy.drafters.networks.scylla import Scylla

REGRESSION = 10.0  # Clover-2: weight of the distance to the target's state against its distribution, if not given


@dataclass(slots=True)
class Lesson:
    """A batch of text as the target sees it."""

    tokens: Tensor  # [B, L]
    states: Tensor  # [B, L, F]: what the head wants of the rows before
    logits: Tensor  # [B, L, V] the target's own
    final: Tensor  # [B, L, hidden] the normalised states its head reads


def rows_before(states: Tensor) -> Tensor:
    """What a head reads beside each token of texts [B, L]: the state of the row before, zeros before the first."""
    return F.pad(states[:, :-1], (0, 0, 1, 0))


class Teaching(NamedTuple):
    """What one level should have said, rows without a state before them left out."""

    labels: Tensor  # [B, N] the text
    logits: Tensor  # [B, N, V] the target's
    final: Tensor  # [B, N, hidden]


LevelLoss = Callable[[Guess, Teaching], Tensor]


@dataclass(frozen=True, slots=True)
class HeadObjective:
    """How a method's head is trained."""

    level_loss: LevelLoss
    levels: int  # how many levels the loss looks at
    decay: float = 0.8  # weight of a level's loss against the one before
    clipping: dict[str, Any] = field(default_factory=dict)  # of gradients, where the paper says so: see loop.Settings


def objective_of(head: Head) -> HeadObjective:
    """By method; cross entropy with the text where the paper says nothing else."""
    if head.config.method == "clover2":
        loss = _regression(float(head.config.options.get("regression", REGRESSION)))
        return HeadObjective(loss, head.levels, decay=0.7, clipping={"clip": 0.5, "clip_each": True})
    if isinstance(head, Eagle3):
        return HeadObjective(_eagle3(head) if head.own else _eagle1, head.unrolled)
    if isinstance(head, Scylla):
        return HeadObjective(_eagle1, head.unrolled)
    return HeadObjective(text_cross_entropy, head.levels)


def head_loss(head: Head, objective: HeadObjective, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
    """The levels' weighted loss, and per level the share of first guesses that are the target's choice."""
    total, metrics = torch.zeros((), device=lesson.tokens.device), {}
    for level, guess in enumerate(head.unroll(lesson.states, lesson.tokens, objective.levels)):
        teaching, known = teaching_of(lesson, level), known_rows(guess)
        total = total + objective.decay**level * objective.level_loss(known, teaching)
        metrics[f"top1_{level + 1}"] = _agreement(known, teaching)
    return total, metrics


def known_rows(guess: Guess) -> Guess:
    """Without the first row, which has no state before it."""
    return Guess(*(part[:, 1:] for part in guess))


def teaching_of(lesson: Lesson, level: int) -> Teaching:
    """Row t at level j is about the token at t + 1 + j, which the target's row t + j says."""
    rows = slice(1 + level, -1)
    return Teaching(lesson.tokens[:, 2 + level :], lesson.logits[:, rows], lesson.final[:, rows])


def text_cross_entropy(guess: Guess, teaching: Teaching) -> Tensor:
    """Medusa and Clover: against the text."""
    return F.cross_entropy(guess.logits.flatten(0, 1).float(), teaching.labels.flatten())


def soft_cross_entropy(logits: Tensor, wanted: Tensor, rows: Tensor | None = None) -> Tensor:
    """Against the target's whole distribution, over all rows or those marked."""
    each = -(torch.softmax(wanted.float(), -1) * torch.log_softmax(logits.float(), -1)).sum(-1)
    return each.mean() if rows is None else (each * rows).sum() / rows.sum().clamp(min=1)


def _regression(weight: float) -> LevelLoss:
    """Clover-2: towards the target's state, weighted, and its distribution."""

    def loss(guess: Guess, teaching: Teaching) -> Tensor:
        return weight * _distance(guess, teaching) + soft_cross_entropy(guess.logits, teaching.logits)

    return loss


def _eagle1(guess: Guess, teaching: Teaching) -> Tensor:
    """Towards the target's next state, and a tenth of its distribution."""
    return _distance(guess, teaching) + 0.1 * soft_cross_entropy(guess.logits, teaching.logits)


def _eagle3(head: Eagle3) -> LevelLoss:
    """Towards the target's distribution over the head's own tokens, where the target's choice is one of them."""

    def loss(guess: Guess, teaching: Teaching) -> Tensor:
        wanted = teaching.logits.index_select(-1, head.words_kept)
        known = torch.isin(teaching.logits.argmax(-1), head.words_kept)
        return soft_cross_entropy(guess.logits.index_select(-1, head.words_kept), wanted, known)

    return loss


def _distance(guess: Guess, teaching: Teaching) -> Tensor:
    return F.smooth_l1_loss(guess.out.float(), teaching.final.float())


@torch.no_grad()
def _agreement(guess: Guess, teaching: Teaching) -> Tensor:
    return (guess.logits.argmax(-1) == teaching.logits.argmax(-1)).float().mean()
