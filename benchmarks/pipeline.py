"""Throughput over the batch size of a model whose layers lie on several processes, as in SpecMemo's table for 70B.

python -m benchmarks.pipeline [--stages 2] [--batches 1 2 4 8 10] [--out FILE]

The target is the bundled one, widened to about a hundred million parameters; the draft model is the bundled one. Each
batch is measured in four ways in turn, with and without drafts: in one process; in a pipeline with one pass at a time,
as published; and with as many passes under way as there are stages. Every text is compared with that of one process.

Rates are tokens a second of wall time, and `bound`: by the processor time of the busiest process, or that of all of
them divided by the passes under way, if that is longer: what a pipeline comes to with a free core for every stage.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from os import sysconf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.widen import widen
from faircopy import bundled
from faircopy.bench.record import write
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.engine import Engine
from faircopy.model.base import Model
from faircopy.model.loader import load_model, load_tokenizer
from faircopy.parallel.launch import start_ranks
from faircopy.parallel.model import Pipeline
from faircopy.parallel.shards import Load
from faircopy.types import Request, SamplingParams

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16, "head_dim": 64}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 4096, "tie_word_embeddings": False}


class Bench:
    """One target in one process and in a pipeline, a draft model, and prompts."""

    def __init__(self, folder: Path, stages: int, tokens: int, k: int) -> None:
        widen(bundled.target(), LlamaConfig(**SHAPE, **HEADS), folder, dtype=torch.float32)
        self.tokens, self.k = tokens, k
        self.group = start_ranks(stages, CPU)
        order = Load(str(folder), torch.float32, True, torch.get_num_threads(), pipeline=True)
        self.one, self.pipeline = load_model(str(folder), torch.float32, CPU), Pipeline(self.group, order)
        self.draft = load_model(bundled.named("draft"), torch.float32, CPU)
        tokenizer = load_tokenizer(bundled.target())
        self.prompts = [tokenizer.encode(text) for text in bundled.prompts()]

    def rate(self, target: Model, batch: int, drafted: bool, overlapped: bool) -> tuple[float, float, list[list[int]]]:
        """Tokens a second of a full batch, by the wall and as a bound, and its texts."""
        config = EngineConfig(k=self.k if drafted else 0, max_batch=batch, cache_memory="512MiB", device="cpu")
        engine: Engine = build_engine(target, draft=self.draft if drafted else None, config=config)
        if not overlapped:
            engine._stages = 1
        params = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        begin, busy = time.perf_counter(), self.processor_seconds()
        asked = [Request(tuple(self.prompts[n % len(self.prompts)]), params) for n in range(batch)]
        seqs = [engine.add(request) for request in asked]
        while engine.busy:
            engine.step()
        taken = [after - before for before, after in zip(busy, self.processor_seconds(), strict=True)]
        passes = min(batch, len(taken)) if overlapped else 1  # that can be under way
        bound, tokens = max(max(taken), sum(taken) / passes), self.tokens * batch
        return tokens / (time.perf_counter() - begin), tokens / bound, [seq.output for seq in seqs]

    def processor_seconds(self) -> list[float]:
        """Of every rank's process so far."""
        return [time.process_time(), *(_processor_seconds(pid) for pid in self.group.pids)]

    def ways(self) -> dict[str, tuple[Model, bool]]:
        return {
            "one_process": (self.one, False),
            "pipeline_one_pass": (self.pipeline, False),
            "pipeline": (self.pipeline, True),
        }

    def row(self, batch: int, drafted: bool, repeats: int) -> dict[str, Any]:
        """Medians of turns in which every way takes its turn."""
        rates: dict[str, list[float]] = {}
        for _ in range(repeats):
            texts = []
            for name, (target, overlapped) in self.ways().items():
                rate, bound, text = self.rate(target, batch, drafted, overlapped)
                rates.setdefault(name, []).append(rate)
                rates.setdefault(f"{name}_bound", []).append(bound)
                texts.append(text)
            assert texts[0] == texts[1] == texts[2], "a pipeline writes other texts"
        return {
            "batch": batch, "drafted": drafted, **{name: median(each) for name, each in rates.items()},
            "over_one_process": _ratio(rates, "pipeline", "one_process"),
            "over_one_pass": _ratio(rates, "pipeline", "pipeline_one_pass"),
            "bound_over_one_process": _ratio(rates, "pipeline_bound", "one_process_bound"),
            "bound_over_one_pass": _ratio(rates, "pipeline_bound", "pipeline_one_pass_bound"),
        }  # fmt: skip


def _ratio(rates: dict[str, list[float]], one: str, other: str) -> float:
    """The median of those of neighbours in time."""
    return median(a / b for a, b in zip(rates[one], rates[other], strict=True))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / sysconf("SC_CLK_TCK")


def rows(bench: Bench, batches: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    first: dict[bool, float] = {}
    for batch in batches:
        plain: dict[str, Any] = {}
        for drafted in (False, True):
            row = bench.row(batch, drafted, repeats)
            plain = plain or row
            first.setdefault(drafted, row["pipeline_bound"])
            row["bound_over_plain"] = row["pipeline_bound"] / plain["pipeline_bound"]
            row["bound_over_first_batch"] = row["pipeline_bound"] / first[drafted]
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 10])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.stages, args.tokens, args.k)
        found = []
        for row in rows(bench, args.batches, args.repeats):
            found.append(row)
            print({name: round(v, 2) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
        bench.group.close()
    if args.out:
        write(args.out, {**vars(args), "target": "bundled, widened, float32", **SHAPE, "threads": 1}, found)


if __name__ == "__main__":
    main()
