"""`faircopy laws run`: from a target and files to a grid of heads and their results."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from faircopy import bundled
from faircopy.config import EngineConfig
from faircopy.errors import ConfigError
from faircopy.laws.acceptance import HeldOutTexts, held_out_texts
from faircopy.laws.points import CHAIN, Point, Result, grid
from faircopy.laws.run import GridRun
from faircopy.laws.states import CachedText
from faircopy.llm import LLM, Answer
from faircopy.model.loader import find_checkpoint, load_config, load_stock
from faircopy.model.transformers_backend import context_length
from faircopy.train.corpus import Answering, corpus, read_documents
from faircopy.train.heads import Teacher
from faircopy.types import SamplingParams

TEMPERATURES = (0.0, 0.8)  # that heads are measured at


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """What to train and to measure on, and for how long."""

    target: str
    data: list[Path]  # text of the target's own, or prompts that it answers
    prompts: list[Path]  # held out: heads are measured behind these
    out: Path
    seconds: float
    pretrain: list[Path] = field(default_factory=list)  # raw text, whose tokens T counts then
    smallest: int = 1 << 18  # tokens of the smallest head
    depths: tuple[int, ...] = (1, 2, 4, 3, 6)
    seeds: int = 3
    rows: int = 16
    length: int = 256
    lr: float = 2e-3
    new: int = 64  # tokens behind each held-out prompt
    device: str = "auto"
    answering: Answering = field(default_factory=Answering)

    def check(self) -> GridPlan:
        """Refuse now what would fail in an hour."""
        for name in ("smallest", "seeds", "rows", "new"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}", getattr(self, name), "below 1", "use 1 or more")
        if self.length < 16:
            raise ConfigError("--length", self.length, "below 16", "use 16 or more")
        if self.new <= CHAIN:
            raise ConfigError("--new", self.new, f"no draft of {CHAIN} tokens ends in it", f"use {CHAIN + 1} or more")
        if not 0 < self.lr < math.inf:
            raise ConfigError("--lr", self.lr, "not a learning rate", "use a number above 0")
        self._check_context()
        if not self.depths or min(self.depths) < 1:
            raise ConfigError("--layers", list(self.depths), "not numbers of layers", "use 1 or more")
        batch = self.rows * self.length
        if self.smallest % batch:  # T would not be what a head reads
            problem, whole = f"no whole batches of {self.rows} x {self.length}", max(1, self.smallest // batch) * batch
            raise ConfigError("--smallest", self.smallest, problem, f"use {whole}, or lower --rows")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("--out", str(self.out), f"cannot be written ({error})", "choose another") from error
        return self

    def _check_context(self) -> None:
        context = context_length(load_config(find_checkpoint(self.target)))
        for name in ("length", "new"):
            if getattr(self, name) >= context - 1:
                problem = f"does not fit the target's context of {context} tokens"
                raise ConfigError(f"--{name}", getattr(self, name), problem, "lower it")


def run_plan(plan: GridPlan, tell: Callable[[str], None] = print) -> list[Result]:
    """Train and measure as much of the grid as fits the time, and behind what a run before left."""
    deadline = time.time() + plan.seconds
    plan = plan.check()
    device = EngineConfig(device=plan.device).torch_device()
    text, answers = _texts(plan)
    written = _written(plan)
    teacher = Teacher(load_stock(plan.target, torch.bfloat16 if device.type == "cuda" else torch.float32, device))
    run = GridRun(
        target=name_of(plan.target),
        folder=plan.target,
        teacher=teacher,
        text=CachedText(teacher, text.to(device), plan.length),
        answers=None if answers is None else CachedText(teacher, answers.to(device), plan.length),
        held_out=[_held_out(teacher, device, *texts) for texts in written],
        out=plan.out,
        rows=plan.rows,
        lr=plan.lr,
        bf16=device.type == "cuda",
    )
    return run.run(points_of(plan, len(text)), deadline, tell)


def name_of(target: str) -> str:
    """A target's name in results: its folder's, or "bundled"."""
    return "bundled" if target == bundled.target() else Path(target).absolute().name


def points_of(plan: GridPlan, tokens: int) -> list[Point]:
    """T doubles while there is text; depths and seeds are tried at a quarter of the text and at a sixteenth."""
    doublings = max(0, (tokens // plan.smallest).bit_length() - 1)
    budgets = [plan.smallest << max(0, doublings - less) for less in (4, 2)]
    return grid(plan.smallest, doublings, plan.depths, budgets, range(plan.seeds))


def _texts(plan: GridPlan) -> tuple[Tensor, Tensor | None]:
    """Text of the first stage, and of the second one if there are two."""
    answering = replace(plan.answering, device=plan.device)
    own = corpus(plan.target, plan.data, answering, plan.out / "data.npy")
    if not plan.pretrain:
        return _enough(plan, own, "--data", plan.data), None
    raw = corpus(plan.target, plan.pretrain, answering, plan.out / "pretrain.npy")
    return _enough(plan, raw, "--pretrain", plan.pretrain), own


def _enough(plan: GridPlan, tokens: Tensor, option: str, files: Sequence[Path]) -> Tensor:
    if len(tokens) < plan.smallest:
        problem = f"{len(tokens)} tokens are less than the smallest head's {plan.smallest}"
        raise ConfigError(option, [str(file) for file in files], problem, "give more text, or lower --smallest")
    return tokens


def _written(plan: GridPlan) -> list[tuple[list[list[int]], list[list[int]], float]]:
    """Prompts, the same with what the target writes behind them, and the temperature."""
    prompts = read_documents(plan.prompts).prompts
    if not prompts:
        files = [str(file) for file in plan.prompts]
        raise ConfigError("--prompts", files, "no prompts in it", "pass .jsonl with 'prompt' or 'turns'")
    llm = LLM(plan.target, device=plan.device, max_batch=plan.answering.batch)
    chat = plan.answering.chat
    asked = [llm.chat_prompt([{"role": "user", "content": p}]) if chat else llm.encode(p) for p in prompts]
    asked = [ids[: llm.model.context - plan.new - 1] for ids in asked]
    found = []
    for temperature in TEMPERATURES:
        params = [SamplingParams(max_tokens=plan.new, temperature=temperature, seed=n) for n in range(len(asked))]
        answers = llm.generate(asked, params)
        _refuse_short(plan, answers)
        found.append((asked, [a.prompt_token_ids + a.token_ids for a in answers], temperature))
    del llm
    gc.collect()  # the engine's pages make room for the states
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _refuse_short(plan: GridPlan, answers: Sequence[Answer]) -> None:
    """Texts that end before a draft does measure nothing."""
    if max(len(answer.token_ids) for answer in answers) <= CHAIN:
        problem = f"the target writes {CHAIN} tokens or fewer behind each of them"
        raise ConfigError("--prompts", [str(file) for file in plan.prompts], problem, "pass others, or use --chat")


def _held_out(
    teacher: Teacher, device: torch.device, prompts: list[list[int]], texts: list[list[int]], temperature: float
) -> HeldOutTexts:
    return held_out_texts(prompts, texts, teacher, device, temperature)
