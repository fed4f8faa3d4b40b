"""On this machine's devices: are the bundled pair's texts the same alone, drafted and in a batch; and widened?

python -m benchmarks.device_check [--prompts 24] [--tokens 64] [--widen] [--out FILE.json]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.widen import widened_model
from faircopy import LLM, SamplingParams, bundled
from faircopy.bench.record import write
from faircopy.bench.shapes import SHAPES
from faircopy.model.loader import load_eos, load_tokenizer


def same_texts(device: str, dtype: str, prompts: list[str], tokens: int) -> list[dict[str, Any]]:
    """Plain decoding one at a time against a draft model in a batch and n-grams over chunked prompts."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "cache_memory": "2GiB"}
    alone = LLM(bundled.target(), max_batch=1, **options)
    drafted = LLM(bundled.target(), draft=bundled.draft(), k=4, **options)
    looked_up = LLM(bundled.target(), draft="ngram", k=6, max_batch=5, chunk=16, **options)
    rows = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=3)
        texts = [[a.token_ids for a in llm.generate(prompts, params)] for llm in (alone, drafted, looked_up)]
        same = sum(a == b == c for a, b, c in zip(*texts, strict=True))
        rows.append({"device": device, "dtype": dtype, "temperature": temperature, "same": same, "of": len(prompts)})
        print(rows[-1], flush=True)
    return rows


def widened(device: str, dtype: str, prompts: list[str], tokens: int) -> dict[str, Any]:
    """The pair at the shapes of Qwen3-8B and 0.6B against the small float32 pair, without the promise (for speed)."""
    params = SamplingParams(max_tokens=tokens)
    options: dict[str, Any] = {"device": device, "cache_memory": "8GiB", "exact": False, "k": 4}
    small = LLM(bundled.target(), draft=bundled.draft(), k=4, dtype="float32", **options)
    kind = getattr(torch, dtype)
    target: Any = widened_model(bundled.target(), SHAPES["qwen3-8b"], dtype=kind, device=device, exact=False)
    draft = widened_model(bundled.draft(), SHAPES["qwen3-0.6b"], dtype=kind, device=device, exact=False)
    target.eos = load_eos(bundled.target())
    wide = LLM(target, draft, 4, tokenizer=load_tokenizer(bundled.target()), dtype=dtype, **options)
    texts = [[a.token_ids for a in llm.generate(prompts, params)] for llm in (small, wide)]
    acceptance = [round(llm.metrics()["acceptance"], 3) for llm in (small, wide)]
    row = {
        "widened": "Qwen3-8B / 0.6B", "device": device, "dtype": dtype, "of": len(prompts),
        "same": sum(a == b for a, b in zip(*texts, strict=True)), "acceptance_small_wide": acceptance,
    }  # fmt: skip
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--widen", action="store_true", help="also the widened pair: needs about 60 GiB on the device")
    parser.add_argument("--out")
    args = parser.parse_args()
    prompts = bundled.prompts()[: args.prompts]
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rows: list[dict[str, Any]] = []
    for device in devices:
        for dtype in ("float32", "bfloat16"):
            rows += same_texts(device, dtype, prompts, args.tokens)
    if args.widen:
        for dtype in ("float32", "bfloat16"):
            rows.append(widened(devices[-1], dtype, prompts[:16], 48))
            torch.cuda.empty_cache()
    if args.out:
        write(args.out, vars(args), rows)


if __name__ == "__main__":
    main()
