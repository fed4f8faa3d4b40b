"""Sampling parameters on the device: penalties, bias and bans change a row's scores, and filters set its threshold.

Every batch slot has a settings row, token counts and biases, written when a sequence gets the slot. A row of a step
reads those of its slot and adds the draft tokens on its own path, so nothing is undone when a draft is rejected.
Thresholds are found as `kernels.filters` defines them, by adding integers: candidates may be gathered in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from faircopy.kernels import filters
from faircopy.kernels.filters import Filter, Kept
from faircopy.kernels.gpu.launch import begin, launched, options, power
from faircopy.kernels.gpu.pages import PATH
from faircopy.kernels.gpu.records import (
    IN_PROMPT,
    MAX_BANS,
    MAX_STOPS,
    MAX_WORD,
    MAX_WORDS,
    Asks,
    Report,
    Setting,
    float_bits,
)
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.transfer import sent

CHUNK = 4096
SPLITS = 8  # programs that share a row's chunks: of a row that asks for no filters each ends at once
GROUPS = 64  # of a chunk, whose maxima bound the k-th best score from below
CANDIDATES = 4096  # scores a program holds; a row with more is searched chunk by chunk

# Triton reads globals of these types only.
_COLUMN = [tl.constexpr(int(setting)) for setting in Setting]
_ASKS, _TOP_K, _SHARE, _BELOW, _STEPS, _WINDOW, _REPETITION = _COLUMN[: Setting.PRESENCE]
_PRESENCE, _FREQUENCY, _PROMPT, _MIN_TOKENS, _LOGPROBS, _STOPS, _WORDS, _COLUMNS = _COLUMN[Setting.PRESENCE :]
_PENALTIES, _BIAS, _BANS, _FILTERS = (tl.constexpr(int(ask)) for ask in Asks)
_ADJUSTS = tl.constexpr(int(Asks.PENALTIES | Asks.BIAS | Asks.BANS))
_SEEN, _STOPS_PER, _WORDS_PER, _WORD, _BANS_PER = (
    tl.constexpr(n) for n in (IN_PROMPT, MAX_STOPS, MAX_WORDS, MAX_WORD, MAX_BANS)
)
_OFF, _SHARE_BITS, _STEP_BITS = (tl.constexpr(n) for n in (1 << filters.SHARE, filters.SHARE, filters.STEPS))
_STEP_MASK = tl.constexpr((1 << filters.STEPS) - 1)
_FAR, _UP = tl.constexpr(float(filters.FARTHEST)), tl.constexpr(filters.SCALE - 30)
_P0, _P1, _P2, _P3, _P4, _P5 = (tl.constexpr(n) for n in filters.POLYNOMIAL)
_CHUNK, _GROUPS, _CANDIDATES = (tl.constexpr(n) for n in (CHUNK, GROUPS, CANDIDATES))


@dataclass(frozen=True, slots=True)
class SamplingSlots:
    """The sampling parameters of all batch slots."""

    settings: Tensor  # [B, Setting.TOTAL] int32
    counts: Tensor  # [B, V] int32: how often the output has each token; IN_PROMPT more if the prompt has it
    bias: Tensor  # [B, V] float32

    @classmethod
    def empty(cls, size: int, vocab: int, device: torch.device) -> SamplingSlots:
        return cls(
            torch.zeros(size, Setting.TOTAL, dtype=torch.int32, device=device),
            torch.zeros(size, vocab, dtype=torch.int32, device=device),
            torch.zeros(size, vocab, dtype=torch.float32, device=device),
        )

    def part(self, size: int) -> SamplingSlots:
        return SamplingSlots(self.settings[:size], self.counts[:size], self.bias[:size])


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What the rows of one pass are chosen with."""

    of: SamplingSlots
    slots: Tensor  # [R] int32: the batch slot of each row
    asks: Tensor  # [R] int32, see Asks
    places: Tensor  # [R] int32: where its log probabilities go
    logprobs: Tensor  # [R] int32: how many are wanted beside the chosen token's; -1: none at all
    path: Tensor  # [R, K] int32: the draft tokens on its path, -1 behind
    bans: Tensor  # [R, MAX_BANS] int32: tokens that may not be chosen, -1: none
    score: Tensor  # [R] float32: the threshold
    last: Tensor  # [R] int32: the last token kept of those that equal it

    @classmethod
    def empty(cls, of: SamplingSlots, rows: int, nodes: int) -> RowSampling:
        def table(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=of.settings.device)

        ints = torch.int32
        return cls(
            of, table(ints, rows), table(ints, rows), table(ints, rows), table(ints, rows).fill_(-1),
            table(ints, rows, max(1, nodes)), table(ints, rows, MAX_BANS), table(torch.float32, rows),
            table(ints, rows),
        )  # fmt: skip

    def part(self, rows: int) -> RowSampling:
        """The first rows."""
        parts = {name: getattr(self, name)[:rows] for name in self.__dataclass_fields__ if name != "of"}
        return RowSampling(self.of, **parts)


@triton.jit
def _number(line, COLUMN: tl.constexpr):
    return tl.load(line + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _path_row(ids, paths, first, row, at, W: tl.constexpr, LAST: tl.constexpr, TREE: tl.constexpr, mask):
    """The draft tokens at these places of a row's path."""
    place = at
    if TREE:
        place = tl.load(paths + row * LAST + at, mask=mask, other=0)
    return tl.load(ids + first + 1 + place, mask=mask, other=-1)


@launched
@triton.jit
def _describe(
    lengths, history, ids, positions, paths, rows, settings, slots, asks, places, logprobs, path, bans, reach, level,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, TREE: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (batch slot, row): its parameters, path and banned tokens. ROWS: "all", "packed", or of one "level"."""
    b, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin(PDL)
    source = b * W + j
    row = source
    depth = j
    if ROWS == "packed":
        row = tl.load(rows + source).to(tl.int64)
    if ROWS == "level":
        row = b
        depth = level
    line = settings + b * _COLUMNS
    asked = tl.load(line + _ASKS)
    n = tl.load(lengths + b)
    if row >= 0:
        tl.store(slots + row, b.to(tl.int32))
        tl.store(asks + row, asked)
        tl.store(places + row, source.to(tl.int32))
        tl.store(logprobs + row, tl.load(line + _LOGPROBS) - 1)
        if (asked & _ADJUSTS) != 0:
            if TREE:
                depth = tl.load(positions + source) - (n - 1)
            at = tl.arange(0, KP)
            tokens = _path_row(ids, paths, b * W, source, at, W, LAST, TREE, (at < depth) & (at < K))
            tl.store(path + row * K + at, tokens, mask=at < K)
            prompt = tl.load(line + _PROMPT)
            stop = tl.arange(0, _STOPS_PER)
            early = n + depth - prompt < tl.load(line + _MIN_TOKENS)
            tl.store(bans + row * _BANS_PER + stop, tl.where(early, tl.load(line + _STOPS + stop), -1))
            i = tl.arange(0, _WORD)
            for w in range(_WORDS_PER):
                word = tl.load(line + _WORDS + w * _WORD + i)
                length = tl.sum((word >= 0).to(tl.int32), 0)
                end = tl.sum(tl.where(i == length - 1, word, 0), 0)
                where = n + depth - (length - 1) + i
                known = (i < length - 1) & (where >= prompt)
                text = tl.load(history + b * reach + where, mask=known & (where < n), other=-1)
                drafted = _path_row(ids, paths, b * W, source, where - n, W, LAST, TREE, known & (where >= n))
                same = known & (tl.where(where < n, text, drafted) == word)
                matches = tl.sum(same.to(tl.int32), 0) == length - 1
                tl.store(bans + row * _BANS_PER + _STOPS_PER + w, tl.where(matches & (length > 0), end, -1))


@triton.jit
def column_tokens(words, at, size, V, WORDS: tl.constexpr):
    """The tokens of these columns, V behind the last one. WORDS: they are listed; else column t is token t."""
    token = at
    if WORDS:
        token = tl.load(words + at, mask=at < size, other=V).to(tl.int32)
    return token


@triton.jit
def adjusted(
    x, at, V, row, asked, slots, settings, counts, bias, path, bans, wide, K: tl.constexpr,
):  # fmt: skip
    """Scores of one row's tokens `at` after penalties, bias and bans, in the order of sampling.adjusted."""
    if (asked & _ADJUSTS) != 0:
        b = tl.load(slots + row).to(tl.int64)
        line = settings + b * _COLUMNS
        if (asked & _PENALTIES) != 0:
            count = tl.load(counts + b * wide + at, mask=at < V, other=0)
            times = count & (_SEEN - 1)
            for i in range(K):
                times += (at == tl.load(path + row * K + i)).to(tl.int32)
            seen = (times > 0) | (count >= _SEEN)
            factor = _number(line, _REPETITION)
            x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor), x)
            less = _number(line, _PRESENCE) + _number(line, _FREQUENCY) * times.to(tl.float32)
            x = tl.where(times > 0, x - less, x)
        if (asked & _BIAS) != 0:
            x += tl.load(bias + b * wide + at, mask=at < V, other=0.0)
        if (asked & _BANS) != 0:
            for i in range(_BANS_PER):
                x = tl.where(at == tl.load(bans + row * _BANS_PER + i), float("-inf"), x)
    return x


@triton.jit
def _ordered(x):
    """Integers from 0 to 2^32 - 1 in the order of the scores."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _score(key):
    """The score with this place in the order."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, best, steps):
    """As filters.mass."""
    far = tl.minimum(tl.maximum((best - x) * steps, 0.0), _FAR).to(tl.int64)
    f = far & _STEP_MASK
    value = ((f * _P5) >> _STEP_BITS) + _P4
    value = ((f * value) >> _STEP_BITS) + _P3
    value = ((f * value) >> _STEP_BITS) + _P2
    value = ((f * value) >> _STEP_BITS) + _P1
    value = ((f * value) >> _STEP_BITS) + _P0
    return (value << _UP) >> (far >> _STEP_BITS)


@triton.jit
def _wanted(total, share):
    """As filters.wanted_mass."""
    high, low = total >> _SHARE_BITS, total & (_OFF - 1)
    return tl.maximum(high * share + ((low * share) >> _SHARE_BITS), 1)


@triton.jit
def _filter_of(row, slots, settings):
    """top_k, share, and the settings row."""
    line = settings + tl.load(slots + row).to(tl.int64) * _COLUMNS
    return tl.load(line + _TOP_K), tl.load(line + _SHARE), line


@launched
@triton.jit(do_not_specialize=["apart"])
def _survey(
    logits, temperatures, maxima, words, slots, asks, settings, counts, bias, path, bans, size, V, stride, apart,
    chunks, wide, K: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the maxima of groups of tokens, in chunks `part`, `part` + SPLITS, and so on."""
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    asked = tl.load(asks + row)
    if ((asked & _FILTERS) != 0) & (tl.load(temperatures + row * apart) > 0.0):
        for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
            at = chunk * _CHUNK + tl.arange(0, _CHUNK)
            x = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf")).to(tl.float32)
            token = column_tokens(words, at, size, V, WORDS)
            x = adjusted(x, token, V, row, asked, slots, settings, counts, bias, path, bans, wide, K) + 0.0
            tops = tl.max(tl.reshape(x, (_GROUPS, _CHUNK // _GROUPS)), 1)
            tl.store(maxima + (row * chunks + chunk) * _GROUPS + tl.arange(0, _GROUPS), tops)


@triton.jit
def _kth(key, live, k):
    """The k-th largest of the live keys; 0 if there are fewer."""
    found = tl.zeros((), tl.int64)
    for bit in range(32):
        trial = found | (tl.full((), 1, tl.int64) << (31 - bit))
        found = tl.where(tl.sum((live & (key >= trial)).to(tl.int32), 0) >= k, trial, found)
    return found


@launched
@triton.jit(do_not_specialize=["apart"])
def _cut(
    temperatures, maxima, slots, asks, settings, top, cut, total, count, apart, groups,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program row: its best score, and one that no kept token is below, as far as it can be known from the maxima."""
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    if ((tl.load(asks + row) & _FILTERS) != 0) & (tl.load(temperatures + row * apart) > 0.0):
        at = tl.arange(0, BLOCK)
        tops = tl.load(maxima + row * groups + at, mask=at < groups, other=float("-inf"))
        top_k, _, line = _filter_of(row, slots, settings)
        best = tl.max(tops, 0)
        least = best - _number(line, _WINDOW)
        if top_k > 0:
            least = _score(_kth(_ordered(tops), at < groups, top_k))
            least = tl.where(top_k <= groups, least, float("-inf"))
        tl.store(top + row, best)
        tl.store(cut + row, least)
        tl.store(total + row, tl.zeros((), tl.int64))
        tl.store(count + row, 0)


@launched
@triton.jit(do_not_specialize=["apart"])
def _gather(
    logits, temperatures, top, cut, total, count, found, tokens, words, slots, asks, settings, counts, bias, path, bans,
    size, V, stride, apart, chunks, wide, K: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): of chunks `part`, `part` + SPLITS and so on the mass, and the scores not below the cut."""
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    asked = tl.load(asks + row)
    if ((asked & _FILTERS) != 0) & (tl.load(temperatures + row * apart) > 0.0):
        top_k, share, line = _filter_of(row, slots, settings)
        if (top_k > 0) | (share < _OFF):
            for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
                at = chunk * _CHUNK + tl.arange(0, _CHUNK)
                x = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf")).to(tl.float32)
                token = column_tokens(words, at, size, V, WORDS)
                x = adjusted(x, token, V, row, asked, slots, settings, counts, bias, path, bans, wide, K) + 0.0
                if top_k == 0:
                    weights = tl.where(at < size, _mass(x, tl.load(top + row), _number(line, _STEPS)), 0)
                    tl.atomic_add(total + row, tl.sum(weights, 0))
                keep = (at < size) & (x >= tl.load(cut + row))
                many = tl.sum(keep.to(tl.int32), 0)
                if many > 0:
                    place = tl.atomic_add(count + row, many) + tl.cumsum(keep.to(tl.int32), 0) - 1
                    fits = keep & (place < _CANDIDATES)
                    tl.store(found + row * _CANDIDATES + place, x, mask=fits)
                    tl.store(tokens + row * _CANDIDATES + place, token, mask=fits)


@triton.jit
def _weigh(
    source, tokens, least, before, best, steps, V, size, row, asked, slots, settings, counts, bias, path, bans, wide,
    K: tl.constexpr, FEW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """How many scores are at or above `least`, of tokens before `before`, and their mass."""
    many, heavy = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    for start in range(0, size, _CHUNK):
        at = start + tl.arange(0, _CHUNK)
        x = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
        token = at
        if FEW:
            token = tl.load(tokens + at, mask=at < size, other=0)
        else:
            token = column_tokens(tokens, at, size, V, WORDS)
            x = adjusted(x, token, V, row, asked, slots, settings, counts, bias, path, bans, wide, K) + 0.0
        inside = (at < size) & (_ordered(x) >= least) & (token < before)
        many += tl.sum(inside.to(tl.int32), 0)
        heavy += tl.sum(tl.where(inside, _mass(x, best, steps), 0), 0)
    return many, heavy


@triton.jit
def _search(
    source, tokens, best, cut, everything, V, size, columns, row, asked, slots, settings, counts, bias, path, bans,
    wide, K: tl.constexpr, FEW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The threshold of top-k and top-p and its last token, from the scores at `source`."""
    top_k, share, line = _filter_of(row, slots, settings)
    steps = _number(line, _STEPS)
    high, differing, bits = _ordered(best), _ordered(best) ^ _ordered(cut), top_k * 0
    for _turn in range(32):
        bits += (differing > 0).to(tl.int32)
        differing = differing >> 1
    floor = tl.zeros((), tl.int64)
    if (top_k > 0) & (top_k < columns):
        floor = (high >> bits) << bits
        for bit in range(bits):
            trial = floor | (tl.full((), 1, tl.int64) << (bits - 1 - bit))
            many, heavy = _weigh(
                source, tokens, trial, V, best, steps, V, size, row, asked,
                slots, settings, counts, bias, path, bans, wide, K, FEW, WORDS,
            )  # fmt: skip
            floor = tl.where(many >= top_k, trial, floor)
    least, end = floor, V
    if share < _OFF:
        if top_k > 0:
            many, everything = _weigh(
                source, tokens, floor, V, best, steps, V, size, row, asked,
                slots, settings, counts, bias, path, bans, wide, K, FEW, WORDS,
            )  # fmt: skip
        wanted = _wanted(everything, share)
        least = (high >> bits) << bits
        for bit in range(bits):
            trial = least | (tl.full((), 1, tl.int64) << (bits - 1 - bit))
            many, heavy = _weigh(
                source, tokens, tl.maximum(trial, floor), V, best, steps, V, size, row, asked,
                slots, settings, counts, bias, path, bans, wide, K, FEW, WORDS,
            )  # fmt: skip
            least = tl.where(heavy >= wanted, trial, least)
        upto, heavy = _weigh(
            source, tokens, least, V, best, steps, V, size, row, asked,
            slots, settings, counts, bias, path, bans, wide, K, FEW, WORDS,
        )  # fmt: skip
        more, above = _weigh(
            source, tokens, least + 1, V, best, steps, V, size, row, asked,
            slots, settings, counts, bias, path, bans, wide, K, FEW, WORDS,
        )  # fmt: skip
        each = tl.maximum(_mass(_score(least), best, steps), 1)
        needed = (wanted - above + each - 1) // each
        if needed < upto - more:
            end = V * 0
            for bit in range(20):
                trial_end = end | (1 << (19 - bit))
                low, heavy = _weigh(
                    source, tokens, least, trial_end, best, steps, V, size, row, asked,
                    slots, settings, counts, bias, path, bans, wide, K, FEW, WORDS,
                )  # fmt: skip
                lower, heavy = _weigh(
                    source, tokens, least + 1, trial_end, best, steps, V, size, row, asked,
                    slots, settings, counts, bias, path, bans, wide, K, FEW, WORDS,
                )  # fmt: skip
                end = tl.where(low - lower < needed, trial_end, end)
    return least, end


@launched
@triton.jit(do_not_specialize=["apart"])
def _threshold(
    logits, temperatures, top, cut, total, count, found, tokens, words, slots, asks, settings, counts, bias, path, bans,
    score, last, columns, V, stride, apart, wide,
    K: tl.constexpr, FEW: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program row: its threshold, from its candidates if they fit (FEW), else from all its scores."""
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    asked = tl.load(asks + row)
    if ((asked & _FILTERS) != 0) & (tl.load(temperatures + row * apart) > 0.0):
        many, best = tl.load(count + row), tl.load(top + row)
        if (many <= _CANDIDATES) == FEW:
            top_k, share, line = _filter_of(row, slots, settings)
            limit, end = tl.full((), float("-inf"), tl.float32), V
            if ((top_k > 0) & (top_k < columns)) | (share < _OFF):
                source = found + row * _CANDIDATES
                names = tokens + row * _CANDIDATES
                size = many
                if not FEW:
                    source = logits + row * stride
                    names = words
                    size = columns
                least, end = _search(
                    source, names, best, tl.load(cut + row), tl.load(total + row), V, size, columns, row,
                    asked, slots, settings, counts, bias, path, bans, wide, K, FEW, WORDS,
                )  # fmt: skip
                limit = _score(least)
            lowest = best + _number(line, _BELOW)
            tl.store(score + row, tl.maximum(limit, lowest))
            tl.store(last + row, tl.where(lowest > limit, V, end))


def describe(
    batch: BatchSlots, inputs: StepInputs, rows: RowSampling, *, places: Tensor | None = None,
    paths: Tensor | None = None, level: int | None = None,
) -> None:  # fmt: skip
    """Fill in what each row is chosen with.

    places [B, W]: the row of each query where rows are packed, -1: none. paths [B, W, PATH], of trees: the nodes down
    to each row. level: the rows are one per batch slot, behind this many nodes of a chain.
    """
    size, width = inputs.ids.shape
    kind = "level" if level is not None else "packed" if places is not None else "all"
    if places is not None:
        rows.asks.zero_()
        rows.logprobs.fill_(-1)
    nodes = rows.path.shape[1]
    _describe[(size, width if level is None else 1)](
        batch.lengths, batch.history, inputs.ids, inputs.positions, paths, places, rows.of.settings, rows.slots,
        rows.asks, rows.places, rows.logprobs, rows.path, rows.bans, batch.history.stride(0), level or 0,
        W=width, K=nodes, KP=power(nodes), LAST=PATH, TREE=paths is not None, ROWS=kind, num_warps=1,
        **options(inputs.ids.device),
    )  # fmt: skip


def restrict(
    logits: Tensor, temperatures: Tensor, rows: RowSampling, vocab: int | None = None, words: Tensor | None = None
) -> None:
    """Find the threshold of every row that asks for filters and draws. words: see pick.pick."""
    (count, _), device, of = logits.shape, logits.device, rows.of
    size, most = columns_and_tokens(logits, vocab, words)
    chunks = -(-size // CHUNK)

    def table(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    maxima, found = table(torch.float32, count, chunks * GROUPS), table(torch.float32, count, CANDIDATES)
    tokens, many = table(torch.int32, count, CANDIDATES), table(torch.int32, count)
    top, cut, total = table(torch.float32, count), table(torch.float32, count), table(torch.int64, count)
    adjusting = (rows.slots, rows.asks, of.settings, of.counts, of.bias, rows.path, rows.bans)
    numbers, nodes = (size, most, logits.stride(0), temperatures.stride(0)), rows.path.shape[1]
    wide, extra = of.counts.stride(0), {"num_warps": 8, "enable_fp_fusion": False, **options(device)}
    named, programs = {"K": nodes, "WORDS": words is not None}, (count, min(chunks, SPLITS))
    _survey[programs](logits, temperatures, maxima, words, *adjusting, *numbers, chunks, wide, **named, **extra)
    _cut[(count,)](
        temperatures, maxima, *adjusting[:3], top, cut, total, many, temperatures.stride(0), chunks * GROUPS,
        BLOCK=power(chunks * GROUPS), **extra,
    )  # fmt: skip
    _gather[programs](
        logits, temperatures, top, cut, total, many, found, tokens, words, *adjusting, *numbers, chunks, wide,
        **named, **extra,
    )  # fmt: skip
    for few in (True, False):
        _threshold[(count,)](
            logits, temperatures, top, cut, total, many, found, tokens, words, *adjusting, rows.score, rows.last,
            *numbers, wide, FEW=few, **named, **extra,
        )  # fmt: skip


def columns_and_tokens(logits: Tensor, vocab: int | None, words: Tensor | None) -> tuple[int, int]:
    """Columns of logits that are looked at, and the number that their tokens lie below."""
    columns = logits.shape[1]
    if words is None:
        columns = min(vocab or columns, columns)
        return columns, columns
    assert vocab is not None and len(words) == columns, "each column is a word of a vocabulary"
    return columns, vocab


@launched
@triton.jit
def _count_tokens(settings, counts, report, wide, columns, FIRST: tl.constexpr, WP: tl.constexpr, PDL: tl.constexpr):
    """Program b: the tokens that batch slot b gained are in its output now."""
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    if (tl.load(settings + b * _COLUMNS + _ASKS) & _PENALTIES) != 0:
        at = tl.arange(0, WP)
        gained = at < tl.load(report + b * columns)
        token = tl.load(report + b * columns + FIRST + at, mask=gained, other=0)
        tl.atomic_add(counts + b * wide + token, 1, mask=gained)


def count_tokens(of: SamplingSlots, report: Tensor, width: int) -> None:
    """Count the tokens in the report rows [B, columns], at most `width` each."""
    _count_tokens[(report.shape[0],)](
        of.settings, of.counts, report, of.counts.stride(0), report.stride(0), FIRST=int(Report.TOKENS),
        WP=power(width, 2), num_warps=1, **options(report.device),
    )  # fmt: skip


def count_tokens_twin(of: SamplingSlots, report: Tensor, width: int) -> None:
    for b, row in enumerate(report.tolist()):
        if int(of.settings[b, Setting.ASKS]) & Asks.PENALTIES:
            for token in row[Report.TOKENS : Report.TOKENS + row[Report.NUM_TOKENS]]:
                of.counts[b, token] += 1


def thresholds(scores: Tensor, wanted: Seq[Filter]) -> tuple[Tensor, Tensor]:
    """The threshold of each row [R, V] of adjusted scores, and the last token kept of those that equal it.

    Minus infinity in a row without filters.
    """
    rows = filter_rows(wanted, scores.shape[1], scores.device)
    restrict(scores, torch.ones(len(wanted), device=scores.device), rows)
    return rows.score, rows.last


def filter_rows(wanted: Seq[Filter], vocab: int, device: torch.device) -> RowSampling:
    """Rows with these filters and no other parameters, which keep everything until thresholds are found."""
    score = torch.full((len(wanted),), -torch.inf, device=device)
    return replace(
        _filter_rows(tuple(wanted), vocab, device), score=score, last=torch.zeros_like(score, dtype=torch.int32)
    )


@lru_cache(64)  # batches keep their filters from step to step, and only thresholds are written
def _filter_rows(wanted: tuple[Filter, ...], vocab: int, device: torch.device) -> RowSampling:
    settings = np.zeros((len(wanted), Setting.TOTAL), np.int32)
    for row, what in zip(settings, wanted, strict=True):
        row[Setting.ASKS] = Asks.FILTERS if what.active else 0
        write_filter(row, what, vocab)
    none = torch.zeros(1, 1, dtype=torch.float32, device=device)
    of = SamplingSlots(sent(settings, torch.int32, device), none.int(), none)
    rows = RowSampling.empty(of, len(wanted), 1)
    rows.slots.copy_(torch.arange(len(wanted), device=device))
    rows.asks.copy_(of.settings[:, Setting.ASKS])
    return rows


def write_filter(row: NDArray[np.int32], what: Filter, vocab: int) -> None:
    """Write a filter's columns of a settings row."""
    spread = 1.0 - what.share / 2**filters.SHARE
    octaves = math.log2(vocab / spread) + 0.01 if spread > 0.0 else 0.0
    row[Setting.TOP_K], row[Setting.SHARE] = min(what.top_k, vocab), what.share
    row[Setting.BELOW], row[Setting.STEPS] = float_bits(what.below), float_bits(what.steps)
    row[Setting.WINDOW] = float_bits(min(3e38, octaves * 2**filters.STEPS / what.steps))


def describe_twin(
    batch: BatchSlots, inputs: StepInputs, rows: RowSampling, *, places: Tensor | None = None,
    paths: Tensor | None = None, level: int | None = None,
) -> None:  # fmt: skip
    size, width = inputs.ids.shape
    rows.asks.zero_()
    rows.logprobs.fill_(-1)
    for b in range(size):
        for j in range(width) if level is None else (0,):
            row = b if level is not None else int(places[b, j]) if places is not None else b * width + j
            if row >= 0:
                _describe_row(batch, inputs, rows, b, j if level is None else level, row, paths)


def _describe_row(
    batch: BatchSlots, inputs: StepInputs, rows: RowSampling, b: int, j: int, row: int, paths: Tensor | None
) -> None:
    n, setting = int(batch.lengths[b]), rows.of.settings[b].tolist()
    depth = j if paths is None else int(inputs.positions[b, j]) - (n - 1)
    nodes = range(depth) if paths is None else paths[b, j, :depth].tolist()
    path = [int(inputs.ids[b, 1 + node]) for node in nodes][: rows.path.shape[1]]
    prompt, stops = setting[Setting.PROMPT], setting[Setting.STOPS : Setting.STOPS + MAX_STOPS]
    output = batch.history[b, prompt:n].tolist() + path
    early = n + depth - prompt < setting[Setting.MIN_TOKENS]
    words = np.array(setting[Setting.WORDS : Setting.TOTAL]).reshape(MAX_WORDS, MAX_WORD).tolist()
    ends = [_end_of(word[: sum(token >= 0 for token in word)], output) for word in words]
    rows.slots[row], rows.asks[row], rows.path[row] = b, setting[Setting.ASKS], -1
    rows.places[row], rows.logprobs[row] = b * inputs.ids.shape[1] + j, setting[Setting.LOGPROBS] - 1
    rows.path[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    rows.bans[row] = torch.tensor((stops if early else [-1] * MAX_STOPS) + ends, dtype=torch.int32)


def _end_of(word: list[int], output: list[int]) -> int:
    """The last token of a bad word whose other tokens have just been written; -1: they have not."""
    begun = len(word) == 1 or (len(word) > 1 and output[1 - len(word) :] == word[:-1])
    return word[-1] if begun else -1


def restrict_twin(logits: Tensor, temperatures: Tensor, rows: RowSampling, vocab: int | None = None) -> None:
    for row, (asked, temperature) in enumerate(zip(rows.asks.tolist(), temperatures.tolist(), strict=True)):
        if asked & Asks.FILTERS and temperature > 0.0:
            scores = adjusted_twin(logits[row, : vocab or logits.shape[1]].float(), rows, row)
            found = filters.kept(scores, _filter_twin(rows.of.settings[int(rows.slots[row])]))
            rows.score[row], rows.last[row] = found.score, found.last


def adjusted_twin(scores: Tensor, rows: RowSampling, row: int) -> Tensor:
    """One row's scores [V] after penalties, bias and bans."""
    asked, slot = int(rows.asks[row]), int(rows.slots[row])
    setting, scores = rows.of.settings[slot], scores.clone()
    if asked & Asks.PENALTIES:
        count = rows.of.counts[slot, : len(scores)]
        times = (count % IN_PROMPT) + sum(
            (torch.arange(len(scores), device=scores.device) == token).int() for token in rows.path[row].tolist()
        )
        factor, presence, frequency = setting[Setting.REPETITION : Setting.FREQUENCY + 1].view(torch.float32)
        penalised = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where((times > 0) | (count >= IN_PROMPT), penalised, scores)
        scores = torch.where(times > 0, scores - (presence + frequency * times.float()), scores)
    if asked & Asks.BIAS:
        scores += rows.of.bias[slot, : len(scores)]
    known = range(len(scores))  # a draft model's vocabulary may be smaller
    banned = [token for token in rows.bans[row].tolist() if token in known] if asked & Asks.BANS else []
    scores[banned] = -torch.inf
    return scores


def kept_twin(scores: Tensor, rows: RowSampling, row: int) -> Tensor:
    """One row's adjusted scores with what its threshold excludes at minus infinity."""
    limit = Kept(float(rows.score[row]), int(rows.last[row]))
    ids = torch.arange(len(scores), device=scores.device)
    return scores.masked_fill((scores < limit.score) | ((scores == limit.score) & (ids > limit.last)), -torch.inf)


def _filter_twin(setting: Tensor) -> Filter:
    below, steps = setting[Setting.BELOW : Setting.STEPS + 1].view(torch.float32).tolist()
    return Filter(int(setting[Setting.TOP_K]), int(setting[Setting.SHARE]), below, steps)
