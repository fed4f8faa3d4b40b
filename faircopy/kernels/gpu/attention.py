"""Attention of ragged queries over paged keys, in spans and blocks of keys that begin at fixed positions.

A span's blocks extend one running softmax in ascending order; the spans' results are merged in ascending order. Whether
one program walks over all spans or many programs take some each changes no bit, and a block past a row's position
leaves the row untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy.kernels.gpu import flash
from faircopy.kernels.gpu.launch import begin, launched, options, power, processors, shared_memory
from faircopy.kernels.gpu.pages import END, PATH, SPAN, PagePlan, block_length

PARTS_LIMIT = 256 << 20  # bytes of spans' states held outside registers at most
COUNTERS = 4096  # two for each tile and key head that programs share


@triton.jit
def _merge(m, total, acc, m_new, total_new, acc_new):
    """The states of the spans so far and of a later one: maximum, sum and output. Exact for a span that saw nothing."""
    top = tl.maximum(m, m_new)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(m - safe), tl.exp2(m_new - safe)
    return top, tl.fma(total, old, total_new * new), tl.fma(acc, old[:, None], acc_new * new[:, None])


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores / cap), in units of log2(e)."""
    turned = 1.0 - 2.0 / (tl.exp2(scores / cap * 2.8853900817779268) + 1.0)
    return cap * turned * 1.4426950408889634


@triton.jit
def _extend(
    m, total, acc, query, keys, values, table, path, base, block, position, dims, head, scale, cap, window,
    KV: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, LAST: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, TAIL: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One more block of a span's keys: its running maximum, sum and output per row."""
    at = block * BN + tl.arange(0, BN)
    last = tl.max(position, 0)
    index = at
    if TAIL:
        index = tl.where(at < base, at, base + tl.load(path + tl.minimum(tl.maximum(at - base, 0), LAST - 1)))
    page = tl.load(table + index // PAGE, mask=at <= last, other=0).to(tl.int64)
    slot = page * PAGE + index % PAGE
    where = (slot[:, None] * KV + head) * D + dims[None, :]
    inside = tl.broadcast_to(at[:, None] <= last, (BN, dims.shape[0]))
    if dims.shape[0] != D:
        inside &= dims[None, :] < D
    precision: tl.constexpr = "ieee" if PRECISE else "tf32"
    key = tl.load(keys + where, mask=inside, other=0.0)
    value = tl.load(values + where, mask=inside, other=0.0)
    scores = tl.dot(query, key.T, input_precision=precision)
    if CAPPED:
        scores, scale = capped(scores * scale, cap), 1.0
    visible = at[None, :] <= position[:, None]
    if WINDOWED:
        visible &= at[None, :] > position[:, None] - window
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(m - safe)
    p = tl.exp2(tl.fma(scores, scale, -safe[:, None])).to(value.dtype)
    # a reduction's order depends on how rows lie in the tile, a product's does not: sums are products with ones
    ones = tl.full((BN, 16), 1.0, value.dtype)
    added = tl.max(tl.dot(p, ones, input_precision=precision), 1)
    return top, tl.fma(total, old, added), tl.dot(p, value, acc * old[:, None], input_precision=precision)


@triton.jit
def _finish(m, total, acc, sinks, heads, inside, SINKS: tl.constexpr):
    """Divide by the sum, shared with a score per head that has no value."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        m, total, acc = _merge(
            m, total, acc, sink, tl.full(total.shape, 1.0, tl.float32), tl.zeros(acc.shape, tl.float32)
        )
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _put(m, total, acc, states, sums, place, dims, live, inside, D: tl.constexpr):
    """Store the states of a tile's rows."""
    tl.store(sums + place * 2, m, mask=live)
    tl.store(sums + place * 2 + 1, total, mask=live)
    tl.store(states + place[:, None] * D + dims[None, :], acc, mask=inside)


@triton.jit
def _get(states, sums, place, dims, live, inside, D: tl.constexpr):
    """The states of a tile's rows that other programs have stored."""
    m = tl.load(sums + place * 2, mask=live, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(sums + place * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
    where = states + place[:, None] * D + dims[None, :]
    return m, total, tl.load(where, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _empty(BM: tl.constexpr, DP: tl.constexpr):
    """The state of rows that have seen no key."""
    m = tl.full((BM,), float("-inf"), tl.float32)
    return m, tl.zeros((BM,), tl.float32), tl.zeros((BM, DP), tl.float32)


@launched
@triton.jit(do_not_specialize=["window", "width", "blocks", "spans", "splits", "even"])
def _attend(
    q, keys, values, out, parts, stats, left, sums, counters, rows, ranges, seqs, tables, bases, paths, positions,
    sinks, scale, cap, window, width, blocks, spans, splits, even,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, Q: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BLOCKS: tl.constexpr, PAGE: tl.constexpr, LAST: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, LEAVES: tl.constexpr,
    TAIL: tl.constexpr, PRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, key head, split). Without SPLIT: all spans, merged as they come. With it: every splits-th span
    goes to `parts`, and the program that arrives last merges them. LEAVES: tiles that end early leave two states in
    `left` and `sums`, of the spans before the last and of the last; a TAIL goes on from there."""
    GROUP: tl.constexpr = HEADS // KV
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    places = tl.arange(0, BM)
    token, heads = places // GROUP, head * GROUP + places % GROUP
    dims = tl.arange(0, DP)
    begin(PDL)
    if EVEN:
        row = tl.where(token < even, tile * even + token, -1)
        seq, first, end = tile, 0, END_
    else:
        row = tl.load(rows + tile * Q + token, mask=token < Q, other=-1)
        seq, first, end = tl.load(seqs + tile), tl.load(ranges + 2 * tile), tl.load(ranges + 2 * tile + 1)
    live = row >= 0
    position = tl.load(positions + row, mask=live, other=-1)
    stop = tl.minimum(tl.minimum(end, blocks), tl.max(position, 0) // BN + 1)
    if WINDOWED:
        lowest = tl.min(tl.where(live, position, END_), 0)
        first = tl.maximum(first, tl.maximum(lowest - window + 1, 0) // BN)
    table = tables + seq.to(tl.int64) * width
    base = 0
    path = paths
    inside = live[:, None] & (dims[None, :] < D)
    line = row.to(tl.int64) * HEADS + heads
    m, total, acc = _empty(BM, DP)
    m_span, total_span, acc_span = _empty(BM, DP)
    low, high = first // BLOCKS, (stop + BLOCKS - 1) // BLOCKS
    if TAIL:
        base = tl.load(bases + tile)
        path = paths + tile * LAST
        if tl.load(ranges + 2 * tile) > 0:
            m, total, acc = _get(left, sums, 2 * line, dims, live, inside, D)
            m_span, total_span, acc_span = _get(left, sums, 2 * line + 1, dims, live, inside, D)
    elif low + split >= high:
        if LEAVES:  # noqa: SIM102
            if (end < END_) & (split == 0):
                _put(m, total, acc, left, sums, 2 * line, dims, live, inside, D)
                _put(m, total, acc, left, sums, 2 * line + 1, dims, live, inside, D)
        return
    query = tl.load(q + line[:, None] * D + dims[None, :], mask=inside, other=0.0)
    if not SPLIT:
        for block in range(first, stop):
            if block % BLOCKS == 0:
                m, total, acc = _merge(m, total, acc, m_span, total_span, acc_span)
                m_span, total_span, acc_span = _empty(BM, DP)
            m_span, total_span, acc_span = _extend(
                m_span, total_span, acc_span, query, keys, values, table, path, base, block, position, dims, head,
                scale, cap, window, KV, D, BN, PAGE, LAST, CAPPED, WINDOWED, TAIL, PRECISE,
            )  # fmt: skip
    else:
        for span in range(low + split, high, splits):
            m_span, total_span, acc_span = _empty(BM, DP)
            for block in range(tl.maximum(first, span * BLOCKS), tl.minimum(stop, (span + 1) * BLOCKS)):
                m_span, total_span, acc_span = _extend(
                    m_span, total_span, acc_span, query, keys, values, table, path, base, block, position, dims, head,
                    scale, cap, window, KV, D, BN, PAGE, LAST, CAPPED, WINDOWED, TAIL, PRECISE,
                )  # fmt: skip
            _put(m_span, total_span, acc_span, parts, stats, line * spans + span, dims, live, inside, D)
        tl.debug_barrier()
        counter = counters + tile * KV + head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived < tl.minimum(high - low, splits) - 1:
            return
        tl.store(counter, 0)
        m_span, total_span, acc_span = _get(parts, stats, line * spans + high - 1, dims, live, inside, D)
        for start in range(low, high - 1, 4):
            for n in tl.static_range(4):  # four at once: the loads do not wait for each other
                here = start + n < high - 1
                place = line * spans + start + n
                m_new, total_new, acc_new = _get(parts, stats, place, dims, live & here, inside & here, D)
                m, total, acc = _merge(m, total, acc, m_new, total_new, acc_new)
    if LEAVES:  # noqa: SIM102
        if end < END_:
            _put(m, total, acc, left, sums, 2 * line, dims, live, inside, D)
            _put(m_span, total_span, acc_span, left, sums, 2 * line + 1, dims, live, inside, D)
            return
    m, total, acc = _merge(m, total, acc, m_span, total_span, acc_span)
    y = _finish(m, total, acc, sinks, heads, live, SINKS)
    tl.store(out + line[:, None] * D + dims[None, :], y.to(out.dtype.element_ty), mask=inside)


END_ = tl.constexpr(END)


def counters(device: torch.device) -> Tensor:
    """How many programs of a tile and key head have arrived: all zero between passes; one set per stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    plan: PagePlan,
    arrived: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """q [T, H, D] at `positions` against pools [S, Hkv, D] -> [T, H, D].

    splits: programs side by side for a tile's spans; None: as pays, and where Hopper's kernel fits, that one.
    """
    rows, heads, d = q.shape
    group = heads // keys.shape[1]
    log2e = 1.4426950408889634
    numbers = (sinks, scale if softcap else scale * log2e, softcap, window)
    given = {"CAPPED": softcap > 0, "WINDOWED": window > 0, "SINKS": sinks is not None}
    out = torch.empty(rows, heads, d, dtype=keys.dtype, device=keys.device)
    for part in (plan, plan.beside):
        if part is None:
            continue
        if splits is None and part.rows.shape[0] > 0 and flash.fits(keys, part, group):
            flash.attend(q, keys, values, out, positions, part, arrived, PARTS_LIMIT, numbers, given)
        else:
            _attend_part(q, keys, values, out, positions, arrived, part, numbers, splits, given)
    return out


def _attend_part(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, positions: Tensor, arrived: Tensor, plan: PagePlan,
    numbers: tuple[Any, ...], splits: int | None, given: dict[str, bool],
) -> None:  # fmt: skip
    """A plan's tiles, and the tails that go on behind them."""
    rows, heads, d = q.shape
    lines = 0 if plan.tails is None else 2 * rows * heads
    left, sums = (torch.empty(lines, n, dtype=torch.float32, device=q.device) for n in (d, 2))
    if plan.rows.shape[0]:
        splits = splits or _splits(q, plan, keys.shape[1])
        _run(q, keys, values, out, left, sums, positions, arrived, plan, numbers, splits, given)
    if plan.tails is not None:
        _run(q, keys, values, out, left, sums, positions, arrived, plan.tails, numbers, 1, given)


def _run(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, left: Tensor, sums: Tensor, positions: Tensor,
    arrived: Tensor, plan: PagePlan, numbers: tuple[Any, ...], splits: int, given: dict[str, bool],
) -> None:  # fmt: skip
    """One launch: a plan's own tiles."""
    (rows, heads, d), kv = q.shape, keys.shape[1]
    tiles, height = plan.rows.shape
    bm, bn = power(height * (heads // kv), 16), block_length(d, q.element_size())
    spans = -(-plan.blocks * bn // SPAN)
    lines = rows * heads * spans if splits > 1 else 0
    parts, stats = (torch.empty(lines, n, dtype=torch.float32, device=q.device) for n in (d, 2))
    _attend[(tiles, kv, splits)](
        q, keys, values, out, parts, stats, left, sums, arrived, plan.rows, plan.ranges, plan.seqs, plan.tables,
        plan.bases, plan.paths, positions, *numbers, plan.tables.stride(0), plan.blocks, spans, splits, plan.even,
        HEADS=heads, KV=kv, D=d, DP=power(d, 16), Q=1 if plan.even else height, BM=bm, BN=bn,
        BLOCKS=SPAN // bn, PAGE=plan.page, LAST=PATH, SPLIT=splits > 1, EVEN=plan.even > 0,
        LEAVES=plan.tails is not None, TAIL=plan.bases is not None, PRECISE=q.dtype == torch.float32, **given,
        **_launch(bm, bn, power(d, 16) * q.element_size(), splits, q.device), **options(q.device),
    )  # fmt: skip


def _launch(bm: int, bn: int, line_bytes: int, splits: int, device: torch.device) -> dict[str, int]:
    """Warps, and as many blocks of keys and values in flight as shared memory holds beside the queries."""
    fitting = (shared_memory(device) - bm * line_bytes) // (2 * bn * line_bytes)
    return {"num_warps": 4 if bm < 64 else 8, "num_stages": max(1, min(fitting, 3 if splits == 1 else 2))}


def _splits(q: Tensor, plan: PagePlan, kv: int) -> int:
    """How many programs share a tile's spans: enough to fill the chip, as far as the states may be held."""
    spans = -(-plan.blocks * block_length(q.shape[2], q.element_size()) // SPAN)
    programs, fill = plan.rows.shape[0] * kv, 2 * processors(q.device)
    if programs >= fill or spans * q.numel() * 4 > PARTS_LIMIT:
        return 1
    return min(spans, power(-(-fill // programs)), 64)


def attend_pages_twin(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    plan: PagePlan,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Row by row, in float32; a row that leaves its state is computed whole by its tail."""
    out = torch.zeros_like(q)
    group = q.shape[1] // keys.shape[1]
    for part, tile, row in _final_rows(plan):
        position = int(positions[row])
        at = torch.arange(max(0, position - window + 1) if window else 0, position + 1, device=q.device)
        slots = _slots(part, tile, at)
        k, v = (pool[slots].float().repeat_interleave(group, 1) for pool in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[row].float(), k) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None]], 1)
        weights = torch.softmax(scores, -1)[:, : len(at)]
        out[row] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
    return out


def _final_rows(plan: PagePlan) -> Iterator[tuple[PagePlan, int, int]]:
    """Each row once: the plan, the tile and the row that finishes it."""
    for part in (plan, plan.tails, plan.beside):
        if part is None:
            continue
        for tile, (rows, (_, stop)) in enumerate(zip(part.rows.tolist(), part.ranges.tolist(), strict=True)):
            if stop >= END:
                yield from ((part, tile, row) for row in rows if row >= 0)


def _slots(plan: PagePlan, tile: int, at: Tensor) -> Tensor:
    index = at
    if plan.bases is not None and plan.paths is not None:
        base = int(plan.bases[tile])
        index = torch.where(at < base, at, base + plan.paths[tile][(at - base).clamp(0, PATH - 1)])
    table = plan.tables[int(plan.seqs[tile])]
    return table[index // plan.page].long() * plan.page + index % plan.page
