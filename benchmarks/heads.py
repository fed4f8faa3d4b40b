"""Draft heads against each other: same target, same text, same number of tokens; accuracy, acceptance, speed.

python -m benchmarks.heads --target models/target --target ../shared/data/models/stories15M --out $OUT --minutes 6

Everything is written to OUT/heads.json as it is measured; called again, it does what is missing. What does not fit
the time is left out and says so. `--show FILE` prints the tables of a file.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faircopy.bench.record import write
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.folder import load_head, new_head, save_head
from faircopy.drafters.heads import Head
from faircopy.drafters.networks.eagle3 import DEPTH, Eagle3
from faircopy.drafters.trees import RerankedTree, Tree
from faircopy.engine import Engine
from faircopy.model.base import Model
from faircopy.model.hidden import stock_token_weights
from faircopy.model.loader import load_model, load_stock
from faircopy.train.data import Windows
from faircopy.train.heads import HeadTask, Teacher, measure_heads
from faircopy.train.language import Distil
from faircopy.train.llama import Shape, fresh, load_llama, save_llama
from faircopy.train.loop import Settings, Task, train
from faircopy.train.runs import held_out_batches
from faircopy.train.sampler import own_text, rows_of, sample
from faircopy.types import Request, SamplingParams

# name -> method and options. The first five are compared; the others take something away.
MAIN = ("medusa", "clover", "clover2", "eagle3", "draft")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "clover": ("clover", {}),
    "clover2": ("clover2", {}),
    "eagle3": ("eagle3", {}),
    "draft": ("draft", {}),
    "clover - decoder": ("clover", {"decoder": False}),
    "clover - decoder, rows as they are": ("clover", {"decoder": "sum"}),
    "clover - decoder - regression": ("clover", {"regress": False}),
    "clover - decoder - regression - block": ("clover", {"regress": False, "augment": False}),
    "clover - block": ("clover", {"augment": False}),
    "eagle3 - training-time test": ("eagle3", {"unroll": 1}),
    "eagle1": ("eagle3", {"style": "eagle1"}),
    "clover2, regression a tenth": ("clover2", {"regression": 1.0}),
}
OWN = {"medusa": 63, "clover": 4, "clover2": 25, "eagle3": 60}  # nodes of each paper's tree
CHAIN, SMALL = 4, 4
SAME = 25  # nodes of the tree that Clover-2 was compared with EAGLE-1 on; here both by EAGLE-2's rule
COMPARED = ("clover2", "clover2, regression a tenth", "eagle1", "eagle3")
PACE = 0.45  # what the variants take on average of the slowest one's time, as measured on an H200


@dataclass(slots=True)
class Bench:
    """One target's run: where things are, what is known, how much time is left."""

    args: argparse.Namespace
    target: str
    deadline: float
    rows: list[dict[str, Any]]
    steps: int = 0
    _cache: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return Path(self.target).name if Path(self.target).name != "target" else "bundled"

    @property
    def work(self) -> Path:
        folder: Path = self.args.work / self.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def folder(self, variant: str) -> Path:
        """Where a variant's weights are."""
        return self.work / folder_of(variant)

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device)

    @property
    def kind(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def length(self) -> int:
        """Tokens per text: a window has one more, and all of them need positions."""
        return min(int(self.args.length), self.model().context - 1)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def teacher(self) -> Teacher:
        return self.once("teacher", lambda: Teacher(load_stock(self.target, self.kind, self.device)))

    def model(self) -> Model:
        return self.once("model", lambda: load_model(self.target, None, self.device, True))

    def left(self) -> float:
        return self.deadline - time.time()

    def known(self, **key: Any) -> bool:
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def drop(self, variant: str) -> None:
        """What was measured of a variant's weights goes with them."""
        self.rows[:] = [row for row in self.rows if (row["target"], row["variant"]) != (self.name, variant)]

    def note(self, **row: Any) -> None:
        """Keep a result, at once and for good."""
        self.rows.append({"target": self.name, **row})
        write(str(self.args.out / "heads.json"), _plain(vars(self.args)), self.rows)
        print(json.dumps(self.rows[-1]), flush=True)


def folder_of(variant: str) -> str:
    """A name that every machine takes for a folder."""
    return "".join(c if c.isalnum() else "-" for c in variant)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {n: v if isinstance(v, int | float | list | None) else str(v) for n, v in settings.items()}


def text_of(bench: Bench) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Text for training and held out, and beginnings of other texts, all written by the target."""
    path, args = bench.work / "own.pt", bench.args
    if not path.exists():
        network = load_llama(bench.target, bench.kind, bench.device)
        begin, ends = _marks(bench)
        size = (args.own_rows, args.own_length)
        own = own_text(network, begin, ends, *size, args.own_seconds, 7)
        held_out = own_text(network, begin, ends, max(64, size[0] // 16), size[1], 0.0, 1_000_003)
        rows = rows_of(sample(network, [[begin]] * 96, 32, ends, temperature=1.0, min_p=0.02, seed=99))
        prompts = [row[: 6 + n % 16] for n, row in enumerate(rows)]
        torch.save({"own": own, "held_out": held_out, "prompts": prompts}, path)
    kept = torch.load(path, weights_only=True)
    return kept["own"].to(bench.device), kept["held_out"].to(bench.device), kept["prompts"]


def _marks(bench: Bench) -> tuple[int, tuple[int, ...]]:
    """The token that begins a text, and those that end one."""
    config = bench.teacher().stock.config
    begin = config.bos_token_id or 0
    return begin, tuple({begin, config.eos_token_id or 0})


def make_task(bench: Bench, variant: str, text: Tensor) -> tuple[Task, Any]:
    method, options = VARIANTS[variant]
    teacher = bench.teacher()
    if method == "draft":
        shape = Shape.of(teacher.stock.config)
        small = Shape(
            vocab=shape.vocab, hidden=bench.args.draft_hidden, layers=2, heads=4, kv_heads=4,
            head_dim=bench.args.draft_hidden // 4, intermediate=3 * bench.args.draft_hidden, context=shape.context,
        )  # fmt: skip
        draft = fresh(small, 1).to(bench.device)
        return Distil(draft, teacher.stock), draft
    head = new_head(method, bench.target, stock_token_weights(teacher.stock), seed=1, **options)
    if isinstance(head, Eagle3):
        head.keep_frequent(torch.bincount(text.long().cpu(), minlength=head.vocab))
    head = head.to(bench.device)
    return HeadTask(head, teacher), head


def pace(bench: Bench, text: Tensor, variants: list[str]) -> int:
    """Steps that every variant gets, so that all of them fit their share of the time."""
    windows = Windows(text, bench.length, bench.args.rows, 3)
    task, _ = make_task(bench, "eagle3", text)  # the slowest
    log = bench.work / "pace.jsonl"
    quick = {"lr": 1e-4, "bf16": bench.device.type == "cuda"}
    train(task, windows, Settings(steps=3, **quick), log)
    taken = train(task, windows, Settings(steps=6, **quick), log).seconds / 6
    share = bench.left() * bench.args.train_share / len(variants) / PACE
    return max(2, min(bench.args.steps, int(share / taken)))


def teach(bench: Bench, variant: str, text: Tensor, held_out: Tensor) -> None:
    """Train one variant, save it, note its accuracy."""
    bench.drop(variant)
    args, cuda = bench.args, bench.device.type == "cuda"
    task, learner = make_task(bench, variant, text)
    settings = Settings(
        steps=bench.steps,
        lr=args.lr,
        warmup=0.03,
        weight_decay=0.01,
        bf16=cuda,
        log_every=max(1, bench.steps // 20),
        seed=1,
        **(task.objective.clipping if isinstance(task, HeadTask) else {}),
    )
    log = bench.work / "logs" / f"{folder_of(variant)}.jsonl"
    done = train(task, Windows(text, bench.length, args.rows, 3), settings, log)
    facts = {"steps": done.step, "tokens": done.tokens, "seconds": round(done.seconds, 1), "loss": done.loss}
    if isinstance(learner, Head):
        batches = held_out_batches(held_out, bench.length, min(8, args.rows), args.measured)
        accuracy = measure_heads(learner, bench.teacher(), batches, cuda)
        save_head(learner, bench.folder(variant), **learner.learned(accuracy.ranks))
        facts |= asdict(accuracy)
    else:
        save_llama(learner, bench.folder(variant), bos_token_id=0, eos_token_id=0)
    bench.note(kind="accuracy", variant=variant, parameters=learner.size, **facts)


def drafter_of(bench: Bench, variant: str) -> Any:
    """A head or draft model as it was saved, for serving."""
    folder = str(bench.folder(variant))
    if VARIANTS[variant][0] == "draft":
        return bench.once(folder, lambda: load_model(folder, None, bench.device, True))
    return bench.once(folder, lambda: load_head(folder, bench.model()))


def tidy(device: torch.device) -> None:
    """The last engine's cache goes before the next one's comes."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def engine_for(bench: Bench, variant: str | None, k: int, batch: int, tree: str = "own") -> Engine:
    tidy(bench.device)
    draft = None if variant is None else drafter_of(bench, variant)
    if isinstance(draft, Head):
        kinds: dict[str, Any] = {"own": type(draft).tree.__get__(draft), "chain": Tree, "same": same_tree}
        draft.tree = kinds[tree]  # type: ignore[method-assign]
    options = {"cache_memory": bench.args.memory, "device": str(bench.device)}
    config = EngineConfig(k=k, max_batch=batch, prefix_reuse=False, chunk=8192, **options)
    return build_engine(bench.model(), draft=draft, config=config)


def same_tree(max_nodes: int) -> Tree:
    return RerankedTree(max_nodes, DEPTH)


@dataclass(slots=True)
class Decoded:
    """What came of decoding some prompts, from the second step on: a head has nothing to read before."""

    rate: float  # tokens per second
    per_step: float  # tokens per sequence and step
    texts: list[list[int]]


def decode(engine: Engine, prompts: list[list[int]], tokens: int, temperature: float = 0.0) -> Decoded:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature)
    seqs = [engine.add(Request(tuple(prompt), params, seed=n)) for n, prompt in enumerate(prompts)]
    engine.step()
    emitted, steps = sum(len(seq.output) for seq in seqs), sum(seq.steps for seq in seqs)
    start = time.perf_counter()
    while engine.busy:
        engine.step()
    seconds = time.perf_counter() - start
    emitted, steps = sum(len(s.output) for s in seqs) - emitted, sum(s.steps for s in seqs) - steps
    return Decoded(emitted / max(seconds, 1e-9), emitted / max(steps, 1), [s.output for s in seqs])


def cycle(prompts: list[list[int]], count: int) -> list[list[int]]:
    return [prompts[n % len(prompts)] for n in range(count)]


def measure_acceptance(bench: Bench, variant: str, prompts: list[list[int]]) -> None:
    """Accepted tokens per step beyond the target's own, by kind of tree."""
    for tree, k, rule in (
        ("chain", CHAIN, "chain"),
        ("tree of 4", SMALL, "own"),
        ("own tree", OWN.get(variant), "own"),
        ("tree of 25", SAME if variant in COMPARED else None, "same"),
    ):
        if k is None or bench.known(target=bench.name, kind="acceptance", variant=variant, tree=tree):
            continue
        if variant not in MAIN and tree == "own tree":
            continue
        if bench.left() < 0:
            return
        engine = engine_for(bench, variant, k, bench.args.accept_batch, rule)
        done = decode(engine, cycle(prompts, bench.args.accept_batch), bench.args.new)
        bench.note(kind="acceptance", variant=variant, tree=tree, nodes=k, extra=round(done.per_step - 1, 4))


def speeds() -> list[tuple[str | None, int, str]]:
    """What is timed: plain, chains of four, and trees, small and as large as in the papers."""
    chains: list[tuple[str | None, int, str]] = [(variant, CHAIN, "chain") for variant in MAIN]
    trees = [("clover", SMALL), ("medusa", SMALL), ("medusa", OWN["medusa"]), ("eagle3", OWN["eagle3"])]
    return [(None, 0, "chain"), *chains, *((variant, k, "own") for variant, k in trees)]


def name_of(variant: str | None, k: int, tree: str) -> str:
    return "plain" if variant is None else f"{variant}, {'chain' if tree == 'chain' else 'tree'} of {k}"


def measure_speed(bench: Bench, prompts: list[list[int]]) -> None:
    for batch in bench.args.batches:
        for variant, k, tree in speeds():
            name = name_of(variant, k, tree)
            if variant is not None and not (bench.folder(variant) / "config.json").exists():
                continue
            if bench.known(target=bench.name, kind="speed", variant=name, batch=batch):
                continue
            if bench.left() < 0:
                return
            done = timed(engine_for(bench, variant, k, batch, tree), cycle(prompts, batch), bench.args.new)
            facts = {"rate": round(done.rate, 1), "per_step": round(done.per_step, 3)}
            bench.note(kind="speed", variant=name, batch=batch, **facts)


def timed(engine: Engine, prompts: list[list[int]], tokens: int) -> Decoded:
    """Once for the graphs, which are captured where first needed; then the faster of two, the same texts again."""
    decode(engine, prompts, tokens)
    return max((decode(engine, prompts, tokens) for _ in range(2)), key=lambda done: done.rate)


def measure_exactness(bench: Bench, prompts: list[list[int]]) -> None:
    """All drafters and trees, greedy and sampled: how many texts equal plain decoding."""
    many = cycle(prompts, 3 * bench.args.accept_batch)
    for temperature in (0.0, 0.8):
        plain = decode(engine_for(bench, None, 0, bench.args.accept_batch), many, bench.args.new, temperature).texts
        for variant, k, tree in speeds()[1:]:
            name = name_of(variant, k, tree)
            if not (bench.folder(variant) / "config.json").exists() or bench.left() < 0:
                continue
            if bench.known(target=bench.name, kind="exact", variant=name, temperature=temperature):
                continue
            texts = decode(
                engine_for(bench, variant, k, bench.args.accept_batch, tree), many, bench.args.new, temperature
            ).texts
            same = sum(a == b for a, b in zip(texts, plain, strict=True))
            bench.note(kind="exact", variant=name, temperature=temperature, identical=same, of=len(plain))


def run(bench: Bench) -> None:
    """Text, training, acceptance, speed; what matters most first."""
    text, held_out, prompts = text_of(bench)
    variants = [v for v in VARIANTS if not bench.args.only or v in bench.args.only]
    missing = [v for v in variants if not bench.known(target=bench.name, kind="accuracy", variant=v)]
    missing += [v for v in variants if v not in missing and not bench.folder(v).exists()]
    if missing:
        bench.steps = pace(bench, text, missing)
        print(f"{bench.name}: {len(text)} tokens, {bench.steps} steps each", flush=True)
    for variant in missing:
        if bench.left() > 0:
            teach(bench, variant, text, held_out)
    bench._cache.pop("teacher", None)
    ready = [v for v in variants if (bench.folder(v) / "config.json").exists()]
    for variant in ready:
        measure_acceptance(bench, variant, prompts)
    if not bench.args.untimed:
        measure_exactness(bench, prompts)
        measure_speed(bench, prompts)
    if bench.left() < 0:
        print(f"{bench.name}: out of time, call again for the rest", flush=True)


def show(rows: list[dict[str, Any]]) -> None:
    """The tables, as plain text."""
    for target in dict.fromkeys(row["target"] for row in rows):
        mine = [row for row in rows if row["target"] == target]
        print(f"\n## {target}\n")
        _show_accuracy([row for row in mine if row["kind"] == "accuracy"])
        _show_grid("extra tokens per step", [r for r in mine if r["kind"] == "acceptance"], "tree", "extra", 2)
        _show_grid("tokens/s by batch", [r for r in mine if r["kind"] == "speed"], "batch", "rate", 0)
        exact = [row for row in mine if row["kind"] == "exact"]
        print(f"\ntexts equal to plain: {sum(row['identical'] for row in exact)} of {sum(row['of'] for row in exact)}")


def _show_accuracy(rows: list[dict[str, Any]]) -> None:
    print("accuracy on held-out text, %: first guess / first five, by level")
    for row in rows:
        pairs = zip(row.get("top1", []), row.get("top5", []), strict=True)
        cells = "  ".join(f"{one * 100:5.1f} / {five * 100:5.1f}" for one, five in pairs)
        print(f"{row['variant']:40} {row['parameters'] / 1e6:6.2f} M  {row['tokens'] / 1e6:6.2f} M tokens  {cells}")


def _show_grid(title: str, rows: list[dict[str, Any]], across: str, value: str, digits: int) -> None:
    columns = list(dict.fromkeys(row[across] for row in rows))
    print(f"\n{title}\n{'':40} " + " ".join(f"{column!s:>10}" for column in columns))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = {row[across]: row[value] for row in rows if row["variant"] == variant}
        line = " ".join(f"{cells[c]:10.{digits}f}" if c in cells else " " * 10 for c in columns)
        print(f"{variant:40} {line}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="folders of small Llamas; once per target")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/faircopy-heads"), help="text and weights, kept between calls"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="for all targets together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", help="train only these variants")
    parser.add_argument("--steps", type=int, default=4000, help="at most; fewer if the time is short")
    parser.add_argument("--train-share", type=float, default=0.5, help="of the time")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--own-rows", type=int, default=8192)
    parser.add_argument("--own-length", type=int, default=256)
    parser.add_argument("--own-seconds", type=float, default=6.0)
    parser.add_argument("--draft-hidden", type=int, default=128)
    parser.add_argument("--measured", type=int, default=48, help="batches of held-out text")
    parser.add_argument("--new", type=int, default=64, help="tokens per prompt when decoding")
    parser.add_argument("--accept-batch", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32, 48])
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--untimed", action="store_true", help="leave the speeds for another call")
    parser.add_argument("--keep", action="append", help="copy this variant's folder to OUT as well, for example clover")
    parser.add_argument("--show", type=Path, help="print the tables of a result file and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.show:
        return show(json.loads(args.show.read_text())["rows"])
    if args.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length; the sampler has hundreds
    args.out.mkdir(parents=True, exist_ok=True)
    file, targets = args.out / "heads.json", args.target or ["models/target"]
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    end = time.time() + 60 * args.minutes
    for place, target in enumerate(targets):
        bench = Bench(args, target, time.time() + (end - time.time()) / (len(targets) - place), rows)
        run(bench)
        _keep(bench)
    show(rows)
    return None


def _keep(bench: Bench) -> None:
    for variant in bench.args.keep or []:
        if bench.folder(variant).exists():
            shutil.copytree(bench.folder(variant), bench.args.out / folder_of(variant), dirs_exist_ok=True)


if __name__ == "__main__":
    main()
