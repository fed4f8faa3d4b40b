"""How close the target's call was where two texts part: a rounding tie, or a bug."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from faircopy import rng
from faircopy.audit.report import Kind
from faircopy.kernels.gumbel import gumbel
from faircopy.llm import LLM
from faircopy.sampling import SamplingRow, adjusted, filtered
from faircopy.testing import cacheless
from faircopy.types import SamplingParams, Sequence

# How many roundings of the largest logit another order of summation may pile up: a rule of thumb, by type.
ROUNDINGS = {torch.float32: 64, torch.float16: 8, torch.bfloat16: 4}


@dataclass(frozen=True, slots=True)
class Margin:
    """The target's best two candidates, in logits, and what follows from their distance."""

    kind: Kind
    why: str
    top_two: float
    threshold: float


def first_difference(want: Seq[int] | Seq[str], got: Seq[int] | Seq[str]) -> int | None:
    """The first place where two texts differ, one being over counted as a difference."""
    place = next((n for n, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
    return min(len(want), len(got)) if place is None and len(want) != len(got) else place


def margin_at(
    alone: LLM, prompt: list[int], params: SamplingParams, expected: list[int], got: int, place: int
) -> Margin:
    """Compute the target's choice at a place of the output once more, from scratch."""
    tokens = [*prompt, *expected[:place]]
    with torch.no_grad():
        logits = cacheless(alone.model, alone.config.exact)(tokens)[-1]
        scores = decision_scores(logits, _row(alone, prompt, params, tokens))
    return judge(scores, expected[place], got, rounding(logits, alone.model.dtype))


def rounding(logits: Tensor, dtype: torch.dtype) -> float:
    """Below this distance, the order of summation alone may decide between two tokens."""
    return ROUNDINGS[dtype] * torch.finfo(dtype).eps * float(logits.abs().max())


def decision_scores(logits: Tensor, row: SamplingRow) -> Tensor:
    """What the chosen token is the largest of, in units of logits: penalties, filters and seeded noise included."""
    scores = adjusted(logits[None], [row])
    params = row.seq.params
    if params.greedy:
        return scores[0]
    places = torch.arange(scores.shape[1], device=scores.device)
    noise = gumbel(torch.tensor(rng.signed(row.key), device=scores.device), places)
    return (filtered(scores, [row])[0] + noise) * params.temperature


def judge(scores: Tensor, expected: int, got: int, threshold: float) -> Margin:
    """A tie only if both tokens are as good as the best: a near-tie between other tokens explains nothing."""
    best, second = scores.topk(2).values.tolist() if scores.numel() > 1 else (float(scores[0]), float("-inf"))
    top_two = best - second
    lag = max(best - float(scores[expected]), best - float(scores[got]))
    says = f"the best two tokens are {top_two:.3g} apart, the threshold is {threshold:.3g}"
    if lag < threshold:
        return Margin("tie", says, top_two, threshold)
    if torch.isinf(scores[got]):
        why = f"top-k, top-p or min-p excludes the token that came ({says}); it may lie on their border"
        return Margin("unknown", why, top_two, threshold)
    return Margin("bug", f"{says}, and the tokens in question lie up to {lag:.3g} behind", top_two, threshold)


def _row(alone: LLM, prompt: list[int], params: SamplingParams, tokens: list[int]) -> SamplingRow:
    request = alone.request(prompt, params)  # bad words as tokens, exactly as the engine gets them
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else alone.engine.eos)
    return SamplingRow(Sequence(0, request, tokens, stops=ends))
