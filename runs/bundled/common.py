"""What the scripts of this recipe share: the work folder, the device, and facts for the model cards."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from faircopy.train.loop import Progress

K = 4  # draft length at which acceptance is reported
HELD_OUT = 100  # one story in 100 is never trained on


def arguments(about: str) -> argparse.ArgumentParser:
    """The arguments every script has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/bundled"), help="folder for everything in between")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def training_arguments(about: str, seconds: float) -> argparse.ArgumentParser:
    """The arguments of the two scripts that train."""
    parser = arguments(about)
    parser.add_argument("--seconds", type=float, default=seconds, help="training time; the schedule follows the clock")
    parser.add_argument("--steps", type=int, help="stop after this many steps instead: repeats a run of known length")
    parser.add_argument("--deadline", type=float, help="clock time (seconds since 1970) by which all must be done")
    parser.add_argument("--reserve", type=float, default=60.0, help="seconds before the deadline kept for the rest")
    parser.add_argument("--rows", type=int, default=256, help="windows per batch")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU only")
    return parser


def time_left(args: argparse.Namespace) -> float | None:
    """Seconds to train for: what was asked, or less if the deadline is near; None when steps decide."""
    if args.steps:
        return None
    if args.deadline is None:
        return float(args.seconds)
    return float(max(10.0, min(args.seconds, args.deadline - args.reserve - time.time())))


def prepare(args: argparse.Namespace) -> None:
    """Set torch up for the device and make the work folder."""
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    if args.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length; the sampler has hundreds
    else:
        torch.set_num_threads(1)


def on_gpu(args: argparse.Namespace) -> bool:
    return bool(args.device == "cuda")


def note(work: Path, stage: str, **facts: Any) -> None:
    """Keep a stage's facts for the model cards and the manifest, and print them."""
    folder = work / "facts"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stage}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{stage}: {json.dumps(facts)[:1500]}", flush=True)


def facts(work: Path, stage: str) -> dict[str, Any]:
    """What a stage noted; empty if it has not run."""
    path = work / "facts" / f"{stage}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def talker(stage: str, every: float = 15.0) -> Callable[[Progress], None]:
    """Prints how training goes, a line every few seconds."""
    last = time.perf_counter()

    def watch(progress: Progress) -> None:
        nonlocal last
        if time.perf_counter() - last > every:
            last = time.perf_counter()
            speed = progress.tokens / max(progress.seconds, 1e-9) / 1e6
            line = f"{progress.seconds:.0f} s, step {progress.step}, loss {progress.loss:.4f}, {speed:.2f} M tokens/s"
            print(f"{stage}: {line}", flush=True)

    return watch


def read_stories(path: Path) -> Iterator[str]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)["text"]


def in_chunks(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    for text in texts:
        chunk.append(text)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
