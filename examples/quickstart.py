"""The main job on models made on the spot: a batch, a draft model, and the proof that it changed nothing.

The weights are random, so the text means nothing; the tokens are real. Pass folders or hub ids to use real models:
python examples/quickstart.py TARGET DRAFT
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from faircopy import LLM, SamplingParams

PROMPTS = [
    [7, 3, 9],
    [5] * 20,
    [1, 2, 3, 4, 5, 6, 7],
    [11],
    list(range(1, 60)),
    [42, 17],
    [8, 8, 1],
    list(range(90, 60, -1)),
]


def make_pair(folder: Path) -> tuple[str, str]:
    """A target of eight layers whose last six say little, and a draft that is its first two."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=8, bos_token_id=None, eos_token_id=None, **shape)
    target = LlamaForCausalLM(config)
    for layer in target.model.layers[2:]:
        layer.self_attn.o_proj.weight.data *= 0.02
        layer.mlp.down_proj.weight.data *= 0.02
    config.num_hidden_layers = 2
    draft = LlamaForCausalLM(config)
    draft.load_state_dict(target.state_dict(), strict=False)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")


def timed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[list[int]], float]:
    llm.generate(prompts[:1], params)  # warm up
    start = time.perf_counter()
    answers = llm.generate(prompts, params)
    return [answer.token_ids for answer in answers], time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = sys.argv[1:3] if len(sys.argv) == 3 else make_pair(Path(scratch))
        plain, speculative = LLM(target, memory="512MiB"), LLM(target, draft=draft, k=4, memory="512MiB")
    for name, params in {
        "greedy": SamplingParams(max_tokens=64),
        "sampled, T=0.8": SamplingParams(max_tokens=64, temperature=0.8, seed=7),
    }.items():
        alone = [timed(plain, [prompt], params)[0][0] for prompt in PROMPTS]
        batched, slow = timed(plain, PROMPTS, params)
        drafted, fast = timed(speculative, PROMPTS, params)
        same = sum(a == b == c for a, b, c in zip(alone, batched, drafted, strict=True))
        figures = speculative.metrics()
        print(
            f"{name:15s} {same} of {len(PROMPTS)} texts identical: alone, in a batch, with a draft model | "
            f"{slow / fast:.2f} x plain decoding of the same batch | {figures['acceptance']:.0%} of drafts accepted"
        )
        if same != len(PROMPTS):
            sys.exit(1)


if __name__ == "__main__":
    main()
