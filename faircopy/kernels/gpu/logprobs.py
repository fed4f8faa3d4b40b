"""Log probabilities of the chosen token and of the best ones, for the rows that ask for them.

Exponentials are summed as whole numbers: the order of a sum depends on how a row is aligned in memory, these do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu.launch import begin, launched, options, power

MAX_LOGPROBS = 20  # best tokens of a row that captured steps report
CHUNK = 4096
UNIT = tl.constexpr(1 << 40)  # of an exponential


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """Room for the log probabilities of R rows."""

    tokens: Tensor  # [R, MAX_LOGPROBS] int32: the best tokens
    values: Tensor  # [R, 1 + MAX_LOGPROBS] float32: the chosen token's log probability, then those of the best

    @classmethod
    def empty(cls, rows: int, device: torch.device | str, pinned: bool = False) -> LogprobReport:
        return cls(
            torch.zeros(rows, MAX_LOGPROBS, dtype=torch.int32, device=device, pin_memory=pinned),
            torch.zeros(rows, 1 + MAX_LOGPROBS, dtype=torch.float32, device=device, pin_memory=pinned),
        )

    def copy_(self, other: LogprobReport) -> None:
        self.tokens.copy_(other.tokens, non_blocking=True)
        self.values.copy_(other.values, non_blocking=True)

    def of(self, row: int, token: int, best: int) -> dict[int, float]:
        """Token id -> log probability: the chosen token first, then the best ones."""
        values = self.values[row].tolist()
        return {token: values[0]} | dict(zip(self.tokens[row, :best].tolist(), values[1 : 1 + best], strict=True))


@launched
@triton.jit
def _tops(
    logits, wanted, found, tokens, stats, V, stride, chunks, MOST: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (row, chunk): the chunk's best tokens, its maximum and the sum of its exponentials."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin(PDL)
    want = tl.load(wanted + row)
    if want >= 0:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
        place = row * chunks + chunk
        top = tl.max(x, 0)
        tl.store(stats + place * 2, top)
        shares = tl.where(x == float("-inf"), 0.0, tl.exp(x - top) * UNIT)
        tl.store(stats + place * 2 + 1, tl.sum(shares.to(tl.int64), 0).to(tl.float32) / UNIT)
        for rank in range(want):
            best = tl.max(x, 0)
            token = tl.min(tl.where(x == best, at, 2147483647), 0)
            tl.store(found + place * MOST + rank, best)
            tl.store(tokens + place * MOST + rank, token)
            x = tl.where(at == token, float("-inf"), x)


@launched
@triton.jit
def _report(
    logits, chosen, wanted, places, found, tokens, stats, out_tokens, out_values, stride, chunks,
    MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program row: the best of all its chunks, less the logarithm of the sum."""
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    want = tl.load(wanted + row)
    if want >= 0:
        at = tl.arange(0, BLOCK)
        top = tl.load(stats + (row * chunks + at) * 2, mask=at < chunks, other=float("-inf"))
        total = tl.load(stats + (row * chunks + at) * 2 + 1, mask=at < chunks, other=0.0)
        most = tl.max(top, 0)
        norm = most + tl.log(tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - most)), 0))
        out = tl.load(places + row).to(tl.int64)
        token = tl.maximum(tl.load(chosen + row), 0)
        value = tl.load(logits + row * stride + token).to(tl.float32)
        tl.store(out_values + out * (MOST + 1), value - norm)
        live = (at < chunks * MOST) & (at % MOST < want)
        values = tl.load(found + row * chunks * MOST + at, mask=live, other=float("-inf"))
        ids = tl.load(tokens + row * chunks * MOST + at, mask=live, other=2147483647)
        for rank in range(want):
            best = tl.max(values, 0)
            winner = tl.min(tl.where(values == best, ids, 2147483647), 0)
            tl.store(out_values + out * (MOST + 1) + 1 + rank, best - norm)
            tl.store(out_tokens + out * MOST + rank, winner)
            values = tl.where(ids == winner, float("-inf"), values)
            ids = tl.where(ids == winner, 2147483647, ids)


def report_logprobs(logits: Tensor, chosen: Tensor, wanted: Tensor, places: Tensor, out: LogprobReport) -> None:
    """Of each row [R, V]: the chosen token's log probability and the wanted [R] best ones (-1: none at all).

    places [R]: where in `out` each row goes.
    """
    (rows, size), device = logits.shape, logits.device
    chunks = -(-size // CHUNK)
    found = torch.empty(rows, chunks, MAX_LOGPROBS, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, chunks, MAX_LOGPROBS, dtype=torch.int32, device=device)
    stats = torch.empty(rows, chunks, 2, dtype=torch.float32, device=device)
    extra = options(device)
    _tops[(rows, chunks)](
        logits, wanted, found, tokens, stats, size, logits.stride(0), chunks,
        MOST=MAX_LOGPROBS, CHUNK=CHUNK, num_warps=8, **extra,
    )  # fmt: skip
    _report[(rows,)](
        logits, chosen, wanted, places, found, tokens, stats, out.tokens, out.values, logits.stride(0), chunks,
        MOST=MAX_LOGPROBS, BLOCK=power(chunks * MAX_LOGPROBS), num_warps=4, **extra,
    )  # fmt: skip


def report_logprobs_twin(logits: Tensor, chosen: Tensor, wanted: Tensor, places: Tensor, out: LogprobReport) -> None:
    for row, want in enumerate(wanted.tolist()):
        if want >= 0:
            table = torch.log_softmax(logits[row].float(), -1)
            values, ids = table.sort(descending=True, stable=True)
            place = int(places[row])
            out.values[place, 0] = table[max(int(chosen[row]), 0)]
            out.values[place, 1 : 1 + want], out.tokens[place, :want] = values[:want], ids[:want].int()


def row_logprobs(logits: Tensor, tokens: list[int], best: int) -> list[dict[int, float]]:
    """The same for rows whose tokens are known."""
    rows, device = len(tokens), logits.device
    out = LogprobReport.empty(rows, device)
    chosen = torch.tensor(tokens, dtype=torch.int32, device=device)
    wanted = torch.full((rows,), best, dtype=torch.int32, device=device)
    report_logprobs(logits, chosen, wanted, torch.arange(rows, dtype=torch.int32, device=device), out)
    host = LogprobReport(out.tokens.cpu(), out.values.cpu())
    return [host.of(row, token, best) for row, token in enumerate(tokens)]
