"""Trees between passes, on the device: where nodes stand, which path is accepted, and its keys moved into line.

Row 0 of a batch slot is its last token, row j its node j - 1. A node's keys lie behind the text in the order of the
nodes, whatever its depth; its position is given by its depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from faircopy import rng
from faircopy.acceptance import accept_path, nodes_that_fit
from faircopy.kernels.gpu.launch import begin, launched, options, power
from faircopy.kernels.gpu.pages import PATH
from faircopy.kernels.gpu.pick import mix
from faircopy.kernels.gpu.records import (
    FINITE,
    LIMIT,
    MAX_NODES,
    NUM_TOKENS,
    PAGES,
    REPORT_MAX_NODES,
    TOKENS,
    Control,
    Report,
    ReportColumns,
    seed_of,
)
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.gpu.step import choices_by_slot, fitting_nodes, key_twin, load_seed


@dataclass(frozen=True, slots=True)
class TreeNodes:
    """What a step with trees knows beside its inputs."""

    parents: Tensor  # [B, W] int32: the row of each row's parent; -1 for row 0. The drafter fills it.
    base: Tensor  # [B] int32: the position where nodes begin
    paths: Tensor  # [B, W, PATH] int32: the nodes down to each row, counted from base
    taken: Tensor  # [B, W] int32: after the step, the rows of the accepted path, row 0 first
    pools: tuple[Tensor, ...]  # keys and values of all layers
    offsets: Tensor  # [pools] int64: where each begins, counted from the first one in numbers
    widths: Tensor  # [pools] int32: numbers per slot
    deepest: int  # levels a tree can have

    @classmethod
    def over(cls, pools: list[Tensor], size: int, width: int, deepest: int) -> TreeNodes:
        device, first = pools[0].device, pools[0]
        offsets = [(pool.data_ptr() - first.data_ptr()) // first.itemsize for pool in pools]
        widths = [pool[0].numel() for pool in pools]

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        parents = table(size, width)
        parents[:, 0] = -1
        return cls(
            parents, table(size), table(size, width, PATH), table(size, width), tuple(pools),
            torch.tensor(offsets, device=device), torch.tensor(widths, dtype=torch.int32, device=device), deepest,
        )  # fmt: skip


@launched
@triton.jit
def _place_nodes(
    control, lengths, parents, base, paths, positions, keys, stride,
    W: tl.constexpr, WP: tl.constexpr, DEEP: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    line = control + b * stride
    n, limit = tl.load(lengths + b), tl.load(line + LIMIT)
    seed = load_seed(line)
    tl.store(base + b, n)
    at = tl.arange(0, WP)
    inside = at < W
    depth = tl.zeros((WP,), tl.int32)
    row = at
    for _ in range(DEEP):
        row = tl.load(parents + b * W + row, mask=inside & (row > 0), other=0)
        depth += (row > 0).to(tl.int32)
    depth += (at > 0).to(tl.int32)
    last = limit - 1 - n  # the last node with a KV slot, counted from base; those behind it are never accepted
    row = at
    for up in range(DEEP):
        place = depth - 1 - up
        here = inside & (place >= 0)
        tl.store(paths + (b * W + at) * LAST + place, tl.minimum(row - 1, last), mask=here)
        row = tl.load(parents + b * W + row, mask=here & (row > 0), other=0)
    position = n - 1 + depth
    tl.store(positions + b * W + at, tl.minimum(position, limit - 1), mask=inside)
    noise = mix(mix(mix(seed ^ (position + 1).to(tl.uint64))))
    tl.store(keys + b * W + at, noise.to(tl.int64, bitcast=True), mask=inside)


@launched
@triton.jit
def _accept_tree(
    control, lengths, history, ids, parents, chosen, starts, taken, out, stride, reach,
    W: tl.constexpr, WP: tl.constexpr, DEEP: tl.constexpr, GUESSES: tl.constexpr, PARENTS: tl.constexpr,
    ROUTE: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b judges the tree of batch slot b and writes its report row."""
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    line = control + b * stride
    n = tl.load(lengths + b)
    fit = tl.minimum(fitting_nodes(tl.load(line + MAX_NODES), n, tl.load(line + LIMIT)), W - 1)
    at = tl.arange(0, WP)
    node = (at > 0) & (at < W)
    guess = tl.load(ids + b * W + at, mask=node, other=-1)
    parent = tl.load(parents + b * W + at, mask=node, other=-1)
    report = out + b * COLUMNS
    path = report + ROUTE
    tl.store(report + GUESSES + at - 1, guess, mask=node)
    tl.store(report + PARENTS + at - 1, parent - 1, mask=node)
    tl.store(taken + b * W + at, tl.zeros((WP,), tl.int32), mask=at < W)
    tl.debug_barrier()
    row = n * 0
    count = n * 0
    finite = n * 0 + 1
    alive = row == 0
    first, rows = b * W, n * 0 + W
    if PACKED:
        first = tl.load(starts + b).to(tl.int64)
        rows = tl.load(starts + b + 1) - first.to(tl.int32)
    for level in range(DEEP + 1):
        token = tl.load(chosen + first + row, mask=row < rows, other=-1)
        tl.store(taken + b * W + level, row, mask=alive & (level < W))
        tl.store(path + level, row, mask=alive & (level < W))
        finite = tl.where(alive & (token < 0), 0, finite)
        alive = alive & (token >= 0)
        tl.store(history + b * reach + n + level, token, mask=alive)
        tl.store(report + TOKENS + level, token, mask=alive & (level < W))
        count += alive.to(tl.int32)
        right = node & (parent == row) & (guess == token) & (at <= fit)
        child = tl.min(tl.where(right, at, WP), 0)
        alive = alive & (child < WP)
        row = tl.where(alive, child, row)
    tl.store(lengths + b, n + count)
    tl.store(report + NUM_TOKENS, count)
    tl.store(report + REPORT_MAX_NODES, fit)
    tl.store(report + FINITE, finite)


@launched
@triton.jit
def _compact(
    control, base, taken, out, pool, offsets, widths, stride,
    W: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (batch slot, pool): the keys of accepted rows move to their positions, in the order of the path."""
    b = tl.program_id(0).to(tl.int64)
    begin(PDL)
    report = out + b * COLUMNS
    rows = tl.load(report + NUM_TOKENS) + 1 - tl.load(report + FINITE)  # rows that hold tokens of the text now
    table = control + b * stride + PAGES
    n, start, width = tl.load(base + b), tl.load(offsets + tl.program_id(1)), tl.load(widths + tl.program_id(1))
    for level in range(1, DEEP + 1):
        row = tl.load(taken + b * W + level, mask=level < W, other=0)
        if (level < rows) & (row != level):
            source, target = n - 1 + row, n - 1 + level
            there = tl.load(table + source // PAGE).to(tl.int64) * PAGE + source % PAGE
            here = tl.load(table + target // PAGE).to(tl.int64) * PAGE + target % PAGE
            for first in range(0, width, BLOCK):
                at = first + tl.arange(0, BLOCK)
                values = tl.load(pool + start + there * width + at, mask=at < width)
                tl.store(pool + start + here * width + at, values, mask=at < width)


def place_nodes(batch: BatchSlots, inputs: StepInputs, trees: TreeNodes) -> None:
    """After the drafter: positions and noise of its nodes by depth, and the path to each."""
    size, width = inputs.ids.shape
    _place_nodes[(size,)](
        batch.control, batch.lengths, trees.parents, trees.base, trees.paths, inputs.positions, inputs.keys,
        batch.control.stride(0), W=width, WP=power(width, 2), DEEP=trees.deepest, LAST=PATH, num_warps=1,
        **options(inputs.ids.device),
    )  # fmt: skip


def place_nodes_twin(batch: BatchSlots, inputs: StepInputs, trees: TreeNodes) -> None:
    for b, control in enumerate(batch.control.tolist()):
        n, limit, seed = int(batch.lengths[b]), control[Control.LIMIT], seed_of(control)
        trees.base[b] = n
        for j in range(inputs.ids.shape[1]):
            path, row = [], j
            while row > 0:
                path.append(min(row - 1, limit - 1 - n))
                row = int(trees.parents[b, row])
            trees.paths[b, j, : len(path)] = torch.tensor(path[::-1], dtype=torch.int32)
            inputs.positions[b, j] = min(n - 1 + len(path), limit - 1)
            inputs.keys[b, j] = rng.signed(key_twin(seed, n + len(path)))


def accept_tree(
    batch: BatchSlots, inputs: StepInputs, trees: TreeNodes, chosen: Tensor, out: Tensor, starts: Tensor | None = None
) -> None:
    """Judge trees: append to histories and lengths, and write report rows to out [B, ReportColumns.total].

    starts [B + 1]: the row where each batch slot's choices begin, if they are packed end to end.
    """
    size, width = inputs.ids.shape
    columns = ReportColumns(width, tree=True)
    _accept_tree[(size,)](
        batch.control, batch.lengths, batch.history, inputs.ids, trees.parents, chosen, starts, trees.taken, out,
        batch.control.stride(0), batch.history.stride(0),
        W=width, WP=power(width, 2), DEEP=trees.deepest, GUESSES=columns.guesses, PARENTS=columns.parents,
        ROUTE=columns.path, COLUMNS=columns.total, PACKED=starts is not None, num_warps=1,
        **options(inputs.ids.device),
    )  # fmt: skip


def accept_tree_twin(
    batch: BatchSlots, inputs: StepInputs, trees: TreeNodes, chosen: Tensor, out: Tensor, starts: Tensor | None = None
) -> None:
    width = inputs.ids.shape[1]
    columns, said = ReportColumns(width, tree=True), choices_by_slot(chosen, starts, width)
    guesses, parents = inputs.ids[:, 1:].tolist(), (trees.parents[:, 1:] - 1).tolist()
    for b, control in enumerate(batch.control.tolist()):
        n = int(batch.lengths[b])
        fit = min(nodes_that_fit(control[Control.MAX_NODES], n, control[Control.LIMIT]), width - 1)
        broken = [token < 0 for token in said[b]]
        nodes, tokens = accept_path(guesses[b][:fit], parents[b][:fit], said[b], broken)
        path = torch.tensor([0, *(node + 1 for node in nodes)], dtype=torch.int32)
        batch.history[b, n : n + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        batch.lengths[b] = n + len(tokens)
        trees.taken[b] = 0
        trees.taken[b, : len(path)] = path
        out[b, : Report.TOKENS] = torch.tensor([len(tokens), fit, int(len(tokens) > len(nodes))])
        out[b, Report.TOKENS : Report.TOKENS + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        out[b, columns.guesses : columns.parents] = inputs.ids[b, 1:]
        out[b, columns.parents : columns.path] = trees.parents[b, 1:] - 1
        out[b, columns.path : columns.path + len(path)] = path


def compact(batch: BatchSlots, trees: TreeNodes, out: Tensor, page: int) -> None:
    """Move the keys and values of the accepted path to their positions, in all layers."""
    size, width = trees.parents.shape
    block = min(1024, power(int(trees.pools[0][0].numel())))
    _compact[(size, len(trees.pools))](
        batch.control, trees.base, trees.taken, out, trees.pools[0], trees.offsets, trees.widths,
        batch.control.stride(0), W=width, DEEP=min(trees.deepest, width - 1),
        COLUMNS=ReportColumns(width, tree=True).total, PAGE=page, BLOCK=block, num_warps=4, **options(out.device),
    )  # fmt: skip


def compact_twin(batch: BatchSlots, trees: TreeNodes, out: Tensor, page: int) -> None:
    for b, control in enumerate(batch.control.tolist()):
        count, finite = int(out[b, Report.NUM_TOKENS]), int(out[b, Report.FINITE])
        for level in range(1, count + 1 - finite):
            ends = [int(trees.base[b]) - 1 + row for row in (int(trees.taken[b, level]), level)]
            there, here = (control[Control.PAGES + end // page] * page + end % page for end in ends)
            for pool in trees.pools:
                pool[here] = pool[there]


__all__ = ["TreeNodes", "accept_tree", "accept_tree_twin", "compact", "compact_twin", "place_nodes", "place_nodes_twin"]
