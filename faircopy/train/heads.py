"""A task for the loop: a draft head learns what its target is about to say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faircopy.drafters.heads import Head
from faircopy.drafters.trees import OFFERED
from faircopy.model.base import FINAL, Taps
from faircopy.model.hidden import tapping
from faircopy.train.loop import Metrics
from faircopy.train.losses import Lesson, head_loss, known_rows, objective_of, rows_before, teaching_of


class Teacher:
    """A frozen target that lets its hidden states be seen."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    @torch.no_grad()
    def lesson(self, tokens: Tensor, wants: tuple[int, ...]) -> Lesson:
        """One pass over texts [B, L]; the head reads the states of the rows before."""
        taps = Taps((*wants, FINAL))
        with tapping(self.stock, taps):
            logits = self.stock(input_ids=tokens, use_cache=False).logits
        states = torch.cat([taps.states[layer] for layer in wants], -1)
        return Lesson(tokens, rows_before(states), logits, taps.states[FINAL])

    @torch.no_grad()
    def states(self, tokens: Tensor, wants: tuple[int, ...] = (FINAL,)) -> Tensor:
        """The states of texts [B, L] that a head wants, end to end; no logits are made."""
        taps = Taps(wants)
        with tapping(self.stock, taps):
            self.stock.base_model(input_ids=tokens, use_cache=False)
        return torch.cat([taps.states[layer] for layer in wants], -1)


class HeadTask:
    """A head and the target it listens to."""

    def __init__(self, head: Head, teacher: Teacher) -> None:
        self.head, self.teacher, self.objective = head.train(), teacher, objective_of(head)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.head.parameters()

    def loss(self, batch: Tensor) -> tuple[Tensor, Metrics]:
        lesson = self.teacher.lesson(batch, self.head.wants)
        lesson.states = lesson.states.to(self.head.dtype)
        return head_loss(self.head, self.objective, lesson)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How often the target's next tokens were among a head's guesses, given true tokens before."""

    top1: list[float]  # per level
    top5: list[float]
    ranks: list[list[float]]  # per level, how often each rank was the one, where first guesses were right so far


@torch.no_grad()
def measure_heads(head: Head, teacher: Teacher, batches: Iterable[Tensor], bf16: bool = False) -> Accuracy:
    """Accuracy of all levels against the target's own choices."""
    head.eval()
    whole, path = _Counts(head.levels), _Counts(head.levels)
    for batch in batches:
        lesson = teacher.lesson(batch, head.wants)
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=bf16):
            right_so_far = torch.ones_like(batch[:, 1:], dtype=torch.bool)
            for level, guess in enumerate(head.unroll(lesson.states.to(head.dtype), batch, head.levels)):
                right = _ranks(known_rows(guess).logits, teaching_of(lesson, level).logits)
                right_so_far = right_so_far[:, : right.shape[1]]
                whole.add(level, right.flatten(0, 1))
                path.add(level, right[right_so_far])
                right_so_far = right_so_far & (right[..., 0] > 0)
    shares = whole.shares()
    return Accuracy(shares[:, 0].tolist(), shares[:, :5].sum(1).tolist(), path.shares().tolist())


class _Counts:
    """Per level, how often each rank was right, and of how many."""

    def __init__(self, levels: int) -> None:
        self._right = torch.zeros(levels, OFFERED, dtype=torch.float64)
        self._rows = torch.zeros(levels, dtype=torch.float64)

    def add(self, level: int, right: Tensor) -> None:
        self._right[level] += right.sum(0).double().cpu()
        self._rows[level] += len(right)

    def shares(self) -> Tensor:
        return self._right / self._rows.clamp(min=1)[:, None]


def _ranks(logits: Tensor, wanted: Tensor) -> Tensor:
    """[B, N, OFFERED]: one at the rank that holds the target's choice."""
    best = logits.topk(min(OFFERED, logits.shape[-1]), -1).indices
    right = (best == wanted.argmax(-1, keepdim=True)).float()
    return F.pad(right, (0, OFFERED - right.shape[-1]))
