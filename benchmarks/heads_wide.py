"""Trained heads at the cost of a large model: the bundled target widened to Qwen3-8B's shape, heads of that shape too.

python -m benchmarks.heads_wide --out FILE --head NAME=FOLDER [--head ...] [--batches 1 8 32 64] [--nodes 4 12 24 60]
    [--tokens 64] [--queue 8] [--draft-vocab 32000] [--minutes 8] [--small]
python -m benchmarks.heads_wide --steps-only --out FILE [--batches 1 8 32 64] [--step-tokens 48] [--small]

Heads are folders of heads for the bundled target, such as those that benchmarks.heads leaves in its work folder. A
random head of the wide shape drafts what each of them does, recorded behind plain decoding's texts before the clock
runs (benchmarks.recorded): greedy texts only. Plain decoding, chains of four (by heads loaded for four levels) and the
heads' own trees with each number of nodes write the texts of a queue of prompts `--queue` times the batch, of half to
one and a half times `--tokens`; ended texts are replaced by waiting ones. Tokens a second count prompts' time too;
step_ms is the median of captured steps by the device's events.

--steps-only: random heads alone, as chains of four; the median of captured steps of `batch` texts, and the head's own
time: the step less one of the same rows whose draft tokens are constants. Without a GPU (--small is a rehearsal with
tiny shapes) step_ms is the process's time over the steps, those that read prompts included.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu import Gaps, first_launches, params, say
from benchmarks.planner import Outputs, Trial, facts, queue
from benchmarks.widen_head import DRAFT_VOCAB, wide_head
from faircopy import LLM, bundled
from faircopy.bench.record import collect
from faircopy.capture import CapturedDrafter, GraphState, Work
from faircopy.drafters.base import Drafter, chains
from faircopy.drafters.folder import head_skeleton
from faircopy.drafters.heads import Head
from faircopy.drafters.trees import Tree
from faircopy.types import Batch, Draft

CHAIN = 4
RANDOM: dict[str, dict[str, Any]] = {"eagle3": {}, "clover": {}, "medusa": {"shared": True}, "scylla": {}}
Rows = Iterator[dict[str, Any]]


class ConstantChains(Drafter):
    """Chains of one token, at no cost: what is left of a step without a head."""

    def propose(self, batch: Batch) -> Draft:
        return chains(batch, lambda seq, max_nodes: [0] * max_nodes)

    def capture(self, num_slots: int) -> CapturedDrafter:
        return CapturedConstants()


class CapturedConstants(CapturedDrafter):
    def plan_fill(self, graph: GraphState) -> Work:
        def fill() -> None:
            graph.inputs.ids[:, 1:] = 0

        return fill


def variants(args: argparse.Namespace) -> Iterator[tuple[str, str | None, int, bool]]:
    """Name, the head's folder, nodes, and whether they are a chain; plain decoding first."""
    yield "plain", None, 0, True
    for head in args.head:
        name, _, folder = head.partition("=")
        yield f"{name}, chain of {CHAIN}", folder, CHAIN, True
        yield from ((f"{name}, tree of {nodes}", folder, nodes, False) for nodes in args.nodes)


def throughput(args: argparse.Namespace, trial: Trial) -> Rows:
    queues = {batch: queue(args, trial, batch) for batch in args.batches}
    plain: dict[int, tuple[float, Outputs]] = {}
    for name, folder, nodes, chain in variants(args):
        if trial.late:
            return
        llm = variant_llm(args, trial, folder, nodes, chain)
        for batch, (prompts, wanted) in queues.items():
            before, clock, known = llm.metrics(), Gaps(llm), len(first_launches())
            done = trial.rate(llm, prompts, wanted, batch)
            if folder is None:
                plain[batch] = done
                trial.keep_plain(prompts, done[1])
            row = facts(llm, before, done, plain[batch])
            yield {
                "variant": name,
                "batch": batch,
                **row,
                **clock.summary(),
                "first_launches": first_launches()[known:],
            }
        del llm


def variant_llm(args: argparse.Namespace, trial: Trial, folder: str | None, nodes: int, chain: bool) -> LLM:
    if folder is None:
        return trial.ready(trial.made(None, 0, cache_memory=args.memory), 0)
    return trial.head_llm(folder, nodes, chain, CHAIN if chain else None, cache_memory=args.memory)


def steps_only(args: argparse.Namespace, trial: Trial) -> Rows:
    same: dict[int, float] = {}
    for name in ("plain", "no head, the same rows", *RANDOM):
        if trial.late:
            return
        draft = random_head(args, trial, name) if name in RANDOM else None if name == "plain" else ConstantChains()
        nodes = 0 if name == "plain" else CHAIN
        llm = trial.ready(trial.made(draft, nodes, cache_memory=args.memory), nodes)
        for batch in args.batches:
            found = step_ms(args, trial, llm, batch)
            if isinstance(draft, ConstantChains):
                same[batch] = found
            own = {"head_ms": found - same[batch]} if isinstance(draft, Head) else {}
            yield {"variant": name, "batch": batch, "nodes": nodes, "step_ms": found, **own}
        del llm, draft


def step_ms(args: argparse.Namespace, trial: Trial, llm: LLM, batch: int) -> float:
    before, clock = llm.metrics()["steps"], Gaps(llm)
    rate, found = trial.rate(llm, trial.prompts(batch), params(batch, args.step_tokens, 0.0), batch)
    steps = llm.metrics()["steps"] - before
    return clock.summary().get("step_ms", 1e3 * sum(map(len, found)) / rate / steps)


def random_head(args: argparse.Namespace, trial: Trial, method: str) -> Head:
    """A head of this method at the wide shape, with as many levels as a chain of four needs."""
    target, shape = trial.wide_target()
    options = {**RANDOM[method], "draft_vocab": min(args.draft_vocab or shape["vocab_size"], shape["vocab_size"])}
    template = head_skeleton(bundled.named("clover"))
    head = wide_head(template, shape, target, method=method, levels=CHAIN, options=options)
    head.tree = Tree  # type: ignore[method-assign]
    return head.bind(target.token_weights())


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--head", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--nodes", nargs="*", type=int, default=[4, 12, 24, 60])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--queue", type=int, default=8)
    parser.add_argument("--draft-vocab", type=int, default=DRAFT_VOCAB, help="tokens a wide head guesses; 0: all")
    parser.add_argument("--memory", default="8GiB", help="of keys and values")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps-only", action="store_true")
    parser.add_argument("--step-tokens", type=int, default=48)
    parser.add_argument("--small", action="store_true")
    parser.set_defaults(
        pair="widened",
        questions=None,
        own_text=False,
        costs=None,
        same=False,
        temperature=0.0,
        most=None,
        history=False,
    )
    args = parser.parse_args(arguments)
    if any("=" not in head for head in args.head):
        parser.error("--head takes NAME=FOLDER")
    trial = Trial(args)
    for row in collect(args.out, vars(args), (steps_only if args.steps_only else throughput)(args, trial)):
        say(row)


if __name__ == "__main__":
    main()
