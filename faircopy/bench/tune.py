"""Time the tiles of products by weight shape and number of rows: for the shipped table, its rule, and `faircopy tune`.

Tiles change speed, never bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faircopy.bench.timing import graph_ms
from faircopy.kernels.gpu import tables
from faircopy.kernels.gpu.launch import compiled_ahead, hopper
from faircopy.kernels.gpu.linear import Linear
from faircopy.kernels.gpu.tables import NARROW, STREAMED, Tile, as_entry, tall_tiles
from faircopy.kernels.groups import group_count

# Rows timed for each bucket: what verifying and reading prompts really bring. Other numbers use the next bucket.
ROWS = {
    16: 8, 32: 32, 64: 48, 96: 96, 128: 128, 144: 144, 160: 160, 192: 192, 208: 208, 224: 224, 256: 256, 288: 288,
    320: 320, 384: 384, 416: 416, 448: 448, 480: 480, 512: 512, 768: 768, 1024: 1024, 2560: 2400,
}  # fmt: skip
APART = 512  # rows up to which groups of K may be tiles of their own
SLOWER = 1.03  # times that a pipelined tile may take by itself where another one would be chosen
SAFETY = 1.1  # times that a tile may take instead of what the rule expects, and is still used
COLD = 256 << 20  # weights rotate through more bytes than the cache holds
_NARROW = [Tile(0, bn, bk, 4, stages) for bn, bk, stages in product((32, 64, 128), (64, 128), (3, 4))]
_WIDE = [
    Tile(64, 64, 64, 4, 3, wide=True, resident=2, high=3),
    Tile(64, 128, 64, 4, 4, wide=True, resident=2),
    Tile(64, 128, 64, 4, 4, wide=True, high=3),
    Tile(64, 128, 64, 8, 3, wide=True, resident=2, high=2),
    Tile(64, 256, 64, 8, 4, wide=True),
    Tile(64, 256, 64, 8, 3, wide=True, high=3),
    Tile(128, 64, 64, 4, 4, wide=True, resident=2),
    Tile(128, 128, 64, 4, 4, wide=True),
    Tile(128, 128, 64, 8, 3, wide=True, resident=2),
    Tile(128, 128, 64, 8, 4, wide=True),
    Tile(128, 128, 64, 8, 3, wide=True, high=3),
    Tile(128, 256, 64, 8, 3, wide=True),
]
_PIPELINED = [Tile(128, 256, 64, 4, 4, wide=True, pipelined=True), Tile(128, 128, 64, 4, 6, wide=True, pipelined=True)]


def candidates(rows: int, groups: int) -> list[Tile]:
    """Tiles worth trying for this many rows; narrow ones for devices that do not stream few rows."""
    if rows <= NARROW:
        return [replace(tile, bm=16 if rows <= 16 else 32 if rows <= 32 else 64) for tile in _NARROW]
    fitting = [tile for tile in _WIDE if _waste(tile, rows) < 1.5]
    parted = [replace(tile, apart=True) for tile in fitting if groups > 1 and rows <= APART]
    return fitting + parted + (hopper_candidates(rows, groups) if hopper(torch.device("cuda")) else [])


def hopper_candidates(rows: int, groups: int) -> list[Tile]:
    """Of them those that Hopper alone has, for more rows than are streamed in any case."""
    pipelined = [tile for tile in _PIPELINED[int(groups > 1) :] if _waste(tile, rows) < 1.5]  # 256 columns: one group
    return pipelined + (tall_tiles(rows) if STREAMED < rows <= APART else [])


def _waste(tile: Tile, rows: int) -> float:
    return -(-rows // tile.height) * tile.height / rows


class Bench:
    """Copies of one weight shape, more than the cache holds."""

    def __init__(self, outputs: int, inner: int, gated: bool) -> None:
        self.shape, self.gated = (outputs, inner), gated
        self.groups = 1 if gated else group_count(inner, outputs)
        copies = min(8, max(2, COLD // (outputs * inner * 2)))
        numbers = torch.randn(copies, outputs, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
        self.layers = [Linear(weight, groups=self.groups) for weight in numbers]

    def times(self, rows: int, tiles: list[Tile]) -> dict[str, Any]:
        """Microseconds of these tiles, and of cuBLAS."""
        x = torch.randn(rows, self.shape[1], device="cuda", dtype=torch.bfloat16)
        found = [(as_entry(tile), self._microseconds(x, tile)) for tile in tiles]
        library = graph_ms(lambda: [x @ layer.weight.T for layer in self.layers], 5) / len(self.layers) * 1e3
        return {
            "shape": list(self.shape), "gated": self.gated, "rows": rows, "cublas": round(library, 2),
            "tiles": [[*entry, round(us, 2)] for entry, us in found if us < float("inf")],
        }  # fmt: skip

    def _microseconds(self, x: Tensor, tile: Tile) -> float:
        """With what the reader of parts pays more; a tile too large for the chip never wins."""
        try:
            ms = graph_ms(lambda: [self._run(layer, x, tile) for layer in self.layers], 5) / len(self.layers)
        except Exception:
            return float("inf")
        return ms * 1e3 + tables.adding(tile, x.shape[0], self.shape[0], self.groups)

    def _run(self, layer: Linear, x: Tensor, tile: Tile) -> Tensor:
        return layer.run(x, tile, "silu" if self.gated else "none")

    def compile(self, tiles: dict[int, list[Tile]]) -> None:
        """All tiles by numbers of rows at once, in threads."""
        with compiled_ahead():
            for rows, known in tiles.items():
                x = torch.zeros(rows, self.shape[1], device="cuda", dtype=torch.bfloat16)
                for tile in known:
                    self._run(self.layers[0], x, tile)

    def against_present(self, rows: int) -> list[Tile]:
        """The tile in use for this many rows, and the tiles that Hopper alone has."""
        plan = self.layers[0].plan
        present = plan.gated(rows, True) if self.gated else plan.tile(rows, True, self.groups)
        return list(dict.fromkeys([present, *hopper_candidates(rows, self.groups)]))


def buckets(streams: bool, head: bool = False) -> list[int]:
    """The numbers of rows worth timing on a device; a vocabulary head sees few rows of a prompt."""
    return [rows for rows in ROWS.values() if rows > (STREAMED if streams else 0) and (not head or rows <= 512)]


def time_shapes(
    shapes: Iterable[tuple[int, int, bool]], rows: list[int] | None = None, against_present: bool = False
) -> Iterator[dict[str, Any]]:
    """Times of every shape (outputs, inner, gated), one record per number of rows.

    against_present: Hopper's own tiles against the one in use, instead of all candidates.
    """
    for outputs, inner, gated in dict.fromkeys(shapes):
        bench = Bench(outputs, inner, gated)
        streams = tables.plan(torch.device("cuda"), outputs, inner).streams
        counts = rows or buckets(streams, outputs > 1 << 15 and not gated)
        tiles = {n: bench.against_present(n) if against_present else candidates(n, bench.groups) for n in counts}
        bench.compile(tiles)
        for count in counts:
            yield bench.times(count, tiles[count])
        del bench
        torch.cuda.empty_cache()


def entries(records: Iterable[dict[str, Any]], rule: tables.Rule = ()) -> dict[str, Any]:
    """The tile to use by shape, kind and bucket, as the tables hold them. rule: what tiles take that were not timed."""
    found: dict[str, Any] = {}
    for record in _every_bucket(records):
        outputs, inner = record["shape"]
        kind = found.setdefault(f"{outputs}x{inner}", {}).setdefault("gated" if record["gated"] else "plain", {})
        bucket = next(bucket for bucket, rows in ROWS.items() if rows >= record["rows"])
        kind[str(bucket)] = _expected_streamed(record, rule) or _chosen(record, rule)
    return found


def _every_bucket(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The last record of every shape and number of rows; of a bucket without one, times of the next larger bucket."""
    shapes: dict[tuple[int, int, bool], dict[int, dict[str, Any]]] = {}
    for record in records:
        shapes.setdefault((*record["shape"], record["gated"]), {})[record["rows"]] = record
    for known in shapes.values():
        for bucket in (rows for rows in ROWS.values() if STREAMED < rows <= APART):
            larger = [rows for rows in known if rows >= bucket]
            if larger:
                known.setdefault(bucket, known[min(larger)] | {"rows": bucket})
        yield from (known[rows] for rows in sorted(known))


def _expected_streamed(record: dict[str, Any], rule: tables.Rule) -> list[int] | None:
    """A taller streamed tile, if none was timed and the rule expects it to be faster than every tile that was."""
    outputs, inner = record["shape"]
    groups = 1 if record["gated"] else group_count(inner, outputs)
    timed = {tables.as_tile(entry): us for *entry, us in record["tiles"]}
    if any(tile.streamed for tile in timed) or not STREAMED < record["rows"] <= APART:
        return None
    wanted = [e for e in rule if e.grouped == (groups > 1) and e.tile in tall_tiles(record["rows"])]
    expected = {e.tile: tables.microseconds(e, record["rows"], outputs, inner, groups) for e in wanted}
    best = min(expected, key=expected.__getitem__, default=None)
    return as_entry(best) if best is not None and SAFETY * expected[best] < min(timed.values()) else None


def _chosen(record: dict[str, Any], rule: tables.Rule) -> list[int]:
    """The fastest tile; of prompts' rows the pipelined one, unless it takes longer by more than SLOWER.

    In a whole pass, where the chip's power limits its clock, pipelined tiles are faster than others that take as long
    by themselves (8B shape, 2,400 rows: 58.6 against 63.9 ms).
    """
    outputs, inner = record["shape"]
    groups = 1 if record["gated"] else group_count(inner, outputs)
    fastest: list[float] = min(record["tiles"], key=lambda row: row[-1])
    tile, stored = _PIPELINED[int(groups > 1)], outputs // 2 if record["gated"] else outputs
    many = record["rows"] >= tables.PROMPTS and (record["gated"] or groups > 1)
    if many and tables.can_pipeline(tile, stored, inner, groups):
        timed = [us for *entry, us in record["tiles"] if tables.as_tile(entry) == tile]
        expected = [tables.microseconds(e, record["rows"], outputs, inner, groups) for e in rule
                    if e.tile == tile and e.grouped == (groups > 1)]  # fmt: skip
        if any(us <= SLOWER * fastest[-1] for us in (timed or expected)):
            return as_entry(tile)
    return [int(value) for value in fastest[:-1]]


def fit(records: Iterable[dict[str, Any]]) -> list[list[float]]:
    """The cost rule: per tile, for one group of K and for several, the microseconds of a round, of a step of K and of
    reading a million weights, by least squares of relative errors; what adding groups takes is known."""
    samples: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    for record in records:
        outputs, inner = record["shape"]
        groups = 1 if record["gated"] else group_count(inner, outputs)
        for *entry, us in record["tiles"]:
            tile = tables.as_tile(entry)
            rounds, steps, million = tables.work(tile, record["rows"], outputs, inner, groups)
            own = us - tables.adding(tile, record["rows"], outputs, groups)
            samples.setdefault((*as_entry(tile), groups > 1), []).append(
                (rounds / own, rounds * steps / own, million / own)
            )
    return [[*map(int, entry), *(round(value, 5) for value in _costs(rows))] for entry, rows in samples.items()]


def _costs(rows: list[tuple[float, ...]]) -> list[float]:
    """Factors, none negative, with which each row sums to one, as nearly as can be."""
    system, kept = torch.tensor(rows, dtype=torch.float64), [0, 1, 2]
    while True:
        found = torch.linalg.lstsq(system[:, kept], torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten()
        if len(kept) == 1 or float(found.min()) >= 0:
            return [float(found[kept.index(n)]) if n in kept else 0.0 for n in range(3)]
        kept.pop(int(found.argmin()))


def write_table(file: Path, records: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """The shipped table of a class of devices."""
    fitted = fit(records)
    chosen = entries(records, tables.as_rule(fitted))
    shapes = ",\n".join(f"  {json.dumps(shape)}: {json.dumps(entry)}" for shape, entry in chosen.items())
    rule = ",\n".join(f"  {json.dumps(row)}" for row in fitted)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{{"about": {json.dumps(about)},\n "rule": [\n{rule}\n ],\n "shapes": {{\n{shapes}\n }}}}\n')


__all__ = ["ROWS", "candidates", "entries", "fit", "hopper_candidates", "time_shapes", "write_table"]
