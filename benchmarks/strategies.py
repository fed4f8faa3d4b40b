"""The published strategies side by side: EMS-SD's ablation, and EQSPEC against EXSPEC, in one run.

python -m benchmarks.strategies --out FILE.jsonl [--device cuda --dtype bfloat16 --widen qwen3] [--parts ems exspec]

Part `ems`: n-gram drafts of 7 tokens found by their last 2 (LLMA's settings) on retold stories. Part `exspec`: drafts
of 5 tokens by the draft model on held-out prompts. The same prompts at every batch size, rounded up to whole batches.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.widen import widened_model
from faircopy import bundled
from faircopy.bench.pair import Pair, load_pair
from faircopy.bench.record import append
from faircopy.bench.run import EAGER, PADDED, Bench, Case, run, spread
from faircopy.bench.shapes import SHAPES
from faircopy.bench.workloads import Workload, held_out, retold
from faircopy.model.loader import load_tokenizer

TINY = {
    "model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8, "head_dim": 64,
    "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 4352, "tie_word_embeddings": True,
}  # fmt: skip
TINY_DRAFT = {**TINY, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": (SHAPES["qwen3-8b"], SHAPES["qwen3-0.6b"]),
    "tiny": (TINY, TINY_DRAFT),
}
EMS = (
    ("ragged", True), ("ragged", False), ("ems", False), ("unpad_inputs", False), ("unpad_cache", False),
    ("padded", False),
)  # fmt: skip
CAPTURED = (PADDED, EAGER)  # on a GPU beside packed rows in graphs: padded rows in graphs, and eager steps
EXSPEC = (("ragged", True), ("ragged", False), ("padded", False), ("realign", False), ("realign", True), ("pool", None))


def pair_of(args: argparse.Namespace) -> Pair:
    if args.widen == "none":
        return load_pair(
            bundled.target(), bundled.draft(), dtype=args.dtype, device=args.device, exact=not args.no_exact
        )
    return widened_pair(*SHAPES[args.widen], getattr(torch, args.dtype), args.device, not args.no_exact)


def widened_pair(target: Any, draft: Any, dtype: torch.dtype, device: str, exact: bool) -> Pair:
    """The bundled pair at the shapes of these configurations: its text at their cost, made on the device."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "exact": exact}
    tokenizer: Any = load_tokenizer(bundled.target())
    return Pair(
        widened_model(bundled.target(), target, **options),
        widened_model(bundled.draft(), draft, **options),
        lambda text: list(tokenizer.encode(text)),
    )


def measure(
    args: argparse.Namespace, pair: Pair, workload: Workload, cases: list[Case], waves: int, **more: Any
) -> None:
    """One batch size after the other, until the part's time is spent."""
    options = {"exact": not args.no_exact, **more}
    clock = "cpu" if args.device == "cpu" and args.threads == 1 else "wall"
    settings = {"widened": args.widen}
    bench = Bench(pair.target, pair.draft, args.repeats, 1, not args.no_profile, args.budget, options, settings, clock)
    begin = time.perf_counter()
    for batch in dict.fromkeys(case.batch for case in cases):
        if time.perf_counter() - begin > args.seconds:
            print(f"{workload.name}: batch {batch} left out, {args.seconds:.0f} s are spent", flush=True)
            continue
        group = [case for case in cases if case.batch == batch]
        for record in run(bench, workload, group, args.prompts, lambda *_: None, waves):
            append(Path(args.out), [record])
            say(record)


def say(record: dict[str, Any]) -> None:
    rate = record["decode_tokens_per_second"]
    print(
        f"{record['workload']:8s} batch {record['batch']:3d}  {record['name']:22s} {rate['median']:8.1f} tokens/s "
        f"({spread(rate, 'spread ')})  {record['accepted_per_step']:.2f} tokens/step  "
        f"{record['identical']}/{record['of']} equal to plain",
        flush=True,
    )


def ems(args: argparse.Namespace, pair: Pair) -> None:
    cases = [
        Case(name, "ngram", batch, 7, refill)
        for batch in args.ems_batches
        for name, refill in EMS
        if name == "ragged" or args.dense_batches is None or batch in args.dense_batches
    ]
    if args.device == "cuda":
        cases += [Case("ragged", "ngram", batch, 7, False, steps) for batch in args.ems_batches for steps in CAPTURED]
    count = max(args.prompts, *args.ems_batches)
    workload = retold(pair.encode, args.tokens, pair.target.context, count)
    measure(args, pair, workload, cases, 1, lookup_min=2, lookup_max=2)


def exspec(args: argparse.Namespace, pair: Pair) -> None:
    cases = [Case(name, "model", batch, 5, refill) for batch in args.exspec_batches for name, refill in EXSPEC]
    chosen = [case for case in cases if not args.exspec_only or case.name in args.exspec_only]
    measure(args, pair, held_out(pair.encode, args.tokens, pair.target.context), chosen, args.waves)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--widen", choices=["none", *SHAPES], default="none", help="the bundled pair at these shapes")
    parser.add_argument("--no-exact", action="store_true", help="without the promise of row-invariant kernels")
    parser.add_argument("--no-profile", action="store_true", help="without the pass that times phases")
    parser.add_argument("--parts", nargs="+", choices=["ems", "exspec"], default=["ems", "exspec"])
    parser.add_argument("--ems-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24])
    parser.add_argument("--dense-batches", type=int, nargs="+", help="part ems: rectangles only at these sizes")
    parser.add_argument("--exspec-batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--prompts", type=int, default=24, help="per run, rounded up to whole batches")
    parser.add_argument("--waves", type=int, default=1, help="part exspec: at least this many batches of prompts")
    parser.add_argument("--exspec-only", nargs="+", help="part exspec: only these, by the names in the output")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="per part: then no further batch size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of repeats per batch size")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    begin = time.perf_counter()
    pair = pair_of(args)
    for part in args.parts:
        {"ems": ems, "exspec": exspec}[part](args, pair)
    print(f"{time.perf_counter() - begin:.0f} s, written to {args.out}")


if __name__ == "__main__":
    main()
