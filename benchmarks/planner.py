"""k="auto" against every fixed k and against plain decoding: tokens a second over batches, drafters and qualities.

python -m benchmarks.planner --out FILE [--pair bundled | widened | FOLDER] [--drafters model ngram useless turns head]
    [--batches 1 8 32 64] [--fixed 1 2 4 8] [--qualities both implicit explicit off] [--tokens 128] [--queue 8]
    [--same] [--temperature 0] [--minutes 60] [--plot FILE] [--small] [--costs FILE | own]
    [--questions FILE --task NAME] [--own-text] [--paired] [--head FOLDER] [--chain [fixed]] [--most N]
    [--draft-vocab 32000] [--history]

A queue of prompts `--queue` times the batch waits from the beginning, and ended texts are replaced. Texts have half to
one and a half times `--tokens`, by a seed, so that plain decoding does not end and replace them all at once; --same:
all have `--tokens`. On a GPU clocks are the wall's, elsewhere the process's own. Texts of all ways are compared.
--paired: every way is compared with plain decoding of the same queue in a second engine, a step of the one after a step
of the other; for machines whose speed changes.
--own-text: prompts are beginnings of texts that the bundled target samples itself, as those that docs/heads.md measures
heads on, instead of the bundled prompts.
"useless" drafts tokens that are never right, "turns" what plain decoding wrote, and wrong tokens from the middle of
each text on. "head" is the bundled Clover head, or another one of the target (--head), with its own trees, or chains
(--chain; --chain fixed: of fixed lengths alone); numbers of draft tokens are then numbers of nodes. --most: what auto
may choose, if not what `LLM(k="auto")` does. For the widened pair a random head of that shape runs, which guesses
`--draft-vocab` tokens of the vocabulary (0: all) and whose drafts are replaced by those of the small one, recorded
before (benchmarks.recorded): greedy texts only. --history: auto begins with what earlier runs on this machine learned
of the drafter, and keeps what it learns; else it knows nothing.

--costs: steps are not timed. Each takes what a cost table says (a file such as benchmarks/results/costs-h200.json, or
"own": measured on this machine for the bundled pair or a folder), with 3 % of noise: real drafts and texts, the
chooser's decisions and their outcome on that device, on any machine and however busy it is.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import TINY, Session, first_launches, say, synchronize
from benchmarks.heads import tidy
from benchmarks.recorded import RecordedHead, Texts, small_head
from benchmarks.widen_head import DRAFT_VOCAB
from faircopy import LLM, SamplingParams, bundled
from faircopy.bench.record import collect
from faircopy.bench.shapes import SHAPES
from faircopy.build import load_target
from faircopy.config import EngineConfig
from faircopy.costs import CostTable, Curve
from faircopy.draft_length import LADDER, DraftLengths
from faircopy.drafters.base import Drafter, chains
from faircopy.engine import Engine
from faircopy.measured_costs import cost_table
from faircopy.model.base import Model
from faircopy.model.loader import load_tokenizer
from faircopy.planner import AutoLength
from faircopy.requests import RequestReader
from faircopy.strategy import STRATEGIES
from faircopy.train.llama import load_llama
from faircopy.train.sampler import rows_of, sample
from faircopy.types import Batch, Draft, FinishedStep, Sequence

OWN_SEED = 1_000_003
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # batch slots of captured steps

Outputs = list[list[int]]
Queue = tuple[list[list[int]], list[SamplingParams]]


class Useless(Drafter):
    """Tokens that the target does not choose: the last token again and again."""

    def propose(self, batch: Batch) -> Draft:
        return chains(batch, lambda seq, max_nodes: [(seq.tokens[-1] + 1) % 100 + 3] * max_nodes)


class Turns(Drafter):
    """What plain decoding wrote, and from the middle of each text on what is never right."""

    def __init__(self, known: Texts) -> None:
        self._known = known

    def propose(self, batch: Batch) -> Draft:
        return chains(batch, self._chain)

    def _chain(self, seq: Sequence, max_nodes: int) -> list[int]:
        text, done = self._known.get(tuple(seq.prompt), []), len(seq.output)
        right = text[done : done + max_nodes]
        return right if 2 * done < len(text) else [(token + 1) % 100 + 3 for token in right]


class TableClock:
    """Gives every step the time that a table says, and adds them up."""

    def __init__(self, engine: Engine, table: CostTable) -> None:
        self._source, self.seconds = random.Random(0), 0.0
        lengths, self._table = engine.draft_lengths, table
        told = type(lengths).observe

        def observe(step: FinishedStep, seconds: float | None) -> None:
            taken = self._time(step, seconds)
            self.seconds += taken
            told(lengths, step, None if seconds is None else taken)

        lengths.observe = observe  # type: ignore[method-assign]

    def _time(self, step: FinishedStep, seconds: float | None) -> float:
        batch, k = len(step.batch), max(map(len, step.draft.tokens), default=0)
        rows = step.rows - step.padding
        table = captured(self._table, (k,)) if k in LADDER else self._table
        found = table.step(batch, k, rows) if seconds is not None else self._table.target(rows)
        return found * (1.0 + 0.03 * self._source.gauss(0.0, 1.0))


class StepLog:
    """Steps by draft length and kind, and the time from the end of the step before to the end of each."""

    def __init__(self, engine: Engine) -> None:
        self._kinds: dict[tuple[int, str], list[float]] = {}
        self._last, self._tell = time.perf_counter(), engine.draft_lengths.observe
        engine.draft_lengths.observe = self._observe  # type: ignore[method-assign]

    def _observe(self, step: FinishedStep, seconds: float | None) -> None:
        kind = "eager" if not step.captured else "joining" if step.prompt_rows else "captured"
        now = time.perf_counter()
        self._kinds.setdefault((max(step.batch.max_nodes, default=0), kind), []).append(now - self._last)
        self._last = now
        self._tell(step, seconds)

    def taken(self) -> list[dict[str, Any]]:
        """What was seen since the last call."""
        found, self._kinds = self._kinds, {}
        return [
            {"k": k, "kind": kind, "steps": len(times), "ms": 1e3 * sum(times) / len(times)}
            for (k, kind), times in sorted(found.items())
        ]


def captured(table: CostTable, lengths: Iterable[int]) -> CostTable:
    """The same table with captured steps of these lengths, if its passes are captured."""
    if not table.target.stepped:
        return table
    return replace(table, steps={(size, k): table.step(size, k) for size in BUCKETS for k in {0, *lengths}})


def read_costs(name: str, llm: LLM, pair: str) -> CostTable:
    if name != "own":
        return CostTable.of_json(json.loads(Path(name).read_text())["rows"][0])
    small = load_target(bundled.draft(), llm.config) if pair == "bundled" else None
    table = cost_table(llm.model, small, llm.config)
    assert table is not None, "a CPU's costs are measured"
    return table


def own_prompts(count: int, device: str) -> list[list[int]]:
    """Beginnings, of 8 to 39 tokens, of texts that the bundled target samples."""
    network = load_llama(bundled.target(), torch.float32, device)
    config = json.loads((Path(bundled.target()) / "config.json").read_text())
    begin, end = config["bos_token_id"], config["eos_token_id"]
    texts = rows_of(sample(network, [[begin]] * count, 48, (end,), 1.0, 0.01, OWN_SEED))
    return [text[: 8 + n % 32] for n, text in enumerate(texts)]


class Trial:
    """One pair of models, its prompts, and the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._session = args, Session(args)
        self.cuda = torch.cuda.is_available()
        self._wide: dict[tuple[str, bool, int | None], RecordedHead] = {}
        self._table: CostTable | None = None
        self.plain: Texts = {}

    @property
    def late(self) -> bool:
        return self._session.late

    def prompts(self, count: int) -> list[list[int]]:
        if self._args.own_text:
            return own_prompts(count, self._session.device)
        if self._args.questions is None:
            return self._session.prompts(count)
        asked = self._questions()
        return [asked[n % len(asked)] for n in range(count)]

    def _questions(self) -> list[list[int]]:
        """First turns of one task in the model's chat format, the shortest first, so that CPUs read them in time."""
        tokenizer: Any = load_tokenizer(self._args.pair)
        lines = [json.loads(line) for line in Path(self._args.questions).read_text().splitlines()]
        reader = RequestReader(tokenizer)
        turns = [line["turns"][0] for line in lines if line["category"] == self._args.task]
        prompts = [reader.chat_prompt([{"role": "user", "content": turn}]) for turn in turns]
        return sorted(prompts, key=len)

    def llm(self, drafter: str | None, k: int | str, **options: Any) -> LLM:
        """An engine with one of the drafters by name; of k="auto", with no more draft tokens than --most."""
        if drafter == "head":
            folder = self._args.head or bundled.named("clover")
            chain = self._args.chain == "all" or (self._args.chain == "fixed" and k != "auto")
            return self.head_llm(folder, k, chain, **options)
        draft: Any = {"useless": Useless(), "turns": Turns(self.plain)}.get(drafter or "", drafter)
        made = self.made(draft, k, **options)
        return self.ready(made, k, drafted=drafter == "model")

    def head_llm(self, folder: str, k: int | str, chain: bool, levels: int | None = None, **options: Any) -> LLM:
        """An engine with a trained head, of the widened pair a wide one that drafts what the trained one does."""
        if self._args.pair != "widened":
            name = bundled.target() if self._args.pair == "bundled" else self._args.pair
            target = load_target(name, EngineConfig(device=self._session.device))
            return self.ready(self.made(small_head(folder, target, chain, levels), k, **options), k)
        wide = self._recorded(folder, chain, levels)
        made = self.made(wide.head, k, **options)
        wide.recorded.attach(made.engine)
        return self.ready(made, k)

    def made(self, draft: Any, k: int | str, **options: Any) -> LLM:
        """An engine with this drafter that nothing was captured of."""
        pair, session = self._args.pair, self._session
        tidy(torch.device(session.device))
        options |= {"max_batch": max(self._args.batches), "prefix_reuse": False}  # as all read their prompts
        options |= {"acceptance_history": self._args.history}
        options |= {"k": self._args.most, "auto": True} if k == "auto" and self._args.most else {"k": k}
        if pair in ("widened", "bundled"):
            return session.llm(pair, draft, **options)
        return LLM(pair, draft, **options)

    def ready(self, made: LLM, k: int | str, drafted: bool = False) -> LLM:
        """Warmed up, and with the table's costs if they are wanted; drafted: by a model, whose passes it has."""
        if self.cuda:
            made.warm_up()
        if self._args.costs:
            table = read_costs(self._args.costs, made, self._args.pair)
            self._table = table if drafted else replace(table, draft=Curve())
            if k == "auto":
                made.engine.draft_lengths.use(captured(self._table, made.engine.draft_lengths.lengths))
        return made

    def wide_target(self) -> tuple[Model, dict[str, Any]]:
        """The widened target, and its shape."""
        return self._session.widened()[0], TINY if self._args.small else SHAPES["qwen3-8b"]

    def _recorded(self, folder: str, chain: bool, levels: int | None) -> RecordedHead:
        """What a head drafts behind the texts of plain decoding, which come first."""
        key = folder, chain, levels
        if key not in self._wide:
            self._wide.clear()  # one wide head at a time
            options = {"chain": chain, "levels": levels, "draft_vocab": self._args.draft_vocab}
            self._wide[key] = RecordedHead(folder, *self.wide_target(), self.plain, **options)
        return self._wide[key]

    def keep_plain(self, prompts: list[list[int]], found: Outputs) -> None:
        """Plain decoding's texts, of a prompt that comes again the longest."""
        for prompt, text in zip(prompts, found, strict=True):
            if len(text) > len(self.plain.get(tuple(prompt), [])):
                self.plain[tuple(prompt)] = text

    def rate(self, llm: LLM, prompts: list[Any], wanted: list[SamplingParams], batch: int) -> tuple[float, Outputs]:
        """Tokens a second with `batch` texts at a time, and the texts."""
        clock = TableClock(llm.engine, self._table) if self._table is not None else None
        synchronize()
        begin = self._now()
        seqs = self._add(llm, prompts, wanted, batch)
        while llm.engine.busy:
            llm.engine.step()
        synchronize()
        found = [seq.output for seq in seqs]
        taken = self._now() - begin if clock is None else clock.seconds
        return sum(map(len, found)) / taken, found

    def rates(
        self, llms: list[LLM], prompts: list[Any], wanted: list[SamplingParams], batch: int
    ) -> list[tuple[float, Outputs]]:
        """The same of several engines that take turns."""
        seqs, taken = [self._add(llm, prompts, wanted, batch) for llm in llms], [0.0] * len(llms)
        while any(llm.engine.busy for llm in llms):
            for n, llm in enumerate(llms):
                begin = self._now()
                if llm.engine.busy:
                    llm.engine.step()
                    synchronize()
                taken[n] += self._now() - begin
        texts = [[seq.output for seq in mine] for mine in seqs]
        return [(sum(map(len, found)) / seconds, found) for found, seconds in zip(texts, taken, strict=True)]

    def _add(self, llm: LLM, prompts: list[Any], wanted: list[SamplingParams], batch: int) -> list[Sequence]:
        config, engine = replace(llm.config, max_batch=batch), llm.engine
        engine.scheduler.policy = STRATEGIES[config.strategy].policy(config, engine.captured)
        pairs = zip(prompts, wanted, strict=True)
        return [engine.add(llm.request(prompt, params)) for prompt, params in pairs]

    def _now(self) -> float:
        return time.perf_counter() if self.cuda else time.process_time()


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    trial = Trial(args)
    queues = {batch: queue(args, trial, batch) for batch in args.batches}
    plain: dict[int, tuple[float, Outputs]] = {}
    alone = trial.llm(None, 0) if args.paired else None
    for drafter, k, options in ways(args):
        if trial.late:
            return
        llm = trial.llm(drafter, k, **options)
        log = StepLog(llm.engine)
        for batch, (prompts, wanted) in queues.items():
            before, known = llm.metrics(), len(first_launches())
            around = [] if alone is None else trial.rates([alone, llm], prompts, wanted, batch)
            rate, found = trial.rate(llm, prompts, wanted, batch) if alone is None else around[1]
            if drafter is None:
                plain[batch] = rate, found
                trial.keep_plain(prompts, found)
            base, texts = plain[batch]
            base = base if alone is None else around[0][0]
            yield {
                **({"task": args.task} if args.task else {}),
                "batch": batch, "drafter": drafter or "none", "k": k, **options,
                **facts(llm, before, (rate, found), (base, texts)), "first_launches": first_launches()[known:],
                **({} if args.paired else {"kinds": log.taken()}), "why": llm.explain()["draft_length"],
                **learned(llm.engine.draft_lengths, batch),
            }  # fmt: skip
        del llm, log


def learned(lengths: DraftLengths, batch: int) -> dict[str, Any]:
    """What auto expects at the end: milliseconds of steps of a full batch by length, accepted shares and tokens."""
    if not isinstance(lengths, AutoLength):
        return {}
    history = lengths.history
    return {
        "expected_ms": {k: round(1e3 * lengths.costs.of(batch, k), 3) for k in lengths.lengths},
        "rates": [round(rate, 3) for rate in (history.rates if history else ())],
        "trees": [[nodes, round(gain, 3)] for nodes, gain in (history.trees if history else ())],
    }


def facts(
    llm: LLM, before: dict[str, float], done: tuple[float, Outputs], plain: tuple[float, Outputs]
) -> dict[str, Any]:
    """What a run brought, against plain decoding of the same queue. before: the engine's metrics before it."""
    (rate, found), (base, texts) = done, plain
    counted = {name: value - before[name] for name, value in llm.metrics().items()}
    return {
        "tokens_per_s": rate, "times_plain": rate / base,
        "identical": sum(a == b for a, b in zip(found, texts, strict=True)), "of": len(texts),
        "tokens_per_step": sum(map(len, found)) / max(1, counted["sequence_steps"]),
        **{name: counted[name] for name in ("steps", "captured_steps", "drafter_rows", "drafted", "accepted")},
    }  # fmt: skip


def queue(args: argparse.Namespace, trial: Trial, batch: int) -> Queue:
    count, source = max(args.queue * batch, 4), random.Random(0)
    least, most = (args.tokens, args.tokens) if args.same else (args.tokens // 2, args.tokens * 3 // 2)
    wanted = [
        SamplingParams(max_tokens=source.randint(least, most), temperature=args.temperature, seed=n, ignore_eos=True)
        for n in range(count)
    ]
    return trial.prompts(count), wanted


def ways(args: argparse.Namespace) -> Iterator[tuple[str | None, int | str, dict[str, Any]]]:
    """Plain decoding first; then each drafter with auto, and with every fixed k."""
    yield None, 0, {}
    shared = {} if args.share is None else {"share_nodes": args.share}
    for drafter in args.drafters:
        yield from ((drafter, "auto", {"quality": quality, **shared}) for quality in args.qualities)
        yield from ((drafter, k, {}) for k in args.fixed)


def plot(found: list[dict[str, Any]], file: str) -> None:
    """Times plain over the batch: every fixed k, and auto."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drafters = list(dict.fromkeys(row["drafter"] for row in found if row["drafter"] != "none"))
    figure, axes = pyplot.subplots(1, len(drafters), figsize=(4.2 * len(drafters), 3.6), squeeze=False, sharey=True)
    for axis, drafter in zip(axes[0], drafters, strict=True):
        mine = [row for row in found if row["drafter"] == drafter]
        for name in dict.fromkeys((row["k"], row.get("quality")) for row in mine):
            line = [row for row in mine if (row["k"], row.get("quality")) == name]
            auto = name[0] == "auto"
            axis.plot(
                [row["batch"] for row in line], [row["times_plain"] for row in line], "o-" if auto else ".--",
                label=f"auto, {name[1]}" if auto else f"k {name[0]}", linewidth=2 if auto else 1,
            )  # fmt: skip
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(title=f"drafter: {drafter}", xlabel="batch", xscale="log")
        axis.set_xticks(sorted({row["batch"] for row in mine}), labels=sorted({row["batch"] for row in mine}))
        axis.minorticks_off()
    axes[0][0].set_ylabel("tokens a second, times plain")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--pair", default="bundled")
    parser.add_argument("--drafters", nargs="+", default=["model", "ngram"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--fixed", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--qualities", nargs="*", default=["both"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--queue", type=int, default=8)
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--paired", action="store_true")
    parser.add_argument("--questions", help="a file such as Spec-Bench's question.jsonl, for a FOLDER as pair")
    parser.add_argument("--own-text", action="store_true", help="prompts that the bundled target began")
    parser.add_argument("--task", help="the category of its questions")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--plot")
    parser.add_argument("--costs", help="a cost table's file, or own")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--share", action=argparse.BooleanOptionalAction, help="whether batches share a head's nodes")
    parser.add_argument("--head", help="a trained head's folder; the bundled Clover head if left out")
    parser.add_argument(
        "--chain", nargs="?", const="all", choices=["all", "fixed"], help="chains instead of the head's own trees"
    )
    parser.add_argument("--most", type=int, help="draft tokens or nodes that auto chooses at most")
    parser.add_argument("--history", action="store_true")
    parser.add_argument("--draft-vocab", type=int, default=DRAFT_VOCAB, help="tokens a wide head guesses; 0: all")
    args = parser.parse_args(arguments)
    if args.pair == "widened" and "head" in args.drafters and args.temperature:
        parser.error("a head's drafts for the widened pair are recorded behind greedy texts")
    found = []
    for row in collect(args.out, vars(args), rows(args)):
        say(row)
        found.append(row)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
