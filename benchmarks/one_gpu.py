"""What the documentation quotes from one GPU, part by part, each in a process of its own, within a number of minutes.

python -m benchmarks.one_gpu --out FOLDER [--parts kernels heads ...] [--minutes 9] [--small]

A part that fails or runs out of time does not stop the others; what it had measured is in its result file, what it
printed in FOLDER/PART.log. --small: tiny shapes on any device, to try the commands.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu import say

HEADS = {name: f"benchmarks/heads/{name}" for name in ("eagle3", "scylla")}
QUEUE = "--batches 64 32 8 1 --tokens 128 --queue 8"  # texts that are written
SMALL_QUEUE = "--batches 4 --tokens 8 --queue 1"
WIDENED = "-m benchmarks.planner --pair widened"
# minutes that a part may take, and its command; {out}: its result file, {folder}: where several go
PARTS: dict[str, tuple[float, str]] = {
    "kernels": (2.0, "-m benchmarks.gpu --parts kernels --out {folder}"),
    "heads": (2.5, "-m benchmarks.heads_wide --steps-only --out {out} {queue}"),
    "steps": (2.5, "-m benchmarks.eager_steps --out {out}"),
    "eagle3": (3.5, f"{WIDENED} --drafters head --head {HEADS['eagle3']} --fixed 2 4 12 --out {{out}} {{queue}}"),
    "scylla": (3.5, f"{WIDENED} --drafters head --head {HEADS['scylla']} --fixed 2 4 12 --out {{out}} {{queue}}"),
    "shared": (2.0, f"{WIDENED} --drafters head --head {HEADS['eagle3']} --share --fixed --out {{out}} {{queue}}"),
    "model": (3.5, f"{WIDENED} --drafters model useless turns --fixed 2 4 --out {{out}} {{queue}}"),
    "quality": (3.0, "-m benchmarks.quality --pair widened --rounds 3 --out {out} {queue}"),
    "passes": (3.0, "-m benchmarks.gpu --parts steps long --shapes qwen3-8b qwen3-0.6b --out {folder}"),
    "exact": (4.0, "-m benchmarks.gpu --parts exact --pairs bundled --out {folder}"),
    "arrivals": (2.0, "-m benchmarks.arrivals --out {out}"),
}


def command(part: str, folder: Path, minutes: float, small: bool) -> list[str]:
    words = PARTS[part][1].format(out=folder / f"{part}.json", folder=folder, queue=SMALL_QUEUE if small else QUEUE)
    return [sys.executable, *words.split(), "--minutes", f"{minutes:.2f}", *(["--small"] if small else [])]


def run(part: str, folder: Path, minutes: float, small: bool) -> str:
    """Run one part; how it ended, in words."""
    log = folder / f"{part}.log"
    with log.open("w") as file:
        try:
            # --minutes only stops what has not begun: a little more time to end in
            done = subprocess.run(
                command(part, folder, minutes, small), stdout=file, stderr=subprocess.STDOUT, timeout=60 * minutes + 30
            )
        except subprocess.TimeoutExpired:
            return "stopped"
    return "done" if done.returncode == 0 else f"failed: {log.read_text().strip().splitlines()[-1:]}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="for all parts together")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + 60 * args.minutes
    for part in args.parts:
        begin = time.perf_counter()
        left = (end - begin) / 60 - 0.5
        outcome = run(part, args.out, min(PARTS[part][0], left), args.small) if left > 0 else "no time left"
        say({"part": part, "outcome": outcome, "seconds": round(time.perf_counter() - begin, 1)})


if __name__ == "__main__":
    main()
