"""What goes wrong when position ids, mask or cache fall out of step: three broken layouts on the bundled models.

python -m benchmarks.broken
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from faircopy import bundled
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.draft_length import FixedLength
from faircopy.drafters.model import ModelDrafter
from faircopy.engine import Engine
from faircopy.kernels.attention import Ints
from faircopy.layout.pool import PagePool
from faircopy.llm import LLM
from faircopy.model.base import Model
from faircopy.model.runner import Runner
from faircopy.papers.dense import AlignedLayout, DenseLayout, RowInput, SharedLayout
from faircopy.papers.policies import WholeBatches
from faircopy.papers.row_tables import RowTables
from faircopy.scheduler import Scheduler
from faircopy.types import Batch, Draft, Request, SamplingParams, Sequence
from faircopy.verify.exact import ExactVerifier


class WrongPositions(SharedLayout):
    """Position ids out of step: a token's position is its column, so padding counts."""

    def _row_input(self, batch: Batch, draft: Draft, i: int, done: int) -> RowInput:
        feed = super()._row_input(batch, draft, i, done)
        feed.positions = feed.first + np.arange(len(feed.positions))
        return feed


class WrongMask(SharedLayout):
    """Mask out of step: what was rejected, and padding, stays visible."""

    def _masks(
        self, inputs: list[RowInput], where: Ints, shape: tuple[int, int, int]
    ) -> dict[tuple[int, int], torch.Tensor]:
        true = self._positions
        self._positions = true.copy()
        self._positions[:, : inputs[0].first].clip(min=0, out=self._positions[:, : inputs[0].first])
        try:
            return super()._masks(inputs, where, shape)
        finally:
            self._positions = true


class WrongCache(AlignedLayout):
    """Cache out of step: tokens, positions and mask are realigned, keys and values stay where they were."""

    def align(self, seqs: list[Sequence], room: int) -> None:
        rows, pools = dict(self._row_of), [*self._keys, *self._values]
        super().align(seqs, room)
        for new, old in zip((*self._keys, *self._values), pools, strict=True):
            width = min(new.shape[1], old.shape[1])
            for seq, row in rows.items():
                if seq in self._row_of:
                    new[self._row_of[seq], :width] = old[row, :width]


DESIGNS: dict[str, type[DenseLayout]] = {
    "padded, as it should be": SharedLayout,
    "position ids out of step": WrongPositions,
    "mask out of step": WrongMask,
    "realign, as it should be": AlignedLayout,
    "cache out of step": WrongCache,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one design did."""

    design: str
    batch: int
    identical: int
    of: int
    prefix: float  # share of tokens before the first wrong one
    example: list[int]


def engine_of(layout: type[DenseLayout], target: Model, draft: Model, batch: int, k: int) -> Engine:
    """The usual engine with this layout under the target; the draft's is sound."""
    tables = RowTables(PagePool(1024), 32)
    runner = Runner(target, layout(tables, target.layers, target.dtype, target.device))
    small = Runner(draft, DenseLayout(tables, draft.layers, draft.dtype, draft.device))
    scheduler = Scheduler(tables, runner.layout.cached, WholeBatches(batch), FixedLength(k), 1 << 20)
    drafter = ModelDrafter(small, target.vocab, 1 << 20)
    return Engine(runner, tables, drafter, ExactVerifier(), scheduler)


def write(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """All texts, greedy, all of one length."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    seqs = [engine.add(Request(tuple(prompt), params)) for prompt in prompts]
    while engine.busy:
        engine.step()
    return [seq.output for seq in seqs]


def compare(target: Model, draft: Model, prompts: list[list[int]], batch: int, tokens: int, k: int) -> list[Outcome]:
    """Every design against plain decoding."""
    plain = write(build_engine(target, config=EngineConfig(cache_memory="256MiB")), prompts, tokens)
    outcomes = []
    for name, layout in DESIGNS.items():
        texts = write(engine_of(layout, target, draft, batch, k), prompts, tokens)
        right = [_agreement(a, b) for a, b in zip(texts, plain, strict=True)]
        worst = right.index(min(right))
        same = sum(count == tokens for count in right)
        outcomes.append(Outcome(name, batch, same, len(plain), sum(right) / (tokens * len(plain)), texts[worst]))
    return outcomes


def _agreement(text: list[int], plain: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(text, plain, strict=True)) if a != b), len(plain))


def main(count: int = 16, tokens: int = 48) -> None:
    torch.set_num_threads(1)
    llm = LLM(bundled.target(), dtype="float32", device="cpu", cache_memory="64MiB")
    draft = LLM(bundled.draft(), dtype="float32", device="cpu", cache_memory="64MiB").model
    prompts = [llm.encode(prompt) for prompt in bundled.prompts()[:count]]
    for batch in (1, 4):
        for outcome in compare(llm.model, draft, prompts, batch, tokens, k=4):
            start = llm.decode(outcome.example)[:60].replace("\n", " ")
            print(
                f"batch {batch}  {outcome.design:26s} {outcome.identical:2d}/{outcome.of} texts equal to plain, "
                f"{outcome.prefix:4.0%} before the first error  {start!r}"
            )


if __name__ == "__main__":
    main()
