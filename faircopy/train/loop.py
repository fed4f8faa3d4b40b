"""The training loop: whatever brings parameters and a loss is trained, logged, checkpointed and resumed here."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from faircopy.errors import ConfigError

Metrics = dict[str, Tensor]  # scalars


class Task(Protocol):
    """What is trained: a network and its loss. Only what `parameters` yields is updated and checkpointed."""

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def loss(self, batch: Tensor) -> tuple[Tensor, Metrics]: ...


class Batches(Protocol):
    """The data as a function: batch number n is always the same, so a position to resume from is one integer."""

    def batch(self, index: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train: for a number of steps, for some seconds, or until the first of the two is reached."""

    steps: int | None = None
    seconds: float | None = None  # the schedule follows the clock: always finishes cleanly, never twice alike
    lr: float = 1e-3
    floor: float = 0.02  # last learning rate, as a share of lr
    warmup: float = 0.02  # share of the run
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    clip_each: bool = False  # cut every gradient at `clip` by itself instead of all by their norm
    accumulate: int = 1  # batches per step
    bf16: bool = False  # products in bfloat16; weights and optimiser stay float32
    log_every: int = 10
    checkpoint_every: int = 0  # steps; 0: never
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise ConfigError("steps", None, "neither steps nor seconds says when to stop", "give one of them")
        for name in ("accumulate", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "below 1", "use 1 or more")


@dataclass(slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan  # as last logged

    def share(self, settings: Settings) -> float:
        """From 0 at the start to 1 at the end."""
        by_step = self.step / settings.steps if settings.steps else 0.0
        by_clock = self.seconds / settings.seconds if settings.seconds else 0.0
        return max(by_step, by_clock)


def train(
    task: Task,
    batches: Batches,
    settings: Settings,
    log: Path,
    checkpoint: Path | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Progress:
    """Train to the end of the schedule; goes on from `checkpoint` if that file exists, with the same losses."""
    run = _Run(task, batches, settings, log, checkpoint)
    with _bar(settings) as advance:
        while run.progress.share(settings) < 1.0:
            run.step()
            advance(run.progress)
            if watch:
                watch(run.progress)
    run.note()
    return run.progress


def learning_rate(share: float, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to the floor."""
    if share < settings.warmup:
        return settings.lr * max(share / settings.warmup, 0.01)
    rest = min((share - settings.warmup) / (1.0 - settings.warmup), 1.0)
    return settings.lr * (settings.floor + (1.0 - settings.floor) * 0.5 * (1.0 + math.cos(math.pi * rest)))


class _Run:
    """One run's moving parts: weights, optimiser, log, clock."""

    def __init__(self, task: Task, batches: Batches, settings: Settings, log: Path, checkpoint: Path | None) -> None:
        self.task, self.batches, self.settings, self.checkpoint = task, batches, settings, checkpoint
        self.parameters = list(task.parameters())
        self.device = self.parameters[0].device
        self.optimiser = _optimiser(self.parameters, settings)
        self.progress, self.sums = Progress(), _Sums()
        torch.manual_seed(settings.seed)
        if checkpoint is not None and checkpoint.exists():
            self._restore(checkpoint)
        self.log = _Log(log, self.progress.step)
        self.started = time.perf_counter() - self.progress.seconds

    def step(self) -> None:
        """One update of the weights, from `accumulate` batches."""
        settings = self.settings
        rate = learning_rate(self.progress.share(settings), settings)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        for part in range(settings.accumulate):
            batch = self.batches.batch(self.progress.step * settings.accumulate + part)
            self._accumulate(batch)
            self.progress.tokens += batch.numel()
        norm = self._clip()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.sums.add({"grad_norm": norm}, 1.0)
        self.sums.steps += 1
        self._tick()

    def _clip(self) -> Tensor:
        """Keep gradients within bounds; how large they were together."""
        if not self.settings.clip_each:
            return nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        nn.utils.clip_grad_value_(self.parameters, self.settings.clip)
        return norm

    def _accumulate(self, batch: Tensor) -> None:
        with self._precision():
            loss, metrics = self.task.loss(batch)
        share = 1.0 / self.settings.accumulate
        (loss * share).backward()  # type: ignore[no-untyped-call]
        self.sums.add({"loss": loss, **metrics}, share)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.settings.bf16 else nullcontext()

    def _tick(self) -> None:
        progress, settings = self.progress, self.settings
        progress.step += 1
        progress.seconds = time.perf_counter() - self.started
        save = bool(settings.checkpoint_every) and progress.step % settings.checkpoint_every == 0
        if save or progress.step % settings.log_every == 0:
            self.note()
        if save and self.checkpoint is not None:
            self._save(self.checkpoint)

    def note(self) -> None:
        """Write the mean of the steps since the last line; this is where host and device meet."""
        if not self.sums.steps:
            return
        rate = float(self.optimiser.param_groups[0]["lr"])
        means = self.sums.means()
        self.progress.loss = means["loss"]
        self.progress.seconds = time.perf_counter() - self.started
        self.log.write(self.progress, rate, means)
        if not math.isfinite(self.progress.loss):
            raise ConfigError("lr", self.settings.lr, f"the loss became {self.progress.loss}", "use a lower lr")

    def _save(self, path: Path) -> None:
        progress = self.progress
        state = {
            "progress": {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds},
            "parameters": [parameter.detach() for parameter in self.parameters],
            "optimiser": self.optimiser.state_dict(),
            "random": _random_states(self.device),
        }
        half_written = path.with_suffix(".tmp")
        torch.save(state, half_written)
        os.replace(half_written, path)  # a kill leaves the old checkpoint or the new one, never half of one

    def _restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
        self.optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"][0].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"][1].cpu(), self.device)


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


class _Sums:
    """Running sums of metrics, kept on the device so that no step waits for the host."""

    def __init__(self) -> None:
        self.steps = 0
        self._values: Metrics = {}

    def add(self, metrics: Metrics, weight: float) -> None:
        for name, value in metrics.items():
            term = value.detach().float() * weight
            self._values[name] = self._values[name] + term if name in self._values else term

    def means(self) -> dict[str, float]:
        """The mean per step since the last call."""
        means = {name: float(value) / self.steps for name, value in self._values.items()}
        self.steps, self._values = 0, {}
        return means


class _Log:
    """One JSON object per line. On resume, lines newer than the checkpoint are dropped: they will be written again."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line["step"] <= step] if path.exists() and step else []
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(self, progress: Progress, rate: float, means: dict[str, float]) -> None:
        line = {"step": progress.step, "tokens": progress.tokens, "seconds": round(progress.seconds, 3), "lr": rate}
        with self._path.open("a") as file:
            file.write(json.dumps({**line, **means}) + "\n")


def read_log(path: Path) -> list[dict[str, float]]:
    """The lines of a log; a last line cut short by a kill is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _optimiser(parameters: list[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    """AdamW; only matrices decay, norms and biases do not."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=fused)


@contextmanager
def _bar(settings: Settings) -> Iterator[Callable[[Progress], None]]:
    """A progress bar over the schedule, or nothing where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda progress: None
        return
    look = "{l_bar}{bar}| {elapsed} {postfix}"
    with tqdm(total=1000, mininterval=1.0, bar_format=look, disable=None) as bar:  # None: silent in a file or pipe

        def advance(progress: Progress) -> None:
            bar.update(int(1000 * min(progress.share(settings), 1.0)) - bar.n)
            bar.set_postfix(step=progress.step, loss=f"{progress.loss:.4f}", refresh=False)

        yield advance
