"""Requests that arrive while others run: the gaps between steps, the time to the first token, and whether texts change.

python -m benchmarks.arrivals --out FILE [--rate 33] [--count 64] [--batch 32] [--small]

The widened Qwen3-8B / 0.6B pair (see benchmarks.gpu); prompts of 260 tokens, 128 new ones; arrivals at random times of
a fixed seed. Plain and with a draft model, after warm_up(). Every text is compared with the one of a full batch.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch

from benchmarks.gpu import Session, counts, first_launches, say, texts
from faircopy import LLM, SamplingParams
from faircopy.bench.record import collect
from faircopy.types import Request, Sequence


def arrivals(count: int, rate: float) -> list[float]:
    """Seconds at which requests arrive, as many a second on average."""
    source, now, found = random.Random(0), 0.0, []
    for _ in range(count):
        now += source.expovariate(rate)
        found.append(now)
    return found


class Trial:
    """Feeds requests to an engine as they arrive and notes when what comes out."""

    def __init__(self, llm: LLM, prompts: list[list[int]], params: list[SamplingParams], rate: float) -> None:
        self._engine = llm.engine
        self._due = list(zip(arrivals(len(prompts), rate), prompts, params, strict=True))
        self.seqs: list[Sequence] = []
        self.first: dict[int, float] = {}  # id -> seconds from arrival to the first token
        self.gaps: list[float] = []  # seconds between two steps that gave tokens, while the engine was busy

    def run(self) -> float:
        """Seconds from the first arrival to the last token."""
        begin = time.perf_counter()
        waiting, arrived, last = list(self._due), {}, None
        while waiting or self._engine.busy:
            self._engine.linger()
            now = time.perf_counter() - begin
            while waiting and waiting[0][0] <= now:
                due, prompt, params = waiting.pop(0)
                seq = self._engine.add(Request(tuple(prompt), params, seed=params.seed or 0))
                self.seqs.append(seq)
                arrived[seq.id] = due
            if not self._engine.busy:
                time.sleep(max(0.0, waiting[0][0] - (time.perf_counter() - begin)))
                last = None
                continue
            outputs = self._engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                self.first.setdefault(output.id, now - arrived[output.id])
            if outputs:
                self.gaps += [] if last is None else [now - last]
                last = now
        return time.perf_counter() - begin


def rows(args: argparse.Namespace) -> Any:
    session = Session(args)
    length, tokens = (24, 8) if args.small else (260, 128)
    prompts = [(prompt * 20)[:length] for prompt in session.prompts(args.count)]
    params = [
        SamplingParams(max_tokens=tokens, temperature=0.8 * (n % 2), seed=n, ignore_eos=True) for n in range(args.count)
    ]
    for drafter, k in ((None, 0), ("model", args.k)):
        memory = "16MiB" if args.small else "24GiB"
        llm = session.llm("widened", drafter, k=k, max_batch=args.batch, cache_memory=memory, prefix_reuse=False)
        begin = time.perf_counter()
        llm.warm_up()
        warm, known = time.perf_counter() - begin, len(first_launches())
        wanted = texts(llm, prompts, params)
        trial = Trial(llm, prompts, params, args.rate)
        taken = trial.run()
        same = sum(seq.output == text for seq, text in zip(trial.seqs, wanted, strict=True))
        firsts = [trial.first[seq.id] for seq in trial.seqs]
        yield {
            "drafter": drafter or "none", "k": k, "rate": args.rate, "tokens_per_s": args.count * tokens / taken,
            **percentiles("gap_ms", trial.gaps), **percentiles("first_ms", firsts), "warm_up_s": warm,
            "first_launches": len(first_launches()) - known,
            "identical": same, "of": args.count, **counts(llm),
        }  # fmt: skip
        del llm, trial


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"{name}_p{share}": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)
    }


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    parser.add_argument("--rate", type=float, default=33.0, help="requests a second")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(arguments)
    for row in collect(args.out, vars(args), rows(args)):
        say(row)


if __name__ == "__main__":
    main()
