"""Triton kernels in the interpreter, or on a GPU where there is one: each against its torch twin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from faircopy import bundled
from faircopy.bench.tune import ROWS, candidates, entries, fit, hopper_candidates
from faircopy.kernels.gpu import tables
from faircopy.kernels.gpu.launch import INTERPRETED
from faircopy.kernels.gpu.linear import Linear
from faircopy.kernels.gpu.tables import Tile
from faircopy.kernels.groups import group_count
from faircopy.model.loader import load_config
from faircopy.testing.kernel_checks import Check, checks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("check", checks(), ids=lambda check: check[0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_kernel_is_its_twin(check: Check) -> None:
    name, run = check
    assert run(DEVICE) <= (0.0 if ":" in name else 1.0), name


def test_these_tests_run_without_a_gpu() -> None:
    assert INTERPRETED or DEVICE.type == "cuda"


@pytest.mark.parametrize("name", ["hopper", "ampere", "default"])
def test_a_table_of_tiles_can_be_read(name: str) -> None:
    shapes = tables.read(name).get("shapes", {})
    assert (name == "default") or shapes
    for shape, entry in shapes.items():
        outputs, inner = map(int, shape.split("x"))
        for kind in ("plain", "gated"):
            groups = group_count(inner, outputs) if kind == "plain" else 1
            for values in entry.get(kind, {}).values():
                tile = tables.as_tile(values)
                assert tile.bm in (16, 32, 64, 128) and tile.bn <= outputs and tile.bk in (64, 128, 256)
                assert tile.possible and not ((tile.wide or tile.streamed) and inner // groups % tile.bk), shape


def test_an_unknown_shape_gets_a_safe_tile() -> None:
    plan = tables.plan(torch.device("cpu"), 640, 8192)
    assert plan.tile(3, True, 4).bm == 16
    assert plan.tile(5000, True, 4).wide and not plan.tile(5000, False, 4).wide


def test_few_rows_are_streamed_where_the_device_can() -> None:
    plan = tables.Plan((4096, 4096), streams=True)
    for rows in (1, 8, 9, 32, 33, 64, 65, 90, 128):
        tile = plan.tile(rows, True, 4)
        assert tile.streamed and rows <= tile.height < 2 * max(rows, 8)
        size = tile.resident * tile.stages * tile.bk * (tile.height + tile.bn) * 2
        assert size <= 210 << 10, "what a processor has, sums left aside"
    assert not plan.tile(129, True, 4).streamed
    assert not plan.tile(8, False, 4).streamed, "32-bit numbers have no tensor cores of this order"


def test_a_rule_chooses_the_tile_of_least_expected_time() -> None:
    small, large = Tile(64, 64, 64, wide=True), Tile(128, 256, 64, wide=True)
    plan = tables.Plan(
        (4096, 4096), rule=(tables.Expected(small, False, 1.0, 0.1), tables.Expected(large, False, 1.0, 0.3))
    )
    assert plan.tile(100, True, 1) == replace(small, high=1)
    assert plan.tile(4096, True, 1) == large, "twice the time a step for eight times the work"


def test_tiles_of_the_users_own_device_go_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "_own", tables.KeptTable("tiles"))
    device, mine = torch.device("cpu"), Tile(64, 128, 64, wide=True)
    tables.keep(device, "640x8192", {"plain": {"128": tables.as_entry(mine)}})
    assert tables.plan(device, 640, 8192).tile(100, True, 4) == mine


@pytest.mark.parametrize("entry", ["x", {"plain": []}, {"plain": {"16": [1]}}, {"plain": {"16": [63] + [1] * 8}}])
def test_damaged_tiles_of_the_user_are_left_out(entry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path))
    shipped = tables.plan(torch.device("cpu"), 640, 8192)
    monkeypatch.setattr(tables, "_own", tables.KeptTable("tiles"))
    tables.keep(torch.device("cpu"), "640x8192", entry)
    assert tables.plan(torch.device("cpu"), 640, 8192) == shipped


def test_the_order_of_sums_depends_on_the_shape_alone() -> None:
    """Whatever the number of rows, the same groups are added: only then can bits agree."""
    assert Linear(torch.zeros(64, 2048)).groups == group_count(2048, 64) == 4
    assert group_count(2048, 6144) == 1 and group_count(4096, 5120) == 4
    assert group_count(576) == 1 and group_count(11008) == 4 and group_count(64) == 1


@pytest.mark.parametrize("rows", ROWS.values())
def test_tuning_tries_tiles_that_fit_a_processor(rows: int) -> None:
    for groups in (1, 4):
        tiles = candidates(rows, groups)
        assert tiles
        for tile in tiles + hopper_candidates(rows, groups):
            assert tile.stages * tile.bk * (tile.height + tile.bn) * 2 <= 227 << 10


def test_the_rule_is_fitted_to_times() -> None:
    """Times made by a rule give that rule back."""
    tile = Tile(64, 128, 64, 4, 4, wide=True, resident=2)
    records = []
    for outputs, inner, rows in ((4096, 4096, 128), (24576, 4096, 256), (8192, 16384, 512), (1024, 1024, 96)):
        rounds, steps, million = tables.work(tile, rows, outputs, inner, 1)
        us = rounds * (2.5 + 0.4 * steps) + 0.1 * million
        records.append(
            {"shape": [outputs, inner], "gated": True, "rows": rows, "tiles": [[*tables.as_entry(tile), us]]}
        )
    (expected,) = tables.as_rule(fit(records))
    assert expected.tile == tile and not expected.grouped
    assert (expected.round, expected.step, expected.read) == pytest.approx((2.5, 0.4, 0.1), rel=1e-3)
    assert set(entries(records)["4096x4096"]["gated"]) == {"128"}


def test_a_table_has_streamed_tiles_that_the_rule_expects_to_be_faster() -> None:
    """Of a bucket that was not timed, times of the next one count; what was timed itself goes before the rule."""
    slow, fast = Tile(64, 128, 64, 4, 4, wide=True), tables.tall_tiles(160)[1]
    rule = (tables.Expected(fast, False, 1.0, 0.1),)
    expected = tables.microseconds(rule[0], 160, 24576, 4096, 1)

    def chosen(*tiles: tuple[Tile, float]) -> dict[str, list[int]]:
        rows = [[*tables.as_entry(tile), us] for tile, us in tiles]
        record = {"shape": [24576, 4096], "gated": True, "rows": 192, "tiles": rows}
        found: dict[str, list[int]] = entries([record], rule)["24576x4096"]["gated"]
        return found

    slower, other = chosen((slow, 1.2 * expected)), tables.tall_tiles(192)[1]
    assert slower["160"] == tables.as_entry(fast) and slower["192"] == slower["144"] == tables.as_entry(slow)
    assert chosen((slow, 1.02 * expected))["160"] == tables.as_entry(slow), "not by so little"
    assert chosen((slow, 90.0), (other, 80.0))["192"] == tables.as_entry(other)


def test_gates_and_values_take_turns() -> None:
    weight = torch.arange(8.0).view(4, 2)
    assert Linear.gating(weight).weight.tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_a_product_without_the_promise_is_the_librarys() -> None:
    weight, x = torch.randn(6, 5), torch.randn(3, 5)
    loose = Linear(weight, None, exact=False)
    assert torch.equal(loose(x), torch.nn.functional.linear(x, weight))
    assert torch.equal(loose.parts(x)[0], loose(x))


def test_tiles_are_values() -> None:
    assert tables.as_tile(tables.as_entry(Tile(64, 128, 64, wide=True, high=3))) == Tile(64, 128, 64, wide=True, high=3)


def test_tuning_keeps_the_fastest_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`faircopy tune`, with times that were not measured."""
    from faircopy.bench import tune as timing
    from faircopy.terminal import tune as command

    def made_up(shapes: list[tuple[int, int, bool]]) -> list[dict[str, Any]]:
        (outputs, inner, gated), tile = shapes[0], Tile(64, 64, 64, wide=True)
        rows = [[*tables.as_entry(replace(tile, bn=bn)), us] for bn, us in ((64, 5.0), (128, 4.0))]
        return [{"shape": [outputs, inner], "gated": gated, "rows": 96, "tiles": rows, "cublas": 4.5}]

    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "_own", tables.KeptTable("tiles"))
    monkeypatch.setattr(tables, "device_name", lambda device: "some device")
    monkeypatch.setattr(command, "needs_gpu", lambda: None)
    monkeypatch.setattr(timing, "time_shapes", made_up)
    command.tune(bundled.target())
    config = load_config(Path(bundled.target()))
    plan = tables.plan(torch.device("cpu"), config.hidden_size, config.intermediate_size)
    assert plan.tile(80, True, 4).bn == 128
    assert tables.plan(torch.device("cpu"), 2 * config.intermediate_size, config.hidden_size).gated(80, True).bn == 128


def test_a_partial_sum_is_not_rounded_and_may_have_no_rows() -> None:
    """Experts without tokens, and rows that begin in the middle of a tensor."""
    weight, x = torch.randn(64, 256), torch.randn(5, 257)
    layer = Linear(weight, groups=4)
    assert layer.partial(x[:0, 1:]).shape == (0, 64)
    partial = layer.partial(x[:, 1:])
    assert partial.dtype == torch.float32 and torch.equal(partial, layer.partial(x[:, 1:].clone()))


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter sees it")
def test_addresses_outside_of_a_kernels_tensors_are_errors() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, count, N: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, N)
        tl.store(x + at, 2 * tl.load(x + at, mask=at < count), mask=at < count)

    numbers = torch.ones(6)
    double[(1,)](numbers[:5], 5, N=8)
    assert numbers.tolist() == [2.0] * 5 + [1.0]
    with pytest.raises(Exception, match="1 of 6 addresses lie outside"):
        double[(1,)](numbers[:5], 6, N=8)
