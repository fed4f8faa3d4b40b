"""Counts what steps cost and gained."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Meter:
    """Totals since the engine began. Mean accepted length counts the target's own token too."""

    steps: int = 0
    grouped_steps: int = 0  # of these, how many ran sequences chosen for having one length
    captured_steps: int = 0  # of these, how many were captured
    prompt_rows: int = 0  # rows of prompts that captured steps read
    sequence_steps: int = 0  # verify passes, summed over sequences
    tokens_fed: int = 0  # rows the target computed
    tokens_padded: int = 0  # of these, rows that stood for nothing
    rows_moved: int = 0  # tokens' keys and values copied to other slots, in the caches of target and draft
    drafter_rows: int = 0  # rows of text that the host let the drafter read
    pages_held: int = 0  # now
    pages_peak: int = 0
    tokens_reused: int = 0  # prompt tokens found in the cache instead of computed
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    preemptions: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.sequence_steps if self.sequence_steps else 0.0

    def snapshot(self) -> dict[str, float]:
        return {**asdict(self), "acceptance": self.acceptance, "tokens_per_step": self.tokens_per_step}
