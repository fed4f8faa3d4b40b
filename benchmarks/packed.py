"""N-gram steps on the GPU, their rows packed and padded: the same texts as plain decoding, and the time of a step.

python -m benchmarks.packed [--which widened] [--batch 24] [--k 7] [--tokens 96] [--small]
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.gpu import Gaps, Session, params, say, texts, timed, verdict
from faircopy import LLM

WAYS: dict[str, dict[str, Any]] = {"eager": {"graphs": False}, "packed": {}, "padded": {"pack_rows": False}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--which", choices=("bundled", "widened"), default="widened")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--small", action="store_true", help="tiny shapes, on any device")
    args = parser.parse_args(arguments)
    session = Session(args)
    memory = "16MiB" if args.small else "16GiB"
    prompts = session.prompts(2 * args.batch)
    wanted = {temperature: params(len(prompts), args.tokens, temperature) for temperature in (0.0, 0.8)}
    llm = session.llm(args.which, None, k=0, max_batch=args.batch, cache_memory=memory)
    plain = {temperature: texts(llm, prompts, asked) for temperature, asked in wanted.items()}
    for way, options in WAYS.items():
        llm = session.llm(args.which, "ngram", k=args.k, max_batch=args.batch, cache_memory=memory, **options)
        for temperature, asked in wanted.items():  # before warming up: graphs are captured while steps are in flight
            say(verdict(args.which, temperature, {"rows": way}, plain[temperature], texts(llm, prompts, asked)))
        say({"rows": way, "batch": args.batch, "k": args.k, **measured(llm, prompts[: args.batch], args.tokens)})


def measured(llm: LLM, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """One batch with every graph made: the median step on the device's clock, and the rows of a mean step,
    prompts included."""
    llm.warm_up()
    asked = params(len(prompts), tokens, 0.0)
    texts(llm, prompts, asked)
    clock, before = Gaps(llm), llm.metrics()
    rate = timed(llm, prompts, asked)
    gained = {name: value - before[name] for name, value in llm.metrics().items()}
    rows = {name: gained[f"tokens_{name}"] / gained["steps"] for name in ("fed", "padded")}
    return {"tokens_per_s": rate, "steps": gained["steps"], **rows, **clock.summary()}


if __name__ == "__main__":
    main()
