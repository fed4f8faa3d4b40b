"""One engine in a process of its own, for benchmarks.cpu_peers: reads requests as JSON lines, answers with JSON lines.

python benchmarks/peer_workers.py ENGINE MODEL DRAFT DTYPE      (DRAFT may be empty)

It imports nothing but the engine it runs, so that a peer may live in an environment without faircopy.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[list[int]], int], list[list[int]]]  # prompts, tokens -> texts
K = 4  # draft tokens per step


def faircopy(model: str, draft: str, dtype: str) -> Run:
    from faircopy import LLM, SamplingParams

    llm = LLM(model, draft=draft or None, k=K, dtype=dtype, threads=1, cache_memory="1GiB", prefix_reuse=False)

    def run(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        answers = llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return [answer.token_ids for answer in answers]

    return run


def transformers(model: str, draft: str, dtype: str) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    target, assistant = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() if folder else None
        for folder in (model, draft)
    )
    options = {"assistant_model": assistant, "num_assistant_tokens": K} if assistant else {}

    def run(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        if assistant is not None and len(prompts) > 1:
            return []  # assisted generation takes one prompt at a time
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0, **options
        )
        return out[:, longest:].tolist()  # type: ignore[no-any-return]

    return run


def openvino_pipeline(model: str, draft: str, dtype: str) -> Any:
    """OpenVINO GenAI's continuous batching on one thread, in the precision and with the cache of the model's type."""
    import openvino_genai as genai

    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    options: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": kind,
        "KV_CACHE_PRECISION": kind,
        "INFERENCE_NUM_THREADS": 1,
    }
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    more = {"draft_model": genai.draft_model(_converted(draft, dtype), "CPU", **options)} if draft else {}
    return genai.ContinuousBatchingPipeline(_converted(model, dtype), scheduler, "CPU", {**options, **more})


def openvino(model: str, draft: str, dtype: str) -> Run:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipe = openvino_pipeline(model, draft, dtype)

    def run(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
        config.num_assistant_tokens = K if draft else 0
        inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        return [list(result.m_generation_ids[0]) for result in pipe.generate(inputs, [config] * len(prompts))]

    return run


def _converted(folder: str, dtype: str) -> str:
    """The checkpoint in OpenVINO's format, beside it; weights keep the type."""
    out = Path(f"{folder}-openvino-{dtype}")
    if not out.exists():
        from openvino import save_model
        from openvino_tokenizers import convert_tokenizer
        from optimum.intel import OVModelForCausalLM
        from transformers import AutoTokenizer

        OVModelForCausalLM.from_pretrained(
            folder, export=True, load_in_8bit=False, compile=False, dtype=dtype
        ).save_pretrained(out)
        parts = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
        for part, name in zip(parts, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
            save_model(part, out / f"{name}.xml")
    return str(out)


ENGINES = {"faircopy": faircopy, "transformers": transformers, "openvino": openvino}


def main() -> None:
    engine, model, draft, dtype = sys.argv[1:]
    run = ENGINES[engine](model, draft, dtype)
    print(json.dumps({"ready": engine}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.process_time()
        texts = run(request["prompts"], request["tokens"])
        seconds = time.process_time() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({"seconds": seconds, "texts": texts, "peak_mb": peak}), flush=True)


if __name__ == "__main__":
    main()
