"""Choose a token per row: the best, or the best after Gumbel noise keyed by (seed, position). Ties: the lowest id.

Or offer several: the best few with their log probabilities, for a draft tree to choose from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.filters import Filter
from faircopy.kernels.gpu.launch import begin, launched, options
from faircopy.kernels.gpu.records import Asks
from faircopy.kernels.gpu.sampler import (
    RowSampling,
    adjusted,
    adjusted_twin,
    column_tokens,
    columns_and_tokens,
    filter_rows,
    kept_twin,
    restrict,
    restrict_twin,
)
from faircopy.kernels.gumbel import BROKEN, gumbel
from faircopy.kernels.transfer import sent

CHUNK = 4096
FILTERS = tl.constexpr(int(Asks.FILTERS))


@triton.jit
def _scramble(x):
    """Murmur3's finaliser on unsigned 32 bits."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _noise(key, tokens):
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _scramble(_scramble((tokens.to(tl.uint32) * 0x9E3779B1) ^ low) ^ high)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def mix(value):
    """splitmix64's finaliser, as rng.mix."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@launched
@triton.jit(do_not_specialize=["apart"])
def _scan(
    logits, temperatures, keys, values, tokens, words, slots, asks, settings, counts, bias, path, bans, score, last,
    size, V, stride, apart, chunks, wide,
    K: tl.constexpr, SAMPLED: tl.constexpr, STRICT: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best of one chunk of one row; -1 for a chunk that is not finite."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    at = column_tokens(words, column, size, V, WORDS)
    begin(PDL)
    x = tl.load(logits + row * stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    bad = (x != x) | (x == float("inf"))
    if STRICT:
        bad |= (x == float("-inf")) & (column < size)
    wrong = tl.max(bad.to(tl.int32), 0)
    temperature = tl.load(temperatures + row * apart)
    if SAMPLED:
        asked = tl.load(asks + row)
        if asked != 0:
            x = adjusted(x, at, V, row, asked, slots, settings, counts, bias, path, bans, wide, K)
            if ((asked & FILTERS) != 0) & (temperature > 0.0):
                limit = tl.load(score + row)
                x = tl.where((x > limit) | ((x == limit) & (at <= tl.load(last + row))), x, float("-inf"))
    if temperature > 0.0:
        key = tl.load(keys + row * apart).to(tl.uint64, bitcast=True)
        x = tl.div_rn(x, temperature) + _noise(key, at)
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, at, 2147483647), 0)
    tl.store(values + row * chunks + chunk, best)
    tl.store(tokens + row * chunks + chunk, tl.where(wrong != 0, -1, token))


@launched
@triton.jit(do_not_specialize=["apart"])
def _best(values, tokens, out, apart, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    begin(PDL)
    value = tl.load(values + row * chunks + at, mask=at < chunks, other=float("-inf"))
    token = tl.load(tokens + row * chunks + at, mask=at < chunks, other=2147483647)
    best = tl.max(value, 0)
    winner = tl.min(tl.where(value == best, token, 2147483647), 0)
    tl.store(out + row * apart, tl.where((tl.min(token, 0) < 0) | (best == float("-inf")), -1, winner))


def pick(
    logits: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    vocab: int | None = None,
    out: Tensor | None = None,
    strict: bool = False,
    sampling: RowSampling | None = None,
    words: Tensor | None = None,
) -> Tensor:
    """logits [R, C], temperatures [R] (0: greedy), 64-bit keys [R] -> token ids [R] int32; BROKEN in a row that
    is not finite or has no token left.

    vocab: only the first `vocab` tokens are considered. Minus infinity is a way to exclude a token, unless `strict`.
    temperatures, keys and out may be columns of tables, of one width. sampling: parameters of the rows, described
    before (sampler.describe); None: there are none beside the temperature. words [C]: the token of each column, below
    vocab; None: column t is token t.
    """
    rows, (size, most) = logits.shape[0], columns_and_tokens(logits, vocab, words)
    chunks = -(-size // CHUNK)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    assert temperatures.stride(0) == keys.stride(0), "columns of tables of one width"
    extra = options(logits.device)
    given: tuple[Tensor | None, ...] = (None,) * 9
    wide, nodes = 0, 1
    if sampling is not None:
        restrict(logits, temperatures, sampling, vocab, words)
        of, wide, nodes = sampling.of, sampling.of.counts.stride(0), sampling.path.shape[1]
        given = (sampling.slots, sampling.asks, of.settings, of.counts, of.bias, sampling.path, sampling.bans,
                 sampling.score, sampling.last)  # fmt: skip
    _scan[(rows, chunks)](
        logits, temperatures, keys, values, tokens, words, *given, size, most, logits.stride(0), keys.stride(0), chunks,
        wide, K=nodes, SAMPLED=sampling is not None, STRICT=strict, WORDS=words is not None, CHUNK=CHUNK, num_warps=8,
        enable_fp_fusion=False, **extra,
    )  # fmt: skip
    _best[(rows,)](
        values, tokens, out, out.stride(0), chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, **extra
    )
    return out


def pick_rows(scores: Tensor, temperatures: list[float], keys: list[int], wanted: list[Filter], strict: bool) -> Tensor:
    """A token per row of adjusted scores [R, V], as `pick`, from what the host knows of the rows."""
    device = scores.device
    drawn_at, noise = sent(temperatures, torch.float32, device), sent(keys, torch.int64, device)
    rows = filter_rows(wanted, scores.shape[1], device) if any(what.active for what in wanted) else None
    return pick(scores, drawn_at, noise, strict=strict, sampling=rows)


def pick_twin(
    logits: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    vocab: int | None = None,
    out: Tensor | None = None,
    strict: bool = False,
    sampling: RowSampling | None = None,
    words: Tensor | None = None,
) -> Tensor:
    if words is not None:
        few, (_, vocab) = logits, columns_and_tokens(logits, vocab, words)
        logits = few.new_full((len(few), vocab), -torch.inf).index_copy_(1, words.long(), few)
    x = logits[:, : vocab or logits.shape[1]].float()
    broken = ((x != x) | (x == torch.inf) | ((x == -torch.inf) & strict)).any(-1)
    if sampling is not None:
        restrict_twin(logits, temperatures, sampling, vocab)
        x = torch.stack([_row_twin(row, float(temperatures[n]), sampling, n) for n, row in enumerate(x)])
    broken |= (x == -torch.inf).all(-1)
    tokens = torch.arange(x.shape[1], device=x.device)
    noisy = x / temperatures[:, None].clamp_min(1e-30) + gumbel(keys[:, None], tokens[None, :])
    chosen = torch.where(temperatures > 0, noisy.argmax(-1), x.argmax(-1))
    chosen = torch.where(broken, BROKEN, chosen).to(torch.int32)
    return chosen if out is None else out.copy_(chosen)


def _row_twin(scores: Tensor, temperature: float, sampling: RowSampling, row: int) -> Tensor:
    """One row's scores, adjusted and filtered."""
    scores = adjusted_twin(scores, sampling, row)
    filters = int(sampling.asks[row]) & Asks.FILTERS and temperature > 0.0
    return kept_twin(scores, sampling, row) if filters else scores


@launched
@triton.jit(do_not_specialize=["apart", "per"])
def _leaders(
    logits, temperatures, keys, values, tokens, stats, words, V, stride, apart, per, chunks,
    MANY: tl.constexpr, CHUNK: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best few of one chunk of one row, its maximum and the sum of its exponentials."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    begin(PDL)
    x = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x = tl.where((x == x) & (x != float("inf")), x, float("-inf"))
    if WORDS:
        at = tl.load(words + at, mask=at < V, other=2147483646).to(tl.int32)
    temperature = tl.load(temperatures + row // per * apart)
    if temperature > 0.0:
        key = tl.load(keys + row // per * apart).to(tl.uint64, bitcast=True)
        x = tl.div_rn(x, temperature) + _noise(key, at)
    place = (row * chunks + chunk) * MANY
    top = tl.max(x, 0)
    total = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0)
    tl.store(stats + (row * chunks + chunk) * 2, top)
    tl.store(stats + (row * chunks + chunk) * 2 + 1, total)
    for rank in tl.static_range(MANY):
        best = tl.max(x, 0)
        token = tl.min(tl.where(x == best, at, 2147483647), 0)
        tl.store(values + place + rank, best)
        tl.store(tokens + place + rank, token)
        x = tl.where(at == token, float("-inf"), x)


@launched
@triton.jit
def _offer(values, tokens, stats, ids, scores, chunks, MANY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    begin(PDL)
    value = tl.load(values + row * chunks * MANY + at, mask=at < chunks * MANY, other=float("-inf"))
    token = tl.load(tokens + row * chunks * MANY + at, mask=at < chunks * MANY, other=2147483647)
    top = tl.load(stats + (row * chunks + at) * 2, mask=at < chunks, other=float("-inf"))
    total = tl.load(stats + (row * chunks + at) * 2 + 1, mask=at < chunks, other=0.0)
    most = tl.max(top, 0)
    norm = most + tl.log(tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - most)), 0))
    for rank in tl.static_range(MANY):
        best = tl.max(value, 0)
        winner = tl.min(tl.where(value == best, token, 2147483647), 0)
        tl.store(scores + row * MANY + rank, tl.where(best != float("-inf"), best - norm, float("-inf")))
        tl.store(ids + row * MANY + rank, winner.to(tl.int64))
        value = tl.where(token == winner, float("-inf"), value)


def offer(
    logits: Tensor, temperatures: Tensor, keys: Tensor, many: int, vocab: int | None = None, words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best tokens of each row [R, many] and their log probabilities.

    Of a row with a temperature, the best with its noise: the first is the one that it draws, and how likely the others
    are to be drawn by a model that differs a little is taken from the scores with noise as if they were logits.
    temperatures and keys [S] (columns of tables, of one width) belong to R / S rows each. What is not to be offered is
    at minus infinity. words [V]: the token of each column, below vocab; None: column t is token t.
    """
    rows, size = logits.shape[0], min(vocab or logits.shape[1], logits.shape[1])
    chunks, per, device = -(-size // CHUNK), rows // keys.shape[0], logits.device
    values, tokens, stats = (
        torch.empty(rows, chunks, n, dtype=kind, device=device)
        for n, kind in ((many, torch.float32), (many, torch.int32), (2, torch.float32))
    )
    ids = torch.empty(rows, many, dtype=torch.int64, device=device)
    scores = torch.empty(rows, many, dtype=torch.float32, device=device)
    assert temperatures.stride(0) == keys.stride(0), "columns of tables of one width"
    extra = options(device)
    _leaders[(rows, chunks)](
        logits, temperatures, keys, values, tokens, stats, words, size, logits.stride(0), keys.stride(0), per, chunks,
        MANY=many, CHUNK=CHUNK, WORDS=words is not None, num_warps=8, **extra,
    )  # fmt: skip
    _offer[(rows,)](
        values, tokens, stats, ids, scores, chunks,
        MANY=many, BLOCK=triton.next_power_of_2(chunks * many), num_warps=4, **extra,
    )  # fmt: skip
    return ids, scores


def offer_twin(
    logits: Tensor, temperatures: Tensor, keys: Tensor, many: int, vocab: int | None = None, words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x = logits[:, : vocab or logits.shape[1]].float()
    words, order = torch.arange(x.shape[1], device=x.device).sort() if words is None else words.long().sort()
    x = x[:, order]
    x = torch.where(torch.isfinite(x), x, -torch.inf)
    per = x.shape[0] // keys.shape[0]
    drawn_at, noise = (part.repeat_interleave(per)[:, None] for part in (temperatures, keys))
    noisy = x / drawn_at.clamp_min(1e-30) + gumbel(noise, words[None])
    table = torch.log_softmax(torch.where(drawn_at > 0, noisy, x), -1)
    scores, columns = torch.sort(table, dim=-1, descending=True, stable=True)
    spare = max(0, many - x.shape[1])
    scores, ids = F.pad(scores[:, :many], (0, spare), value=-torch.inf), F.pad(words[columns[:, :many]], (0, spare))
    return ids, torch.where(scores == scores, scores, -torch.inf)
