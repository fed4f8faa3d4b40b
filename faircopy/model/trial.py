"""Passes of a known size over a cache of their own, for timing: what they compute does not matter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from faircopy.costs import Curve
from faircopy.layout.base import LayerShape, Packed
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model
from faircopy.types import Batch, Draft, Request
from faircopy.types import Sequence as Text

PAGE = 32
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXT = 128
LEAST = 2  # sizes that are timed whatever it takes


@torch.no_grad()
def pass_curve(model: Model, most: int, seconds: float) -> Curve:
    """Seconds of a pass by its rows, each of a sequence of its own, up to `most`; measuring takes about `seconds`."""
    found: list[tuple[int, float]] = []
    end = time.perf_counter() + seconds
    for rows in SIZES:
        if found and (rows > 2 * most or (len(found) >= LEAST and time.perf_counter() + 3 * found[-1][1] > end)):
            break
        layout, packed = scene(model, rows, 1, min(CONTEXT, model.context // 2))
        found.append((rows, min(_timed(model, layout, packed) for _ in range(3))))
    return Curve(tuple(plausible(found)))


def plausible(times: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Times by rows without what slow moments have added: none is above that of more rows, or of several passes."""
    found: list[tuple[int, float]] = []
    for place, (rows, _) in enumerate(times):
        least = min(seconds for _, seconds in times[place:])
        found.append((rows, min([least, *(-(-rows // n) * before for n, before in found)])))
    return found


def _timed(model: Model, layout: PagedLayout, packed: Packed) -> float:
    begin = time.perf_counter()
    model.forward(packed, layout)
    return time.perf_counter() - begin


@dataclass(frozen=True, slots=True)
class CachedRows:
    """What a cache keeps per token, and of which tokens."""

    layers: list[LayerShape]
    dtype: torch.dtype
    device: torch.device
    vocab: int


def scene(
    model: Model | CachedRows, batch: int, rows: int, context: int, prompt: bool = False, page: int = PAGE
) -> tuple[PagedLayout, Packed]:
    """A layout filled with noise and a pass of `rows` rows for each sequence at this context.

    prompt: the rows are the last of the context, all fed at once, in tiles like those of graphs; else its last token
    and nodes behind it.
    """
    layout, seqs = filled(model, batch, context, rows, page)
    for seq in seqs:
        layout.set_cached(seq, context - (rows if prompt else 1))
    nodes = [[] if prompt else [n % model.vocab for n in range(1, rows)] for _ in seqs]
    lengths = [len(chain) for chain in nodes]
    packed = layout.pack(Batch(seqs, [context] * batch, lengths), Draft.chains(nodes), like_graphs=prompt)
    return layout, packed


def tree_scene(model: Model | CachedRows, context: int, page: int) -> tuple[PagedLayout, Packed]:
    """The same for the last token of one sequence and a tree of two nodes, in tiles like those of graphs."""
    layout, seqs = filled(model, 1, context, 2, page)
    layout.set_cached(seqs[0], context - 1)
    return layout, layout.pack(Batch(seqs, [context], [2]), Draft([[0, 1]], [[-1, -1]]), like_graphs=True)


def filled(model: Model | CachedRows, batch: int, context: int, more: int, page: int) -> tuple[PagedLayout, list[Text]]:
    """A layout filled with noise, and sequences of this length with room for more."""
    tables = BlockTables(PagePool(batch * -(-(context + more) // page)), page, reuse=False)
    layout = PagedLayout(tables, model.layers, model.dtype, model.device)
    for layer in range(len(model.layers)):
        for pool in layout.pools(layer):
            pool.normal_()
    return layout, [_sequence(n, context, tables, context + more, min(1000, model.vocab)) for n in range(batch)]


def _sequence(n: int, length: int, tables: BlockTables, tokens: int, vocab: int) -> Text:
    seq = Text(n, Request((1,)), [(7 * i + n) % vocab for i in range(length)])
    tables.open(seq)
    tables.reserve(seq, tokens)
    return seq
