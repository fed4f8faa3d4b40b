"""Two tasks for the loop: learn the next token of a text, or learn a larger model's whole distribution."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faircopy.train.loop import Metrics

Objective = Callable[[Tensor], tuple[Tensor, Metrics]]


class NextToken:
    """Cross entropy of every token given those before it."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.objective: Objective = self._objective

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.network.parameters()

    def loss(self, batch: Tensor) -> tuple[Tensor, Metrics]:
        return self.objective(batch)

    def _objective(self, batch: Tensor) -> tuple[Tensor, Metrics]:
        logits = logits_of(self.network, batch[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), {}


class Distil:
    """The student learns the teacher's distribution (forward KL) and, in the share `hard`, its favourite token.

    Greedy acceptance asks only for the favourite, sampled acceptance for the whole distribution.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, hard: float = 0.5) -> None:
        self.student, self.teacher, self.hard = student, teacher.eval().requires_grad_(False), hard
        self.objective: Objective = self._objective

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.student.parameters()

    def loss(self, batch: Tensor) -> tuple[Tensor, Metrics]:
        return self.objective(batch)

    def _objective(self, batch: Tensor) -> tuple[Tensor, Metrics]:
        inputs = batch[:, :-1]
        with torch.no_grad():
            wanted = F.log_softmax(logits_of(self.teacher, inputs).float(), -1)
            favourite = wanted.argmax(-1)
        guess = F.log_softmax(logits_of(self.student, inputs).float(), -1)
        divergence = (wanted.exp() * (wanted - guess)).sum(-1).mean()
        choice = -guess.gather(-1, favourite[..., None]).mean()
        agree = (guess.argmax(-1) == favourite).float().mean()
        loss = (1.0 - self.hard) * divergence + self.hard * choice
        return loss, {"kl": divergence.detach(), "choice": choice.detach(), "agree": agree}


def logits_of(network: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of a network of ours or of transformers."""
    out = network(tokens)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def speed_up(task: NextToken | Distil, batch: Tensor, bf16: bool) -> bool:
    """Compile the task's objective; if one trial step fails, say why and stay with the eager one."""
    eager = task.objective
    task.objective = torch.compile(eager, dynamic=False)
    try:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=bf16):
            loss, _ = task.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # a compiler fails in many ways, and none of them should end a training
        print(f"not compiled, going on without: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
        task.objective = eager
    for parameter in task.parameters():
        parameter.grad = None
    return task.objective is not eager


@torch.no_grad()
def held_out_loss(network: nn.Module, batches: Iterable[Tensor], bf16: bool) -> float:
    """Mean cross entropy over batches that were not trained on."""
    losses = []
    for batch in batches:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=bf16):
            logits = logits_of(network, batch[:, :-1]).float()
        losses.append(float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())))
    return sum(losses) / len(losses)
