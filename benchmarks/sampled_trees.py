"""Trees against chains of a draft head for sampled requests: tokens per step by draft nodes.

python -m benchmarks.sampled_trees --out FILE [--head FOLDER] [--nodes 4 7 12 24] [--temperatures 0.8 1] [--texts 16]

The bundled target and its Clover head, or another head of it. A chain has no more nodes than the head has levels; a
tree of more nodes verifies more rows. Every text is compared with plain decoding's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from faircopy import LLM, SamplingParams, bundled
from faircopy.bench.record import collect
from faircopy.build import load_target
from faircopy.config import EngineConfig
from faircopy.drafters.folder import load_head
from faircopy.drafters.trees import Tree

PROMPT = 24  # tokens


def engine(args: argparse.Namespace, nodes: int, chain: bool = False) -> LLM:
    if not nodes:
        return LLM(bundled.target(), k=0, cache_memory="1GiB")
    head = load_head(args.head or bundled.named("clover"), load_target(bundled.target(), EngineConfig()))
    if chain:
        head.tree = Tree  # type: ignore[assignment, method-assign]
    return LLM(bundled.target(), head, k=nodes, cache_memory="1GiB")


def sampled(args: argparse.Namespace, temperature: float, tokens: int) -> list[SamplingParams]:
    asked = {"max_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    return [SamplingParams(seed=n, **asked) for n in range(args.texts)]


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    plain = engine(args, 0)
    begun = plain.generate([[1, 5 + 7 * n] for n in range(args.texts)], sampled(args, 1.0, PROMPT), progress=False)
    prompts = [answer.token_ids for answer in begun]
    for temperature in args.temperatures:
        params = sampled(args, temperature, args.tokens)
        wanted = [answer.token_ids for answer in plain.generate(prompts, params, progress=False)]
        for nodes in args.nodes:
            for draft in ("chain", "tree"):
                llm = engine(args, nodes, draft == "chain")
                found = [answer.token_ids for answer in llm.generate(prompts, params, progress=False)]
                yield {
                    "temperature": temperature, "nodes": nodes, "draft": draft,
                    "tokens_per_step": round(llm.metrics()["tokens_per_step"], 3),
                    "identical": sum(a == b for a, b in zip(found, wanted, strict=True)), "of": len(wanted),
                }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--head", help="a folder; the bundled Clover head if left out")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 7, 12, 24])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 1.0])
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    for row in collect(args.out, vars(args), rows(args)):
        print(row, flush=True)


if __name__ == "__main__":
    main()
