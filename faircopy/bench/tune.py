"""Find the fastest tile per weight shape and number of rows, and write the table the kernels read.

Run by hand for a class of devices, committed, and never run again by itself: the split of K it fixes decides bits.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from faircopy.bench.kernels import weights
from faircopy.bench.timing import graph_ms
from faircopy.kernels.gpu.linear import Linear
from faircopy.kernels.gpu.tables import Tile, as_entry, span_length

# Rows timed for each bucket: what decoding, verifying and reading prompts really bring. The others use the next one.
ROWS = {
    16: 8, 32: 32, 64: 48, 96: 96, 128: 128, 192: 192, 256: 256, 320: 320, 384: 384, 512: 512, 768: 768, 1024: 1024,
    2560: 2400, 4096: 8192,
}  # fmt: skip
FEW = (16, 64)  # the buckets that choose the split: elsewhere it costs the same
SPLITS = (1, 2, 4, 8)
COLD = 256 << 20  # weights rotate through more bytes than the cache holds


def candidates(rows: int, gated: bool) -> list[Tile]:
    """Tiles worth trying for this many rows."""
    found = []
    if rows <= 64:
        height = 16 if rows <= 16 else 32 if rows <= 32 else 64
        for bn, bk, stages in product((32, 64, 128), (64, 128, 256), (3, 5)):
            size = stages * bk * (height + bn) * 2
            if 24 << 10 <= size <= 200 << 10:
                found.append(Tile(height, bn, bk, 4, stages))
    for (bm, high), bn, stages, warps in product(_HEIGHTS, (64, 128, 256), (3, 4), (4, 8)):
        found += _wide_tiles(rows, bm, high, bn, stages, warps, gated)
    return found


_HEIGHTS = ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2), (128, 3))


def _wide_tiles(rows: int, bm: int, high: int, bn: int, stages: int, warps: int, gated: bool) -> list[Tile]:
    """The tile, if it fits a processor and wastes less than half of its rows."""
    numbers = bm * high * bn // (32 * warps)  # registers a thread spends on sums
    size = stages * 64 * (bm * high + bn) * 2
    waste = -(-rows // (bm * high)) * bm * high / max(rows, 64)
    if size > 220 << 10 or not 16 <= numbers <= 200 or waste >= 1.5 or (rows > 1000 and numbers < 64):
        return []
    residents = (2,) if size <= 110 << 10 and numbers <= 96 else (1,)
    aparts = (False, True) if rows <= 512 and not gated else (False,)
    return [Tile(bm, bn, 64, warps, stages, 0, True, *more) for more in product(residents, (high,), aparts)]


def compile_all(tiles: Iterable[tuple[Tile, bool]], processes: int = 12) -> None:
    """Fill the compiler's cache from many processes at once; a tile that does not compile is found out later."""
    jobs = list(dict.fromkeys(tiles))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for _ in tqdm(pool.imap_unordered(_compile, jobs, 1), total=len(jobs), desc="compile"):
            pass


def _compile(job: tuple[Tile, bool]) -> None:
    tile, gated = job
    layer = Linear(torch.zeros(512, 2048, dtype=torch.bfloat16, device="cuda"))
    x = torch.zeros(8, 2048, dtype=torch.bfloat16, device="cuda")
    try:
        for split in (1,) if gated else (1, 2):
            layer.run(x, tile, split, "silu" if gated else "none")
        torch.cuda.synchronize()
    except Exception as error:
        print(tile, gated, str(error)[:200])


class Bench:
    """Copies of one weight shape, more than the cache holds."""

    def __init__(self, outputs: int, inner: int) -> None:
        copies = min(16, max(2, COLD // (outputs * inner * 2)))
        weights = torch.randn(copies, outputs, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
        self.layers = [Linear(weight) for weight in weights]

    def seconds(self, x: Tensor, tile: Tile, gated: bool, split: int) -> float:
        kind = "silu" if gated else "none"
        return graph_ms(lambda: [layer.run(x, tile, split, kind) for layer in self.layers], 5) / len(self.layers) * 1e-3

    def library(self, x: Tensor) -> float:
        return graph_ms(lambda: [x @ layer.weight.T for layer in self.layers], 5) / len(self.layers) * 1e-3


def tune_shape(
    outputs: int, inner: int, gated: bool, about: tuple[int, ...] = tuple(ROWS), split: int | None = None
) -> dict[str, Any]:
    """One entry of the table, with the seconds that chose it and cuBLAS's beside them; split: keep this one."""
    bench = Bench(outputs, inner)
    allowed = [1] if gated else [s for s in SPLITS if s == 1 or span_length(inner, s) >= 256]
    if split is not None:
        return _entry(bench, gated, about, split, {})
    few = {(b, s): _fastest(bench, b, gated, s) for b in FEW for s in allowed}
    split = min(allowed, key=lambda s: sum(few[b, s][0] for b in FEW))
    return _entry(bench, gated, about, split, few)


def _entry(
    bench: Bench, gated: bool, about: tuple[int, ...], split: int, few: dict[tuple[int, int], tuple[float, Tile]]
) -> dict[str, Any]:
    inner = bench.layers[0].inner
    chosen = {b: few.get((b, split)) or _fastest(bench, b, gated, split) for b in about}
    return {
        "split": split,
        "gated" if gated else "plain": {str(b): as_entry(tile) for b, (_, tile) in chosen.items()},
        "microseconds": {str(b): round(s * 1e6, 2) for b, (s, _) in chosen.items()},
        "cublas": {str(b): round(bench.library(_rows(b, inner)) * 1e6, 2) for b in about},
        "splits": {f"{b} rows, split {s}": round(seconds * 1e6, 2) for (b, s), (seconds, _) in few.items()},
    }


def _rows(bucket: int, inner: int) -> Tensor:
    return torch.randn(ROWS[bucket], inner, device="cuda", dtype=torch.bfloat16)


def _fastest(bench: Bench, bucket: int, gated: bool, split: int) -> tuple[float, Tile]:
    x = _rows(bucket, bench.layers[0].inner)
    outputs, tiles = bench.layers[0].outputs, candidates(ROWS[bucket], gated)
    timed = [
        (bench_or_never(bench, x, tile, gated, split) + _adding(bucket, split, outputs, tile), tile) for tile in tiles
    ]
    return min(timed, key=lambda pair: pair[0])


def bench_or_never(bench: Bench, x: Tensor, tile: Tile, gated: bool, split: int) -> float:
    """A tile too large for the chip never wins."""
    if tile.apart and split == 1:
        return float("inf")
    if tile.wide and not gated and span_length(bench.layers[0].inner, split) % tile.bk:
        return float("inf")
    try:
        return bench.seconds(x, tile, gated, split)
    except Exception:
        return float("inf")


def _adding(bucket: int, split: int, outputs: int, tile: Tile) -> float:
    """What the reader of unadded spans pays more, in seconds."""
    return (
        0.0
        if split == 1 or (tile.wide and not tile.apart)
        else (split * ROWS[bucket] * outputs * 4) / 3e12 + 0.15e-6 * split
    )


def tune(names: tuple[str, ...], file: Path) -> Iterator[dict[str, Any]]:
    """Time every product of these shapes and write the table; what it holds of other shapes stays.

    Known shapes keep their split of K, which decides bits.
    """
    known = json.loads(file.read_text())["shapes"] if file.exists() else {}
    compile_all((tile, gated) for rows in ROWS.values() for gated in (False, True) for tile in candidates(rows, gated))
    for name in names:
        for product_name, (outputs, inner) in weights(name).items():
            about = tuple(rows for rows in ROWS if product_name != "head" or rows <= 512)
            split = known.get(f"{outputs}x{inner}", {}).get("split")
            entry = tune_shape(outputs, inner, product_name == "gate_up", about, split)
            known[f"{outputs}x{inner}"] = entry
            write_table(file, known, {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
            yield {"model": name, "product": product_name, **entry}
            torch.cuda.empty_cache()


def write_table(file: Path, shapes: dict[str, Any], about: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = ("split", "plain", "gated")
    slim = {shape: {name: entry[name] for name in kept if name in entry} for shape, entry in shapes.items()}
    lines = ",\n".join(f"  {json.dumps(shape)}: {json.dumps(entry)}" for shape, entry in slim.items())
    file.write_text(f'{{"about": {json.dumps(about)},\n "shapes": {{\n{lines}\n }}}}\n')


__all__ = ["candidates", "compile_all", "tune_shape", "write_table"]
