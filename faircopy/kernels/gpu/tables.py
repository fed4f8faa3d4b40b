"""Which tile a product uses: from a table per class of device, made once by a tuning command, never at run time.

The split of K decides bits, so it belongs to the weight's shape alone; everything else is only speed.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

GRAIN = 64  # spans of K are multiples of this
FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one block's work."""

    bm: int
    bn: int
    bk: int
    warps: int = 4
    stages: int = 4
    ahead: int = 0  # lines of 64 weights per column asked for before the kernel ahead has ended
    wide: bool = False  # tensor descriptors and a grid that stays
    resident: int = 1  # blocks per processor of that grid
    high: int = 1  # tiles of rows that share a tile of weights, up to three
    apart: bool = False  # spans of K are tiles of their own too


@dataclass(frozen=True, slots=True)
class Plan:
    """How one weight shape is multiplied."""

    split: int
    plain: dict[int, Tile] = field(default_factory=dict)  # by the most rows they serve
    halves: dict[int, Tile] = field(default_factory=dict)  # the same for gated products
    shape: tuple[int, int] = (0, 0)
    depth: int = 64  # of K in a tile that is in no table

    def tile(self, rows: int, wide: bool) -> Tile:
        return self._fitting(_nearest(self.plain, rows), rows, wide)

    def gated(self, rows: int, wide: bool) -> Tile:
        return self._fitting(_nearest(self.halves, rows), rows, wide)

    def _fitting(self, known: Tile | None, rows: int, wide: bool) -> Tile:
        if known is None or (known.wide and not wide):
            return default_tile(rows, wide, self.depth)
        return replace(known, high=min(known.high, -(-rows // known.bm)))  # no higher than there are rows


def _nearest(tiles: dict[int, Tile], rows: int) -> Tile | None:
    """The tile of the smallest bucket that holds this many rows; the largest bucket serves everything above."""
    fitting = [bucket for bucket in tiles if bucket >= rows]
    return tiles[min(fitting)] if fitting else tiles[max(tiles)] if tiles else None


def span_length(inner: int, split: int) -> int:
    """Length of each span of K but the last."""
    return -(-inner // (split * GRAIN)) * GRAIN


def default_tile(rows: int, wide: bool, depth: int = 64) -> Tile:
    """Safe on every chip with tensor cores: at most 96 KiB of shared memory."""
    height = next((h for h in (16, 32, 64) if rows <= h), 64)
    if rows <= 64 or not wide:
        return Tile(height, 64, depth, 4, 3)
    return Tile(128, 128, 64, 8, 3, wide=True)


def default_split(outputs: int, inner: int) -> int:
    """Enough spans that few rows still fill a large chip, none shorter than 512."""
    split = 1
    while split < 8 and -(-outputs // 64) * split < 192 and inner // (2 * split) >= 512:
        split *= 2
    return split


def plan(device: torch.device, outputs: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Plan:
    """The tables were measured with 16-bit numbers. 32-bit ones take twice the shared memory, and their products are
    single multiply-adds: they get small tiles that compile fast."""
    known = read(device_class(device)).get(f"{outputs}x{inner}")
    split = default_split(outputs, inner) if known is None else known["split"]
    if known is None or dtype.itemsize > 2:
        return Plan(split, shape=(outputs, inner), depth=16 if dtype.itemsize > 2 else 64)
    plain, gated = (
        {int(rows): _tile(values) for rows, values in known.get(name, {}).items()} for name in ("plain", "gated")
    )
    return Plan(known["split"], plain, gated, (outputs, inner))


def _tile(values: list[int]) -> Tile:
    bm, bn, bk, warps, stages, ahead, wide, resident, high, apart = values
    return Tile(bm, bn, bk, warps, stages, ahead, bool(wide), resident, high, bool(apart))


@cache
def device_class(device: torch.device) -> str:
    """The table a device reads. Bits may differ between classes: a class is a kind of device."""
    if device.type != "cuda":
        return "default"
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "ampere", 9: "hopper"}.get(major, "default")


@cache
def read(name: str) -> dict[str, Any]:
    file = FOLDER / f"{name}.json"
    return dict(json.loads(file.read_text())["shapes"]) if file.exists() else {}


def as_entry(tile: Tile) -> list[int]:
    """A tile as the tables hold it."""
    return [int(value) for value in astuple(tile)]
