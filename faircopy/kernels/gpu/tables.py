"""Which tile a product uses: by a rule for few rows on Hopper, else from a table per class of device, else by a rule.

Tiles are only speed: the order of sums, and with it the bits, belongs to the weight's shape (`kernels/groups.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from faircopy.cache import KeptTable
from faircopy.kernels.gpu.launch import power

FOLDER = Path(__file__).parent / "tuned"
STREAMED = 128  # rows up to which all products on Hopper are streamed; beyond, tables and rule say which
# Rows of the first, second and third tile that share a tile of weights in streamed products, by their sum: tiles are
# powers of two, these heights are not. Up to 128 rows other numbers have one tile, of the next power of two.
ROW_TILES = {
    80: (64, 16, 0), 96: (64, 32, 0), 144: (128, 16, 0), 160: (128, 32, 0), 192: (128, 64, 0), 208: (128, 64, 16),
    224: (128, 64, 32), 256: (128, 128, 0),
}  # fmt: skip
NARROW = 64  # rows up to which other devices have narrow tiles
PROCESSORS = 132  # of the chip that tables and rules were measured on
ROOM = 1600  # rows and columns, 64 inputs deep, that a processor's shared memory holds in all stages of a block,
TALL_ROOM = 1680  # and the same of more than STREAMED rows
FULL = 0.9  # share of them that blocks of 128 columns should keep busy
# Rows beyond STREAMED that tiles are chosen for; other numbers of rows use the next one's.
BUCKETS: tuple[int, ...] = (
    144, 160, 192, 208, 224, 256, 288, 320, 384, 416, 448, 480, 512, *range(768, 4097, 256),
)  # fmt: skip
# Numbers of rows that together use every tile which any number of rows would use.
TILE_ROWS = (1, 2, 8, 16, 32, 48, 64, 80, 96, 128, *BUCKETS)
TIMED_PIPELINED = 192  # rows, rounded as the rule is asked, from which on pipelined tiles were timed
PROMPTS = 1024  # rows from which on products are long enough to be limited by the chip's power
MANY_ROUNDS = 4  # of blocks over all processors: the output layer's


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one block's work."""

    bm: int
    bn: int
    bk: int
    warps: int = 4
    stages: int = 4
    wide: bool = False  # tensor descriptors and a persistent grid
    resident: int = 1  # blocks per processor of that grid
    high: int = 1  # tiles of rows that share a tile of weights, up to three
    apart: bool = False  # groups of K are tiles of their own too
    pipelined: bool = False  # a warp of its own copies (kernels/gpu/pipelined.py)
    streamed: bool = False  # the same for few rows (kernels/gpu/stream.py); as high as there are rows
    second: int = 0  # rows of a second tile of such a product, after the first one's
    warpgroups: int = 1  # groups of four warps that have a share of its columns each, up to three
    third: int = 0  # rows of a third tile, after the second one's

    @property
    def height(self) -> int:
        """Rows that share a tile of weights."""
        return self.bm * self.high + self.second + self.third

    @property
    def possible(self) -> bool:
        """Whether kernels can be compiled for it at all."""
        counts = (self.stages, self.resident, self.high, self.warpgroups)
        if min(counts) < 1 or max(self.high, self.warpgroups) > 3 or self.bn % self.warpgroups:
            return False
        sides = (self.bm, self.bn // self.warpgroups, self.bk, self.warps, self.second or 1, self.third or 1)
        return all(n > 0 and n & (n - 1) == 0 for n in sides)


class Expected(NamedTuple):
    """What a tile was measured to take, in microseconds."""

    tile: Tile
    grouped: bool  # weights with several groups of K
    round: float  # of blocks
    step: float  # of 64 inputs, each round
    read: float = 0.0  # of a million numbers of the weight


Rule = tuple[Expected, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one weight shape is multiplied."""

    shape: tuple[int, int]
    plain: dict[int, Tile] = field(default_factory=dict)  # by the most rows they serve
    halves: dict[int, Tile] = field(default_factory=dict)  # the same for gated products
    rule: Rule = ()
    depth: int = 64  # of K in a tile that is in no table and of no rule
    streams: bool = False  # whether the device has what `kernels/gpu/stream.py` needs

    def tile(self, rows: int, tensor_cores: bool, groups: int) -> Tile:
        return self._chosen(self.plain, rows, tensor_cores, groups)

    def gated(self, rows: int, tensor_cores: bool) -> Tile:
        return self._chosen(self.halves, rows, tensor_cores, 1)

    def _chosen(self, known: dict[int, Tile], rows: int, tensor_cores: bool, groups: int) -> Tile:
        if self.streams and tensor_cores and rows <= STREAMED:
            return streamed_tile(rows, self.shape[0], groups)
        found = _nearest(known, rows) if known else None
        if found is None and self.rule and tensor_cores and rows > NARROW:
            found = ruled_tile(self.rule, rounded(rows), *self.shape, groups, known is self.halves)
        if found is None or ((found.wide or found.streamed) and not tensor_cores):
            return default_tile(rows, tensor_cores, self.depth)
        return replace(found, high=min(found.high, -(-rows // found.bm)))  # no higher than there are rows


def _nearest(tiles: dict[int, Tile], rows: int) -> Tile:
    """The tile of the smallest bucket that holds this many rows; the largest bucket serves everything above."""
    fitting = [bucket for bucket in tiles if bucket >= rows]
    return tiles[min(fitting)] if fitting else tiles[max(tiles)]


def rounded(rows: int) -> int:
    """The next number of rows that the rule is asked for: so few that their tiles can be compiled ahead."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), BUCKETS[-1])


@cache
def ruled_tile(rule: Rule, rows: int, outputs: int, inner: int, groups: int, gated: bool = False) -> Tile:
    """The tile of which the rule expects the least time."""
    stored = outputs // 2 if gated else outputs

    def taken(expected: Expected) -> float:
        return microseconds(expected, rows, outputs, inner, groups)

    def pipelines(tile: Tile) -> bool:
        return tile.pipelined and rows >= TIMED_PIPELINED and can_pipeline(tile, stored, inner, groups)

    fitting = [e for e in rule if e.grouped == (groups > 1)]
    piped = [e for e in fitting if pipelines(e.tile)]
    if groups > 1 and rows >= PROMPTS and piped:  # sums in registers: 16 to 25 % faster than all others
        return min(piped, key=taken).tile
    others = [e for e in fitting if not e.tile.pipelined and (rows <= 512 or not (e.tile.apart or e.tile.streamed))]
    return min(others + piped, key=taken).tile


def microseconds(expected: Expected, rows: int, outputs: int, inner: int, groups: int) -> float:
    """What a product is expected to take with this tile."""
    rounds, steps, million = work(expected.tile, rows, outputs, inner, groups)
    own = rounds * (expected.round + expected.step * steps) + expected.read * million
    return own + adding(expected.tile, rows, outputs, groups)


def adding(tile: Tile, rows: int, outputs: int, groups: int) -> float:
    """Microseconds that the reader of a product pays for groups of K which are not added yet."""
    return groups * rows * outputs * 4 / 3e6 if groups > 1 and (tile.apart or tile.streamed) else 0.0


def can_pipeline(tile: Tile, outputs: int, inner: int, groups: int) -> bool:
    """Whether `pipelined.py` can make a product: whole steps of K, rows that can be copied, sums that fit registers.

    outputs: columns that are stored, of a gated product half of the weight's.
    """
    return inner // groups % tile.bk == 0 and outputs % 8 == 0 and (groups == 1 or tile.bn <= 128)


def work(tile: Tile, rows: int, outputs: int, inner: int, groups: int) -> tuple[int, float, float]:
    """Rounds of blocks over Hopper's processors, steps of 64 inputs in a block's tile, and millions of weights."""
    parts = groups if tile.apart or tile.streamed else 1
    blocks = -(-rows // tile.height) * -(-outputs // tile.bn) * parts
    return -(-blocks // (PROCESSORS * tile.resident)), inner / (64 * parts), outputs * inner / 1e6


def streamed_tile(rows: int, outputs: int, groups: int) -> Tile:
    """Few rows: two small blocks per processor, so that one stores its sums while the other reads weights.

    More rows, or a vocabulary: one large block with as many stages as shared memory holds; of a weight that has not
    enough columns for all processors half as many columns each.
    """
    large = -(-outputs // 128) * groups  # blocks of 128 columns
    if rows > 32:
        return tall_tile(rows, 128 if large >= FULL * PROCESSORS else 64)
    if large >= MANY_ROUNDS * PROCESSORS:
        return Tile(power(rows, 8), 128, 64, 4, 10, streamed=True)
    return Tile(power(rows, 8), 64, 64, 4, 8, resident=2, streamed=True)


def tall_tile(rows: int, columns: int, warpgroups: int = 1) -> Tile:
    """A streamed tile of more than 32 rows, with a processor to itself."""
    first, second, third = row_tiles(rows)
    height = first + second + third
    stages = (ROOM if height <= STREAMED else TALL_ROOM) // (height + columns)
    return Tile(first, columns, 64, 4, stages, streamed=True, second=second, warpgroups=warpgroups, third=third)


def row_tiles(rows: int) -> tuple[int, int, int]:
    """Rows of the first, second and third tile (0: none) of the smallest height that holds these."""
    single = {power(rows): (power(rows), 0, 0)} if rows <= STREAMED else {}
    fitting = single | {height: tiles for height, tiles in ROW_TILES.items() if height >= rows}
    return fitting[min(fitting)]


def tall_tiles(rows: int) -> list[Tile]:
    """Streamed tiles worth trying for a bucket of more than STREAMED rows: one, or several that share them evenly."""
    least = -(-rows // max(ROW_TILES))
    heights = {count: sum(row_tiles(-(-rows // count))) for count in (least, least + 1)}
    height = heights[min(heights, key=lambda count: (count * heights[count], count))]
    most = 3 if height <= 224 else 2  # three warpgroups have too few registers for more rows of 32 bits
    return [tall_tile(height, 64 * warpgroups, warpgroups) for warpgroups in range(1, most + 1)]


def default_tile(rows: int, wide: bool, depth: int = 64) -> Tile:
    """Safe on every chip with tensor cores: at most 96 KiB of shared memory."""
    height = next((h for h in (16, 32, 64) if rows <= h), 64)
    if rows <= 64 or not wide:
        return Tile(height, 64, depth, 4, 3)
    return Tile(128, 128, 64, 8, 3, wide=True)


def plan(device: torch.device, outputs: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Plan:
    """The tables were measured with 16-bit numbers. 32-bit ones take twice the shared memory, and their products are
    single multiply-adds: they get small tiles that compile fast."""
    if dtype.itemsize > 2:
        return Plan((outputs, inner), depth=16)
    kind, shape = device_class(device), f"{outputs}x{inner}"
    plain, gated = _own_tiles(f"{device_name(device)} {shape}") or _tiles(read(kind).get("shapes", {}).get(shape, {}))
    return Plan((outputs, inner), plain, gated, _rule(kind), streams=kind == "hopper")


def _own_tiles(key: str) -> tuple[dict[int, Tile], ...] | None:
    """Tiles measured on the user's own device; None: there are none, or the file was damaged."""
    with suppress(AttributeError, TypeError, ValueError):
        found = _tiles(_own.get(key) or {})
        if any(found) and all(tile.possible for tiles in found for tile in tiles.values()):
            return found
    return None


def _tiles(entry: dict[str, Any]) -> tuple[dict[int, Tile], ...]:
    """A table's entry for one shape: tiles by rows, of plain and of gated products."""
    names = ("plain", "gated")
    return tuple({int(rows): as_tile(values) for rows, values in entry.get(name, {}).items()} for name in names)


def keep(device: torch.device, shape: str, entry: dict[str, Any]) -> None:
    """Tiles measured on the user's own device go before the shipped ones."""
    _own.put(f"{device_name(device)} {shape}", entry)


_own = KeptTable("tiles")  # by device and shape


@cache
def _rule(kind: str) -> Rule:
    return as_rule(read(kind).get("rule", ()))


def as_rule(rows: Iterable[Sequence[float]]) -> Rule:
    """A rule from a table's rows."""
    return tuple(
        Expected(as_tile(entry), bool(grouped), over, step, read) for *entry, grouped, over, step, read in rows
    )


def as_tile(values: Sequence[float]) -> Tile:
    """A tile from a table's row, which may leave out the last fields."""
    kinds: list[Callable[[float], Any]] = [bool if isinstance(field.default, bool) else int for field in fields(Tile)]
    return Tile(*(kind(value) for kind, value in zip(kinds, values, strict=False)))


def as_entry(tile: Tile) -> list[int]:
    """A tile as the tables hold it."""
    return [int(value) for value in astuple(tile)]


@cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


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
    return dict(json.loads(file.read_text())) if file.exists() else {}
