"""Sampling parameters of the sequences in captured steps, written to the device when they get their batch slots."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from faircopy.kernels.gpu.logprobs import MAX_LOGPROBS
from faircopy.kernels.gpu.records import IN_PROMPT, MAX_STOPS, MAX_WORD, MAX_WORDS, Asks, Setting, float_bits
from faircopy.kernels.gpu.sampler import SamplingSlots, write_filter
from faircopy.kernels.transfer import sent
from faircopy.sampling import row_filter
from faircopy.types import Sequence

MOST = np.iinfo(np.int32).max


def fits_device(seq: Sequence) -> bool:
    """Whether its tokens can be drafted and chosen without the host."""
    if seq.drafts_itself or seq.request.constraint is not None or (seq.params.logprobs or 0) > MAX_LOGPROBS:
        return False
    if not seq.adjusts:
        return True
    words = seq.request.bad_words
    return (
        (not seq.params.min_tokens or len(seq.stops) <= MAX_STOPS)
        and len(words) <= MAX_WORDS
        and max(map(len, words), default=0) <= MAX_WORD
    )


Rows = dict[Sequence, NDArray[np.int32]]


def write_settings(
    of: SamplingSlots, slots: dict[Sequence, int], new: Iterable[Sequence], moved: dict[Sequence, int], known: Rows
) -> Rows:
    """Write the parameters of all batch slots; those without a sequence have none.

    new: sequences that were in no batch slot, so that nothing is on the device of their tokens' counts.
    moved: the batch slots that sequences had before, where others are theirs now.
    known: settings rows from before; returns those of these sequences.
    """
    rows = {seq: known[seq] if seq in known else _settings_row(seq, of.counts.shape[1]) for seq in slots}
    table = np.zeros(of.settings.shape, np.int32)
    table[[*slots.values()]] = np.stack([*rows.values()])
    for seq, before in moved.items():  # first: what new sequences write must not be taken for it
        if seq.params.penalises:
            of.counts[slots[seq]].copy_(of.counts[before])
        if seq.params.logit_bias:
            of.bias[slots[seq]].copy_(of.bias[before])
    for seq in new:
        if seq.params.penalises:
            _write_counts(of.counts[slots[seq]], seq)
        if seq.params.logit_bias:
            _write_bias(of.bias[slots[seq]], seq)
    of.settings.copy_(sent(table, torch.int32, of.settings.device))
    return rows


def _settings_row(seq: Sequence, vocab: int) -> NDArray[np.int32]:
    row, params, words = np.zeros(Setting.TOTAL, np.int32), seq.params, seq.request.bad_words
    if not params.greedy:
        what = row_filter(params)
        write_filter(row, what, vocab)
        row[Setting.ASKS] |= Asks.FILTERS if what.active else 0
    row[Setting.ASKS] |= Asks.PENALTIES if params.penalises else 0
    row[Setting.ASKS] |= Asks.BIAS if params.logit_bias else 0
    row[Setting.ASKS] |= Asks.BANS if params.min_tokens or words else 0
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    row[Setting.REPETITION : Setting.FREQUENCY + 1] = [float_bits(number) for number in penalties]
    row[Setting.LOGPROBS] = 0 if params.logprobs is None else params.logprobs + 1
    row[Setting.PROMPT], row[Setting.MIN_TOKENS] = len(seq.prompt), min(params.min_tokens, MOST)
    row[Setting.STOPS :] = -1
    if params.min_tokens:
        row[Setting.STOPS : Setting.STOPS + len(seq.stops)] = sorted(seq.stops)
    for n, word in enumerate(words):
        begin = Setting.WORDS + n * MAX_WORD
        row[begin : begin + len(word)] = word
    return row


def _write_counts(counts: torch.Tensor, seq: Sequence) -> None:
    """How often the output has each token, and which ones the prompt has."""
    numbers = np.bincount(np.array(seq.output, np.int64), minlength=len(counts)).astype(np.int32)
    numbers[np.array(seq.prompt, np.int64)] += IN_PROMPT
    counts.copy_(sent(numbers, counts.dtype, counts.device))  # the host does not wait for a step in flight


def _write_bias(bias: torch.Tensor, seq: Sequence) -> None:
    numbers = np.zeros(len(bias), np.float32)
    for token, number in seq.params.logit_bias.items():
        numbers[token] = number
    bias.copy_(sent(numbers, bias.dtype, bias.device))
