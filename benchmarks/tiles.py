"""Times of tiles on this GPU for the products of named shapes, and the shipped table with its rule made of them.

python -m benchmarks.tiles --shape llama-3.1-8b --shape qwen3-32b --out tiles.jsonl      on the GPU; appends
    [--rows 144 192] [--against-present]     these rows alone; Hopper's own tiles against the one in use
python -m benchmarks.tiles --table faircopy/kernels/gpu/tuned/hopper.json tiles.jsonl    anywhere
python -m benchmarks.tiles --leave-out qwen3-14b tiles.jsonl                             how good is the rule?
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from faircopy.bench.shapes import SHAPES, products

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=[*SHAPES], help="a model whose products are timed")
    parser.add_argument("--out", type=Path, help="file that times are appended to")
    parser.add_argument("--minutes", type=float, default=60.0, help="no further product is begun after this")
    parser.add_argument("--rows", nargs="+", type=int, help="numbers of rows to time; all buckets if left out")
    parser.add_argument("--against-present", action="store_true", help="time Hopper's own tiles and the one in use")
    parser.add_argument("--table", type=Path, help="table to write")
    parser.add_argument("--leave-out", action="append", choices=[*SHAPES], default=[], help="judge the rule on these")
    parser.add_argument("times", nargs="*", type=Path, help="files of times")
    args = parser.parse_args()
    if args.shape:
        measure(args.shape, args.out, args.minutes, args.rows, args.against_present)
    records = [json.loads(line) for file in args.times for line in file.read_text().splitlines()]
    if args.leave_out:
        judge(records, args.leave_out)
    if args.table:
        from faircopy.bench.tune import write_table

        write_table(args.table, [r for r in records if "shape" in r], records[0]["about"])


def measure(names: list[str], out: Path, minutes: float, rows: list[int] | None, against_present: bool) -> None:
    import torch

    from faircopy.bench.tune import time_shapes

    end, known = time.monotonic() + 60 * minutes, out.read_text() if out.exists() else ""
    with out.open("a") as file:
        if not known:
            about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            file.write(json.dumps({"about": about}) + "\n")
        for shape in wanted(names):
            if time.monotonic() > end or f'"shape": [{shape[0]}, {shape[1]}]' in known:
                continue
            for record in time_shapes([shape], rows, against_present):
                file.write(json.dumps(record) + "\n")
                file.flush()
            print(shape, round(time.monotonic() - end + 60 * minutes, 1), flush=True)


def wanted(names: list[str]) -> Iterator[tuple[int, int, bool]]:
    """Outputs, inputs and whether the product is gated, of all products of these models."""
    found = {(*shape, name == "gate_up"): None for model in names for name, shape in products(model).items()}
    yield from found


def judge(records: list[Record], names: list[str]) -> None:
    """What the rule, fitted without these models' products, costs against the best tile and against cuBLAS."""
    from faircopy.bench.tune import fit
    from faircopy.kernels.gpu.tables import as_rule, as_tile, ruled_tile
    from faircopy.kernels.groups import group_count

    left = {shape[:2] for shape in wanted(names)}
    timed = [r for r in records if "shape" in r and r["rows"] > 64]
    rule = as_rule(fit([r for r in timed if tuple(r["shape"]) not in left]))
    for shape in sorted(left):
        lines = []
        for r in (r for r in timed if tuple(r["shape"]) == shape):
            groups = 1 if r["gated"] else group_count(shape[1], shape[0])
            by_tile = {as_tile(entry): us for *entry, us in r["tiles"]}
            known = tuple(expected for expected in rule if expected.tile in by_tile)  # later records have more tiles
            best, chosen = min(by_tile.values()), ruled_tile(known, r["rows"], *shape, groups)
            lines.append((r["rows"], by_tile[chosen] / best, best / r["cublas"]))
        for rows, regret, ours in lines:
            print(shape, rows, f"rule / best {regret:.3f}", f"best / cuBLAS {ours:.3f}")
        if lines:
            print(shape, f"mean rule / best {mean(line[1] for line in lines):.3f}")


if __name__ == "__main__":
    main()
