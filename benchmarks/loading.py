"""What loading a checkpoint takes on a CPU: memory and CPU seconds, beside transformers.

python -m benchmarks.loading FOLDER [--dtype float32] [--out FILE.json]

Each measurement is a process of its own with one thread; "again" is a process that finds trials and self-tests kept.
Seconds are the process's CPU time from the call that loads to its return, imports not counted, tokenizer counted.
Megabytes are resident after the call, and after a second LLM of the same folder, less what imports alone take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from faircopy.bench.record import write

TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.__name__, AutoTokenizer.__name__
start()
kept = [AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)]
weights = sum(p.nbytes for p in kept[0].parameters())
end(weights=weights)
"""
FAIRCOPY = """
from faircopy import LLM
LLM.__name__
start()
llm = LLM(folder, dtype=dtype, threads=1)
end(**llm.explain()["memory_bytes"])
start()
second = LLM(folder, dtype=dtype, threads=1)
end()
"""
COMMON = """
import json, sys, time
import torch, transformers
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
folder, dtype = sys.argv[1:]

def resident():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

def start():
    global begin, before
    begin, before = time.process_time(), resident()

def end(**more):
    print(json.dumps({"cpu_seconds": round(time.process_time() - begin, 1), "mb": resident() - before, **more}))
"""


def measure(name: str, code: str, folder: str, dtype: str, cache: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAIRCOPY_CACHE": cache, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, folder, dtype],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    names = (name, f"{name}, second LLM")
    return [{"what": what, **json.loads(line)} for what, line in zip(names, done.stdout.splitlines(), strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        rows = measure("transformers", TRANSFORMERS, args.folder, args.dtype, cache)
        for name in ("faircopy, first time", "faircopy, again"):
            rows += measure(name, FAIRCOPY, args.folder, args.dtype, cache)
    for row in rows:
        print(json.dumps(row))
    if args.out:
        write(args.out, vars(args), rows)


if __name__ == "__main__":
    main()
