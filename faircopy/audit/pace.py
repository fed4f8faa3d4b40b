"""How long an audit takes: measured on a few tokens, before it begins."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from faircopy.llm import LLM, Prompt
from faircopy.types import SamplingParams

TOKENS = 6  # decoded per prompt to measure with
FEWEST = 4  # prompts that are audited however long they take


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one decoding step without a draft, alone and in the largest batch that was measured."""

    alone: float
    together: float
    batch: int

    def seconds(self, prompts: int, tokens: int, batches: Seq[int]) -> float:
        """An audit's time: the reference, and one run per entry of batches. Drafts are not counted: they save steps."""
        return sum(self._run(prompts, tokens, batch) for batch in (1, *batches))

    def prompts_within(self, seconds: float, most: int, tokens: int, batches: Seq[int]) -> int:
        """How many prompts can be audited in that time; a few in any case."""
        few = min(FEWEST, most)
        return next((n for n in range(most, few, -1) if self.seconds(n, tokens, batches) <= seconds), few)

    def _run(self, prompts: int, tokens: int, batch: int) -> float:
        """Copies fill a batch that is larger than the prompts."""
        growth = (self.together - self.alone) * (batch - 1) / max(1, self.batch - 1)
        return -(-max(prompts, batch) // batch) * tokens * (self.alone + max(0.0, growth))


def measure_pace(alone: LLM, together: LLM, prompts: Seq[Prompt]) -> Pace:
    """Time a few tokens of the first prompts, after one call that is not timed."""
    batch = together.config.max_batch
    crowd = [prompts[n % len(prompts)] for n in range(batch)]
    return Pace(_step(alone, crowd[:1]), _step(together, crowd), batch)


def _step(llm: LLM, prompts: list[Prompt]) -> float:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    llm.generate(prompts, params, progress=False, errors="return")
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False, errors="return")
    return (time.perf_counter() - start) / TOKENS
