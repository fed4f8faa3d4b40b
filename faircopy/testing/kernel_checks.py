"""Every Triton kernel against its torch twin, and against itself in other company: run by the tests in the
interpreter, by `faircopy bench kernels` on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from faircopy import rng
from faircopy.kernels.gpu import (
    attention,
    gates,
    heads,
    linear,
    norm,
    packing,
    pages,
    pending_norm,
    pick,
    step,
    tables,
)
from faircopy.kernels.gpu.launch import INTERPRETED, hopper
from faircopy.kernels.gpu.records import EMPTY_SLOT, Control, ReportColumns
from faircopy.kernels.gpu.state import BatchSlots, StepInputs
from faircopy.kernels.gpu.tables import Tile
from faircopy.kernels.gumbel import BROKEN
from faircopy.kernels.rope import rope_table
from faircopy.testing import growth_checks, sampling_checks, tree_checks

Check = tuple[str, Callable[[torch.device], float]]  # name -> error: 0 means the same bits, where that is asked for

# the interpreter of Triton 3.6 has no products of bfloat16
HALF = torch.float16 if INTERPRETED else torch.bfloat16
Scene = dict[str, Any]  # arguments of an attention kernel
DTYPES = {"float32": torch.float32, "16 bits": HALF}
TOLERANCE = {"float32": 1e-4, "16 bits": 1.2e-2}


def checks() -> Iterator[Check]:
    """All of them, by name; each returns how far off it is, relative to what is allowed."""
    for name, dtype in DTYPES.items():
        allowed = TOLERANCE[name]
        for bias in (False, True):
            yield f"linear {name} bias={bias}", _within(allowed, _linear, dtype, bias)
        yield f"gated {name}", _within(allowed, _gated, dtype)
        yield f"norms {name}", _within(allowed, _norms, dtype)
        yield f"gates {name}", _within(allowed, _gates, dtype)
        for kind in ("plain", "normed", "interleaved", "partial"):
            yield f"heads {name} {kind}", _within(allowed, _heads, dtype, kind)
        for kind in ATTENTION:
            yield f"attention {name} {kind}", _within(allowed, _attention, dtype, kind)
    yield "attention: splits change no bit", _splits
    yield "attention: rows do not know how many they are", _lonely
    yield "attention: rows do not know where they were packed", _packed_bits
    yield "attention: a tree's rows have a chain's bits", _tree_bits
    yield "attention: Hopper's kernel and the other", _both_kernels
    yield "attention: texts whose spans several blocks merge", _long_texts
    yield "linear: rows do not know how many they are", _companies
    yield "linear: streamed and not", _streams
    yield "linear: pipelined and not", _pipelines
    yield "norms: on the way to a product and not", _pending_norms
    yield "pick: the same tokens", _pick
    yield "sampling: the same rows and tokens", sampling_checks.sampling
    yield "sampling: a row's threshold does not depend on its neighbours", sampling_checks.thresholds
    yield "sampling: columns that are some of the tokens", sampling_checks.words
    yield "logprobs: the same tokens and values", sampling_checks.logprobs
    yield "logprobs: rows do not know where they lie", sampling_checks.logprobs_anywhere
    yield "step: the same state", _step
    yield "packing: the same rows, and the same accepted", _packing
    yield "offer: the same tokens", tree_checks.offers
    yield "trees: the same state", tree_checks.trees
    yield "trees: the same packed rows, and the same accepted", tree_checks.packed_trees
    yield "growth: the same trees", growth_checks.trees
    yield "growth: the same places", growth_checks.places
    yield "attention: captured trees have their chains' bits", lambda device: tree_checks.tree_bits(device, HALF)
    yield "trees: the same lanes", tree_checks.tree_lanes
    yield "attention: trees by Hopper's kernel have chains' bits", lambda device: tree_checks.hopper_trees(device, HALF)


def _within(allowed: float, run: Callable[..., float], *options: Any) -> Callable[[torch.device], float]:
    return lambda device: run(device, *options) / allowed


def distance(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    value = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return value if value == value else float("inf")


def _random(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def _linear(device: torch.device, dtype: torch.dtype, biased: bool) -> float:
    """All tile kinds and numbers of groups."""
    outputs, inner, rows = 96, 512, 21
    w, x = _random(device, outputs, inner, dtype=dtype), _random(device, rows, inner, dtype=dtype)
    bias = _random(device, outputs, dtype=dtype) if biased else None
    many, worst = _random(device, 150, inner, dtype=dtype), 0.0
    for groups in (1, 2, 4):
        layer = linear.Linear(w, bias, groups=groups)
        reference = linear.parts_twin(x, w, bias, groups)
        parts = layer.run(x, Tile(16, 32, 64))
        added = linear.add_parts(parts, dtype) if groups > 1 else parts[0]
        worst = max(worst, distance(parts, reference), distance(added, reference.sum(0)), distance(layer(x), added))
        if layer.tensor_cores(x):
            reference = linear.parts_twin(many, w, bias, groups).sum(0)
            outs = [layer.run(many, tile).float().sum(0) for tile in _wide_tiles(64, 32)]
            worst = max(worst, *(distance(out, reference) for out in outs))
    uneven = _random(device, outputs, 328, dtype=dtype)
    return max(worst, distance(linear.Linear(uneven)(x[:, :328]), linear.parts_twin(x[:, :328], uneven, None, 1)[0]))


def _wide_tiles(height: int, width: int) -> list[Tile]:
    heights = (1, 2, 3)
    return [Tile(height, width, 64, wide=True, high=high, apart=apart) for high in heights for apart in (False, True)]


def _gated(device: torch.device, dtype: torch.dtype) -> float:
    worst = 0.0
    for kind in ("silu", "gelu_pytorch_tanh", "gelu", "relu"):
        w, x = _random(device, 128, 192, dtype=dtype) / 8, _random(device, 19, 192, dtype=dtype)
        layer = linear.Linear.gating(w)
        reference = linear.gated_twin(linear.parts_twin(x, layer.weight, None, 1)[0].to(dtype), kind)
        worst = max(worst, distance(layer.gated(x, kind), reference))
        if layer.tensor_cores(x):
            worst = max(worst, *(distance(layer.run(x, tile, kind)[0], reference) for tile in _wide_tiles(64, 32)))
    return worst


def _gates(device: torch.device, dtype: torch.dtype) -> float:
    """Products in one part and in four, with a gate per head and without."""
    x, worst = _random(device, 5, 96, dtype=dtype), 0.0
    for count in (1, 4):
        said, query = (_random(device, count, 5, n, dtype=torch.float32 if count > 1 else dtype) for n in (192, 96))
        gated = [f(x, said, query, 4) for f in (gates.take_in, gates.take_in_twin)]
        plain = [f(x, query) for f in (gates.take_in, gates.take_in_twin)]
        worst = max(worst, distance(*gated), distance(*plain))
    return worst


def _norms(device: torch.device, dtype: torch.dtype) -> float:
    table, weight = _random(device, 30, 80, dtype=dtype), _random(device, 80, dtype=dtype)
    ids = torch.tensor([3, 29, 0, 31, -1], dtype=torch.int32, device=device)
    ours, twin = norm.embed_norm(ids, table, weight, 1.5, 1e-6), norm.embed_norm_twin(ids, table, weight, 1.5, 1e-6)
    worst = max(distance(a, b) for a, b in zip(ours, twin, strict=True))
    rows, state = (norm.embed_norm(None, table, weight, 1.0, 1e-6), _random(device, 5, 80, dtype=dtype))
    worst = max(worst, distance(rows[1], norm.embed_norm_twin(None, table, weight, 1.0, 1e-6)[1]))
    for weights, apart in ((None, False), ((weight, weight + 1), False), ((weight, weight + 1), True)):
        both = [f(ids, table, state, weights, 1e-6, apart) for f in (norm.pair, norm.pair_twin)]
        worst = max(worst, distance(*both))
    for count, after in ((1, None), (4, None), (2, weight)):
        parts = _random(device, count, 5, 80, dtype=torch.float32 if count > 1 else dtype)
        x = _random(device, 5, 80, dtype=dtype)
        x[2, 3] = torch.nan
        other, (fine, well) = x.clone(), torch.empty(2, 5, dtype=torch.bool, device=device)
        y = norm.add_norm(x, parts, weight, 1e-6, after, 0.5, fine)
        z = norm.add_norm_twin(other, parts, weight, 1e-6, after, 0.5, well)
        assert torch.equal(fine, well) and not bool(fine[2]), "a row that is not finite was not seen"
        worst = max(worst, *(distance(a[fine], b[fine]) for a, b in ((y, z), (x, other))))
    return worst


def _heads(device: torch.device, dtype: torch.dtype, kind: str) -> float:
    rows, count, kv, dim, number = 7, 6, 2, 32, 2
    parts = _random(device, number, rows, (count + 2 * kv) * dim)
    parts[0, 3, -1] = torch.inf
    half = dim // 4 if kind == "partial" else dim // 2
    table = rope_table(torch.rand(half, generator=torch.Generator().manual_seed(1)), 50, 1.0, dtype).to(device)
    weight = _random(device, count + kv, dim, dtype=dtype) if kind == "normed" else None
    positions = torch.tensor([0, 5, 49, 60, 2, 3, 4], dtype=torch.int32, device=device)
    slots = torch.tensor([9, 3, 4, 1, 0, 2, 8], device=device)
    pools = [torch.zeros(10, kv, dim, dtype=dtype, device=device) for _ in range(4)]
    options = (parts, weight, table, positions, slots)
    q = heads.place(*options, pools[0], pools[1], count, 1e-6, kind == "interleaved")
    twin = heads.place_twin(*options, pools[2], pools[3], count, 1e-6, kind == "interleaved")
    return max(distance(a, b) for a, b in ((q, twin), (pools[0], pools[2]), (pools[1], pools[3])))


ATTENTION: dict[str, dict[str, float]] = {
    "chain": {},
    "window": {"window": 70},
    "cap": {"softcap": 20.0},
    "sinks": {"sinks": 1},
    "odd group": {"group": 3, "dim": 80},
    "tree": {"tree": 1},
    "tree, window": {"tree": 1, "window": 70},
}


PAGES = 36  # of a sequence: three spans of keys


def _scene(device: torch.device, dtype: torch.dtype, group: int = 4, dim: int = 64, tree: bool = False) -> Scene:
    """Three sequences of 1, 6 and 20 queries at lengths 3, 650 and 1100; with a tree in the second."""
    page, kv, many = 32, 2, 3 * PAGES + 4
    order = torch.randperm(many, generator=torch.Generator().manual_seed(3)).int()
    tables = torch.stack([order[n * PAGES : (n + 1) * PAGES] for n in range(3)]).to(device)
    lengths, counts = (3, 650, 1100), (1, 6, 20)
    positions, lanes, row = [], [], 0
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rows = range(row, row + count)
        if tree and seq == 1:  # nodes 0 1 2 3 4 5 with parents - 0 0 1 2 -
            positions += [length + depth for depth in (0, 1, 1, 2, 2, 0)]
            block, n = length // pages.block_length(dim, dtype.itemsize), [*rows]
            lanes.append(pages.PageLane(seq, n, 0, block))
            for fresh, path in (((0, 1, 3), (0, 1, 3)), ((2, 4), (0, 2, 4)), ((5,), (5,))):
                lanes.append(pages.PageLane(seq, [n[i] for i in fresh], block, pages.END, length, path))
        else:
            positions += range(length - count, length)
            lanes.append(pages.PageLane(seq, rows))
        row += count
    plan = pages.plan_pages([lane for lane in lanes if lane.stop], group, tables, page, PAGES)
    pools = [_random(device, many * page, kv, dim, dtype=dtype, seed=s) for s in (1, 2)]
    q = _random(device, row, kv * group, dim, dtype=dtype)
    where = torch.tensor(positions, dtype=torch.int32, device=device)
    return {"q": q, "keys": pools[0], "values": pools[1], "positions": where, "plan": plan}


def _attention(device: torch.device, dtype: torch.dtype, kind: str) -> float:
    given: dict[str, Any] = dict(ATTENTION[kind])
    shape = {name: int(given.pop(name)) for name in ("group", "dim") if name in given}
    scene = _scene(device, dtype, tree=bool(given.pop("tree", 0)), **shape)
    if given.pop("sinks", 0):
        given["sinks"] = _random(device, scene["q"].shape[1])
    window: dict[str, Any] = {"window": int(given.pop("window", 0))}
    twin = attention.attend_pages_twin(**scene, scale=0.3, **window, **given)
    return max(distance(_attend(scene, device, splits, **window, **given), twin) for splits in (1, 2))


def _attend(scene: Scene, device: torch.device, splits: int | None, **options: Any) -> Tensor:
    arrived = attention.counters(device)
    return attention.attend_pages(**scene, arrived=arrived, scale=0.3, splits=splits, **options)


def _splits(device: torch.device) -> float:
    scene = _scene(device, HALF)
    results = [_attend(scene, device, splits) for splits in (1, 2, 4, 1)]
    return float(sum(not torch.equal(result, results[0]) for result in results))


def _lonely(device: torch.device) -> float:
    """The twenty rows of the longest sequence at once, six at a time, and one by one."""
    scene = _scene(device, HALF)
    plan, q, positions = scene["plan"], scene["q"][7:], scene["positions"][7:]
    results = []
    for many in (20, 6, 1):
        outs = []
        for at in range(0, 20, many):
            rows = q[at : at + many].contiguous()
            part = pages.plan_pages([pages.PageLane(2, range(len(rows)))], 4, plan.tables, plan.page, PAGES)
            own = {**scene, "q": rows, "positions": positions[at : at + many].contiguous(), "plan": part}
            outs += [_attend(own, device, splits) for splits in (1, 3)]
        results += [torch.cat(outs[::2]), torch.cat(outs[1::2])]
    return float(sum(not torch.equal(result, results[0]) for result in results))


def _packed_bits(device: torch.device) -> float:
    """Five rows of each sequence side by side; then one, none and four of them, packed where the device says."""
    scene, width, counts = _scene(device, HALF), 5, (1, 0, 4)
    tables, page = scene["plan"].tables, scene["plan"].page
    scene["q"] = _random(device, 3 * width, 8, 64, dtype=HALF)
    first = torch.tensor([[3], [650], [1100]], dtype=torch.int32, device=device)
    scene["positions"] = (first + torch.arange(width, dtype=torch.int32, device=device)).flatten()
    scene["plan"] = pages.even_plan(3, width, tables, page, PAGES * page, 64)
    whole = [_attend(scene, device, splits) for splits in (1, 2)]
    packed_rows = packing.PackedRows.empty(3, width, device)
    kept: list[int] = []
    packed_rows.rows.fill_(-1)
    for slot, count in enumerate(counts):
        packed_rows.rows[slot, :count] = torch.arange(len(kept), len(kept) + count)
        packed_rows.ranges[slot, 1] = pages.END if count else 0
        kept += range(slot * width, slot * width + count)
    scene["q"], scene["positions"] = scene["q"][kept].contiguous(), scene["positions"][kept].contiguous()
    scene["plan"] = packed_rows.plan(tables, page, PAGES * page, 64)
    packed = [_attend(scene, device, splits) for splits in (1, 2)]
    return float(sum(not torch.equal(a[kept], b) for a in whole for b in packed))


CHUNKS = ((1, 6, 300, 40), (3, 650, 1100, 2100))  # queries and lengths of four sequences
EVEN_LENGTHS = (40, 520, 1100, 5000)
LONG_LENGTHS = (33000, 9000, 16500, 12000)
LAUNCHES = 20


def _both_kernels(device: torch.device) -> float:
    """The kernel that Hopper has alone, where this is one: long and short contexts, chunks of prompts beside them."""
    if not hopper(device):
        return 0.0
    wrong = 0
    sinks = _random(device, 8)
    for dim, group, dtype, given in (
        (128, 4, HALF, {}), (128, 4, HALF, {"sinks": sinks, "window": 700}), (64, 3, HALF, {}),
        (64, 3, HALF, {"softcap": 20.0}), (128, 7, HALF, {"window": 100}), (128, 1, torch.float16, {}),
    ):  # fmt: skip
        for both in (CHUNKS, *(((width,) * 4, EVEN_LENGTHS) for width in (1, 6, 16))):
            scene = _paged_scene(device, dtype, dim, group, *both)
            results = [_attend(scene, device, splits, **given) for splits in (None, 1)]
            wrong += not torch.equal(*results) or not results[0].isfinite().all()
    return float(wrong)


def _long_texts(device: torch.device) -> float:
    """Texts of more spans than are merged at a time by Hopper's kernel, launch after launch with the same counters."""
    if not hopper(device):
        return 0.0
    wrong = 0
    for dim, group, width in ((128, 4, 1), (128, 4, 6), (64, 3, 1), (64, 3, 6)):
        scene = _paged_scene(device, HALF, dim, group, (width,) * len(LONG_LENGTHS), LONG_LENGTHS)
        wanted, arrived = _attend(scene, device, 1), attention.counters(device)
        for _ in range(LAUNCHES):
            wrong += not torch.equal(attention.attend_pages(**scene, arrived=arrived, scale=0.3), wanted)
        wrong += bool(arrived.any())
    return float(wrong)


def _paged_scene(
    device: torch.device, dtype: torch.dtype, dim: int, group: int, counts: Sequence[int], lengths: Sequence[int]
) -> Scene:
    """Sequences in pages that hold large numbers behind their last position."""
    page, kv = 32, 2
    width = -(-max(lengths) // page)
    tables = torch.randperm(len(counts) * width, generator=torch.Generator().manual_seed(3)).int().view(len(counts), -1)
    pools = [_random(device, tables.numel() * page, kv, dim, dtype=dtype, seed=s) for s in (1, 2)]
    lanes: list[pages.PageLane] = []
    positions: list[int] = []
    for seq, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        lanes.append(pages.PageLane(seq, range(len(positions), len(positions) + count)))
        positions += range(length - count, length)
        behind = tables[seq].repeat_interleave(page)[length:] * page + torch.arange(length, width * page) % page
        for pool in pools:
            pool[behind.to(device)] = 1e4
    blocks = -(-width * page // pages.block_length(dim))
    plan = pages.plan_pages(lanes, group, tables.to(device), page, blocks, dim)
    q = _random(device, len(positions), kv * group, dim, dtype=dtype)
    where = torch.tensor(positions, dtype=torch.int32, device=device)
    return {"q": q, "keys": pools[0], "values": pools[1], "positions": where, "plan": plan}


def _tree_bits(device: torch.device) -> float:
    """The path 0 2 4 of the tree, laid out as a chain."""
    scene = _scene(device, HALF, tree=True)
    out = _attend(scene, device, None)
    plan = scene["plan"]
    keys, values, q = (scene[name].clone() for name in ("keys", "values", "q"))

    def slot(index: int) -> int:
        return int(plan.tables[1, index // plan.page] * plan.page + index % plan.page)

    for pool in (keys, values):
        moved = [pool[slot(650 + node)].clone() for node in (0, 2, 4)]
        for place, line in enumerate(moved):
            pool[slot(650 + place)] = line
    rows = torch.tensor([1, 3, 5], device=q.device)
    chain = pages.plan_pages([pages.PageLane(1, range(3))], 4, plan.tables, plan.page, PAGES)
    positions = torch.tensor([650, 651, 652], dtype=torch.int32, device=q.device)
    straight = {"q": q[rows].contiguous(), "keys": keys, "values": values, "positions": positions, "plan": chain}
    return float(not torch.equal(_attend(straight, device, None), out[rows]))


COMPANIES = (1, 2, 5, 16, 17, 40, 64, 130)


def _companies(device: torch.device) -> float:
    """Rows alone, in small company by groups, in large company by the standing grid: the same bits."""
    w, x = _random(device, 128, 2048, dtype=HALF), _random(device, 130, 2048, dtype=HALF)
    layer, gating = linear.Linear(w), linear.Linear.gating(w)
    assert layer.groups == 4, "a shape with all groups is wanted"
    whole, gated = layer(x), gating.gated(x, "silu")
    wrong = sum(not torch.equal(layer(x[:m].contiguous()), whole[:m]) for m in COMPANIES)
    for parts in (layer.run(x, tile) for tile in _wide_tiles(64, 64)):
        done = parts[0] if len(parts) == 1 else linear.add_parts(parts, HALF)
        wrong += not torch.equal(done, whole)
    wrong += sum(not torch.equal(gating.gated(x[:m].contiguous(), "silu"), gated[:m]) for m in COMPANIES)
    return float(wrong)


def _pending_norms(device: torch.device) -> float:
    """Rows that a product normalises for itself, where the device can, and the same rows among others before it."""
    wrong = 0
    for rows, n, count, behind, gate in product((1, 2, 5, 8), (1024, 3584, 4096, 5120), (1, 2, 4), (0, 1), (0, 1)):
        x = _random(device, 40, n, dtype=HALF)
        if not pending_norm.few(x[:rows]):
            continue
        weight, after = (
            _random(device, n, dtype=HALF, seed=5),
            _random(device, n, dtype=HALF, seed=6) if behind else None,
        )
        parts = _random(device, count, 40, n, dtype=torch.float32 if count > 1 else HALF, seed=7)
        w = _random(device, 200, n, dtype=HALF)
        layer = linear.Linear.gating(w) if gate else linear.Linear(w, _random(device, 200, dtype=HALF), groups=1)
        healthy = torch.empty(2, 40, dtype=torch.bool, device=device)
        first = int(rows > 1)
        x[:first, 3] = torch.inf
        stream, mine = x.clone(), parts[:, :rows].contiguous()
        y = norm.add_norm(stream, parts, weight, 1e-6, after, 0.5, healthy[0])
        few = pending_norm.PendingNorm(x[:rows].clone(), mine, weight, 1e-6, after, 0.5, healthy[1, :rows])
        wanted = layer.gated(y[:rows].contiguous(), "silu") if gate else layer.parts(y[:rows].contiguous())
        found = layer.gated(few, "silu") if gate else layer.parts(few)
        same = torch.equal(healthy[0, :rows], healthy[1, :rows]) and torch.equal(few.x[first:], stream[first:rows])
        wrong += not (same and torch.equal(found[..., first:, :], wanted[..., first:, :]))
    return float(wrong)


def _pipelines(device: torch.device) -> float:
    """Products whose copies run ahead of them, where the device has them, and the others: the same bits."""
    if not hopper(device):
        return 0.0
    wrong, plain = 0, Tile(128, 128, 64, 8, 3, wide=True)
    broad, grouped = (Tile(128, bn, 64, 4, n, wide=True, pipelined=True) for bn, n in ((256, 4), (128, 6)))
    for (tile, groups), outputs in product([(broad, 1), (grouped, 1), (grouped, 2), (grouped, 4)], (200, 1536)):
        w, x = _random(device, outputs, 2048, dtype=HALF), _random(device, 1000, 2048, dtype=HALF)
        layer = linear.Linear(w, _random(device, outputs, dtype=HALF) if groups == 2 else None, groups=groups)
        for rows in (70, 128, 300, 1000):
            few = x[:rows].contiguous()
            wrong += not torch.equal(layer.run(few, tile), layer.run(few, plain))
        gating = linear.Linear.gating(w)
        wrong += sum(
            not torch.equal(gating.run(x, tile, kind), gating.run(x, plain, kind)) for kind in ("silu", "gelu")
        )
    return float(wrong)


def _streams(device: torch.device) -> float:
    """Streamed products, where the device has them, and the others: the same bits."""
    if not tables.plan(device, 192, 2048).streams:
        return 0.0
    wrong = 0
    for groups, biased in ((1, True), (2, False), (4, True)):
        w, x = _random(device, 192, 2048, dtype=HALF), _random(device, 64, 2048, dtype=HALF)
        layer = linear.Linear(w, _random(device, 192, dtype=HALF) if biased else None, groups=groups)
        parts = layer.run(x, Tile(64, 64, 64))
        wrong += sum(not torch.equal(layer.parts(x[:m].contiguous()), parts[:, :m]) for m in COMPANIES if m <= 64)
        for kind in ("silu", "gelu_pytorch_tanh", "gelu", "relu"):
            gating = linear.Linear.gating(w)
            gated = gating.run(x, Tile(64, 64, 64), kind)[0]
            wrong += sum(not torch.equal(gating.gated(x[:m].contiguous(), kind), gated[:m]) for m in (1, 17, 64))
    return float(wrong) + _tall_streams(device)


def _tall_streams(device: torch.device) -> float:
    """Streamed products of more rows, by all warpgroups and heights, and the others: the same bits."""
    wrong, others = 0, Tile(64, 128, 64, 4, 4, wide=True, apart=True)
    for rows, groups in product((70, 90, 140, 150, 180, 200, 220, 250, 280, 430, 500), (1, 4)):
        w, x = _random(device, 1000, 2048, dtype=HALF), _random(device, rows, 2048, dtype=HALF)
        layer = linear.Linear(w, _random(device, 1000, dtype=HALF) if groups == 4 else None, groups=groups)
        gating = linear.Linear.gating(w)
        parts, gated = layer.run(x, others), gating.run(x, others, "silu")
        streamed = tables.tall_tiles(rows) if rows > tables.STREAMED else [tables.tall_tile(rows, n) for n in (64, 128)]
        wrong += sum(not torch.equal(layer.run(x, tile), parts) for tile in streamed)
        wrong += sum(not torch.equal(gating.run(x, tile, "silu"), gated) for tile in streamed)
    return float(wrong)


def _pick(device: torch.device) -> float:
    logits = _random(device, 8, 9000, dtype=HALF)
    logits[6:] = -torch.inf
    logits[1, 4097] = logits[1, 8000] = 50.0
    logits[4, 5000] = torch.nan
    logits[5, 17] = -torch.inf
    temperatures = torch.tensor([0.0, 0.0, 0.8, 1.3, 0.0, 0.0, 0.0, 0.8], device=device)
    keys = torch.tensor([rng.signed(rng.key(7, n)) for n in range(8)], device=device)
    wrong = 0
    for strict in (False, True):
        ours, twin = (f(logits, temperatures, keys, 8990, strict=strict) for f in (pick.pick, pick.pick_twin))
        wrong += int((ours != twin).sum()) + int((ours[6:] != BROKEN).sum())
    return float(wrong)


def _step(device: torch.device) -> float:
    """Prepare, look up and accept, twice in a row, as the twins do."""
    pairs = [_slots(device) for _ in range(2)]
    all_inputs = [StepInputs.empty(4, 4, device) for _ in range(2)]
    outs = [torch.zeros(4, ReportColumns(4, tree=False).total, dtype=torch.int32, device=device) for _ in range(2)]
    wrong = 0
    for turn in range(2):
        said = [[1, 2, 3, 4], [5, 5, 5, 5], [7, -1, 7, 7], [1, 2, 1, 2]]
        chosen = torch.tensor(said, dtype=torch.int32, device=device)
        for (prepare, lookup, accept), slots, inputs, out in zip(_STEPS, pairs, all_inputs, outs, strict=True):
            prepare(slots, inputs, 4, 999)
            lookup(slots, inputs, 1, 3)
            accept(slots, inputs, chosen.flatten(), out)
            slots.control[:, Control.FRESH] = 0
        same = [
            torch.equal(getattr(all_inputs[0], n), getattr(all_inputs[1], n)) for n in StepInputs.__dataclass_fields__
        ]
        same += [torch.equal(outs[0], outs[1]), torch.equal(pairs[0].history, pairs[1].history)]
        wrong += same.count(False) * (turn + 1)
    return float(wrong)


_STEPS = (
    (step.prepare, step.lookup, step.accept),
    (step.prepare_twin, step.lookup_twin, step.accept_twin),
)


def _packing(device: torch.device) -> float:
    """Drafts of random lengths, cut by width and limit, beside an empty batch slot and a text of full length."""
    wrong = 0
    for seed in range(3):
        crowds = [_crowd(device, seed) for _ in range(2)]
        packings = [packing.PackedRows.empty(7, 5, device) for _ in range(2)]
        outs = [torch.zeros(7, ReportColumns(5, tree=False).total, dtype=torch.int32, device=device) for _ in range(2)]
        chosen = torch.randint(-1, 2, (35,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        for (pack, accept), (slots, inputs), packed_rows, out in zip(_PACKERS, crowds, packings, outs, strict=True):
            pack(slots, inputs, packed_rows, 999)
            accept(slots, inputs, chosen.to(device), out, packed_rows.starts)
        same = [
            torch.equal(getattr(packings[0], n), getattr(packings[1], n))
            for n in packing.PackedRows.__dataclass_fields__
        ]
        same += [torch.equal(getattr(crowds[0][0], n), getattr(crowds[1][0], n)) for n in ("lengths", "history")]
        wrong += [*same, torch.equal(outs[0], outs[1])].count(False)
        wrong += not 0 < int(packings[0].starts[-1]) < 35
    return float(wrong)


_PACKERS = ((packing.pack, step.accept), (packing.pack_twin, step.accept_twin))


def _crowd(device: torch.device, seed: int) -> tuple[BatchSlots, StepInputs]:
    """Seven batch slots in the middle of a step: the fourth is empty, the last has written all it may."""
    chance = torch.Generator().manual_seed(seed)
    control = torch.zeros(7, Control.PAGES + 8, dtype=torch.int32)
    lengths = torch.randint(1, 20, (7,), generator=chance, dtype=torch.int32)
    control[:, Control.LIMIT] = lengths + torch.randint(1, 9, (7,), generator=chance)
    control[:, Control.MAX_NODES] = torch.randint(0, 5, (7,), generator=chance)
    control[3, : Control.PAGES], lengths[3] = torch.tensor(EMPTY_SLOT), 1
    control[6, Control.LIMIT] = lengths[6]
    history = torch.randint(0, 2, (7, 40), generator=chance, dtype=torch.int32)
    inputs = StepInputs.empty(7, 5, device)
    nodes = torch.randint(0, 2, (7, 5), generator=chance)
    nodes[torch.arange(5) > torch.randint(0, 5, (7, 1), generator=chance)] = -1
    for table in (inputs.positions, inputs.slots, inputs.keys, inputs.temperatures):
        table.copy_(torch.randint(0, 99, (7, 5), generator=chance))
    inputs.ids.copy_(nodes)
    return BatchSlots(control.to(device), lengths.to(device), history.to(device)), inputs


def _slots(device: torch.device) -> BatchSlots:
    control = torch.zeros(4, Control.PAGES + 8, dtype=torch.int32)
    control[:, Control.FRESH] = 1
    control[:, Control.LENGTH] = torch.tensor([1, 9, 12, 14])
    control[:, Control.LIMIT] = torch.tensor([30, 11, 30, 30])
    control[:, Control.MAX_NODES] = torch.tensor([3, 3, 2, 3])
    control[:, Control.TEMPERATURE] = torch.tensor([0.0, 0.5, 0.0, 1.0]).view(torch.int32)
    control[:, Control.SEED_LOW :] = torch.randint(1, 99, (4, 10), generator=torch.Generator().manual_seed(5))
    history = torch.randint(0, 3, (4, 40), generator=torch.Generator().manual_seed(6), dtype=torch.int32)
    history[1, :9] = 5
    history[3, :14] = torch.tensor([1, 2] * 7)
    return BatchSlots(control.to(device), torch.zeros(4, dtype=torch.int32, device=device), history.to(device))
