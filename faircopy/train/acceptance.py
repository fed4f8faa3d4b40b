"""How many tokens a verify yields with a given draft model: exact, without running any speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from faircopy.train.llama import Llama
from faircopy.train.sampler import rows_of, sample


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a draft achieves on a set of prompts."""

    tokens_per_verify: float  # accepted nodes plus the target's own token
    agreement: float  # share of single tokens guessed right
    verifies: int


def measure_acceptance(
    target: Llama, draft: Llama, prompts: Sequence[Sequence[int]], k: int, new: int, end: int, chunk: int = 64
) -> Acceptance:
    """Greedy acceptance over `new` tokens after each prompt."""
    matches: list[list[bool]] = []
    for start in range(0, len(prompts), chunk):
        matches += _matches(target, draft, [list(prompt) for prompt in prompts[start : start + chunk]], new, end)
    steps = [accepted for row in matches for accepted in accepted_per_verify(row, k)]
    right = sum(map(sum, matches)) / max(1, sum(map(len, matches)))
    return Acceptance(1.0 + sum(steps) / max(1, len(steps)), right, len(steps))


def accepted_per_verify(matches: Sequence[bool], k: int) -> list[int]:
    """Nodes accepted by each verify along one text; a last verify with fewer than k + 1 tokens left is not counted.

    Greedy speculation never changes the text, and as long as a chain is right its nodes are the text itself. So a chain
    from any place is accepted up to the first place where the draft, reading the text, would have guessed wrong.
    """
    counts, place = [], 0
    while place + k < len(matches):
        window = list(matches[place : place + k])
        count = window.index(False) if False in window else k
        counts.append(count)
        place += count + 1
    return counts


@torch.inference_mode()
def _matches(target: Llama, draft: Llama, prompts: list[list[int]], new: int, end: int) -> list[list[bool]]:
    """Per prompt, for each token the target writes: would the draft have guessed it?"""
    block = sample(target, prompts, max(map(len, prompts)) + new, (end,))
    device = draft.model.embed_tokens.weight.device
    guesses = draft(block[:, :-1].clamp(min=0).to(device)).argmax(-1).cpu()
    right = (guesses == block[:, 1:]).tolist()
    spans = zip(right, prompts, rows_of(block), strict=True)
    return [row[len(prompt) - 1 : min(len(text), len(prompt) + new) - 1] for row, prompt, text in spans]
