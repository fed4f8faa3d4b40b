"""Hashes of what this code computes: logits, tokens and log probabilities of many models, drafters and strategies.

python -m benchmarks.fingerprint --out FILE.json      records them
python -m benchmarks.fingerprint --check FILE.json    computes them again and names every one that differs

Run it before and after a change that must not change a bit. Bits depend on the kind of CPU, on torch and on the number
of threads (one here), so a file is compared only on the kind of machine it was recorded on; on another one `--check`
refuses. It needs the repository: the tiny models are those of tests/zoo.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

from faircopy import LLM, Answer, SamplingParams, bundled
from faircopy.bench.record import origin, write
from faircopy.build import build_engine
from faircopy.config import STRATEGIES, EngineConfig
from faircopy.drafters.folder import new_head, save_head
from faircopy.drafters.ngram import NgramDrafter
from faircopy.kernels.gpu.suite import TWINS
from faircopy.testing import cacheless
from faircopy.types import Request, Sequence
from tests.helpers import shaken
from tests.test_replay import fused
from tests.zoo import build

Row = dict[str, Any]

ZOO = {  # own decoder, transformers backend, windows, caps, experts, latent attention
    "llama": ("float32", "bfloat16"),
    "qwen3": ("float32",),
    "qwen2_window": ("bfloat16",),
    "granite": ("float32",),
    "gpt2": ("float32", "bfloat16"),
    "gemma2": ("float32",),
    "qwen3_moe": ("float32", "bfloat16"),
    "mixtral": ("float32",),
    "gpt_oss": ("float32",),
    "deepseek_v3": ("float32",),
}
HEADS = ("medusa", "clover", "clover2", "eagle3")
GREEDY = SamplingParams(max_tokens=14, logprobs=3, prompt_logprobs=1)
WARM = SamplingParams(max_tokens=14, temperature=0.9, logprobs=0)
SAMPLED = SamplingParams(max_tokens=14, temperature=1.1, top_p=0.9, top_k=30, repetition_penalty=1.2, logprobs=1)
PARAMS = (GREEDY, WARM, SAMPLED)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the hashes to this file")
    parser.add_argument("--check", help="compare with the hashes in this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    begin, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for row in fingerprints(Path(folder)):
            rows.append(row)
            print(f"[{time.perf_counter() - begin:6.1f}]", json.dumps(row), flush=True)
    if args.out:
        write(args.out, {"threads": 1}, rows)
    return compare(json.loads(Path(args.check).read_text()), rows) if args.check else 0


def compare(known: dict[str, Any], rows: list[Row]) -> int:
    """0 if every row is as recorded; 1 if one differs; 2 if the file was recorded on another kind of machine."""
    here = origin()
    for name in ("device", "versions"):
        if known[name] != here[name]:
            print(f"recorded with {name} {known[name]}, this is {here[name]}: bits cannot be compared")
            return 2
    before = {row["case"]: row for row in known["rows"]}
    wrong = [row["case"] for row in rows if before.pop(row["case"], None) != row]
    for case in [*wrong, *before]:
        print("DIFFERS" if case in wrong else "MISSING", case)
    print(f"{len(rows) - len(wrong)} of {len(rows)} as recorded at {known['commit']}")
    return int(bool(wrong or before))


def fingerprints(folder: Path) -> Iterator[Row]:
    """All cases, each a row of a name, hashes and counts."""
    saved = {name: saved_zoo(folder, name) for name in ZOO}
    for name, dtypes in ZOO.items():
        for dtype in dtypes:
            yield from of_model(name, saved[name], dtype)
    for method in HEADS:
        yield from of_head(method, saved["llama"], folder)
    yield from of_strategies(saved["llama"])
    yield run(
        "llama rejection model", LLM(saved["llama"], saved["llama"], 4, verifier="rejection", cache_memory="8MiB")
    )
    yield from of_bundled()
    yield from of_captured(saved["llama"], folder)


def of_model(name: str, path: str, dtype: str) -> Iterator[Row]:
    """Plain, looked up in chunks, and drafted by itself."""
    options: dict[str, Any] = {"dtype": dtype, "cache_memory": "8MiB"}
    about = f"{name} {dtype}"
    llm = LLM(path, **options)
    yield {"case": f"{about} logits", "logits": digest(cacheless(llm.model)(prompts()[2]))}
    yield run(f"{about} plain", llm)
    yield run(f"{about} ngram", LLM(path, "ngram", k=3, chunk=16, max_batch=3, **options))
    yield run(f"{about} model", LLM(path, path, k=4, **options))


def of_head(method: str, path: str, folder: Path) -> Iterator[Row]:
    for dtype in ("float32", "bfloat16"):
        for k in (3, 12):
            llm = LLM(path, saved_head(method, path, folder), k=k, dtype=dtype, cache_memory="8MiB")
            yield run(f"llama {dtype} {method} k={k}", llm)


def of_strategies(path: str) -> Iterator[Row]:
    for strategy in STRATEGIES:
        options: dict[str, Any] = {"strategy": strategy, "max_batch": 3, "cache_memory": "8MiB"}
        yield run(f"llama {strategy} model", LLM(path, path, k=3, **options))
        yield run(f"llama {strategy} ngram", LLM(path, "ngram", k=3, **options))


def of_bundled() -> Iterator[Row]:
    texts = bundled.prompts()[:4]
    for dtype in ("float32", "bfloat16"):
        for draft in (None, "ngram", bundled.draft(), bundled.named("clover")):
            llm = LLM(bundled.target(), draft, k=4, dtype=dtype, cache_memory="64MiB")
            yield run(f"bundled {dtype} {Path(draft).name if draft else 'plain'}", llm, texts)


def of_captured(path: str, folder: Path) -> Iterator[Row]:
    """Captured steps, run by the kernels' torch twins: chains packed and whole, a draft model, trees of heads."""
    pair = fused(bundled.draft()), fused(bundled.draft())
    for k in (0, 3, 23):
        yield captured(f"captured ngram k={k}", pair[0], NgramDrafter() if k else None, None, k)
    for k in (1, 4):
        yield captured(f"captured model k={k}", pair[0], None, pair[1], k)
    target = fused(path)
    for method in HEADS:
        head = shaken(new_head(method, path, target.token_weights())).requires_grad_(False)
        yield captured(f"captured {method} k=9", target, None, head, 9)
        yield captured(f"captured {method} k=3", target, None, head, 3)


def captured(case: str, target: Any, drafter: Any, draft: Any, k: int) -> Row:
    config = EngineConfig(k=k, max_batch=3, cache_memory="4MiB")
    engine = build_engine(target, drafter, draft=draft, config=config, suite=TWINS)
    plain = [SamplingParams(max_tokens=12, temperature=t) for t in (0.0, 0.8)]
    seqs = [engine.add(Request(tuple(p), plain[n % 2], seed=n)) for n, p in enumerate(prompts())]
    while engine.busy:
        engine.step()
    return {"case": case, "tokens": digest([written(seq) for seq in seqs]), **counts(engine.meter.snapshot())}


def written(seq: Sequence) -> list[Any]:
    return [seq.output, seq.drafted, seq.accepted, seq.steps, seq.finished]


def run(case: str, llm: LLM, given: Any = None) -> Row:
    """Greedy and sampled requests in one batch."""
    asked = prompts() if given is None else given
    each = [replace_seed(PARAMS[n % len(PARAMS)], n) for n in range(len(asked))]
    answers = llm.generate(asked, each, progress=False)
    return {"case": case, "tokens": digest([a.token_ids for a in answers]), **probabilities(answers), **numbers(llm)}


def probabilities(answers: list[Answer]) -> Row:
    """Log probabilities to the last bit (they hold the logits' bits), and which tokens a draft had right."""
    return {
        "logprobs": digest([[a.logprobs, a.prompt_logprobs] for a in answers]),
        "drafts": digest([a.outputs[0].origins for a in answers]),
    }


def numbers(llm: LLM) -> Row:
    return counts(llm.metrics())


def counts(meter: dict[str, float]) -> Row:
    return {name: meter[name] for name in ("steps", "tokens_fed", "drafted", "accepted", "emitted")}


def replace_seed(params: SamplingParams, seed: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in SamplingParams.names()}
    return SamplingParams(**{**fields, "seed": seed})


def prompts() -> list[list[int]]:
    """Some with repetitions, one of a single token, one longer than a page."""
    draw = random.Random(12)
    return [
        [5, 9, 9, 5, 9],
        [7],
        [draw.randrange(1, 128) for _ in range(45)],
        [3, 4] * 12,
        [11, 12, 13],
        [draw.randrange(1, 128) for _ in range(20)],
    ]


def saved_zoo(folder: Path, name: str) -> str:
    path = folder / name
    build(name).save_pretrained(path)
    return str(path)


def saved_head(method: str, path: str, folder: Path) -> str:
    where = folder / f"head-{method}"
    if not where.exists():
        save_head(shaken(new_head(method, path, LLM(path, cache_memory="1MiB").model.token_weights())), where)
    return str(where)


def digest(thing: Any) -> str:
    """Of a tensor its bytes; of anything else its JSON, in which floats are written to the last bit."""
    data = thing.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(thing, torch.Tensor) else None
    return sha256(data if data is not None else json.dumps(thing).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
