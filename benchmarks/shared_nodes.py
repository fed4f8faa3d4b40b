"""What a batch gains by sharing its draft nodes: tokens per step with as many rows.

python -m benchmarks.shared_nodes --out FILE [--heads clover benchmarks/heads/eagle3 benchmarks/heads/scylla]
    [--batches 4 8 32] [--nodes 1 2 3 5 8] [--temperature 0] [--tokens 64] [--queue 3]

The bundled target and heads of it, greedy unless a temperature is given, a queue of prompts `--queue` times the batch.
"own": every sequence has k nodes. "shared": the batch has k nodes per sequence, for the paths that the head is surest
of, and a sequence has twice as many at most. Every text is compared with plain decoding's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import say
from faircopy import SamplingParams, bundled
from faircopy.bench.record import collect
from faircopy.build import build_engine, load_target
from faircopy.config import EngineConfig
from faircopy.draft_length import DraftLengths, FixedLength, own_room, shared_room
from faircopy.drafters.folder import load_head
from faircopy.model.loader import load_tokenizer
from faircopy.types import Request


class Measurement:
    """The target, the heads, and what plain decoding writes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._config = args, EngineConfig(cache_memory="1GiB", k=2 * max(args.nodes))
        self._target = load_target(bundled.target(), self._config)
        texts, tokenizer = bundled.prompts(), load_tokenizer(bundled.target())
        self._prompts = [tuple(tokenizer.encode(text)) for text in texts]
        self._plain: dict[int, list[list[int]]] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        for head in self._args.heads:
            for batch in self._args.batches:
                for k in self._args.nodes:
                    own = self._tokens_per_step(head, batch, FixedLength(k, own_room))
                    shared = self._tokens_per_step(head, batch, FixedLength(k, partial(shared_room, most=2 * k)))
                    yield {"head": head, "batch": batch, "nodes": k, "own": own, "shared": shared, "gain": shared / own}

    def _tokens_per_step(self, head: str, batch: int, lengths: DraftLengths) -> float:
        if batch not in self._plain:
            self._plain[batch] = self._written(batch, None, None)[0]
        folder = bundled.named(head) if head in ("clover",) else head
        texts, rate = self._written(batch, load_head(folder, self._target), lengths)
        assert texts == self._plain[batch], "every text is plain decoding's"
        return rate

    def _written(self, batch: int, head: Any, lengths: DraftLengths | None) -> tuple[list[list[int]], float]:
        args = self._args
        options = {"ignore_eos": True, "temperature": args.temperature}
        requests = [
            Request(
                self._prompts[n % len(self._prompts)],
                SamplingParams(max_tokens=args.tokens + n % 16, seed=n, **options),
                n,
            )
            for n in range(args.queue * batch)
        ]
        config = EngineConfig(cache_memory="1GiB", k=self._config.k, max_batch=batch)
        engine = build_engine(self._target, draft=head, config=config, draft_lengths=lengths)
        seqs = [engine.add(request) for request in requests]
        while engine.busy:
            engine.step()
        return [seq.output for seq in seqs], engine.meter.emitted / engine.meter.sequence_steps


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="/dev/null")
    known = ["clover", "benchmarks/heads/eagle3", "benchmarks/heads/scylla"]
    parser.add_argument("--heads", nargs="+", default=known, help="folders, or the bundled clover")
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 8, 32])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 3, 5, 8])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--queue", type=int, default=3)
    args = parser.parse_args(arguments)
    for row in collect(args.out, vars(args), Measurement(args).rows()):
        say(row)


if __name__ == "__main__":
    main()
