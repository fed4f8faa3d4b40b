"""What happens between passes, on the device: where the next tokens go, what a lookup proposes, what is accepted.

A batch in the air is a table of slots. The host says who sits where and how far each may go; lengths and histories are
the device's own, so that a step can follow the one before without anybody looking.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy import rng
from faircopy.kernels.gpu.launch import begin, options, power
from faircopy.kernels.gpu.pick import mix

# Columns of the control table; the page table follows.
FRESH, LENGTH, LIMIT, WIDTH, TEMPERATURE, SEED_LOW, SEED_HIGH, PAGES = range(8)


@dataclass(frozen=True, slots=True)
class BatchSlots:
    """The state of a batch in the air, one row per slot."""

    control: Tensor  # [B, PAGES + pages] int32, written by the host
    lengths: Tensor  # [B] int32
    history: Tensor  # [B, context + spare] int32

    def part(self, size: int) -> BatchSlots:
        return BatchSlots(self.control[:size], self.lengths[:size], self.history[:size])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step's passes read: rows of W = k + 1 columns, the last token and its nodes."""

    ids: Tensor  # [B, W] int32; the drafter fills the nodes
    positions: Tensor  # [B, W] int32
    slots: Tensor  # [B, W] int64
    keys: Tensor  # [B, W] int64, for the token after each place
    temperatures: Tensor  # [B, W] float32
    before: Tensor  # [3, B, 2] int64: ids, positions, slots of the last two tokens, for a draft model to catch up
    columns: Tensor  # [2, W, B] int64: positions and slots once more, column by column

    @classmethod
    def empty(cls, size: int, width: int, device: torch.device) -> StepInputs:
        def table(kind: torch.dtype) -> Tensor:
            return torch.zeros(size, width, dtype=kind, device=device)

        ints, longs = torch.int32, torch.int64
        before = torch.zeros(3, size, 2, dtype=longs, device=device)
        columns = torch.zeros(2, width, size, dtype=longs, device=device)
        return cls(table(ints), table(ints), table(longs), table(longs), table(torch.float32), before, columns)


@triton.jit
def _slot(table, position, limit, inside, scratch, PAGE: tl.constexpr):
    """Where a position's keys lie; beyond the limit, or before the beginning, in the scratch."""
    real = inside & (position >= 0) & (position < limit)
    page = tl.load(table + position // PAGE, mask=real, other=0).to(tl.int64)
    return tl.where(real, page * PAGE + position % PAGE, scratch)


@triton.jit(do_not_specialize=["size"])
def _prepare(
    control, lengths, history, ids, positions, slots, keys, temperatures, before, lanes, columns, reach, scratch, size,
    W: tl.constexpr, WP: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    line = control + b * columns
    n = tl.where(tl.load(line) != 0, tl.load(line + 1), tl.load(lengths + b))
    tl.store(lengths + b, n)
    limit = tl.load(line + 2)
    temperature = tl.load(line + 4).to(tl.float32, bitcast=True)
    low, high = tl.load(line + 5).to(tl.uint32, bitcast=True), tl.load(line + 6).to(tl.uint32, bitcast=True)
    seed = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    at = tl.arange(0, WP)
    inside = at < W
    position = n - 1 + at
    seen = tl.minimum(position, limit - 1)  # nodes beyond count for nothing, and have no pages to look into
    tl.store(positions + b * W + at, seen, mask=inside)
    slot = _slot(line + 7, position, limit, inside, scratch, PAGE)
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
    tl.store(where + size * 4, _slot(line + 7, back, limit, back >= 0, scratch, PAGE))


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


@triton.jit
def _accept(
    control, lengths, history, ids, chosen, starts, out, columns, reach,
    W: tl.constexpr, WP: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[b]: how many tokens, of how many nodes, were they all sound; then the tokens, then the nodes."""
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    line = control + b * columns
    n = tl.load(lengths + b)
    room = tl.maximum(tl.minimum(tl.load(line + 3), tl.load(line + 2) - n - 1), 0)
    at = tl.arange(0, WP)
    inside = at < W
    first, rows = b * W, W
    if PACKED:
        first = tl.load(starts + b).to(tl.int64)
        rows = tl.load(starts + b + 1) - first
    said = tl.load(chosen + first + at, mask=inside & (at < rows), other=-1)
    guess = tl.load(ids + b * W + 1 + at, mask=at < W - 1, other=-1)
    wrong = (guess != said) | (at >= room) | (at >= W - 1)
    right = tl.min(tl.where(wrong, at, WP), 0)  # nodes that say what the target says, from the first on
    broken = tl.min(tl.where((said < 0) | (at >= W), at, WP), 0)
    count = tl.minimum(right + 1, broken)
    tl.store(history + b * reach + n + at, said, mask=at < count)
    tl.store(lengths + b, n + count)
    row = out + b * (2 * W + 2)
    tl.store(row, count)
    tl.store(row + 1, tl.minimum(room, W - 1))
    tl.store(row + 2, (count == right + 1).to(tl.int32))
    tl.store(row + 3 + at, said, mask=inside)
    tl.store(row + 3 + W + at, guess, mask=at < W - 1)


def prepare(batch: BatchSlots, inputs: StepInputs, page: int, scratch: int) -> None:
    """Fill the inputs from the slots: every column but the nodes."""
    size, width = inputs.ids.shape
    _prepare[(size,)](
        batch.control, batch.lengths, batch.history, inputs.ids, inputs.positions, inputs.slots, inputs.keys,
        inputs.temperatures, inputs.before, inputs.columns, batch.control.stride(0), batch.history.stride(0), scratch, size,
        W=width, WP=power(width, 2), PAGE=page, num_warps=1, **options(inputs.ids.device),
    )  # fmt: skip


def prepare_twin(batch: BatchSlots, inputs: StepInputs, page: int, scratch: int) -> None:
    for b, row in enumerate(batch.control.tolist()):
        n = row[LENGTH] if row[FRESH] else int(batch.lengths[b])
        batch.lengths[b] = n
        seed = (row[SEED_HIGH] & 0xFFFFFFFF) << 32 | (row[SEED_LOW] & 0xFFFFFFFF)
        inputs.ids[b, 0] = batch.history[b, n - 1]
        inputs.temperatures[b] = batch.control[b, TEMPERATURE : TEMPERATURE + 1].view(torch.float32)
        for j in range(inputs.ids.shape[1]):
            inputs.positions[b, j] = min(n - 1 + j, row[LIMIT] - 1)
            inputs.slots[b, j] = _slot_twin(row, n - 1 + j, page, scratch)
            inputs.keys[b, j] = as_signed(key_twin(seed, n + j))
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
    """Judge chains: append to histories and lengths, and report to out [B, 2 W + 2].

    starts [B + 1]: where each slot's choices begin, if they are packed end to end.
    """
    size, width = inputs.ids.shape
    _accept[(size,)](
        batch.control, batch.lengths, batch.history, inputs.ids, chosen, starts, out, batch.control.stride(0),
        batch.history.stride(0),
        W=width, WP=power(width, 2), PACKED=starts is not None, num_warps=1, **options(inputs.ids.device),
    )  # fmt: skip


def accept_twin(
    batch: BatchSlots, inputs: StepInputs, chosen: Tensor, out: Tensor, starts: Tensor | None = None
) -> None:
    width = inputs.ids.shape[1]
    said = chosen.view(-1, width).tolist() if starts is None else _apart(chosen.tolist(), starts.tolist(), width)
    for b, row in enumerate(batch.control.tolist()):
        n, nodes = int(batch.lengths[b]), inputs.ids[b, 1:].tolist()
        room = max(min(row[WIDTH], row[LIMIT] - n - 1), 0)
        right = 0
        while right < min(room, width - 1) and nodes[right] == said[b][right]:
            right += 1
        sound = next((i for i, token in enumerate(said[b]) if token < 0), width)
        count = min(right + 1, sound)
        batch.history[b, n : n + count] = torch.tensor(said[b][:count])
        batch.lengths[b] = n + count
        out[b] = torch.tensor([count, min(room, width - 1), int(count == right + 1), *said[b], *nodes])


def _apart(chosen: list[int], starts: list[int], width: int) -> list[list[int]]:
    """Packed choices slot by slot, with -1 where a slot had no row."""
    rows = [chosen[first:stop] for first, stop in pairwise(starts)]
    return [row + [-1] * (width - len(row)) for row in rows]


def _slot_twin(row: list[int], position: int, page: int, scratch: int) -> int:
    return row[PAGES + position // page] * page + position % page if 0 <= position < row[LIMIT] else scratch


def key_twin(mixed: int, position: int) -> int:
    return rng.mix(rng.mix(rng.mix(mixed ^ position)))


def as_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


__all__ = ["BatchSlots", "StepInputs", "accept", "accept_twin", "lookup", "lookup_twin", "prepare", "prepare_twin"]
