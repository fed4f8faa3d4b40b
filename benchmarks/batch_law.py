"""Scylla's batch law against measured passes: how many rows per sequence cost no time, over batch sizes.

python -m benchmarks.batch_law --shape qwen3-0.6b --layers 8 --out benchmarks/results/batch-law-cpu.json --plot law.png
python -m benchmarks.batch_law --device cuda --shape qwen3-8b --out $OUT/batch-law-h200.json --plot $OUT/law.png
python -m benchmarks.batch_law ... --most 4096 --accepted benchmarks/results/laws-h200.jsonl   # and Scylla's Table 5
python -m benchmarks.batch_law --costs benchmarks/results/costs-h200.json --shape qwen3-8b --device cuda --plot law.png
python -m benchmarks.batch_law --again benchmarks/results/batch-law-h200.json --plot law.png --plot-rates rates.png

A pass of n rows for each sequence is timed (on a GPU as a graph) for every batch size. Free are the rows up to which it
takes at most 1 + SLACK times as long as with one; between two measured numbers of rows time is taken to be linear. The
two constants of the law are fitted to that, and compared with the roofline's.

Beside them stands what k="auto" chooses if its steps take the measured times and --acceptance of the draft tokens are
right: the number of draft tokens it has most often in the second half of 800 steps. With --costs no pass is timed:
passes of target and draft model take what a cost table says. Otherwise drafting costs rows alone.

With --accepted (results of `faircopy laws run`) tokens per second follow from the passes, the levels of a Scylla head
of this shape, and the accepted tokens by nodes of the best head with one layer: plain, a fixed tree of 60, the law's k,
and the k that is best by these measurements, which is what the planner looks for. --again prints and plots a result.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from faircopy.bench.plots import plot_lengths, plot_lines
from faircopy.bench.record import write
from faircopy.bench.shapes import SHAPES, random_model, shape_config
from faircopy.bench.steps import pass_ms, scene
from faircopy.costs import CostTable, Curve
from faircopy.drafters.heads import Head, HeadConfig
from faircopy.drafters.networks.blocks import BlockShape
from faircopy.drafters.networks.scylla import Scylla
from faircopy.laws.points import TREE, measure_name, read_results
from faircopy.laws.predict import draft_seconds
from faircopy.laws.timing import level_ms
from faircopy.laws.trees import small_trees
from faircopy.model.base import Model
from faircopy.model.shape import shape_of_config, shape_of_model
from faircopy.planner import AutoLength
from faircopy.planning.devices import named_device
from faircopy.planning.roofline import BatchLaw, Roofline, best_k, fit
from faircopy.testing.simulated_steps import simulate

SLACK = 0.1
MOST_K, STEPS = 16, 800  # of the trial of k=auto
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, TREE + 1, 64, 96, 128, 192)


def passes(model: Model, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds by batch and rows per sequence."""
    for batch in args.batches:
        for rows in (n for n in ROWS if n * batch <= args.most):
            yield {"batch": batch, "rows": rows, "ms": timed(model, batch, rows, args.context, args.repeats)}


def known_passes(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Those of an earlier result, for the same batches."""
    yield from (row for row in json.loads(args.passes.read_text())["rows"] if row["batch"] in args.batches)


def timed(model: Model, batch: int, rows: int, context: int, repeats: int) -> float:
    if model.device.type == "cuda":
        return pass_ms(model, batch, rows, context)
    layout, packed = scene(model, batch, rows, context)
    taken = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            model.forward(packed, layout)
            taken.append(time.perf_counter() - begin)
    return 1e3 * min(taken[1:])


def free_rows(found: list[dict[str, Any]], batch: int) -> float:
    """Rows per sequence up to which a pass takes no more than 1 + SLACK times one row's."""
    line = [(row["rows"], row["ms"]) for row in found if row["batch"] == batch]
    allowed = (1.0 + SLACK) * line[0][1]
    for (low, before), (high, after) in pairwise(line):
        if after > allowed:
            return float(low + (high - low) * max(0.0, allowed - before) / (after - before))
    return float(line[-1][0])


def controller_k(table: CostTable, batch: int, acceptance: float) -> int:
    """The number of draft tokens that k="auto" has most often, with drafts that are right with this chance."""
    chooser = AutoLength(MOST_K, "off", table)
    _, _, chosen = simulate(chooser, acceptance, table.step, STEPS, batch)
    return Counter(chosen[STEPS // 2 :]).most_common(1)[0][0]


def table_of(found: list[dict[str, Any]], batch: int) -> CostTable:
    """What passes of this batch took; draft tokens cost their rows alone."""
    return CostTable(Curve(tuple((row["rows"] * batch, 1e-3 * row["ms"]) for row in found if row["batch"] == batch)))


def passes_of(table: CostTable, batches: list[int], most: int) -> Iterator[dict[str, Any]]:
    """Milliseconds by batch and rows per sequence, as a cost table has them."""
    for batch in batches:
        for rows in (n for n in ROWS if n * batch <= most):
            yield {"batch": batch, "rows": rows, "ms": 1e3 * table.target(rows * batch)}


def wide_head(config: Any, model: Model, layers: int) -> Head:
    """A Scylla head with random weights, of the model's shape."""
    sizes = BlockShape(
        hidden=config.hidden_size, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, intermediate=config.intermediate_size, context=config.max_position_embeddings,
    )  # fmt: skip
    depth = config.num_hidden_layers
    options = {"layers": layers}
    settings = HeadConfig(method="scylla", shape=sizes, vocab=config.vocab_size, depth=depth, levels=7, options=options)
    return Scylla(settings).to(model.device, model.dtype).bind(model.token_weights()).serve()


def level_rows(config: Any, model: Model, depths: list[int], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Milliseconds of a draft's level by layers and rows, as `faircopy laws predict --times` reads them."""
    for layers in depths:
        head = wide_head(config, model, layers)
        yield from ({"layers": layers, "rows": rows, "ms": level_ms(head, rows)} for rows in sizes)


def accepted_by_nodes(file: Path) -> Curve:
    """Accepted tokens per cycle over nodes, of the best head with one layer; a line between those measured."""
    results = [result for result in read_results([file]) if result.layers == 1]
    most = max(result.accepted(measure_name("tree", TREE, 0.0)) for result in results)
    return Curve(tuple((nodes, tree(most)) for nodes, tree in small_trees(results).items()))


def rates(found: list[dict[str, Any]], law: BatchLaw, level: Curve, accepted: Curve) -> Iterator[dict[str, Any]]:
    """Scylla's Table 5: tokens per second by batch, of plain decoding, a fixed tree, the law's k and the best one."""
    for batch in dict.fromkeys(row["batch"] for row in found):
        passes = Curve(tuple((row["rows"], 1e-3 * row["ms"]) for row in found if row["batch"] == batch))
        measured = passes.points[-1][0] - 1

        def seconds(k: int, batch: int = batch, passes: Curve = passes) -> float:
            return passes(k + 1) + draft_seconds(level, batch, k)

        def rate(k: int, batch: int = batch, seconds: Any = seconds) -> float:
            return batch * (1.0 + accepted(k)) / seconds(k)

        lawful = min(TREE, measured, round(law.k(batch)))
        best = best_k(lambda k: 1.0 + accepted(k), seconds, min(TREE, measured))
        fixed = rate(TREE) if measured >= TREE else None
        names = {"plain": rate(0), "fixed": fixed, "law_k": lawful, "law": rate(lawful), "best_k": best}
        yield {"batch": batch, **names, "best": rate(best)}


def show_rates(rows: list[dict[str, Any]]) -> None:
    print("batch    plain  tree of 60  x plain   law's k    rate  x plain  x fixed   best k    rate  x plain")
    for row in rows:
        plain, fixed = row["plain"], row["fixed"]
        tree = f"{fixed:11.0f} {fixed / plain:8.2f}" if fixed else f"{'-':>11} {'-':>8}"
        over = f"{row['law'] / fixed:8.2f}" if fixed else f"{'-':>8}"
        law = f"{row['law_k']:9d} {row['law']:7.0f} {row['law'] / plain:8.2f} {over}"
        best = f"{row['best_k']:8d} {row['best']:7.0f} {row['best'] / plain:8.2f}"
        print(f"{row['batch']:5d} {plain:8.0f} {tree} {law} {best}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gpu", help="whose roofline is drawn; this machine's unless given")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*SHAPES])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, default=384, help="rows of a pass at most")
    parser.add_argument("--out")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--costs", type=Path, help="a cost table's file, instead of timing passes")
    parser.add_argument("--acceptance", type=float, default=0.7, help="of the draft tokens that k=auto is tried with")
    parser.add_argument("--accepted", type=Path, help="results of faircopy laws run, for tokens per second")
    parser.add_argument("--plot-rates", type=Path)
    parser.add_argument("--passes", type=Path, help="a result file whose passes are used instead of timing them again")
    parser.add_argument("--again", type=Path, help="a result file to print and plot; nothing is measured")
    parser.add_argument("--times", help="write times of a draft's levels by depth to this file")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 6], help="of --times")
    args = parser.parse_args(arguments)
    if args.again:
        again(args)
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
    config = shape_config(args.shape, **changes)
    if args.costs:
        model, shape = None, shape_of_config(config, getattr(torch, args.dtype))
        kept = CostTable.of_json(json.loads(args.costs.read_text())["rows"][0])
        found, tables = list(passes_of(kept, args.batches, args.most)), dict.fromkeys(args.batches, kept)
    else:
        model = random_model(config, getattr(torch, args.dtype), torch.device(args.device))
        shape, found = shape_of_model(model), list(known_passes(args) if args.passes else passes(model, args))
        tables = {batch: table_of(found, batch) for batch in args.batches}
    known = named_device(args.gpu if args.device == "cuda" else "cpu")
    roof = Roofline(shape, known, args.context)
    free = [(batch, free_rows(found, batch)) for batch in args.batches]
    measured, law = fit(free), roof.law
    for batch, rows in free:
        print(f"batch {batch:3d}  free rows per sequence {rows:6.1f} measured  {law.rows(batch):6.1f} by the roofline")
    for name, one in (("measured", measured), ("roofline", law)):
        print(f"{name}: {one.shared:.1f} / batch + {one.own:.2f}")
    chosen = [(batch, controller_k(tables[batch], batch, args.acceptance)) for batch in args.batches]
    print(f"k=auto at acceptance {args.acceptance}: {', '.join(f'{k} at batch {batch}' for batch, k in chosen)}")
    table = rates_of(args, config, model, found, law) if args.accepted and model is not None else []
    if args.plot:
        title = f"{args.shape}, {args.dtype}, {args.context} tokens, {known.name}"
        draw(args.plot, title, free, law, (args.acceptance, chosen))
    if args.out:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        settings = {**plain, "slack": SLACK, "threads": torch.get_num_threads()}
        laws = {"measured": measured._asdict(), "roofline": law._asdict(), "free_rows": free, "rates": table}
        laws["auto"] = chosen
        write(args.out, settings | laws, found)


def rates_of(
    args: argparse.Namespace, config: Any, model: Model, found: list[dict[str, Any]], law: BatchLaw
) -> list[dict[str, Any]]:
    sizes = sorted({batch * breadth for batch in args.batches for breadth in (1, 2, 5, 10)})
    times = list(level_rows(config, model, args.depths if args.times else [1], sizes))
    level = Curve(tuple((row["rows"], 1e-3 * row["ms"]) for row in times if row["layers"] == 1))
    if args.times:
        write(args.times, {"shape": args.shape, "device": args.device}, times)
    table = list(rates(found, law, level, accepted_by_nodes(args.accepted)))
    show_rates(table)
    if args.plot_rates:
        draw_rates(args.plot_rates, f"{args.shape} on {args.device}", table)
    return table


def again(args: argparse.Namespace) -> None:
    """The tables and plots of a result."""
    kept = json.loads(args.again.read_text())
    settings, law = kept["settings"], BatchLaw(**kept["settings"]["roofline"])
    show_rates(settings["rates"])
    if args.plot:
        title = f"{settings['shape']}, {settings['dtype']}, {settings['context']} tokens, {kept['device']}"
        draw(args.plot, title, settings["free_rows"], law, (settings["acceptance"], settings["auto"]))
    if args.plot_rates:
        draw_rates(args.plot_rates, f"{settings['shape']} on {kept['device']}", settings["rates"])


def draw_rates(file: Path, title: str, table: list[dict[str, Any]]) -> None:
    names = {"plain": "plain", "fixed": "tree of 60", "law": "k by the law", "best": "best k"}
    lines = {shown: [(row["batch"], row[name]) for row in table if row[name]] for name, shown in names.items()}
    plot_lines(file, title, "tokens per second", lines)


def draw(
    file: Path, title: str, free: list[tuple[int, float]], law: BatchLaw, auto: tuple[float, list[tuple[int, int]]]
) -> None:
    acceptance, chosen = auto
    plot_lengths(
        file,
        title,
        {
            f"measured: {1 + SLACK:.1f} times one row": [(batch, max(0.0, rows - 1.0)) for batch, rows in free],
            "closed form, by the roofline": [(batch, law.k(batch)) for batch, _ in free],
            f"k=auto with these times, acceptance {acceptance}": [(batch, float(k)) for batch, k in chosen],
        },
    )


if __name__ == "__main__":
    main()
