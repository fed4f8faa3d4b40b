"""From logits to tokens: adjust, filter, choose. One row, one answer: no row's result depends on another row.

Both the verifier and a drafter choose with these functions, so a good drafter guesses the noise as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from faircopy import rng
from faircopy.kernels.available import gpu_module
from faircopy.kernels.filters import Filter, exclude
from faircopy.kernels.gumbel import BROKEN, gumbel_argmax, with_noise
from faircopy.kernels.transfer import sent
from faircopy.types import Logprobs, SamplingParams, Sequence

MOST_ON_DEVICE = 20  # log probabilities of a row that a GPU finds by itself
SLICE = 256  # rows whose whole vocabulary is sorted at once


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A place where a token is chosen: after seq.tokens and the draft tokens on the path so far."""

    seq: Sequence
    path: Seq[int] = ()

    @property
    def position(self) -> int:
        return len(self.seq.tokens) + len(self.path)

    @property
    def output_length(self) -> int:
        return self.position - len(self.seq.prompt)

    @property
    def key(self) -> int:
        return rng.key(self.seq.seed, self.position)


def choose(logits: Tensor, rows: Seq[SamplingRow], strict: bool = False) -> list[int]:
    """One token per row [R, V]: the best, or the best after seeded Gumbel noise. Ties go to the lowest id.

    BROKEN in a row with NaN, infinity or no token left. Minus infinity excludes a token, unless strict.
    """
    return chosen_tokens(logits, rows, strict).tolist()


def chosen_tokens(logits: Tensor, rows: Seq[SamplingRow], strict: bool = False) -> Tensor:
    """What `choose` chooses, where the logits are; on a GPU the host does not wait for it."""
    adjusts = any(row.seq.adjusts for row in rows)
    scores = adjusted(logits, rows) if adjusts else logits
    kernel = gpu_module("pick", logits.device)
    if kernel is None:
        chosen: Tensor = _choose(scores.float(), rows)
    else:  # captured steps choose with it too, and both must draw the same noise to the bit
        chosen = kernel.pick_rows(scores, *_drawing(rows), strict=strict and not adjusts)
        if not adjusts:  # the kernel has found broken rows itself
            return chosen
    broken = not_finite(logits, strict)
    if adjusts:
        broken |= not_finite(scores, False)
    return torch.where(broken, BROKEN, chosen)


def _choose(scores: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    drawn = [i for i, row in enumerate(rows) if not row.seq.params.greedy]
    if len(drawn) == len(rows):
        return _draw(scores.clone(), rows)
    chosen = scores.argmax(-1)
    if drawn:
        where = sent(drawn, torch.int64, scores.device)
        chosen[where] = _draw(scores[where], [rows[i] for i in drawn])
    return chosen


def _draw(scores: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """Changes the scores."""
    return gumbel_argmax(filtered(scores, rows), _noise_keys(rows, scores.device))


def _noise_keys(rows: Seq[SamplingRow], device: torch.device) -> Tensor:
    return sent([rng.signed(row.key) for row in rows], torch.int64, device)


def noisy(logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """Adjusted scores; of rows that draw, filtered, over the temperature and with noise: the best is what they draw.

    Minus infinity excludes a token.
    """
    scores = adjusted(logits, rows) if any(row.seq.adjusts for row in rows) else logits
    drawn = [i for i, row in enumerate(rows) if not row.seq.params.greedy]
    if not drawn:
        return scores
    where, drawing = sent(drawn, torch.int64, scores.device), [rows[i] for i in drawn]
    found = with_noise(filtered(scores[where], drawing), _noise_keys(drawing, scores.device))
    return found if len(drawn) == len(rows) else scores.index_copy(0, where, found)


def _drawing(rows: Seq[SamplingRow]) -> tuple[list[float], list[int], list[Filter]]:
    """Temperatures, noise keys and filters of rows; greedy ones have none."""
    params = [row.seq.params for row in rows]
    return (
        [0.0 if one.greedy else one.temperature for one in params],
        [0 if row.seq.params.greedy else rng.signed(row.key) for row in rows],
        [Filter() if one.greedy else row_filter(one) for one in params],
    )


def not_finite(logits: Tensor, strict: bool) -> Tensor:
    """Which rows have NaN, infinity, or nothing but minus infinity; with `strict` any minus infinity."""
    least, most = logits.aminmax(dim=-1)
    return ~(most.isfinite() & least.isfinite()) if strict else ~most.isfinite()


def choice_bytes(rows: int, vocab: int, dtype: torch.dtype, sampled: bool = True) -> int:
    """What `choose` allocates besides the logits: for greedy rows a float32 copy of 16-bit ones; else scores, drawn
    ones, filtered ones, those over temperature and with noise, in float32, and a mask."""
    greedy = 0 if dtype == torch.float32 else 4
    return rows * vocab * (5 * 4 + 1 if sampled else greedy)


def probabilities(logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """What each row [R, V] is drawn from, after adjusting and filtering; no row is greedy.

    NaN everywhere in a row with NaN or infinity, or with no token left.
    """
    return torch.softmax(filtered(adjusted(logits, rows), rows), -1)


def logprobs(logits: Tensor, tokens: Seq[int], best: int) -> list[Logprobs]:
    """The model's own log probabilities, before any parameter acts: each row's token first, then the best ones."""
    if logits.is_cuda and best <= min(MOST_ON_DEVICE, logits.shape[1]) and (kernel := _row_logprobs()) is not None:
        return kernel(logits, list(tokens), best)
    if len(tokens) > SLICE:  # sorting a vocabulary takes many times its memory
        return [
            found
            for at in range(0, len(tokens), SLICE)
            for found in logprobs(logits[at : at + SLICE], tokens[at : at + SLICE], best)
        ]
    table = torch.log_softmax(logits.float(), -1)
    values, ids = table.sort(dim=-1, descending=True, stable=True)
    return [
        {token: table[i, token].item()} | dict(zip(ids[i, :best].tolist(), values[i, :best].tolist(), strict=True))
        for i, token in enumerate(tokens)
    ]


def _row_logprobs() -> Callable[[Tensor, list[int], int], list[Logprobs]] | None:
    """The GPU's own; captured steps use it too, and a request gets the same numbers from both."""
    try:
        from faircopy.kernels.gpu.logprobs import row_logprobs
    except ImportError:
        return None
    return row_logprobs


def adjusted(logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """A float32 copy with bias, penalties, bad words, the minimum length and the constraint applied."""
    scores = logits.to(torch.float32, copy=True)
    for i, row in enumerate(rows):
        if row.seq.adjusts:
            _adjust(scores[i], row)
    return scores


def filtered(scores: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """Divide scores by temperatures, in place, with what top-k, top-p and min-p exclude at minus infinity."""
    exclude(scores, [row_filter(row.seq.params) for row in rows])
    temperatures = sent([row.seq.params.temperature for row in rows], torch.float32, scores.device)
    return scores.div_(temperatures[:, None])


def row_filter(params: SamplingParams) -> Filter:
    """The filters of a request that draws."""
    return _filter(params.temperature, params.top_k, params.top_p, params.min_p)


_filter = lru_cache(1024)(Filter.of)


def _adjust(scores: Tensor, row: SamplingRow) -> None:
    params, seq = row.seq.params, row.seq
    if params.penalises:
        _penalise(scores, params, seq.prompt, [*seq.output, *row.path])
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    banned = [*(seq.stops if row.output_length < params.min_tokens else ()), *_bad_ends(row)]
    if banned:
        scores[banned] = -torch.inf
    if seq.request.constraint is not None:
        allowed = seq.request.constraint.allowed([*seq.output, *row.path])
        scores.masked_fill_(~allowed.to(scores.device), -torch.inf)


def _penalise(scores: Tensor, params: SamplingParams, prompt: Seq[int], output: Seq[int]) -> None:
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), device=scores.device)
        values, factor = scores[seen], scores.new_tensor(params.repetition_penalty)  # CUDA divides by a tensor exactly
        scores[seen] = torch.where(values > 0, values / factor, values * factor)
    counts = Counter(output)
    if counts and (params.presence_penalty or params.frequency_penalty):
        tokens = torch.tensor(list(counts), device=scores.device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=scores.device)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * times


def _bad_ends(row: SamplingRow) -> list[int]:
    """The last tokens of bad words whose beginning has just been written."""
    words = row.seq.request.bad_words
    if not words:
        return []
    longest = max(map(len, words)) - 1
    tail = [*row.seq.output[-longest:], *row.path][-longest:] if longest else []
    return [word[-1] for word in words if len(word) == 1 or tuple(tail[1 - len(word) :]) == word[:-1]]
