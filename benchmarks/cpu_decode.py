"""Plain and speculative decoding of a 100M-parameter model against transformers' generate(), same batch, one run.

python -m benchmarks.cpu_decode [--tokens 48] [--repeats 3] [--threads 2] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from faircopy import LLM, SamplingParams
from faircopy.bench.record import write

logging.disable_progress_bar()
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
}


def make_model(damp: float = 0.02, shape: dict[str, int] = SHAPE) -> LlamaForCausalLM:
    """Random weights; later layers are damped so that the first two agree with the whole most of the time."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None, bos_token_id=None, pad_token_id=0)).eval()
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight.data *= damp
        layer.mlp.down_proj.weight.data *= damp
    return model


def shorten(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig.from_dict({**model.config.to_dict(), "num_hidden_layers": layers})
    short = LlamaForCausalLM(config).eval()
    short.load_state_dict(model.state_dict(), strict=False)
    return short


def generate(model: LlamaForCausalLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """transformers' own batched generate, left-padded."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    return out[:, longest:].tolist()


def ours(llm: LLM, prompts: list[list[int]], tokens: int, accepted: dict[str, float], name: str) -> list[list[int]]:
    answers = llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    accepted[name] = round(sum(a.accepted for a in answers) / max(1, sum(a.drafted for a in answers)), 2)
    return [a.token_ids for a in answers]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = make_model()
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as short:
        model.save_pretrained(whole)
        shorten(model, 2).save_pretrained(short)
        options = {"dtype": "float32", "cache_memory": "1GiB", "prefix_reuse": False}
        accepted: dict[str, float] = {}
        systems: dict[str, Callable[[list[list[int]], int], list[list[int]]]] = {
            "generate()": lambda p, n: generate(model, p, n),
        }
        for name, llm in {
            "plain, exact": LLM(whole, **options),
            "plain, exact=False": LLM(whole, exact=False, **options),
            "draft k=4, exact": LLM(whole, draft=short, k=4, **options),
            "draft k=4, exact=False": LLM(whole, draft=short, k=4, exact=False, **options),
        }.items():
            systems[name] = lambda p, n, llm=llm, name=name: ours(llm, p, n, accepted, name)
        rows = []
        for batch in args.batches:
            for row in compare(systems, batch, args.tokens, args.repeats):
                rows.append({**row, "acceptance": accepted.get(str(row["system"]), 0.0)})
    if args.out:
        write(args.out, {**vars(args), "shape": SHAPE}, rows)


def compare(
    systems: dict[str, Callable[[list[list[int]], int], list[list[int]]]], batch: int, tokens: int, repeats: int
) -> list[dict[str, object]]:
    source = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 16384, (16 + 16 * (n % 8),), generator=source).tolist() for n in range(batch)]
    times: dict[str, list[float]] = {name: [] for name in systems}
    texts = {}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, run in systems.items():
            start = time.perf_counter()
            texts[name] = run(prompts, tokens)
            if turn:
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["generate()"])
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        same = sum(a == b for a, b in zip(texts[name], texts["generate()"], strict=True))
        rows.append(
            {
                "batch": batch,
                "system": name,
                "ratio": round(base / median, 2),
                "same_as_generate": same,
                "spread": round((max(seconds) - min(seconds)) / median, 2),
            }
        )
        print(
            f"batch {batch:2d}  {name:24s} {base / median:5.2f} x generate()   {same}/{batch} texts equal   "
            f"spread {rows[-1]['spread']:.0%}"
        )
    return rows


if __name__ == "__main__":
    main()
