"""Tokens per CPU second of this engine and of whichever peers are installed, one thread each, in turns.

python -m benchmarks.cpu_peers [--python openvino=/path/to/python] [--shape 1.1b] [--batches 1 8] [--out FILE.json]

Each engine runs in a process of its own (benchmarks/peer_workers.py), with the Python that --python names or this one;
an engine that does not start is left out, by name. Prompts have 16 to 128 tokens and are read within the measured time.
"Same" counts a drafted run's texts that equal the same engine's plain ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cpu_decode import SHAPE, make_model, shorten
from benchmarks.peer_workers import ENGINES
from faircopy import bundled
from faircopy.bench.record import write

SHAPES = {
    "100m": SHAPE,
    "1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
}
WORKER = Path(__file__).with_name("peer_workers.py")


class Worker:
    """An engine in its own process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process
        self.seconds: list[float] = []
        self.texts: list[list[int]] = []
        self.peak_mb = 0

    def read(self) -> dict[str, Any] | None:
        """The next JSON line of the process; engines may print others. None: it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        return None

    def run(self, prompts: list[list[int]], tokens: int, measured: bool) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = self.read()
        assert answer is not None, f"{self.name} ended"
        self.texts, self.peak_mb = answer["texts"], answer["peak_mb"]
        self.seconds += [answer["seconds"]] if measured else []


@contextmanager
def started(name: str, python: str, model: str, draft: str, dtype: str) -> Iterator[Worker | None]:
    """A worker that is ready, or None where the engine is not installed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1]) if name == "faircopy" else ""
    with subprocess.Popen(
        [python, str(WORKER), name, model, draft, dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if name != "faircopy" else None,
        text=True,
        env=environment,
    ) as process:
        worker = Worker(name, process)
        if worker.read() is None:
            reason = process.stderr.read().strip().splitlines()[-1:] if process.stderr else ["see above"]
            print(f"{name} left out: {' '.join(reason)}")
            yield None
        else:
            yield worker
            process.terminate()


def main() -> None:
    args = parse()
    pythons = dict(pair.split("=", 1) for pair in args.python)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        whole, short = make_pair(Path(folder), SHAPES[args.shape])
        for dtype in args.dtypes:
            plain: dict[tuple[str, int], list[list[int]]] = {}
            for draft in ("", short) if not args.plain else ("",):
                with ExitStack() as stack:
                    workers = [
                        worker
                        for name in args.engines
                        if (
                            worker := stack.enter_context(
                                started(name, pythons.get(name, sys.executable), whole, draft, dtype)
                            )
                        )
                    ]
                    for batch in args.batches:
                        rows += compare(workers, batch, args, dtype, bool(draft), plain)
    if args.out:
        write(args.out, {**vars(args), "shape": SHAPES[args.shape]}, rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", nargs="+", default=[*ENGINES])
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--shape", choices=[*SHAPES], default="100m")
    parser.add_argument("--plain", action="store_true", help="no drafts")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    return parser.parse_args()


def make_pair(folder: Path, shape: dict[str, int]) -> tuple[str, str]:
    """A model and its first two layers, with a tokenizer that no engine needs and one insists on."""
    from faircopy.model.loader import load_tokenizer

    model, tokenizer = make_model(shape=shape), load_tokenizer(bundled.target())
    for name, part in (("whole", model), ("short", shorten(model, 2))):
        part.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "whole"), str(folder / "short")


def compare(
    workers: list[Worker],
    batch: int,
    args: argparse.Namespace,
    dtype: str,
    drafted: bool,
    plain: dict[tuple[str, int], list[list[int]]],
) -> list[dict[str, Any]]:
    """One cell of the table, all engines in turns; the first turn warms up."""
    prompts = make_prompts(batch)
    for worker in workers:
        worker.seconds = []
    for turn in range(args.repeats + 1):
        for worker in workers:
            worker.run(prompts, args.tokens, turn > 0)
    rows = []
    for worker in (worker for worker in workers if worker.texts):
        known = plain.setdefault((worker.name, batch), worker.texts)
        rows.append(
            {
                "dtype": dtype,
                "drafted": drafted,
                "batch": batch,
                "engine": worker.name,
                "tokens_per_cpu_second": round(batch * args.tokens / statistics.median(worker.seconds), 1),
                "spread": round((max(worker.seconds) - min(worker.seconds)) / statistics.median(worker.seconds), 2),
                "same_as_plain": sum(a == b for a, b in zip(worker.texts, known, strict=True)),
                "peak_mb": worker.peak_mb,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def make_prompts(batch: int) -> list[list[int]]:
    source = random.Random(1)
    return [[source.randrange(1, SHAPE["vocab_size"]) for _ in range(16 + 16 * (n % 8))] for n in range(batch)]


if __name__ == "__main__":
    main()
