"""Whole trainings, from a target and files to a folder that LLM(draft=...) takes: heads and draft models."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faircopy.config import EngineConfig
from faircopy.drafters.folder import LAYERED, METHODS, new_head, save_head
from faircopy.drafters.heads import Head
from faircopy.errors import ConfigError
from faircopy.model.hidden import stock_token_weights
from faircopy.model.loader import find_checkpoint, load_config, load_stock
from faircopy.model.transformers_backend import context_length
from faircopy.train.corpus import Answering, corpus
from faircopy.train.data import Windows
from faircopy.train.heads import Accuracy, HeadTask, Teacher, measure_heads
from faircopy.train.language import Distil
from faircopy.train.llama import Llama, Shape, fresh, save_llama
from faircopy.train.loop import Progress, Settings, Task, train

HELD_OUT = 0.05  # the last share of the text is never trained on
FILES = ("log.jsonl", "state.pt", "curves.png")  # of a training
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Plan:
    """What both trainings need to know."""

    target: str
    data: list[Path]
    out: Path
    steps: int
    rows: int = 8  # texts per batch
    length: int = 256  # tokens per text
    accumulate: int = 1
    lr: float = 1e-3
    seed: int = 0
    precision: str = "auto"
    device: str = "auto"
    checkpoint_every: int = 0  # 0: ten times
    log_every: int = 10
    pretrain: list[Path] = field(default_factory=list)  # raw text for a first stage; none: there is one stage
    pretrain_steps: int = 0  # 0: as many as steps
    answering: Answering = field(default_factory=Answering)

    def check(self) -> Plan:
        """Refuse now what would fail in an hour; the length is cut to the target's context."""
        for name in ("steps", "rows", "accumulate", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}", getattr(self, name), "below 1", "use 1 or more")
        if self.pretrain_steps < 0 or (self.pretrain_steps and not self.pretrain):
            problem = "below 0" if self.pretrain_steps < 0 else "given without --pretrain"
            raise ConfigError(
                "--pretrain-steps", self.pretrain_steps, problem, "pass --pretrain FILE and 1 or more steps"
            )
        if self.length < 16:
            raise ConfigError("--length", self.length, "below 16", "use 16 or more")
        if not 0 < self.lr < math.inf:
            raise ConfigError("--lr", self.lr, "not a learning rate", "use a number above 0")
        if self.precision not in PRECISIONS:
            raise ConfigError("--precision", self.precision, "unknown", f"use one of {', '.join(PRECISIONS)}")
        if not self.data:
            raise ConfigError("--data", "", "no files given", "pass .txt or .jsonl files")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "log.jsonl").open("a").close()
        except OSError as error:
            raise ConfigError("--out", str(self.out), f"cannot be written ({error})", "choose another") from error
        context = context_length(load_config(find_checkpoint(self.target)))
        return replace(self, length=min(self.length, context - 1))

    def torch_device(self) -> torch.device:
        return EngineConfig(device=self.device).torch_device()

    @property
    def bf16(self) -> bool:
        """Mixed precision: on a GPU unless said otherwise."""
        auto = self.precision == "auto" and self.torch_device().type == "cuda"
        return auto or self.precision == "bfloat16"

    def settings(self, **special: Any) -> Settings:
        return Settings(
            steps=self.steps,
            lr=self.lr,
            warmup=0.03,
            weight_decay=0.01,
            accumulate=self.accumulate,
            bf16=self.bf16,
            log_every=self.log_every,
            checkpoint_every=self.checkpoint_every or max(1, self.steps // 10),
            seed=self.seed,
            **special,
        )


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of a training."""

    out: Path
    progress: Progress
    parameters: int
    tokens: int
    accuracy: Accuracy | None = None


def train_head(plan: Plan, method: str, levels: int | None = None, **options: Any) -> Learned:
    """A head for the target, saved to plan.out; a run that was killed goes on where its last checkpoint was."""
    if method not in METHODS:
        raise ConfigError("--method", method, "unknown", f"use one of {', '.join(METHODS)}")
    if "layers" in options and method not in LAYERED:
        remedy = f"leave it out, or use one of {', '.join(LAYERED)}"
        raise ConfigError("--layers", options["layers"], f"{method} has a fixed number of layers", remedy)
    if "draft_vocab" in options and method == "medusa" and not options.get("shared"):
        remedy = "leave it out, or use another method"
        raise ConfigError(
            "--draft-vocab", options["draft_vocab"], "medusa's heads have output layers of their own", remedy
        )
    if levels is not None and not 1 <= levels <= 16:
        raise ConfigError("--levels", levels, "not within 1 to 16", "papers use 3 to 7")
    plan = plan.check()
    _same_run(plan, {"method": method, "levels": levels, "options": options})
    text, held_out = _text(plan)
    raw = _raw_text(plan) if plan.pretrain else None
    teacher = _teacher(plan)
    head = new_head(method, plan.target, stock_token_weights(teacher.stock), levels, plan.seed, **options)
    head.keep_frequent(torch.bincount(text.long().cpu(), minlength=head.vocab))
    head = head.to(plan.torch_device())
    task = HeadTask(head, teacher)
    before = 0 if raw is None else _pretrain(task, raw, plan)
    progress = _run(task, text, plan, **task.objective.clipping)
    accuracy = measure_heads(head, teacher, held_out_batches(held_out, plan.length, 1, 32), plan.bf16)
    stages = stage_sizes(head, before, progress.tokens)
    save_head(head, plan.out, **head.learned(accuracy.ranks), **stages)
    _report(plan, progress, parameters=head.size, **stages, **asdict(accuracy))
    return Learned(plan.out, progress, head.size, len(text), accuracy)


def stage_sizes(head: Head, pretrain: int, tokens: int) -> dict[str, Any]:
    """What a head's folder says of its training: tokens of both stages, and its size."""
    return {"stages": {"pretrain_tokens": pretrain, "tokens": tokens, "parameters": head.size}}


def train_draft(plan: Plan, hidden: int = 128, layers: int = 2, heads: int = 4, hard: float = 0.5) -> Learned:
    """A small Llama with the target's tokenizer that says what the target says."""
    if hidden % (2 * heads):
        raise ConfigError("--hidden", hidden, f"not divisible into {heads} heads of an even size", "use another size")
    plan = plan.check()
    _same_run(plan, {"method": "draft", "hidden": hidden, "layers": layers, "heads": heads, "hard": hard})
    text, _ = _text(plan)
    stock = _teacher(plan).stock
    draft = fresh(_draft_shape(stock.config.get_text_config(), hidden, layers, heads), plan.seed)
    draft = draft.to(plan.torch_device())
    progress = _run(Distil(draft, stock, hard), text, plan)
    _save_draft(draft, plan, stock.config.get_text_config())
    _report(plan, progress, parameters=draft.size)
    return Learned(plan.out, progress, draft.size, len(text))


def _draft_shape(config: Any, hidden: int, layers: int, heads: int) -> Shape:
    return Shape(
        vocab=config.vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=3 * hidden,
        context=context_length(config),
    )


def _save_draft(draft: Llama, plan: Plan, config: Any) -> None:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    save_llama(draft, plan.out, **{name: getattr(config, name, None) for name in names})
    for file in find_checkpoint(plan.target).iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template")):
            shutil.copy(file, plan.out / file.name)


def _text(plan: Plan) -> tuple[Tensor, Tensor]:
    """Tokens to train on, and the last ones, held out."""
    tokens = corpus(plan.target, plan.data, replace(plan.answering, device=plan.device), plan.out / "tokens.npy")
    keep = max(2 * plan.length + 2, int(len(tokens) * HELD_OUT))
    if len(tokens) - keep < plan.rows * plan.length + plan.length + 1:
        problem = f"{len(tokens)} tokens are less than one batch of {plan.rows} x {plan.length} and a held-out part"
        raise ConfigError("--data", [str(file) for file in plan.data], problem, "give more text, or lower --rows")
    device = plan.torch_device()
    return tokens[:-keep].to(device), tokens[-keep:].to(device)


def _raw_text(plan: Plan) -> Tensor:
    """Tokens of the first stage; nothing is held out of them."""
    answering = replace(plan.answering, device=plan.device)
    tokens = corpus(plan.target, plan.pretrain, answering, plan.out / "pretrain.npy", "--pretrain")
    if len(tokens) < plan.rows * plan.length + plan.length + 1:
        problem = f"{len(tokens)} tokens are less than one batch of {plan.rows} x {plan.length}"
        raise ConfigError("--pretrain", [str(file) for file in plan.pretrain], problem, "give more text")
    return tokens.to(plan.torch_device())


def _pretrain(task: HeadTask, text: Tensor, plan: Plan) -> int:
    """The first stage, with a schedule of its own; returns its tokens. Not run again once the second has begun."""
    first = replace(plan, steps=plan.pretrain_steps or plan.steps)
    if not (plan.out / "state.pt").exists():
        _run(task, text, first, name="pretrain", **task.objective.clipping)
    return first.steps * plan.accumulate * plan.rows * (plan.length + 1)


def _teacher(plan: Plan) -> Teacher:
    """On a GPU in 16 bits, as it will be served; on a CPU in float32."""
    device = plan.torch_device()
    return Teacher(load_stock(plan.target, torch.bfloat16 if device.type == "cuda" else torch.float32, device))


def _run(task: Task, text: Tensor, plan: Plan, name: str | None = None, **special: Any) -> Progress:
    """One stage; name: of its files, if they are not those of the last stage."""
    log, state, picture = (plan.out / (f"{name}{Path(file).suffix}" if name else file) for file in FILES)
    windows = Windows(text, plan.length, plan.rows, plan.seed)
    progress = train(task, windows, plan.settings(**special), log, state)
    _draw(log, picture)
    return progress


def _draw(log: Path, picture: Path) -> None:
    """Curves, where matplotlib is installed."""
    from faircopy.train.plots import plot_training

    try:
        plot_training(log, picture)
    except ImportError:
        print(f"no {picture.name}: install faircopy[train] for pictures")


def _same_run(plan: Plan, what: dict[str, Any]) -> None:
    """A checkpoint of another training must not be gone on with by accident."""
    names = ("target", "steps", "rows", "length", "accumulate", "lr", "seed", "precision")
    wanted = {**what, **{name: getattr(plan, name) for name in names}, "data": [str(file) for file in plan.data]}
    if plan.pretrain:
        wanted |= {"pretrain": [str(file) for file in plan.pretrain], "pretrain_steps": plan.pretrain_steps}
    note = plan.out / "run.json"
    if (plan.out / "state.pt").exists() and note.exists():
        before = json.loads(note.read_text())
        for name, value in json.loads(json.dumps(wanted)).items():
            if before.get(name) != value:
                problem = f"a run with {name} = {before.get(name)!r} was begun there, not {value!r}"
                raise ConfigError("--out", str(plan.out), problem, "choose another folder, or remove this one")
    note.write_text(json.dumps(wanted, indent=1) + "\n")


def _report(plan: Plan, progress: Progress, **facts: Any) -> None:
    kept = {"steps": progress.step, "tokens": progress.tokens, "seconds": round(progress.seconds, 1)}
    (plan.out / "report.json").write_text(json.dumps({**kept, "loss": progress.loss, **facts}, indent=1) + "\n")


def held_out_batches(tokens: Tensor, length: int, rows: int, count: int) -> Sequence[Tensor]:
    """Some batches of a text, always the same."""
    windows = Windows(tokens, length, rows, 0)
    return [windows.batch(n) for n in range(min(count, windows.per_epoch))]
