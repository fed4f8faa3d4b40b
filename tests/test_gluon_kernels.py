"""Hopper's own kernels on the CPU, in tests/gluon_interpreter.py, against their torch twins: with another number of
processors, in another order of events, and before the kernel ahead of them has written its outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from transformers import AutoModelForCausalLM, Qwen3Config
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.kernels.gpu import (
    attention,
    flash,
    lanes,
    linear,
    norm,
    packing,
    pages,
    pending_norm,
    pipelined,
    stream,
)
from faircopy.kernels.gpu.suite import KERNELS
from faircopy.kernels.gpu.tables import Tile
from faircopy.kernels.gpu.tree import TreeNodes
from faircopy.model import loader
from faircopy.model.fused import Fused, fused_weights
from faircopy.model.weights import Source, decoder_spec
from faircopy.testing import kernel_checks, tree_checks
from faircopy.testing.kernel_checks import distance
from faircopy.testing.tree_checks import TreeScene
from faircopy.types import Request, SamplingParams
from tests.gluon_interpreter import Interpreted, KernelError

CPU, HALF = torch.device("cpu"), torch.float16
NAN = float("nan")
LAUNCHERS = (
    flash._flash, pipelined._pipelined, pending_norm._add_norm, pending_norm._normed_stream,
    stream._stream,
)  # fmt: skip
Set = Callable[..., None]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Set:
    """A function that sets the seed of all kernels, the number of processors, and tensors the kernel ahead writes."""
    kernels = [launcher.kernel for launcher in LAUNCHERS]
    for module in (flash, pages, pending_norm):
        monkeypatch.setattr(module, "hopper", lambda device: True)

    def set_(seed: int, processors: int, late: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        stale = {now.data_ptr(): before for now, before in late}
        for launcher, kernel in zip(LAUNCHERS, kernels, strict=True):
            monkeypatch.setattr(launcher, "kernel", Interpreted(kernel, seed, stale))
        for module in (flash, pipelined, pending_norm, stream):
            monkeypatch.setattr(module, "processors", lambda device: processors)

    return set_


def unwritten(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.full_like(x, NAN)


def random(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# Products


def layer_of(outputs: int, inner: int, groups: int, biased: bool, gate: str) -> linear.Linear:
    weight = random(outputs, inner)
    if gate != "none":
        return linear.Linear.gating(weight)
    return linear.Linear(weight, random(outputs) if biased else None, groups=groups)


def wanted(layer: linear.Linear, x: Tensor, gate: str) -> Tensor:
    parts = linear.parts_twin(x, layer.weight, layer.bias, layer.groups)
    return parts if gate == "none" else linear.gated_twin(parts[0].to(x.dtype), gate)[None]


SMALL, ONE_WARPGROUP = Tile(16, 64, 64, 4, 4, streamed=True), Tile(128, 128, 64, 4, 3, streamed=True)
TWO_HEIGHTS, TWO_WARPGROUPS, THREE_WARPGROUPS = (
    Tile(bm, bn, 64, 4, 2, streamed=True, second=16, warpgroups=warpgroups)
    for bm, bn, warpgroups in ((64, 128, 1), (64, 128, 2), (32, 192, 3))
)
THREE_HEIGHTS = (
    Tile(64, 64, 64, 4, 3, streamed=True, second=32, third=16),
    Tile(128, 192, 64, 4, 2, streamed=True, second=32, warpgroups=3, third=16),
)


@pytest.mark.parametrize(
    ("groups", "biased", "rows", "gate", "tile"),
    [
        (1, True, 5, "none", SMALL),
        (4, False, 13, "none", SMALL),
        (1, False, 9, "silu", SMALL),
        (4, True, 100, "none", ONE_WARPGROUP),
        (1, False, 66, "silu", ONE_WARPGROUP),
        (4, True, 70, "none", TWO_HEIGHTS),
        (1, False, 70, "silu", TWO_HEIGHTS),
        (4, True, 90, "none", TWO_WARPGROUPS),  # two tiles of rows
        (1, False, 75, "silu", TWO_WARPGROUPS),
        (4, True, 47, "none", THREE_WARPGROUPS),
        (1, False, 100, "silu", THREE_WARPGROUPS),
        (4, True, 105, "none", THREE_HEIGHTS[0]),  # rows that two tiles have in common
        (1, False, 200, "silu", THREE_HEIGHTS[0]),
        (4, True, 170, "none", THREE_HEIGHTS[1]),
        (1, False, 176, "silu", THREE_HEIGHTS[1]),
    ],
)
def test_streamed_products(hopper: Set, groups: int, biased: bool, rows: int, gate: str, tile: Tile) -> None:
    layer, x = layer_of(200, 512, groups, biased, gate), random(rows, 512)
    results = []
    for seed, processors in enumerate((1, 5)):
        hopper(seed, processors, [unwritten(x)])
        results.append(layer.run(x, tile, gate))
    assert torch.equal(*results)
    assert distance(results[0], wanted(layer, x, gate)) < 1e-3


@pytest.mark.parametrize(
    ("width", "groups", "biased", "rows", "gate"),
    [
        (256, 1, True, 70, "none"),
        (256, 1, False, 300, "silu"),
        (128, 1, False, 300, "silu"),
        (128, 2, False, 130, "none"),
        (128, 4, True, 300, "none"),
    ],
)
def test_pipelined_products(hopper: Set, width: int, groups: int, biased: bool, rows: int, gate: str) -> None:
    tile = Tile(128, width, 64, 4, 3, wide=True, pipelined=True)
    layer, x = layer_of(272, 512, groups, biased, gate), random(rows, 512)
    results = []
    for seed, processors in enumerate((1, 3)):
        hopper(seed, processors, [unwritten(x)])
        results.append(layer.run(x, tile, gate))
    assert torch.equal(*results)
    assert distance(results[0], wanted(layer, x, gate).sum(0, keepdim=True)) < 1e-3


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize(
    ("n", "count", "after", "gate"),
    [(1024, 1, False, "none"), (1344, 2, True, "silu"), (1344, 4, False, "silu"), (1024, 4, True, "none")],
)
def test_pending_norms(hopper: Set, rows: int, n: int, count: int, after: bool, gate: str) -> None:
    x, weight = random(rows, n), random(n)
    between = random(n, seed=1) if after else None
    parts = random(count, rows, n, dtype=torch.float32 if count > 1 else HALF)
    x[0, 3] = torch.inf if rows > 1 else x[0, 3]
    layer = layer_of(520, n, 1, True, gate)
    healthy = torch.zeros(3, rows, dtype=torch.bool)
    hopper(rows, 3, [unwritten(parts)])
    streams = [x.clone() for _ in range(3)]
    own = pending_norm.add_norm(streams[0], parts, weight, 1e-6, between, 0.5, healthy[0])
    twin = norm.add_norm_twin(streams[1], parts, weight, 1e-6, between, 0.5, healthy[1])
    pending = pending_norm.PendingNorm(streams[2], parts, weight, 1e-6, between, 0.5, healthy[2])
    found = layer.parts(pending) if gate == "none" else layer.gated(pending, gate)[None]
    fine = healthy[1]
    assert torch.equal(healthy[0], fine) and torch.equal(healthy[2], fine) and int(fine.sum()) == max(1, rows - 1)
    assert torch.equal(streams[0][fine], streams[1][fine]) and torch.equal(pending.x[fine], streams[1][fine])
    assert distance(own[fine], twin[fine]) < 1e-3
    assert distance(found[:, fine], wanted(layer, own, gate)[:, fine]) < 1e-3


# Attention

MIXED = ((1, 6, 70, 20), (3, 650, 1100, 300))  # queries and lengths of the sequences
EVEN = [((1,) * 3, (40, 520, 1500)), ((6,) * 3, (40, 520, 1100)), ((16,) * 2, (1100, 130))]


def unwritten_keys(scene: dict[str, Any], counts: Sequence[int], lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The pools and the queries before this pass has stored its own."""
    fresh = own_slots(scene, counts, lengths)
    pools = [(scene[name], scene[name].clone()) for name in ("keys", "values")]
    for _, before in pools:
        before[fresh] = NAN
    return [*pools, unwritten(scene["q"])]


@pytest.mark.parametrize(
    ("dim", "group", "options"),
    [
        (128, 4, {}),
        (64, 3, {"window": 300}),
        (64, 1, {"softcap": 20.0}),
        (128, 7, {"sinks": 1, "window": 100}),
    ],
    ids=["plain", "window", "cap", "sinks"],
)
@pytest.mark.parametrize("chunks", [True, False], ids=["chunks", "even"])
def test_attention(hopper: Set, chunks: bool, dim: int, group: int, options: dict[str, Any]) -> None:
    for seed, (counts, lengths) in enumerate([MIXED] if chunks else EVEN):
        scene = kernel_checks._paged_scene(CPU, HALF, dim, group, counts, lengths)
        assert (scene["plan"].even > 0) is not chunks
        given = {**options, "sinks": random(2 * group)} if "sinks" in options else options
        results, arrived = [], attention.counters(CPU)
        for processors in (1, 5):
            hopper(seed, processors, unwritten_keys(scene, counts, lengths))
            results.append(attention.attend_pages(**scene, arrived=arrived, scale=0.3, **given))
        assert torch.equal(*results), "which processor takes a key block changes no bit"
        assert not arrived.any(), "counters are zero between passes"
        assert distance(results[0], attention.attend_pages_twin(**scene, scale=0.3, **given)) < 1e-3


@pytest.mark.parametrize("patience", [0, 3, flash.PATIENCE])
@pytest.mark.parametrize("rows", [1, 6])
def test_blocks_that_share_a_text_merge_its_spans(
    hopper: Set, rows: int, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they wait for each other or the last one to leave merges all rows: the same bits."""
    scene = kernel_checks._paged_scene(CPU, HALF, 64, 4, (rows,) * 2, (2600, 900))
    arrived, results = attention.counters(CPU), []
    monkeypatch.setattr(flash, "_PATIENCE", gl.constexpr(patience))
    monkeypatch.setattr(flash, "MERGED", (4, 4))  # six spans are more than are merged at a time
    for seed, processors in enumerate((1, 4, 7, 9)):
        hopper(seed, processors, unwritten_keys(scene, (rows,) * 2, (2600, 900)))
        results.append(attention.attend_pages(**scene, arrived=arrived, scale=0.3))
        assert torch.equal(results[0], results[-1])
        assert not arrived.any(), "counters are zero between passes"
    assert distance(results[0], attention.attend_pages_twin(**scene, scale=0.3)) < 1e-3


def test_attention_beside_prompts(hopper: Set) -> None:
    """In a step in which sequences join, the pass itself stores keys before a slot's rows: none is read too early."""
    scene = kernel_checks._paged_scene(CPU, HALF, 128, 4, (6, 6, 6), (300, 520, 140))
    arrived, plan = attention.counters(CPU), scene["plan"]
    assert plan.even > 0
    hopper(0, 3)
    alone = attention.attend_pages(**scene, arrived=arrived, scale=0.3)
    none = torch.full((2, 32), -1, dtype=torch.int32)
    empty = pages.PagePlan(none, torch.zeros_like(none[:, :2]), torch.zeros_like(none[:, 0]), *_pages_of(plan))
    stale = [(scene[name], torch.full_like(scene[name], NAN)) for name in ("keys", "values")]
    for seed in range(3):
        hopper(seed, 3, [*stale, unwritten(scene["q"])])
        beside = {**scene, "plan": replace(plan, beside=empty)}
        assert torch.equal(attention.attend_pages(**beside, arrived=arrived, scale=0.3), alone)


@pytest.mark.parametrize(("group", "rows"), [(4, 3), (1, 6), (7, 1)])
def test_prompts_in_the_launch_of_the_batch_slots(hopper: Set, group: int, rows: int) -> None:
    """One launch for the tiles of both: the bits of two."""
    counts, lengths = (*(rows,) * 5, 39, 20), (300, 520, 140, 9, 3000, 39, 150)
    scene = kernel_checks._paged_scene(CPU, HALF, 128, group, counts, lengths)
    plan, first, arrived = scene["plan"], 5 * rows, attention.counters(CPU)
    own = pages.even_plan(5, rows, plan.tables[:5], plan.page, 4096, 128)
    height = pages.shared_height(rows, group, 128, 2, plan.page, CPU)
    assert height is not None and rows <= height <= pages.chain_height(group, 128, 2, plan.page, CPU)
    lanes_of = [pages.PageLane(5, range(first, first + 39)), pages.PageLane(6, range(first + 39, first + 59))]
    more = pages._cut(lanes_of, height, plan.tables, plan.page, plan.blocks, height)
    results = []
    for joined in (replace(own, tables=plan.tables, beside=more), replace(own, tables=plan.tables).with_tiles(more)):
        for seed, processors in enumerate((1, 5)):
            hopper(seed, processors, unwritten_keys(scene, counts, lengths))
            results.append(attention.attend_pages(**{**scene, "plan": joined}, arrived=arrived, scale=0.3))
            assert not arrived.any(), "counters are zero between passes"
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert distance(results[0], attention.attend_pages_twin(**scene, scale=0.3)) < 1e-3


def _pages_of(plan: pages.PagePlan) -> tuple[Tensor, int, int]:
    return plan.tables, plan.page, plan.blocks


def test_attention_without_room_for_spans(hopper: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two blocks share a tile then: the same bits."""
    scene, results = kernel_checks._paged_scene(CPU, HALF, 128, 4, *MIXED), []
    hopper(0, 3)
    for limit in (attention.PARTS_LIMIT, 1000):
        monkeypatch.setattr(attention, "PARTS_LIMIT", limit)
        results.append(attention.attend_pages(**scene, arrived=attention.counters(CPU), scale=0.3))
    assert torch.equal(*results)


def tree_scene(bases: Sequence[int], rows: int, seed: int, dim: int = 128, group: int = 4, **more: Any) -> TreeScene:
    given = (CPU, HALF, dim, group, bases, rows, Random(seed))
    return tree_checks.tree_scene(*given, place=lanes.place_lanes_twin, **more)


def unwritten_nodes(scene: TreeScene, bases: Sequence[int], rows: int) -> list[tuple[Tensor, Tensor]]:
    """The pools before the last tokens and all nodes have been stored, and the queries."""
    tables, page = scene.trees.tables, scene.trees.page
    pools = [(pool, pool.clone()) for pool in scene.pools]
    for _, before in pools:
        for table, base in zip(tables, bases, strict=True):
            before[tree_checks._slots(table, page)[base - 1 : base - 1 + rows]] = NAN
    return [*pools, unwritten(scene.q)]


def check_trees(hopper: Set, bases: Sequence[int], rows: int, seed: int, options: dict[str, Any], **more: Any) -> None:
    """Rows of random trees: the bits of chains, with any number of processors; close to the twin."""
    scene = tree_scene(bases, rows, seed, **more)
    source, arrived = Random(seed), attention.counters(CPU)
    given = {**options, "sinks": random(scene.q.shape[1])} if "sinks" in options else options
    assert scene.trees.lanes is not None and flash.fits(scene.pools[0], scene.trees, more.get("group", 4))
    hopper(seed, 3)
    chains = scene.attend(scene.chains, **given)
    for processors in (1, source.randint(2, 7)):
        hopper(source.randrange(1000), processors, unwritten_nodes(scene, bases, rows))
        q, (keys, values) = scene.q, scene.pools
        found = attention.attend_pages(q, keys, values, scene.positions, scene.trees, arrived, 0.3, **given)
        other = (found != chains).any(-1).any(-1)
        assert not other.any(), f"rows {other.nonzero().flatten().tolist()} of {len(bases)} trees of {rows} rows"
        assert not arrived.any(), "counters are zero between passes"
    twin = attention.attend_pages_twin(q, keys, values, scene.positions, scene.trees, 0.3, **given)
    assert distance(found, twin) < 1e-3


@pytest.mark.parametrize(
    ("rows", "bases", "more"),
    [
        (3, (1, 15, 16, 17, 111, 112, 113), {}),
        (5, (126, 127, 128, 129, 130), {}),
        (5, (495, 504, 510, 511, 512, 513), {}),
        (9, (127, 509, 640, 1023), {"dim": 64, "group": 3}),
        (16, (5, 120, 125, 508), {"page": 16}),
        (25, (3, 122, 300, 511), {"dim": 64, "group": 4}),  # two tiles of a tree
        (25, (121, 505), {"group": 1}),  # more lanes than shared memory holds at once
    ],
)
def test_trees(hopper: Set, rows: int, bases: tuple[int, ...], more: dict[str, Any]) -> None:
    check_trees(hopper, bases, rows, sum(bases), {}, **more)


@pytest.mark.parametrize("options", [{"window": 100}, {"window": 9}, {"softcap": 20.0}, {"sinks": 1}], ids=str)
def test_trees_with_options(hopper: Set, options: dict[str, Any]) -> None:
    check_trees(hopper, (12, 122, 510, 1020), 7, 1, options, dim=64, group=2)


@pytest.mark.parametrize("deepest", [1, 3, pages.DEEPEST])
@pytest.mark.parametrize("first", [120, 504, 1016])
def test_trees_at_the_ends_of_blocks(hopper: Set, first: int, deepest: int) -> None:
    """A path of 17 nodes ends in a later block than it begins in, or in a later span."""
    check_trees(hopper, range(first, first + 10, 3), 18, first, {}, dim=64, group=2, deepest=deepest)


def test_trees_without_room_for_spans(hopper: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block takes all of a tile's keys then, though most of them lie behind its stretch."""
    monkeypatch.setattr(attention, "PARTS_LIMIT", 1000)
    check_trees(hopper, (3, 511, 2500, 900), 5, 4, {}, dim=64)


def test_packed_trees(hopper: Set) -> None:
    """The first rows of some trees, end to end, beside padding rows and a sequence without rows."""
    bases, rows, counts = (100, 125, 511, 900), 6, (6, 1, 0, 4)
    scene = tree_scene(bases, rows, 5)
    hopper(2, 3)
    chains = scene.attend(scene.chains)
    kept = [seq * rows + row for seq, count in enumerate(counts) for row in range(count)]
    table, trees = packing.PackedRows.empty(4, rows, CPU), TreeNodes.over(scene.pools, 4, rows, rows)
    table.rows.fill_(-1)
    for seq, count in enumerate(counts):
        table.rows[seq, :count] = torch.arange(sum(counts[:seq]), sum(counts[: seq + 1]))
    assert scene.trees.tails is not None and scene.trees.tails.paths is not None
    trees.base.copy_(torch.tensor(bases))
    trees.paths.copy_(scene.trees.tails.paths.view(4, rows, -1))
    tables, page = scene.trees.tables, scene.trees.page
    plan = pages.packed_tree_plan(4, rows, len(kept) + 3, tables, page, tables.shape[1] * page, 4, 128, 2, rows - 1)
    packing.pack_paths_twin(table, trees, plan, 128)
    places = torch.tensor([*kept, 0, 0, 0])
    positions = scene.positions[places]
    lanes.place_lanes_twin(plan, positions)
    assert flash.fits(scene.pools[0], plan, 4)
    arrived = attention.counters(CPU)
    found = attention.attend_pages(scene.q[places], *scene.pools, positions, plan, arrived, 0.3)
    assert torch.equal(found[: len(kept)], chains[kept])


def test_which_trees_it_takes(hopper: Set) -> None:
    """Not those of deep paths, nor draft heads' levels, whose lanes nobody finds."""
    tables, paths = torch.zeros(1, 9).int(), torch.zeros(1, 30, pages.PATH).int()
    keys = torch.zeros(1, 1, 128, dtype=HALF)
    for depth, found in ((pages.DEEPEST, True), (pages.DEEPEST + 1, False), (pages.PATH, False)):
        plan = pages.tree_plan(paths, tables, 32, 288, 4, 128, 2, depth)
        assert flash.fits(keys, plan, 4) is found
    assert not flash.fits(keys, pages.tree_plan(paths, tables, 8, 72, 4, 128, 2, 3), 4)


@pytest.mark.parametrize(
    ("dim", "itemsize", "page", "tokens"),
    [(64, 2, 32, 128), (128, 2, 128, 128), (32, 4, 32, 64), (64, 4, 32, 64), (128, 2, 8, 64), (256, 2, 32, 64)],
)
def test_tiles_are_as_high_as_their_kernel_takes(hopper: Set, dim: int, itemsize: int, page: int, tokens: int) -> None:
    """Heads of 32 bits and other pages are not this kernel's, and have the other one's tiles."""
    assert pages.chain_height(4, dim, itemsize, page, CPU) * 4 == tokens
    kind = HALF if itemsize == 2 else torch.float32
    plan = pages.plan_pages([pages.PageLane(0, range(200))], 4, torch.zeros(1, 99).int(), page, 9, dim, itemsize)
    assert plan.rows.shape[1] * 4 == tokens
    assert flash.fits(torch.zeros(1, 1, dim, dtype=kind), plan, 4) is (tokens == pages.HOPPER_TOKENS)


def own_slots(scene: dict[str, Any], counts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Where the pass stores its keys."""
    tables, page = scene["plan"].tables, scene["plan"].page
    return [
        int(tables[seq, at // page]) * page + at % page
        for seq, (count, length) in enumerate(zip(counts, lengths, strict=True))
        for at in range(length - count, length)
    ]


# A whole model


def a_model(folder: Path, layers: int = 2) -> Fused:
    """A few layers in the GPU's decoder, wide enough for products that normalise their own rows."""
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=96, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    spec = decoder_spec(config, *loader.rope_frequencies(config))
    tensors = loader.CheckpointTensors(folder, HALF, CPU)
    return Fused(fused_weights(Source("a model", spec, tensors, 96, 256, HALF, True)))


def test_a_model_writes_the_same_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Prompts and single rows, through products, norms and attention as the decoder calls them."""
    model, launched = a_model(tmp_path), Counter[str]()
    monkeypatch.setattr("faircopy.layout.paged.cache_dtype", lambda *about: HALF)  # as on a GPU
    requests = [Request(tuple(range(3, 3 + n)), SamplingParams(max_tokens=2, ignore_eos=True)) for n in (1, 5)]
    config = EngineConfig(k=0, max_batch=2, cache_memory="4MiB", graphs=False)

    def written() -> list[list[int]]:
        engine = build_engine(model, config=config, suite=KERNELS)
        seqs = [engine.add(one) for one in requests]
        while engine.busy:
            engine.step()
        return [seq.output for seq in seqs]

    wanted = written()
    request.getfixturevalue("hopper")(1, 3)
    for launcher in LAUNCHERS:
        run = launcher.kernel._run
        name = launcher.kernel._kernel.fn.__name__
        monkeypatch.setattr(launcher.kernel, "_run", lambda *a, f=run, n=name: (launched.update([n]), f(*a)))
    assert written() == wanted
    assert launched["_normed_stream"] and launched["_flash"] and launched["_add_norm"]


# The interpreter itself: each mistake is seen


@gluon.jit
def _bring(x, full, empty, tiles, count, FREE: gl.constexpr, EXPECT: gl.constexpr, PDL: gl.constexpr):
    if PDL:
        gdc_wait()
    for i in range(count):
        if FREE:
            mbarrier.wait(empty.index(i % 2), (i // 2 + 1) & 1)
        mbarrier.expect(full.index(i % 2), EXPECT)
        tma.async_copy_global_to_shared(x, [0, i * 64], full.index(i % 2), tiles.index(i % 2))


@gluon.jit
def _add_up(out, full, empty, tiles, ones, count, FULL: gl.constexpr, WAIT: gl.constexpr, FENCE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    ones.store(gl.full([64, 16], 1.0, ones.dtype, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])))
    if FENCE:
        fence_async_shared()
    acc = gl.zeros([64, 16], gl.float32, layout)
    for i in range(count):
        if FULL:
            mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        acc = warpgroup_mma(tiles.index(i % 2), ones, acc, is_async=True)
        if WAIT:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(i % 2), count=1)
    at = gl.arange(0, 64, gl.SliceLayout(1, layout))
    gl.store(out + at, gl.max(acc, 1))


@gluon.jit
def _sums(
    x, out, count, FREE: gl.constexpr, FULL: gl.constexpr, WAIT: gl.constexpr, FENCE: gl.constexpr,
    EXPECT: gl.constexpr, FOLLOW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [64]: the sums of the rows of x [64, 64 count]."""
    tiles = gl.allocate_shared_memory(x.dtype, [2, 64, 64], x.layout)
    ones = gl.allocate_shared_memory(x.dtype, [64, 16], gl.NVMMASharedLayout.get_default_for([64, 16], x.dtype))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(2):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    gl.warp_specialize(
        [
            (_add_up, (out, full, empty, tiles, ones, count, FULL, WAIT, FENCE)),
            (_bring, (x, full, empty, tiles, count, FREE, EXPECT, FOLLOW)),
        ],
        [1],
        [24],
    )  # fmt: skip


def check_sums(x: Tensor, late: bool = False, **mistake: Any) -> None:
    """In each of twenty orders of events."""
    right = {"FREE": True, "FULL": True, "WAIT": True, "FENCE": True, "EXPECT": 64 * 64 * 2, "FOLLOW": True}
    for seed in range(20):
        out = torch.zeros(64)
        stale = {x.data_ptr(): torch.full_like(x, NAN)} if late else {}
        kernel = Interpreted(_sums, seed, stale)
        kernel[(1,)](stream.descriptor(x, 64, 64), out, x.shape[1] // 64, **right | mistake)
        if not torch.allclose(out, x.float().sum(1), atol=1e-2):
            raise KernelError("wrong sums")


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"FOLLOW": False, "late": True}, "wrong sums"),  # inputs are read before the kernel ahead has written them
        ({"FULL": False}, "wrong sums|wait for each other|more have arrived"),  # a tile before it has come
        ({"FREE": False}, "wrong sums|wait for each other|more have arrived"),  # a tile is overwritten
        ({"WAIT": False}, "before the wait"),
        ({"FENCE": False}, "without a fence"),
        ({"EXPECT": 64 * 64 * 4}, "wait for each other"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_the_interpreter_sees_mistakes(mistake: dict[str, Any], said: str) -> None:
    x = random(64, 64 * 7)
    check_sums(x, late=True)
    with pytest.raises(KernelError, match=said):
        check_sums(x, **mistake)


def test_the_interpreter_sees_addresses_outside() -> None:
    @gluon.jit
    def fill(out, n, PDL: gl.constexpr):
        at = gl.program_id(0) * 8 + gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
        gl.store(out + at, at, mask=at < n)

    out = torch.zeros(13, dtype=torch.int32)
    Interpreted(fill)[(2,)](out, 13)
    assert out.tolist() == list(range(13))
    with pytest.raises(KernelError, match="outside a tensor"):
        Interpreted(fill)[(2,)](out, 14)
