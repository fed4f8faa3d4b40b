"""Step 1: short stories sampled from the stories15M checkpoint, without copies, one in a hundred held out."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from tokenizers import Tokenizer

from faircopy.train.llama import Llama, load_llama
from faircopy.train.sampler import rows_of, sample
from runs.bundled.common import HELD_OUT, arguments, file_hash, note, on_gpu, prepare

Block = np.ndarray[tuple[int, int], np.dtype[np.int16]]  # arrays travel between processes without shared memory

BOS, EOS = 1, 2
SENTENCE_END = re.compile(r"[.!?][\"']?(?=\s|$)")
STRAIGHT = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})


class Shelf:
    """Turns sampled tokens into story files; lives in a process of its own so that the GPU never waits for it."""

    def __init__(self, teacher: Path, work: Path, least: int) -> None:
        self._tokenizer, self._least = Tokenizer.from_file(str(teacher / "tokenizer.json")), least
        self._seen: set[bytes] = set()
        self._files = {name: (work / f"{name}.jsonl").open("w") for name in ("stories", "heldout")}
        self.counts = {"stories": 0, "heldout": 0, "copies": 0, "dropped": 0, "characters": 0}

    def add(self, block: Block) -> dict[str, int]:
        """Keep one batch's good and new stories; returns all counts so far."""
        rows = rows_of(torch.from_numpy(block))
        texts = self._tokenizer.decode_batch(rows, skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            self._keep(clean(text, ended=row[-1] in (BOS, EOS)))
        for file in self._files.values():
            file.flush()
        return self.counts

    def _keep(self, text: str) -> None:
        if len(text) < self._least or not text.isascii():
            self.counts["dropped"] += 1
            return
        digest = hashlib.sha256(text.encode()).digest()
        if digest in self._seen:
            self.counts["copies"] += 1
            return
        self._seen.add(digest)
        name = "heldout" if held_out(digest) else "stories"
        self.counts[name] += 1
        self.counts["characters"] += len(text)
        _write(self._files[name], text)


def clean(text: str, ended: bool) -> str:
    """Straight quotes; a story that was cut off ends with its last whole sentence."""
    text = text.translate(STRAIGHT).strip()
    if ended:
        return text
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


def held_out(digest: bytes) -> bool:
    """Decided by the text alone, so the same story is always on the same side."""
    return int.from_bytes(digest[:4], "big") % HELD_OUT == 0


def _write(file: TextIO, text: str) -> None:
    file.write(json.dumps({"text": text}) + "\n")


_shelf: Shelf | None = None


def _open_shelf(teacher: Path, work: Path, least: int) -> None:
    global _shelf
    _shelf = Shelf(teacher, work, least)


def _shelve(block: Block) -> dict[str, int]:
    assert _shelf is not None, "the worker was not initialised"
    return _shelf.add(block)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--teacher", type=Path, required=True, help="the stories15M checkpoint folder")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--batches", type=int, default=10_000, help="stop after this many batches: repeats a known run")
    parser.add_argument("--rows", type=int, default=8192, help="stories per batch")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--least", type=int, default=80, help="characters a story must have")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--min-p", type=float, default=0.02)
    return parser.parse_args(argv)


def fill(network: Llama, args: argparse.Namespace) -> tuple[int, dict[str, int]]:
    """Sample until time or batches run out; returns how many batches there were and what was kept of them."""
    started, batch, pending = time.perf_counter(), 0, list[Future[dict[str, int]]]()
    # A fresh process, not a fork: a fork would inherit the GPU's state and hang.
    with ProcessPoolExecutor(1, get_context("spawn"), _open_shelf, (args.teacher, args.work, args.least)) as worker:
        while batch < args.batches and time.perf_counter() - started < args.seconds:
            rows, seed = [[BOS]] * args.rows, args.seed * 100_003 + batch
            block = sample(network, rows, args.length, (BOS, EOS), args.temperature, args.min_p, seed)
            pending.append(worker.submit(_shelve, block.short().numpy()))
            batch += 1
            if len(pending) > 4:
                pending.pop(0).result()
            print(f"sample: batch {batch}, {time.perf_counter() - started:.1f} s", flush=True)
        return batch, [future.result() for future in pending][-1]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    prepare(args)
    network = load_llama(args.teacher, torch.bfloat16 if on_gpu(args) else torch.float32, args.device)
    started = time.perf_counter()
    batches, counts = fill(network, args)
    options = {name: getattr(args, name) for name in ("rows", "length", "temperature", "min_p", "seed")}
    hashes = {name: file_hash(args.work / f"{name}.jsonl") for name in ("stories", "heldout")}
    seconds = round(time.perf_counter() - started, 1)
    note(args.work, "sample", **counts, batches=batches, **options, seconds=seconds, sha256=hashes)


if __name__ == "__main__":
    main()
