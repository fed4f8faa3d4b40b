"""How Hopper's attention kernel shares key blocks among its blocks: its own functions, run on Python's integers."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from faircopy.kernels.gpu import flash

INTEGERS = SimpleNamespace(minimum=min, maximum=max, where=lambda condition, a, b: a if condition else b)


def plain(kernel: Any) -> Any:
    """A device function of scalars as a function of integers."""
    return FunctionType(kernel.fn.__code__, {"gl": INTEGERS})


start, unit = plain(flash._begin), plain(flash._unit)
Unit = tuple[int, int, int, int]  # tile, head, first block, the one after the last


def walk(ranges: list[tuple[int, int]], at: int, end: int, blocks: int, parts: bool) -> Iterator[tuple[Unit, bool]]:
    """The loop of the kernel's warps over one stretch; whether each unit is a whole tile."""
    counts = [stop - first for first, stop in ranges]
    head = at // max(sum(counts), 1)
    within = at - head * sum(counts)
    passed = [sum(counts[: n + 1]) <= within for n in range(len(counts))]
    tile, offset = sum(passed), within - sum(count for count, past in zip(counts, passed, strict=True) if past)
    while at < end:
        first, stop = ranges[tile]
        while at < end and offset < stop - first:
            block = start(offset, first, stop, blocks)
            at += block - first - offset
            upto = unit(block, first, stop, at, end, blocks, parts)
            if at < end and block < stop:
                yield (tile, head, block, upto), block == first and upto == stop
            at += upto - block
            offset = upto - first
        tile, offset = tile + 1, 0
        if tile == len(ranges):
            tile, head = 0, head + 1


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=9),
    st.integers(1, 8),
    st.integers(1, 40),
    st.sampled_from([4, 8]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_key_block_has_one_owner(
    tiles: list[tuple[int, int]], heads: int, programs: int, span: int, parts: bool
) -> None:
    ranges = [(first, first + count) for first, count in tiles]
    total = sum(stop - first for first, stop in ranges) * heads
    seen: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
    for program in range(programs):
        at, end = program * total // programs, (program + 1) * total // programs
        longest = max(stop - first for first, stop in ranges)
        taken = 0
        for (tile, head, block, upto), whole in walk(ranges, at, end, span if parts else 1 << 30, parts):
            assert whole or (block // span == (upto - 1) // span), "a unit is a tile or lies in a span"
            assert block == ranges[tile][0] or block % span == 0
            assert parts or whole
            seen.setdefault((tile, head), []).append((block, upto, whole))
            taken += upto - block
        assert taken <= end - at + (span if parts else longest), "shares are even but for the last unit"
    for tile, (first, stop) in enumerate(ranges):
        for head in range(heads):
            units = sorted(seen.pop((tile, head), []))
            covered = [n for block, upto, _ in units for n in range(block, upto)]
            assert covered == list(range(first, stop))
            assert len(units) <= 1 or not any(whole for *_, whole in units), "a tile is whole or in spans"
            if len(units) > 1:
                assert len(units) == -(-stop // span) - first // span, "the last to arrive waits for every span"
    assert not seen
