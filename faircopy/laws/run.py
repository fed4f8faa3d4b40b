"""Train a grid of Scylla heads on cached states and measure each: what fits a time budget, in order of importance."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from faircopy.bench.record import origin
from faircopy.drafters.folder import new_head, save_head
from faircopy.drafters.heads import Head
from faircopy.files import cut_unfinished_line
from faircopy.laws.acceptance import HeldOutTexts, measure
from faircopy.laws.points import (
    CHAIN,
    TREE,
    Point,
    Result,
    append_result,
    measure_name,
    read_results,
    refuse_other_settings,
)
from faircopy.laws.states import CachedHeadTask, CachedText, ShuffledWindows
from faircopy.model.hidden import stock_token_weights
from faircopy.train.heads import Teacher
from faircopy.train.loop import Progress, Settings, train
from faircopy.train.losses import HeadObjective, objective_of
from faircopy.train.runs import stage_sizes

SMALLER_TREES = (2, 4, 8, 16, 32)  # measured at the grid's budgets with one layer: A over the number of nodes
DEEPER = 0.35  # a first guess of what one more layer adds to the time of a training
METHOD = "scylla"


@dataclass(slots=True, kw_only=True)
class GridRun:
    """A target, its texts, and where results go."""

    target: str  # its name in results
    folder: str
    teacher: Teacher
    text: CachedText  # of the first stage
    answers: CachedText | None  # of the second one, read once by every head; None: there is none
    held_out: Sequence[HeldOutTexts]
    out: Path
    rows: int = 16  # windows per batch
    lr: float = 1e-3
    bf16: bool = False
    prepare: Callable[[HeadObjective], HeadObjective] = lambda objective: objective  # for example to compile its loss
    options: dict[str, Any] = field(default_factory=dict)  # of the heads
    _seconds: dict[int, float] = field(default_factory=dict)  # per token, by layers
    _measuring: float = 0.0  # seconds that the last head's measures took
    _best: float = -1.0

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def run(
        self,
        points: Sequence[Point],
        deadline: float,
        tell: Callable[[str], None] = print,
        part: Sequence[Point] | None = None,
    ) -> list[Result]:
        """Train and measure what is missing; a point that would end after the deadline is left out, and said.

        part: those of the points that are wanted here; all of them if None.
        """
        found = self._known()
        done = {result.point for result in found}
        for number, point in enumerate(points, 1):
            if point in done or (part is not None and point not in part):
                continue
            if time.time() + self._expected(point) > deadline:
                tell(f"{_words(point)}: left out, no time")
                continue
            found.append(self._one(point, smaller=point.layers == 1 and _is_budget(point, points)))
            tell(f"{number}/{len(points)} {describe(found[-1])}")
        return found

    def _known(self) -> list[Result]:
        if self.results.exists():
            cut_unfinished_line(self.results)
        known = read_results([self.results]) if self.results.exists() else []
        mine = [result for result in known if result.target == self.target]
        refuse_other_settings(self.results, mine, self._settings)
        self._best = max((result.accepted(_main()) for result in mine), default=-1.0)
        for result in mine:
            self._observe(result)
        return mine

    def _one(self, point: Point, smaller: bool) -> Result:
        begin = time.time()
        head, progress = self.teach(point)
        between = time.time()
        measures = self._measures(head, smaller)
        result = Result(
            target=self.target,
            tokens=point.tokens,
            layers=point.layers,
            seed=point.seed,
            distinct=min(point.tokens, self.text.windows.numel()),
            answers=0 if self.answers is None else self.answers.windows.numel(),
            parameters=head.size,
            loss=progress.loss,
            train_seconds=round(between - begin, 2),
            measure_seconds=round(time.time() - between, 2),
            measures=measures,
            settings=self._settings,
            origin=origin(),
        )
        self._keep_best(head, result)  # first: a head whose result is known is not trained again
        append_result(self.results, result)
        self._observe(result)
        return result

    @property
    def _settings(self) -> dict[str, Any]:
        """What must not change while a grid is trained, by the names of its options."""
        texts = hashlib.sha256()
        for one in self.held_out:
            for numbers in (one.tokens, one.begins, one.ends):
                texts.update(numbers.cpu().numpy().tobytes())
        prompts = f"texts {texts.hexdigest()[:12]}"  # the prompts and what the target wrote behind them
        return {"rows": self.rows, "length": self.text.length, "lr": self.lr, "prompts": prompts}

    def teach(self, point: Point) -> tuple[Head, Progress]:
        """A head with its own full schedule: the first stage's tokens, then the second stage's."""
        weights = stock_token_weights(self.teacher.stock)
        head = new_head(METHOD, self.folder, weights, seed=point.seed, layers=point.layers, **self.options)
        head = head.to(self.text.windows.device)
        progress = self._stage(head, self.text, point.tokens, point, "text", self.lr)
        if self.answers is not None:
            progress = self._stage(head, self.answers, self.answers.windows.numel(), point, "answers", self.lr / 2)
        return head, progress

    def _stage(self, head: Head, text: CachedText, tokens: int, point: Point, name: str, lr: float) -> Progress:
        count = min(len(text.windows), -(-tokens // text.length))
        text.need(count)
        steps = max(1, tokens // (min(self.rows, count) * text.length))
        settings = Settings(
            steps=steps, lr=lr, warmup=0.05, weight_decay=0.01, bf16=self.bf16, seed=point.seed,
            log_every=max(1, steps // 10),
        )  # fmt: skip
        batches = ShuffledWindows(text, count, self.rows, point.seed)
        log = self.out / "logs" / f"T{point.tokens}-D{point.layers}-seed{point.seed}-{name}.jsonl"
        return train(CachedHeadTask(head, text, self.prepare(objective_of(head))), batches, settings, log)

    def _measures(self, head: Head, smaller: bool) -> dict[str, dict[str, list[int]]]:
        """Chain and tree on every set of held-out texts; of the greedy one smaller trees too, if wanted."""
        wanted = [("chain", CHAIN, texts) for texts in self.held_out] + [("tree", TREE, t) for t in self.held_out]
        wanted += [("tree", nodes, self.held_out[0]) for nodes in (SMALLER_TREES if smaller else ())]
        found = {}
        for kind, nodes, texts in wanted:
            with torch.autocast(texts.tokens.device.type, torch.bfloat16, enabled=self.bf16):
                accepted = measure(head, texts, nodes, chain=kind == "chain")
            found[measure_name(kind, nodes, texts.temperature)] = {"tokens": accepted.tokens, "cycles": accepted.cycles}
        return found

    def _expected(self, point: Point) -> float:
        """Seconds of a point, by those before it; 0 before the first."""
        if not self._seconds:
            return 0.0
        near = min(self._seconds, key=lambda layers: abs(layers - point.layers))
        slower = (1 + DEEPER * (point.layers - 1)) / (1 + DEEPER * (near - 1))
        answers = 0 if self.answers is None else self.answers.windows.numel()
        return (point.tokens + answers) * self._seconds[near] * slower + self._measuring

    def _observe(self, result: Result) -> None:
        self._seconds[result.layers] = result.train_seconds / (result.tokens + result.answers)
        self._measuring = result.measure_seconds

    def _keep_best(self, head: Head, result: Result) -> None:
        """The head with the most accepted tokens so far, as a folder that LLM(draft=...) takes."""
        if result.accepted(_main()) > self._best:
            self._best = result.accepted(_main())
            stages = (result.tokens, result.answers) if result.answers else (0, result.tokens)
            save_head(head, self.out / "best", **stage_sizes(head, *stages))


def describe(result: Result) -> str:
    means = "  ".join(f"{name}: {result.accepted(name):.3f}" for name in result.measures)
    return f"{_words(result.point)}  {means}  ({result.train_seconds:.1f} + {result.measure_seconds:.1f} s)"


def _main() -> str:
    return measure_name("tree", TREE, 0.0)


def _words(point: Point) -> str:
    return f"T {point.tokens / 1e6:g} M, {point.layers} layers, seed {point.seed}"


def _is_budget(point: Point, points: Sequence[Point]) -> bool:
    """Whether the grid has deeper heads of this many tokens."""
    return any(other.layers > 1 and replace(other, layers=1) == point for other in points)
