"""Triton kernels in the interpreter, or on a GPU where there is one: each against its torch twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from faircopy.bench.tune import ROWS, candidates
from faircopy.kernels.gpu import tables
from faircopy.kernels.gpu.launch import INTERPRETED
from faircopy.kernels.gpu.linear import Linear
from faircopy.kernels.gpu.tables import Tile
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
    shapes = tables.read(name)
    assert (name == "default") or shapes
    for shape, entry in shapes.items():
        outputs, inner = map(int, shape.split("x"))
        assert tables.span_length(inner, entry["split"]) * (entry["split"] - 1) < inner
        for kind in ("plain", "gated"):
            for values in entry.get(kind, {}).values():
                tile = tables._tile(values)
                assert tile.bm in (16, 32, 64, 128) and tile.bn <= outputs and tile.bk in (64, 128, 256)
                assert not (tile.wide and tables.span_length(inner, entry["split"]) % tile.bk), shape


def test_an_unknown_shape_gets_a_safe_tile_and_a_split_of_its_own() -> None:
    plan = tables.plan(torch.device("cpu"), 640, 8192)
    assert plan.split > 1
    assert plan.tile(3, True).bm == 16 and plan.tile(5000, True).wide and not plan.tile(5000, False).wide


def test_the_split_depends_on_the_shape_alone() -> None:
    """Whatever the number of rows, the same spans are added: only then can bits agree."""
    layer = Linear(torch.zeros(64, 2048))
    assert len({layer.plan.split for _ in (1, 8, 64, 512)}) == 1
    assert layer.plan.split == tables.default_split(64, 2048)


@pytest.mark.parametrize("rows", ROWS.values())
def test_tuning_tries_tiles_that_fit_a_processor(rows: int) -> None:
    for gated in (False, True):
        tiles = candidates(rows, gated)
        assert tiles
        for tile in tiles:
            assert tile.stages * tile.bk * (tile.bm * tile.high + tile.bn) * 2 <= 227 << 10


def test_gates_and_values_take_turns() -> None:
    weight = torch.arange(8.0).view(4, 2)
    assert Linear.gating(weight).weight.tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_a_product_without_the_promise_is_the_librarys() -> None:
    weight, x = torch.randn(6, 5), torch.randn(3, 5)
    loose = Linear(weight, None, exact=False)
    assert torch.equal(loose(x), torch.nn.functional.linear(x, weight))
    assert torch.equal(loose.parts(x)[0], loose(x))


def test_tiles_are_values() -> None:
    assert tables._tile(tables.as_entry(Tile(64, 128, 64, wide=True, high=3))) == Tile(64, 128, 64, wide=True, high=3)
