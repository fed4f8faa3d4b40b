"""SpecMemo at our scale: Medusa as published, with logits per path, its tree pruned under a budget, and our engine.

faircopy train head --method medusa --levels 5 --data models/prompts.jsonl --out HEAD --steps 900 --lr 0.002 \
    --temperature 0.7 --answer-tokens 400 --device cpu
python -m benchmarks.specmemo --head HEAD --out benchmarks/results/specmemo-cpu.json

Medusa as published runs its heads on every node of the tree and gathers the logits of target and heads once per path:
[heads + 1, leaves, levels, vocabulary]. SpecMemo keeps that and chooses a smaller tree and fewer heads. Our engine
keeps one row of the target's logits per node, and the heads see one row per sequence. Bytes are those that live at the
same time in one step, counted by torch's profiler; what plain decoding's step needs is taken off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from faircopy import bundled
from faircopy.acceptance import children
from faircopy.bench.record import write
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.base import Drafter
from faircopy.drafters.folder import load_head
from faircopy.drafters.heads import Head
from faircopy.drafters.trees import best_shape
from faircopy.engine import Engine
from faircopy.model.base import FINAL, Model
from faircopy.model.loader import load_model, load_tokenizer
from faircopy.model.runner import Result
from faircopy.types import Batch, Decision, Draft, Request, SamplingParams, Sequence, Verdict

Tree = list[tuple[int, int]]  # (parent, rank) of each node

# The 63 nodes that Medusa's authors ship for Vicuna-7B, each as the ranks on its path.
DEFAULT = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)
OFFERED = 10  # tokens of each head
CLOVER_NODES = 4


def default_tree() -> Tree:
    """Medusa's tree, shorter paths first."""
    paths = sorted(DEFAULT.split(), key=lambda path: (len(path), path))
    place = {path: n for n, path in enumerate(paths)}
    return [(place.get(path[:-1], -1), int(path[-1])) for path in paths]


def paths_of(parents: list[int]) -> list[list[int]]:
    """The nodes from the root's child down to each leaf."""
    below, found = children(parents), []
    for node in range(len(parents)):
        if not below[node + 1]:
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            found.append(path)
    return found


def buffer_bytes(heads: int, leaves: int, levels: int, vocab: int, itemsize: int) -> int:
    """Medusa's candidate buffer: logits of target and heads per path, the root counted as a level."""
    return (heads + 1) * leaves * levels * vocab * itemsize


class PublishedMedusa(Drafter):
    """Drafter and verifier in one, as in the authors' loop: greedy."""

    wants = (FINAL,)

    def __init__(self, head: Head, tree: Tree, heads: int) -> None:
        self._head, self._tree, self._heads = head.eval(), tree, heads
        self._offers: dict[Sequence, list[list[int]]] = {}  # the best tokens of each head
        self._depths: list[int] = []
        for parent, _ in tree:
            self._depths.append(0 if parent < 0 else self._depths[parent] + 1)

    def propose(self, batch: Batch) -> Draft:
        draft = Draft.empty(len(batch))
        for i, seq in enumerate(batch.seqs):
            offers = self._offers.get(seq)
            if offers is not None and batch.complete(i):
                tree = self._tree[: batch.max_nodes[i]]
                draft.tokens[i].extend(offers[self._depths[n]][rank] for n, (_, rank) in enumerate(tree))
                draft.parents[i].extend(parent for parent, _ in tree)
        return draft

    @torch.no_grad()
    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict:
        decisions, row = [], 0
        for i, seq in enumerate(batch.seqs):
            fed, nodes = result.packed.fed[i], len(draft.tokens[i])
            if batch.complete(i):
                states = result.states[FINAL][row + fed - 1 : row + fed + nodes]
                decisions.append(self._decide(seq, draft, i, states, result.of(i)[-1 - nodes :]))
            else:
                decisions.append(Decision())
            row += fed + nodes
        return Verdict(decisions)

    def forget(self, seq: Sequence) -> None:
        self._offers.pop(seq, None)

    def _decide(self, seq: Sequence, draft: Draft, i: int, states: Tensor, logits: Tensor) -> Decision:
        """states, logits: of the last token and all nodes."""
        ahead = torch.stack([self._head.step(n, states[None], states).logits[0] for n in range(self._heads)])
        paths = paths_of(draft.parents[i]) or [[]]
        deepest = max(map(len, paths))
        rows = torch.tensor([[0, *(node + 1 for node in path), *[0] * (deepest - len(path))] for path in paths])
        known = torch.tensor([-1, *draft.tokens[i]])
        guesses = known[rows[:, 1:]]  # [leaves, levels - 1]; -1 behind a path's end
        per_path, ahead_per_path = logits[rows], ahead[:, rows]  # [leaves, levels, V], [heads, leaves, levels, V]
        chosen = per_path.argmax(-1)
        agreed = (guesses == chosen[:, :-1]).long().cumprod(1).sum(1)
        best = int(agreed.argmax())
        count = int(agreed[best])
        self._offers[seq] = ahead_per_path[:, best, count].topk(OFFERED).indices.tolist()
        return Decision([int(row) - 1 for row in rows[best, 1 : count + 1]], chosen[best, : count + 1].tolist())


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode."""

    name: str
    tree: Tree
    heads: int
    published: bool  # with logits per path; else by our engine

    @property
    def leaves(self) -> int:
        return len(paths_of([parent for parent, _ in self.tree]))

    @property
    def levels(self) -> int:
        return 1 + max((len(path) for path in paths_of([parent for parent, _ in self.tree])), default=0)


class Bench:
    """A target, its head, and prompts."""

    def __init__(self, head: str, prompts: int, tokens: int) -> None:
        self.folder, self.tokens = head, tokens
        self.target: Model = load_model(bundled.target(), torch.float32, torch.device("cpu"))
        tokenizer = load_tokenizer(bundled.target())
        self.prompts = [tokenizer.encode(text) for text in bundled.prompts()[:prompts]]

    def head(self, levels: int) -> Head:
        return load_head(self.folder, self.target, levels)

    def accuracy(self) -> list[list[float]]:
        table: list[list[float]] = self.head(5).config.options["accuracy"]
        return table

    def engine(self, way: Way) -> Engine:
        config = EngineConfig(k=len(way.tree), max_batch=1, cache_memory="256MiB", device="cpu", prefix_reuse=False)
        if not way.heads:
            return build_engine(self.target, config=config)
        if not way.published:
            return build_engine(self.target, draft=self.head(way.heads), config=config)
        medusa = PublishedMedusa(self.head(way.heads), way.tree, way.heads)
        engine = build_engine(self.target, medusa, config=config)
        engine.verifier = medusa
        return engine

    def write(self, engine: Engine) -> tuple[float, list[list[int]]]:
        """Tokens per second over all prompts, and the texts."""
        begin = time.perf_counter()
        params = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        seqs = [engine.add(Request(tuple(prompt), params)) for prompt in self.prompts]
        while engine.busy:
            engine.step()
        return self.tokens * len(seqs) / (time.perf_counter() - begin), [seq.output for seq in seqs]


def live_bytes(engine: Engine, prompt: list[int], steps: int = 6) -> int:
    """The most bytes of tensors that live at the same time in a decoding step, beyond those before it."""
    engine.add(Request(tuple(prompt), SamplingParams(max_tokens=200, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    most = 0
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            engine.step()
        events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
        live = 0
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            live += event.nbytes()
            most = max(most, live)
    return most


def ways(accuracy: list[list[float]]) -> Iterator[Way]:
    """Medusa's default with all five heads; smaller trees and fewer heads by measured accuracy; ours."""
    yield Way("Medusa, 63 nodes", default_tree(), 5, True)
    for heads in (4, 3, 2):
        for nodes in (32, 20, 12):
            yield Way(f"pruned, {nodes} nodes", best_shape(accuracy[:heads], nodes), heads, True)
    for heads, nodes in ((5, 63), (4, 20), (4, 12), (3, 8), (3, 5)):
        yield Way(f"ours, {nodes} nodes", best_shape(accuracy[:heads], nodes), heads, False)


def measure(bench: Bench, way: Way, plain: Way, repeats: int) -> dict[str, Any]:
    """Rates in turns with plain decoding: the ratio is the median of those of neighbours in time."""
    rates, ratios = [], []
    for _ in range(repeats):
        engine = bench.engine(way)
        rate, texts = bench.write(engine)
        reference, expected = bench.write(bench.engine(plain))
        assert texts == expected, f"{way.name}: other texts than plain decoding"
        rates.append(rate)
        ratios.append(rate / reference)
    meter, head = engine.meter, bench.head(way.heads)
    return {
        "name": way.name, "heads": way.heads, "nodes": len(way.tree), "leaves": way.leaves, "levels": way.levels,
        "per_path_logits": way.published,
        "buffer_bytes": buffer_bytes(way.heads, way.leaves, way.levels, bench.target.vocab, 4) if way.published else 0,
        "live_bytes": live_bytes(bench.engine(way), bench.prompts[0]),
        "head_bytes": sum(p.nbytes for p in head.parameters()),
        "tokens_per_second": median(rates), "times_plain": median(ratios),
        "tokens_per_step": meter.emitted / max(1, meter.sequence_steps),
    }  # fmt: skip


def batched(bench: Bench, batches: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """SpecMemo's batched table, with the bundled Clover head: padded speculation as there, our ragged one, plain."""
    head = load_head(bundled.named("clover"), bench.target)
    kinds: dict[str, tuple[Head | None, str]] = {
        "plain": (None, "ragged"),
        "padded": (head, "padded"),
        "ragged": (head, "ragged"),
    }
    for batch in batches:
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(repeats):
            for name, (draft, strategy) in kinds.items():
                config = EngineConfig(
                    k=CLOVER_NODES, max_batch=batch, cache_memory="256MiB", device="cpu", strategy=strategy, refill=True
                )
                rates[name].append(bench.write(build_engine(bench.target, draft=draft, config=config))[0])
        yield {"batch": batch} | {name: median(found) for name, found in rates.items()}


def chosen(rows: list[dict[str, Any]], keep: float = 0.96) -> dict[str, Any]:
    """The pruned tree with the smallest buffer that keeps this share of the default's tokens per second and per step:
    where rows of a pass are free, as on a GPU at batch 1, the latter is the former."""
    goals = {name: keep * rows[0][name] for name in ("times_plain", "tokens_per_step")}
    good = [row for row in rows[1:] if row["per_path_logits"] and all(row[n] >= goal for n, goal in goals.items())]
    return min(good, key=lambda row: row["buffer_bytes"])


def show(row: dict[str, Any], first: dict[str, Any]) -> str:
    shape = f"{row['heads']} heads {row['nodes']:2d} nodes {row['leaves']:2d} leaves"
    memory = f"buffer {row['buffer_bytes'] / 2**20:6.2f} MiB  live {row['live_bytes'] / 2**20:6.2f} MiB"
    speed = f"{row['tokens_per_second']:6.1f} tokens/s  {row['times_plain']:.2f} x plain"
    share = row["times_plain"] / first["times_plain"]  # of Medusa's
    return f"{row['name']:18s} {shape}  {memory}  {speed} ({share:.0%})  {row['tokens_per_step']:.2f} tokens/step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True)
    parser.add_argument("--out")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 10])
    args = parser.parse_args()
    bench, plain = Bench(args.head, args.prompts, args.tokens), Way("plain", [], 0, False)
    rows: list[dict[str, Any]] = []
    base = live_bytes(bench.engine(plain), bench.prompts[0])
    for way in ways(bench.accuracy()):
        rows.append(measure(bench, way, plain, args.repeats))
        rows[-1]["live_bytes"] -= base
        print(show(rows[-1], rows[0]), flush=True)
    best, ours = chosen(rows), max((r for r in rows if not r["per_path_logits"]), key=lambda r: r["times_plain"])
    print(f"SpecMemo's choice: {show(best, rows[0])}")
    for name in ("buffer_bytes", "live_bytes"):
        print(f"  {name}: {1 - best[name] / rows[0][name]:.1%} less than Medusa's default")
    print(f"Ours: {show(ours, rows[0])}\n  live_bytes: {1 - ours['live_bytes'] / rows[0]['live_bytes']:.1%} less")
    table = []
    for row in batched(bench, args.batches, args.repeats):
        table.append(row)
        print({name: round(value, 1) for name, value in row.items()}, flush=True)
    if args.out:
        settings = {**vars(args), "target": "bundled, float32", "threads": torch.get_num_threads()}
        write(args.out, settings | {"chosen": best, "ours": ours, "batched": table}, rows)


if __name__ == "__main__":
    main()
