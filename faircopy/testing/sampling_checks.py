"""Checks of the sampling kernels against their torch twins, see kernel_checks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faircopy import rng
from faircopy.kernels.filters import Filter, kept
from faircopy.kernels.gpu import pick, sampler
from faircopy.kernels.gpu.logprobs import LogprobReport, report_logprobs, report_logprobs_twin, row_logprobs
from faircopy.kernels.gpu.records import IN_PROMPT, Asks, Control, Report, Setting, float_bits
from faircopy.kernels.gpu.state import BatchSlots, StepInputs

VOCAB, SLOTS, WIDTH = 9000, 5, 3
FILTERS = [
    Filter.of(0.8, 0, 0.95, 0.0),
    Filter.of(1.0, 20, 1.0, 0.0),
    Filter.of(0.8, 0, 1.0, 0.05),
    Filter.of(0.7, 50, 0.9, 0.02),
    Filter.of(1.5, 0, 0.6, 0.0),
    Filter.of(30.0, 0, 0.99, 0.0),  # more candidates than a program holds
    Filter.of(30.0, 6000, 0.9, 0.0),
]


def sampling(device: torch.device) -> float:
    """Describe and pick rows of mixed parameters, all and packed, as the twins do; then count what was gained."""
    wrong = 0
    logits = _logits(device, SLOTS * WIDTH)
    for packed in (False, True):
        found = [_chosen(device, logits, packed, twin) for twin in (False, True)]
        wrong += sum(not torch.equal(a, b) for a, b in zip(*found, strict=True))
    return float(wrong)


def thresholds(device: torch.device) -> float:
    """Rows together, rows alone and the twin keep the same tokens."""
    wrong = 0
    for halves in (False, True):
        scores = _logits(device, len(FILTERS)).float()
        scores = scores if halves else scores + torch.rand(scores.shape, generator=_seeded()).to(device) * 1e-3
        together = sampler.thresholds(scores, FILTERS)
        for row, what in enumerate(FILTERS):
            alone = sampler.thresholds(scores[row : row + 1].contiguous(), [what])
            twin = kept(scores[row], what)
            masks = [_mask(scores[row], float(score), int(last)) for score, last in _rows(together, alone, row)]
            wrong += sum(not torch.equal(mask, _mask(scores[row], twin.score, twin.last)) for mask in masks)
    return float(wrong)


def words(device: torch.device) -> float:
    """Logits of some tokens alone: what is chosen if all others are at minus infinity, with any parameters."""
    wrong = 0
    for count in (900, 8500):
        kept = torch.randperm(VOCAB, generator=_seeded())[:count].to(device)
        few = _logits(device, SLOTS * WIDTH)[:, :count].contiguous()
        every = few.new_full((len(few), VOCAB), -torch.inf).index_copy_(1, kept, few)
        temperatures = torch.tensor([0.8, 1.0, 0.0, 0.7, 30.0] * WIDTH, device=device)
        keys = torch.tensor([rng.signed(rng.key(3, n)) for n in range(len(few))], device=device)
        wide = [Filter.of(30.0, 6000, 1.0, 0.0), Filter.of(1.0, 1000, 1.0, 0.05)]  # more than there are words
        filters = [[*FILTERS, *wide][n % (len(FILTERS) + 2)] for n in range(len(few))]
        batch, inputs, of = _scene(device)
        described = sampler.RowSampling.empty(of, SLOTS * WIDTH, WIDTH - 1)
        sampler.describe(batch, inputs, described)
        for rows in (described, sampler.filter_rows(filters, VOCAB, device), None):
            wanted = pick.pick(every, temperatures, keys, sampling=rows)
            wrong += not torch.equal(wanted, pick.pick(few, temperatures, keys, VOCAB, sampling=rows, words=kept))
            wrong += not torch.equal(wanted, pick.pick_twin(few, temperatures, keys, VOCAB, sampling=rows, words=kept))
    return float(wrong)


def logprobs(device: torch.device) -> float:
    logits = _logits(device, 6)
    chosen = torch.tensor([1, 2, 3, 8999, 5, 6], dtype=torch.int32, device=device)
    wanted = torch.tensor([0, -1, 5, 20, 3, 1], dtype=torch.int32, device=device)
    places = torch.tensor([5, 4, 3, 2, 1, 0], dtype=torch.int32, device=device)
    ours, twin = (LogprobReport.empty(6, device) for _ in range(2))
    report_logprobs(logits, chosen, wanted, places, ours)
    report_logprobs_twin(logits, chosen, wanted, places, twin)
    return float(not torch.equal(ours.tokens, twin.tokens)) + float((ours.values - twin.values).abs().max() > 1e-4)


def logprobs_anywhere(device: torch.device) -> float:
    """Rows of an odd width, together, alone, and with room between them have the same bits."""
    logits = _logits(device, 5)[:, :4999].contiguous()
    spaced = torch.nn.functional.pad(logits, (0, 9))[:, :4999]
    tokens = list(range(5))
    together = row_logprobs(logits, tokens, 3)
    alone = [row_logprobs(logits[n : n + 1], [n], 3)[0] for n in tokens]
    return float(together != alone) + float(together != row_logprobs(spaced, tokens, 3))


def _chosen(device: torch.device, logits: Tensor, packed: bool, twin: bool) -> list[Tensor]:
    describe, choose = (sampler.describe_twin, pick.pick_twin) if twin else (sampler.describe, pick.pick)
    count = sampler.count_tokens_twin if twin else sampler.count_tokens
    batch, inputs, of = _scene(device)
    rows = sampler.RowSampling.empty(of, SLOTS * WIDTH, WIDTH - 1)
    places = torch.arange(SLOTS * WIDTH, dtype=torch.int32, device=device).view(SLOTS, WIDTH)
    places = places.flip(0).contiguous() if packed else places
    if packed:
        places[2, 1:] = -1
    describe(batch, inputs, rows, places=places if packed else None)
    temperatures = torch.tensor([0.8, 1.0, 0.0, 0.7, 1.3] * WIDTH, device=device)
    keys = torch.tensor([rng.signed(rng.key(3, n)) for n in range(SLOTS * WIDTH)], device=device)
    chosen = choose(logits, temperatures, keys, strict=True, sampling=rows)
    report = torch.zeros(SLOTS, Report.TOKENS + WIDTH, dtype=torch.int32, device=device)
    report[:, Report.NUM_TOKENS], report[:, Report.TOKENS :] = 2, chosen.view(SLOTS, WIDTH)
    count(of, report, WIDTH)
    asking = (rows.asks & (Asks.PENALTIES | Asks.BIAS | Asks.BANS)) != 0
    return [chosen, rows.asks, rows.logprobs, rows.path[asking], rows.bans[asking], of.counts]


def _scene(device: torch.device) -> tuple[BatchSlots, StepInputs, sampler.SamplingSlots]:
    """Five texts with different parameters; the drafts of the last continue a bad word."""
    history = torch.zeros(SLOTS, 64, dtype=torch.int32)
    history[:, :20] = torch.randint(0, VOCAB, (SLOTS, 20), generator=_seeded(), dtype=torch.int32)
    history[4, 18:20] = torch.tensor([7, 8])
    batch = BatchSlots(
        torch.zeros(SLOTS, Control.PAGES + 2, dtype=torch.int32, device=device),
        torch.full((SLOTS,), 20, dtype=torch.int32, device=device),
        history.to(device),
    )
    inputs = StepInputs.empty(SLOTS, WIDTH, device)
    inputs.ids.copy_(torch.randint(0, VOCAB, (SLOTS, WIDTH), generator=_seeded(), dtype=torch.int32))
    inputs.ids[4, 1] = 9
    of = sampler.SamplingSlots.empty(SLOTS, VOCAB, device)
    table = np.stack([_setting(slot) for slot in range(SLOTS)])
    of.settings.copy_(torch.from_numpy(table))
    of.counts[:, 3:50] = 2
    of.counts[:, 40:90] += IN_PROMPT
    of.bias[:, 100:200] = 1.5
    return batch, inputs, of


def _setting(slot: int) -> NDArray[np.int32]:
    row = np.zeros(Setting.TOTAL, np.int32)
    row[Setting.STOPS :] = -1
    row[Setting.ASKS] = [Asks.FILTERS, Asks.PENALTIES | Asks.FILTERS, Asks.BIAS, 0, 15][slot]
    sampler.write_filter(row, FILTERS[slot], VOCAB)
    row[Setting.REPETITION : Setting.FREQUENCY + 1] = [float_bits(number) for number in (1.3, 0.2, 0.4)]
    row[Setting.PROMPT], row[Setting.MIN_TOKENS], row[Setting.LOGPROBS] = 12, 9, slot
    row[Setting.STOPS : Setting.STOPS + 2] = [0, 8999]
    row[Setting.WORDS : Setting.WORDS + 3] = [7, 8, 44]
    row[Setting.WORDS + 8 : Setting.WORDS + 12] = [7, 8, 9, 45]
    row[Setting.WORDS + 16] = 46
    return row


def _logits(device: torch.device, rows: int) -> Tensor:
    return (torch.randn(rows, VOCAB, generator=_seeded()) * 3).bfloat16().to(device)


def _rows(together: tuple[Tensor, Tensor], alone: tuple[Tensor, Tensor], row: int) -> list[tuple[Tensor, Tensor]]:
    return [(together[0][row], together[1][row]), (alone[0][0], alone[1][0])]


def _mask(scores: Tensor, limit: float, last: int) -> Tensor:
    ids = torch.arange(len(scores), device=scores.device)
    return (scores > limit) | ((scores == limit) & (ids <= last))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
