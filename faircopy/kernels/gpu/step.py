"""What happens between passes, on the device: where the next tokens go, what an n-gram lookup proposes, which nodes of
a chain are accepted.

A batch of captured steps is a table of batch slots. The host writes which sequence is in which batch slot and how long
it may become; lengths and histories live on the device, so a step can follow the one before without the host.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy import rng
from faircopy.acceptance import accept_path, nodes_that_fit
from faircopy.kernels.gpu.launch import begin, launched, options, power
from faircopy.kernels.gpu.pick import mix
from faircopy.kernels.gpu.records import (
    FINITE,
    FRESH,
    LENGTH,
    LIMIT,
    MAX_NODES,
    NUM_TOKENS,
    PAGES,
    REPORT_MAX_NODES,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOKENS,
    Control,
    ReportColumns,
    seed_of,
)
from faircopy.kernels.gpu.state import BatchSlots, StepInputs


@triton.jit
def _slot(table, position, limit, inside, scratch, PAGE: tl.constexpr):
    """The KV slot of a position; at or beyond the limit, or below 0, the scratch slot."""
    real = inside & (position >= 0) & (position < limit)
    page = tl.load(table + position // PAGE, mask=real, other=0).to(tl.int64)
    return tl.where(real, page * PAGE + position % PAGE, scratch)


@triton.jit
def load_seed(line):
    """The seed in a control row, as 64 bits."""
    low, high = (
        tl.load(line + SEED_LOW).to(tl.uint32, bitcast=True),
        tl.load(line + SEED_HIGH).to(tl.uint32, bitcast=True),
    )
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def fitting_nodes(max_nodes, n, limit):
    """As acceptance.nodes_that_fit."""
    return tl.maximum(tl.minimum(max_nodes, limit - n - 1), 0)


@launched
@triton.jit(do_not_specialize=["size"])
def _prepare(
    control, lengths, history, ids, positions, slots, keys, temperatures, before, lanes, stride, reach, scratch, size,
    W: tl.constexpr, WP: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    line = control + b * stride
    n = tl.where(tl.load(line + FRESH) != 0, tl.load(line + LENGTH), tl.load(lengths + b))
    tl.store(lengths + b, n)
    limit = tl.load(line + LIMIT)
    temperature = tl.load(line + TEMPERATURE).to(tl.float32, bitcast=True)
    seed = load_seed(line)
    at = tl.arange(0, WP)
    inside = at < W
    position = n - 1 + at
    seen = tl.minimum(position, limit - 1)  # nodes beyond the limit are never accepted, and have no pages
    tl.store(positions + b * W + at, seen, mask=inside)
    slot = _slot(line + PAGES, position, limit, inside, scratch, PAGE)
    tl.store(slots + b * W + at, slot, mask=inside)
    tl.store(lanes + at * size + b, seen.to(tl.int64), mask=inside)
    tl.store(lanes + (W + at) * size + b, slot, mask=inside)
    noise = mix(mix(mix(seed ^ (position + 1).to(tl.uint64))))
    tl.store(keys + b * W + at, noise.to(tl.int64, bitcast=True), mask=inside)
    tl.store(temperatures + b * W + at, tl.full((WP,), 0.0, tl.float32) + temperature, mask=inside)
    tl.store(ids + b * W, tl.load(history + b * reach + n - 1))
    pair = tl.arange(0, 2)
    back = n - 2 + pair
    where = before + b * 2 + pair
    tl.store(where, tl.load(history + b * reach + tl.maximum(back, 0)).to(tl.int64))
    tl.store(where + size * 2, tl.maximum(back, 0).to(tl.int64))
    tl.store(where + size * 4, _slot(line + PAGES, back, limit, back >= 0, scratch, PAGE))


@launched
@triton.jit
def _lookup(
    lengths, history, ids, reach,
    W: tl.constexpr, WP: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where the longest suffix was last continued: ends are ranked by (length of the match, place)."""
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    text = history + b * reach
    n = tl.load(lengths + b)
    best = tl.zeros((), tl.int64)
    for start in range(1, n, BLOCK):
        end = start + tl.arange(0, BLOCK)
        alive = end < n
        length = tl.zeros((BLOCK,), tl.int64)
        for m in tl.static_range(1, LONG + 1):
            reaches = alive & (end >= m)
            alive = reaches & (
                tl.load(text + end - m, mask=reaches, other=-1) == tl.load(text + n - m, mask=n >= m, other=-2)
            )
            length += alive.to(tl.int64)
        rank = tl.where(length >= SHORT, (length << 32) + end, 0)
        best = tl.maximum(best, tl.max(rank, 0))
    after = (best & 0xFFFFFFFF).to(tl.int32)
    at = tl.arange(0, WP)
    known = (best > 0) & (after + at < n) & (at < W - 1)
    token = tl.load(text + after + at, mask=known, other=-1)
    tl.store(ids + b * W + 1 + at, token, mask=at < W - 1)


@launched
@triton.jit
def _accept(
    control, lengths, history, ids, chosen, starts, out, stride, reach,
    W: tl.constexpr, WP: tl.constexpr, GUESSES: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program b judges the chain of batch slot b and writes its report row."""
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    line = control + b * stride
    n = tl.load(lengths + b)
    fit = fitting_nodes(tl.load(line + MAX_NODES), n, tl.load(line + LIMIT))
    at = tl.arange(0, WP)
    inside = at < W
    first, rows = b * W, W
    if PACKED:
        first = tl.load(starts + b).to(tl.int64)
        rows = tl.load(starts + b + 1) - first
    said = tl.load(chosen + first + at, mask=inside & (at < rows), other=-1)
    guess = tl.load(ids + b * W + 1 + at, mask=at < W - 1, other=-1)
    wrong = (guess != said) | (at >= fit) | (at >= W - 1)
    right = tl.min(tl.where(wrong, at, WP), 0)  # leading nodes whose token the target chose
    broken = tl.min(tl.where((said < 0) | (at >= W), at, WP), 0)
    count = tl.minimum(right + 1, broken)
    tl.store(history + b * reach + n + at, said, mask=at < count)
    tl.store(lengths + b, n + count)
    report = out + b * COLUMNS
    tl.store(report + NUM_TOKENS, count)
    tl.store(report + REPORT_MAX_NODES, tl.minimum(fit, W - 1))
    tl.store(report + FINITE, (count == right + 1).to(tl.int32))
    tl.store(report + TOKENS + at, said, mask=inside)
    tl.store(report + GUESSES + at, guess, mask=at < W - 1)


def prepare(batch: BatchSlots, inputs: StepInputs, page: int, scratch: int) -> None:
    """Fill the inputs from the batch slots: everything but the nodes' tokens."""
    size, width = inputs.ids.shape
    _prepare[(size,)](
        batch.control, batch.lengths, batch.history, inputs.ids, inputs.positions, inputs.slots, inputs.keys,
        inputs.temperatures, inputs.before, inputs.columns, batch.control.stride(0), batch.history.stride(0),
        scratch, size, W=width, WP=power(width, 2), PAGE=page, num_warps=1, **options(inputs.ids.device),
    )  # fmt: skip


def prepare_twin(batch: BatchSlots, inputs: StepInputs, page: int, scratch: int) -> None:
    for b, row in enumerate(batch.control.tolist()):
        n = row[Control.LENGTH] if row[Control.FRESH] else int(batch.lengths[b])
        batch.lengths[b] = n
        seed = seed_of(row)
        inputs.ids[b, 0] = batch.history[b, n - 1]
        inputs.temperatures[b] = batch.control[b, Control.TEMPERATURE, None].view(torch.float32)
        for j in range(inputs.ids.shape[1]):
            inputs.positions[b, j] = min(n - 1 + j, row[Control.LIMIT] - 1)
            inputs.slots[b, j] = _slot_twin(row, n - 1 + j, page, scratch)
            inputs.keys[b, j] = rng.signed(key_twin(seed, n + j))
        inputs.columns[0, :, b], inputs.columns[1, :, b] = inputs.positions[b], inputs.slots[b]
        for j, back in enumerate((n - 2, n - 1)):
            place = max(back, 0)
            numbers = [int(batch.history[b, place]), place, _slot_twin(row, back, page, scratch)]
            inputs.before[:, b, j] = torch.tensor(numbers)


def lookup(batch: BatchSlots, inputs: StepInputs, shortest: int, longest: int) -> None:
    """Fill the nodes with what followed the last time the latest tokens were written; -1 where nothing did."""
    size, width = inputs.ids.shape
    if width > 1:
        _lookup[(size,)](
            batch.lengths, batch.history, inputs.ids, batch.history.stride(0),
            W=width, WP=power(width, 2), SHORT=shortest, LONG=longest, BLOCK=1024, num_warps=4,
            **options(inputs.ids.device),
        )  # fmt: skip


def lookup_twin(batch: BatchSlots, inputs: StepInputs, shortest: int, longest: int) -> None:
    width = inputs.ids.shape[1] - 1
    for b, n in enumerate(batch.lengths.tolist()):
        text = batch.history[b, :n].tolist()
        found: list[int] = []
        for m in range(longest, shortest - 1, -1):
            ends = [end for end in range(m, n) if text[end - m : end] == text[n - m :]] if m <= n else []
            if ends:
                found = text[ends[-1] : ends[-1] + width]
                break
        inputs.ids[b, 1:] = torch.tensor(found + [-1] * (width - len(found)))


def accept(batch: BatchSlots, inputs: StepInputs, chosen: Tensor, out: Tensor, starts: Tensor | None = None) -> None:
    """Judge chains: append to histories and lengths, and write report rows to out [B, ReportColumns.total].

    starts [B + 1]: the row where each batch slot's choices begin, if they are packed end to end.
    """
    size, width = inputs.ids.shape
    columns = ReportColumns(width, tree=False)
    _accept[(size,)](
        batch.control, batch.lengths, batch.history, inputs.ids, chosen, starts, out, batch.control.stride(0),
        batch.history.stride(0),
        W=width, WP=power(width, 2), GUESSES=columns.guesses, COLUMNS=columns.total, PACKED=starts is not None,
        num_warps=1, **options(inputs.ids.device),
    )  # fmt: skip


def accept_twin(
    batch: BatchSlots, inputs: StepInputs, chosen: Tensor, out: Tensor, starts: Tensor | None = None
) -> None:
    width = inputs.ids.shape[1]
    said = choices_by_slot(chosen, starts, width)
    for b, row in enumerate(batch.control.tolist()):
        n, guesses = int(batch.lengths[b]), inputs.ids[b, 1:].tolist()
        fit = min(nodes_that_fit(row[Control.MAX_NODES], n, row[Control.LIMIT]), width - 1)
        broken = [token < 0 for token in said[b]]
        nodes, tokens = accept_path(guesses[:fit], list(range(-1, fit - 1)), said[b], broken)
        batch.history[b, n : n + len(tokens)] = torch.tensor(tokens)
        batch.lengths[b] = n + len(tokens)
        out[b] = torch.tensor([len(tokens), fit, int(len(tokens) > len(nodes)), *said[b], *guesses])


def choices_by_slot(chosen: Tensor, starts: Tensor | None, width: int) -> list[list[int]]:
    """Choices by batch slot; with -1 where one had no row, if they are packed."""
    if starts is None:
        rows: list[list[int]] = chosen.view(-1, width).tolist()
        return rows
    packed = chosen.tolist()
    rows = [packed[first:stop] for first, stop in pairwise(starts.tolist())]
    return [row + [-1] * (width - len(row)) for row in rows]


def _slot_twin(row: list[int], position: int, page: int, scratch: int) -> int:
    return (
        row[Control.PAGES + position // page] * page + position % page
        if 0 <= position < row[Control.LIMIT]
        else scratch
    )


def key_twin(mixed: int, position: int) -> int:
    return rng.mix(rng.mix(rng.mix(mixed ^ position)))


__all__ = ["accept", "accept_twin", "lookup", "lookup_twin", "prepare", "prepare_twin"]
