"""A target's final states of a text, computed once: the trainings of a grid read them instead of running the target."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from faircopy.drafters.heads import Head
from faircopy.errors import ConfigError
from faircopy.train.heads import Teacher
from faircopy.train.loop import Metrics
from faircopy.train.losses import HeadObjective, Lesson, head_loss, rows_before

FORWARD = 1 << 16  # tokens per pass of the target, on a GPU
FORWARD_CPU = 1 << 12


class CachedText:
    """A text cut into windows [N, length], and the states of as many windows as were needed so far, in 16 bits."""

    def __init__(self, teacher: Teacher, tokens: Tensor, length: int) -> None:
        if len(tokens) < length:
            raise ConfigError("text", len(tokens), f"shorter than one window of {length}", "give more text")
        count = len(tokens) // length
        self.windows, self._teacher = tokens[: count * length].view(count, length), teacher
        hidden = teacher.stock.config.get_text_config().hidden_size
        self._states = torch.empty(count, length, hidden, dtype=torch.bfloat16, device=tokens.device)
        self._ready = 0

    @property
    def length(self) -> int:
        return self.windows.shape[1]

    def need(self, count: int) -> None:
        """Compute the states of the first `count` windows, in large passes."""
        rows = max(1, (FORWARD if self.windows.is_cuda else FORWARD_CPU) // self.length)
        while self._ready < min(count, len(self.windows)):
            part = slice(self._ready, self._ready + rows)
            self._states[part] = self._teacher.states(self.windows[part].long())
            self._ready += rows

    def read(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, length] and final states [B, length, hidden] of these windows."""
        return self.windows[numbers].long(), self._states[numbers]


class ShuffledWindows:
    """Batches of window numbers over the first `count` windows; every epoch in a new order.

    A batch holds each window's number once per token, so that the training loop counts tokens.
    """

    def __init__(self, text: CachedText, count: int, rows: int, seed: int) -> None:
        self._text, self._count, self._rows, self._seed = text, count, rows, seed
        self._per_epoch, self._epoch = max(1, count // rows), -1
        self._order = torch.empty(0)

    def batch(self, index: int) -> Tensor:
        epoch, place = divmod(index, self._per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self._count, generator=generator)
            self._epoch, self._order = epoch, order.to(self._text.windows.device)
        numbers = self._order[place * self._rows : (place + 1) * self._rows]
        return numbers[:, None].expand(-1, self._text.length)


class CachedHeadTask:
    """A head that learns from cached states; the target's logits are its output layer over them."""

    def __init__(self, head: Head, text: CachedText, objective: HeadObjective) -> None:
        self._head, self._text, self._objective = head.train(), text, objective

    def parameters(self) -> Iterable[nn.Parameter]:
        return self._head.parameters()

    def loss(self, batch: Tensor) -> tuple[Tensor, Metrics]:
        tokens, final = self._text.read(batch[:, 0])
        final = final.to(self._head.dtype)
        with torch.no_grad():
            logits = self._head.speak(final)
        return head_loss(self._head, self._objective, Lesson(tokens, rows_before(final), logits, final))
