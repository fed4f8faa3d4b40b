"""Kernel checks of trees between passes: each against its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from faircopy import rng
from faircopy.kernels.gpu import attention, flash, lanes, packing, pages, pick, tree
from faircopy.kernels.gpu.launch import hopper
from faircopy.kernels.gpu.records import Control, ReportColumns
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.gpu.tree import TreeNodes

SLOTS, WIDTH, PAGE, DEEP = 5, 8, 4, 4
PARENTS = [[-1, 0, 0, 1, 3, 4, 2, 0], [-1, 0, 1, 2, 3, 0, 0, 5], [-1, 0, 0, 0, 0, 0, 0, 0]]
GUESSES = [[9, 1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 3, 4, 1, 7, 8], [9, 1, 2, -1, 4, 5, 6, 7]]
CHOSEN = [[1, 3, 6, 4, 5, 8, 8, 8], [1, 2, -1, 4, 5, 6, 7, 8], [2, 9, 3, 9, 9, 9, 9, 9]]


def offers(device: torch.device) -> float:
    """Which tokens are offered, and how likely they are said to be; three rows per batch slot."""
    logits = torch.randn(9, 9000, generator=torch.Generator().manual_seed(4)).to(device) * 3
    logits[1, 4097] = logits[1, 8000] = 50.0
    logits[4, 5000], logits[5] = torch.nan, -torch.inf
    logits[5, 17] = 1.0
    temperatures = torch.tensor([0.0, 0.0, 0.8], device=device)
    keys = torch.tensor([rng.signed(rng.key(7, n)) for n in range(3)], device=device)
    worst = 0.0
    for many in (1, 10):
        found = [f(logits, temperatures, keys, many, 8990) for f in (pick.offer, pick.offer_twin)]
        worst += _offered_otherwise(*found)
    return worst + _few_words(logits[:, :6000], temperatures, keys)


def _few_words(logits: Tensor, temperatures: Tensor, keys: Tensor) -> float:
    """Logits of some tokens alone, in any order: what is offered with those of the others at minus infinity."""
    words = torch.randperm(8990, generator=torch.Generator().manual_seed(2))[:6000].to(logits.device)
    whole = logits.new_full((9, 9000), -torch.inf).index_copy(1, words, logits)
    wanted = pick.offer_twin(whole, temperatures, keys, 10, 8990)
    found = [f(logits.contiguous(), temperatures, keys, 10, 8990, words) for f in (pick.offer, pick.offer_twin)]
    return sum(_offered_otherwise(ours, wanted) for ours in found)


def _offered_otherwise(ours: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    (ids, scores), (twin_ids, twin_scores) = ours, wanted
    there = twin_scores > -torch.inf
    wrong = (ids != twin_ids)[there].sum() + (there != (scores > -torch.inf)).sum()
    return float(wrong) + float((scores - twin_scores)[there].abs().max() > 1e-4)


def trees(device: torch.device) -> float:
    """place_nodes, accept_tree and compact, as the twins do; some slots end, one is empty, one breaks in the middle."""
    worlds = [_world(device) for _ in range(2)]
    for (place_nodes, accept_tree, compact), (slots, inputs, trees, out, chosen) in zip(_STEPS, worlds, strict=True):
        place_nodes(slots, inputs, trees)
        accept_tree(slots, inputs, trees, chosen.flatten(), out)
        compact(slots, trees, out, PAGE)
    return float(sum(not torch.equal(a, b) for a, b in zip(*map(_state, worlds), strict=True)))


def packed_trees(device: torch.device) -> float:
    """Rows of trees end to end, their plans, and which path is accepted, as the twins do."""
    kernels = (tree.place_nodes, packing.pack, packing.pack_paths, tree.accept_tree)
    twins = (tree.place_nodes_twin, packing.pack_twin, packing.pack_paths_twin, tree.accept_tree_twin)
    states = []
    for place_nodes, pack, pack_paths, accept_tree in (kernels, twins):
        world = slots, inputs, trees, out, chosen = _world(device)
        inputs.ids[2, 3:] = -1
        rows = packing.PackedRows.empty(SLOTS, WIDTH, device)
        tables, count = slots.control[:, Control.PAGES :], SLOTS * WIDTH - 9
        plan = pages.packed_tree_plan(SLOTS, WIDTH, count, tables, PAGE, 32, 16, 64)
        place_nodes(slots, inputs, trees)
        pack(slots, inputs, rows, 159)
        pack_paths(rows, trees, plan, 4)
        said = torch.zeros(count, dtype=torch.int32, device=device)
        real = rows.rows >= 0
        said[rows.rows[real].long()] = chosen[real]
        accept_tree(slots, inputs, trees, said, out, rows.starts)
        tails = plan.tails
        assert tails is not None and tails.bases is not None and tails.paths is not None
        live = tails.rows[:, 0] >= 0
        parts = [tails.seqs[live], tails.bases[live], tails.paths[live], tails.rows, tails.ranges, plan.rows]
        states.append([*_state(world), *parts, plan.ranges, rows.starts, rows.rows])
    return float(sum(not torch.equal(a, b) for a, b in zip(*states, strict=True)))


_STEPS: Any = (
    (tree.place_nodes, tree.accept_tree, tree.compact),
    (tree.place_nodes_twin, tree.accept_tree_twin, tree.compact_twin),
)


def _world(device: torch.device) -> tuple[BatchSlots, StepInputs, TreeNodes, Tensor, Tensor]:
    control = torch.zeros(SLOTS, Control.PAGES + 8, dtype=torch.int32)
    control[:, Control.LIMIT] = torch.tensor([30, 14, 30, 30, 1])
    control[:, Control.MAX_NODES] = torch.tensor([7, 7, 7, 2, 0])
    control[:, Control.SEED_LOW : Control.PAGES] = torch.arange(10).view(5, 2) - 4
    control[:, Control.PAGES :] = torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(5, 8)
    lengths = torch.tensor([9, 11, 16, 4, 1], dtype=torch.int32)
    history = torch.zeros(SLOTS, 40, dtype=torch.int32)
    slots = BatchSlots(control.to(device), lengths.to(device), history.to(device))
    shapes = [(160, 2, 8), (160, 1, 8), (160, 2, 24)]
    pools = [torch.arange(float(torch.Size(s).numel()), device=device).view(s) + n for n, s in enumerate(shapes)]
    inputs, trees = StepInputs.empty(SLOTS, WIDTH, device), TreeNodes.over(pools, SLOTS, WIDTH, DEEP)
    order = [0, 1, 2, 0, 1]
    inputs.ids.copy_(torch.tensor([GUESSES[n] for n in order]))
    trees.parents.copy_(torch.tensor([PARENTS[n] for n in order]))
    chosen = torch.tensor([CHOSEN[n] for n in order], dtype=torch.int32, device=device)
    return (
        slots,
        inputs,
        trees,
        torch.zeros(SLOTS, ReportColumns(WIDTH, tree=True).total, dtype=torch.int32, device=device),
        chosen,
    )


def _state(world: tuple[BatchSlots, StepInputs, TreeNodes, Tensor, Tensor]) -> list[Tensor]:
    slots, inputs, trees, out, _ = world
    tables = [slots.lengths, slots.history, inputs.positions, inputs.keys, trees.base, trees.paths, trees.taken]
    return [*tables, out, *trees.pools]


PAGES = 24  # of a sequence: two spans of keys


def tree_bits(device: torch.device, dtype: torch.dtype) -> float:
    """Captured trees: every row has the bits of its path laid out as a chain, at lengths around the ends of blocks."""
    page, kv, group, dim, rows = 32, 2, 4, 64, 6
    lengths, parents = (3, 127, 129, 511, 512, 700), [-1, 0, 0, 1, 2, 4]
    size = len(lengths)
    tables = torch.randperm(size * PAGES, generator=torch.Generator().manual_seed(3)).int().view(size, -1).to(device)
    generator = torch.Generator().manual_seed(5)
    pools = [torch.randn(size * PAGES * page, kv, dim, generator=generator).to(device, dtype) for _ in range(2)]
    q = torch.randn(size * rows, kv * group, dim, generator=generator).to(device, dtype)
    routes = [_route(parents, row) for row in range(rows)]
    paths = torch.zeros(size, rows, pages.PATH, dtype=torch.int32, device=device)
    for row, route in enumerate(routes):
        paths[:, row, : len(route)] = torch.tensor([node - 1 for node in route], dtype=torch.int32)
    plan = pages.tree_plan(paths, tables, page, PAGES * page, group, dim, dtype.itemsize, rows - 1)
    bases = torch.tensor(lengths, dtype=torch.int32, device=device)
    pages.set_base(plan, bases, pages.block_length(dim, dtype.itemsize))
    where = [n - 1 + len(route) for n in lengths for route in routes]
    positions = torch.tensor(where, dtype=torch.int32, device=device)
    if plan.lanes is not None:
        lanes.place_lanes(plan, positions)
    out = _attend(q, pools, positions, plan, device)
    wrong = _packed_otherwise(q, pools, positions, paths, tables, bases, out)
    for seq, n in enumerate(lengths):
        for row, route in enumerate(routes):
            straight = _straightened(pools, tables[seq], page, n, route)
            one = pages.plan_pages([pages.PageLane(0, [0])], group, tables[seq : seq + 1], page, PAGES)
            at = torch.tensor([n - 1 + len(route)], dtype=torch.int32, device=device)
            place = seq * rows + row
            wrong += not torch.equal(_attend(q[place : place + 1], straight, at, one, device)[0], out[place])
    return float(wrong)


def _packed_otherwise(
    q: Tensor, pools: list[Tensor], positions: Tensor, paths: Tensor, tables: Tensor, bases: Tensor, wanted: Tensor
) -> int:
    """Rows that have other bits where those of all trees lie end to end; some trees have fewer than others."""
    (size, width), device, page = paths.shape[:2], q.device, 32
    group, dim = q.shape[1] // pools[0].shape[1], q.shape[2]
    counts = [1 + n % width for n in range(size)]
    rows, trees = packing.PackedRows.empty(size, width, device), TreeNodes.over(pools, size, width, width)
    rows.rows.fill_(-1)
    kept = [n * width + row for n, count in enumerate(counts) for row in range(count)]
    for n, count in enumerate(counts):
        first = sum(counts[:n])
        rows.rows[n, :count] = torch.arange(first, first + count, device=device)
        rows.starts[n + 1] = first + count
    trees.base.copy_(bases)
    trees.paths.copy_(paths)
    total = len(kept) + 2  # padding rows
    plan = pages.packed_tree_plan(
        size, width, total, tables, page, PAGES * page, group, dim, q.element_size(), width - 1
    )
    packing.pack_paths(rows, trees, plan, pages.block_length(dim, q.element_size()))
    places = torch.tensor([*kept, 0, 0], device=device)
    if plan.lanes is not None:
        lanes.place_lanes(plan, positions[places])
    found = _attend(q[places], pools, positions[places], plan, device)
    return sum(not torch.equal(found[n], wanted[place]) for n, place in enumerate(kept))


def _route(parents: list[int], row: int) -> list[int]:
    return [] if row == 0 else [*_route(parents, parents[row]), row]


def _straightened(pools: list[Tensor], table: Tensor, page: int, n: int, route: list[int]) -> list[Tensor]:
    """The pools with a path's keys in line behind the text."""
    slots = [int(table[i // page]) * page + i % page for i in range(n - 1, n + 7)]
    moved = [pool.clone() for pool in pools]
    for new, old in zip(moved, pools, strict=True):
        for place, node in enumerate(route):
            new[slots[place + 1]] = old[slots[node]]
    return moved


def _attend(q: Tensor, pools: list[Tensor], positions: Tensor, plan: Any, device: torch.device) -> Tensor:
    arrived = attention.counters(device)
    return attention.attend_pages(q.contiguous(), pools[0], pools[1], positions, plan, arrived, 0.3)


@dataclass(frozen=True, slots=True)
class TreeScene:
    """Rows of trees, and the same rows as chains: each is the last token of a sequence of its own, in which the keys of
    its path lie in line."""

    q: Tensor
    pools: list[Tensor]
    positions: Tensor
    trees: pages.PagePlan
    chains: pages.PagePlan

    def attend(self, plan: pages.PagePlan, splits: int | None = None, **options: Any) -> Tensor:
        arrived = attention.counters(self.q.device)
        given = self.q, self.pools[0], self.pools[1], self.positions, plan, arrived, 0.3
        return attention.attend_pages(*given, splits=splits, **options)


PlaceLanes = Callable[[pages.PagePlan, Tensor], None]


def tree_scene(
    device: torch.device, dtype: torch.dtype, dim: int, group: int, bases: Sequence[int], rows: int, source: Random,
    page: int = 32, kv: int = 2, deepest: int = pages.DEEPEST, place: PlaceLanes = lanes.place_lanes,
) -> TreeScene:  # fmt: skip
    """A random tree of `rows` rows behind each text of bases[n] tokens; large numbers where no key lies."""
    size, width = len(bases), -(-(max(bases) + rows) // page)
    parents = [random_parents(rows, deepest, source) for _ in bases]
    routes = [[_route(own, row) for row in range(rows)] for own in parents]
    private = (page - 1 + deepest) // page + 1  # pages of a chain's own
    order = list(range(size * width + size * rows * private))
    source.shuffle(order)
    tables = torch.tensor(order[: size * width], dtype=torch.int32).view(size, width)
    owned = torch.tensor(order[size * width :], dtype=torch.int32).view(size * rows, private)
    straight = tables.repeat_interleave(rows, 0)
    sources, targets, behind = list[Tensor](), list[Tensor](), list[Tensor]()
    for seq, base in enumerate(bases):
        slots = _slots(tables[seq], page)
        behind.append(slots[base + rows - 1 :])
        for row, route in enumerate(routes[seq]):
            n, first = seq * rows + row, base // page
            fitting = min(private, width - first)
            straight[n, first : first + fitting] = owned[n, :fitting]
            own, end = _slots(straight[n], page), base + len(route)
            behind.append(own[end:])
            sources.append(torch.cat([slots[first * page : base], slots[[base - 1 + node for node in route]]]))
            targets.append(own[first * page : end])
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    pools = [torch.randn(len(order) * page, kv, dim, generator=generator).to(dtype) for _ in range(2)]
    copied = [pool[torch.cat(sources)] for pool in pools]
    for pool, moved in zip(pools, copied, strict=True):
        pool[torch.cat(behind)] = 1e4
        pool[torch.cat(targets)] = moved
    pools = [pool.to(device) for pool in pools]
    q = torch.randn(size * rows, kv * group, dim, generator=generator).to(device, dtype)
    paths = torch.zeros(size, rows, pages.PATH, dtype=torch.int32)
    for seq, own_routes in enumerate(routes):
        for row, route in enumerate(own_routes):
            paths[seq, row, : len(route)] = torch.tensor([node - 1 for node in route], dtype=torch.int32)
    where = [base - 1 + len(route) for base, own_routes in zip(bases, routes, strict=True) for route in own_routes]
    positions = torch.tensor(where, dtype=torch.int32, device=device)
    given = tables.to(device), page, width * page
    depth = min(rows - 1, deepest)
    trees = pages.tree_plan(paths.to(device), *given, group, dim, dtype.itemsize, depth)
    begins = torch.tensor(bases, dtype=torch.int32, device=device)
    pages.set_base(trees, begins, pages.block_length(dim, dtype.itemsize))
    if trees.lanes is not None:
        place(trees, positions)
    chains = pages.even_plan(size * rows, 1, straight.to(device), page, width * page, dim, dtype.itemsize)
    return TreeScene(q, pools, positions, trees, chains)


def random_parents(rows: int, deepest: int, source: Random) -> list[int]:
    """The row of each row's parent; trees are wide, narrow or anything between."""
    recent, parents, depths = source.choice((1, 2, 4, rows)), [-1], [0]
    for row in range(1, rows):
        fitting = [above for above in range(row) if depths[above] < deepest]
        near = [above for above in fitting if above >= row - recent] or fitting
        parents.append(source.choice(near))
        depths.append(depths[parents[-1]] + 1)
    return parents


def _slots(table: Tensor, page: int) -> Tensor:
    """The KV slot of each position."""
    return (table.long()[:, None] * page + torch.arange(page)).flatten()


HOPPER_TREES: tuple[tuple[int, int, int, int, int, dict[str, Any]], ...] = (
    # batch size, nodes, longest text, numbers of a head, group, options
    (8, 1, 600, 128, 4, {}), (64, 2, 700, 128, 4, {}), (8, 3, 1500, 128, 4, {}), (1, 4, 1500, 128, 4, {}),
    (16, 6, 1500, 128, 4, {}), (64, 15, 300, 128, 4, {}), (8, 24, 1500, 128, 4, {}), (3, 24, 1100, 128, 1, {}),
    (5, 5, 1500, 128, 7, {"window": 70}), (5, 8, 1500, 64, 3, {"softcap": 20.0}),
)  # fmt: skip


def hopper_trees(device: torch.device, dtype: torch.dtype) -> float:
    """Rows of captured trees by Hopper's kernel, where this is one, that have other bits as chains or by the other
    kernel; three sets of texts each, many of which end near the end of a block."""
    if not hopper(device):
        return 0.0
    source, wrong = Random(7), 0
    near = [n + more for n in (128, 256, 512, 1024) for more in range(-17, 18)]
    for size, nodes, longest, dim, group, options in HOPPER_TREES * 3:
        bases = [source.choice((source.choice(near), source.randint(1, longest))) for _ in range(size)]
        scene = tree_scene(device, dtype, dim, group, bases, nodes + 1, source)
        assert flash.fits(scene.pools[0], scene.trees, group), "this kernel is not the one that is checked"
        found = scene.attend(scene.trees, **options)
        others = scene.attend(scene.chains, **options), scene.attend(scene.trees, 1, **options)
        wrong += sum(int((found != other).any(-1).any(-1).sum()) for other in others) + int((~found.isfinite()).sum())
    return float(wrong)


def tree_lanes(device: torch.device) -> float:
    """Which rows share a path and where its keys lie, as the twin does; beside padding rows and nodes without slots."""
    source, wrong = Random(3), 0
    for rows, group in ((2, 4), (5, 4), (9, 16), (25, 4)):
        bases = [source.randint(1, 300) for _ in range(4)]
        scene = tree_scene(device, torch.float32, 32, group, bases, rows, source)
        plan, positions = scene.trees, scene.positions
        if rows == 5:
            plan.rows[1, 3:] = plan.rows[2] = -1
            assert plan.tails is not None and plan.tails.paths is not None
            plan.tails.paths[15:20].clamp_(max=1)  # the last sequence ends behind its second node
            positions[15:20].clamp_(max=bases[3] + 1)
        found = []
        for place in (lanes.place_lanes, lanes.place_lanes_twin):
            empty = pages.TreeLanes.empty(plan.rows.shape[0], plan.rows.shape[1], pages.DEEPEST, device)
            place(replace(plan, lanes=empty), positions)
            found.append((empty.about, empty.lanes, empty.slots))
        wrong += sum(not torch.equal(a, b) for a, b in zip(*found, strict=True))
        wrong += int(found[0][1].max()) < min(1, rows - 2)
    return float(wrong)
