"""Which estimate sets a sequence's own draft length: explicit, implicit, both or none, against fixed k, by the clock.

python -m benchmarks.quality --out FILE [--plot FILE] [--batches 1 2 4 8] [--fixed 2 3 4] [--rounds 5] [--tokens 96]
    [--queue 3] [--temperature 0] [--pair bundled | widened | FOLDER] [--device cpu | cuda] [--small] [--minutes 60]
    [--questions FILE --task NAME]

The draft model of the pair. All ways run in turn, as many rounds as asked for, and each is compared with plain decoding
of the same round, so that a machine that becomes slower meanwhile changes no ratio; medians and extremes of the rounds
are written. Texts of all ways are compared. In captured steps (on a GPU) the drafter runs for all and rows are paid
for: there the estimates differ in steps that run eagerly alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import say
from benchmarks.planner import Trial, queue
from faircopy import LLM
from faircopy.bench.plots import plot_lines
from faircopy.bench.record import collect
from faircopy.errors import ConfigError

QUALITIES = ("both", "implicit", "explicit", "off")
CACHE = "4GiB"  # keys and values of each way: on a GPU all are loaded at once


def ways(fixed: list[int]) -> Iterator[tuple[str, int | str, dict[str, str]]]:
    """(name, k, options) of everything that is compared; plain decoding first."""
    yield "plain", 0, {}
    yield from ((f"k {k}", k, {}) for k in fixed)
    yield from ((f"auto, {quality}", "auto", {"quality": quality}) for quality in QUALITIES)


def made(args: argparse.Namespace, trial: Trial) -> dict[str, LLM]:
    return {
        name: trial.llm("model" if name != "plain" else None, k, cache_memory=CACHE, **options)
        for name, k, options in ways(args.fixed)
    }


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    trial = Trial(args)
    llms = made(args, trial)
    for batch in args.batches:
        prompts, wanted = queue(args, trial, batch)
        ratios: dict[str, list[float]] = {name: [] for name in llms}
        texts, rates = {}, dict.fromkeys(llms, 0.0)
        for turn in range(args.rounds + 1):
            for name, llm in llms.items():
                rates[name], texts[name] = trial.rate(llm, prompts, wanted, batch)
                if turn:  # in the first round the choosers learn
                    ratios[name].append(rates[name] / rates["plain"])
            if trial.late and turn:
                break
        for name, found in ratios.items():
            yield {
                "batch": batch, "way": name, "times_plain": statistics.median(found), "least": min(found),
                "most": max(found), "rounds": len(found), "tokens_per_s": rates[name], "of": len(prompts),
                "identical": sum(a == b for a, b in zip(texts[name], texts["plain"], strict=True)),
            }  # fmt: skip
        if trial.late:
            return


def plot(found: list[dict[str, Any]], file: Path) -> None:
    names = dict.fromkeys(row["way"] for row in found if row["way"] != "plain")
    lines = {name: [(row["batch"], row["times_plain"]) for row in found if row["way"] == name] for name in names}
    plot_lines(file, "a sequence's own draft length, by the clock", "tokens per second, times plain", lines, one=True)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--pair", default="bundled")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="this machine's unless given")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--fixed", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--queue", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--questions", help="a file such as Spec-Bench's question.jsonl, for a FOLDER as pair")
    parser.add_argument("--task", help="the category of its questions")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--small", action="store_true")
    parser.set_defaults(same=False, costs=None, most=None, own_text=False, history=False)
    args = parser.parse_args(arguments)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device not in (None, here):
        raise ConfigError("device", args.device, f"this machine has {here}", f"use --device {here}")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    found = []
    for row in collect(args.out, settings, rows(args)):
        say(row)
        found.append(row)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
