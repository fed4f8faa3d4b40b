"""Which tiles are chosen: they fit the chip, hold their rows, and belong to kernels that can make the product."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from faircopy.bench.shapes import SHAPES, products
from faircopy.kernels.gpu import tables
from faircopy.kernels.groups import group_count

SHARED = 227 << 10  # bytes of shared memory that blocks of one of Hopper's processors have together


@pytest.mark.parametrize("model", SHAPES)
def test_streamed_tiles_fit(model: str) -> None:
    for name, (outputs, inner) in products(model).items():
        groups = 1 if name == "gate_up" else group_count(inner, outputs)
        for rows in range(1, tables.STREAMED + 1):
            tile = tables.streamed_tile(rows, outputs, groups)
            stage = (tile.height + tile.bn) * tile.bk * 2
            assert tile.streamed and tile.height >= rows and tile.bm % 8 == tile.second % 8 == 0
            assert tile.resident * (tile.stages * stage + 1024) <= SHARED


@pytest.mark.parametrize("rows", [rows for rows in tables.BUCKETS if rows <= 512])
def test_taller_streamed_tiles_fit(rows: int) -> None:
    tiles = tables.tall_tiles(rows)
    assert {tile.bn for tile in tiles} >= {64, 128}
    for tile in tiles:
        count = -(-rows // tile.height)
        assert tile.possible and count * tile.height - rows < 16 * count, "as high as the rows, or nearly"
        assert tile.stages >= 4 and tile.stages * (tile.height + tile.bn) * tile.bk * 2 + (12 << 10) <= SHARED
        assert tables.as_tile(tables.as_entry(tile)) == tile


def test_output_layers_and_small_weights_have_tiles_of_their_own() -> None:
    assert tables.streamed_tile(8, 151936, 1).bn == 128 and tables.streamed_tile(8, 24576, 1).bn == 64
    assert tables.streamed_tile(48, 6144, 1).bn == 64 and tables.streamed_tile(48, 4096, 4).bn == 128


@pytest.mark.parametrize(("outputs", "inner", "groups"), [(6144, 4096, 1), (4096, 12288, 4), (1004, 4096, 1)])
def test_the_rule_chooses_what_can_be_made(outputs: int, inner: int, groups: int) -> None:
    rule = tables.as_rule(tables.read("hopper")["rule"])
    for rows in (96, 256, 512, 1024, 2560, 4096):
        tile = tables.ruled_tile(rule, rows, outputs, inner, groups)
        possible = rows >= tables.TIMED_PIPELINED and tables.can_pipeline(tile, outputs, inner, groups)
        assert possible or not tile.pipelined
    assert tables.ruled_tile(rule, 4096, 4096, 12288, 4).pipelined
    assert not tables.ruled_tile(rule, 4096, 1004, 4096, 1).pipelined
