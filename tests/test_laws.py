"""Laws of draft heads: counts are the engine's, grids resume, fits find what is there, predictions name their range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from faircopy.drafters.trees import Tree
from faircopy.laws.acceptance import HeldOutTexts, held_out_texts, measure, noise_keys
from faircopy.model.loader import load_stock
from faircopy.train.heads import Teacher
from faircopy.types import Request, SamplingParams
from tests.helpers import CPU, engine_of, head_for, load, random_prompts

NEW = 40


def written(folder: str, temperature: float) -> tuple[list[list[int]], list[list[int]], HeldOutTexts]:
    """Prompts, what the target writes behind them in the engine, and the same as held-out texts."""
    model = load(folder)
    prompts = random_prompts(5, model.vocab, seed=4)
    engine = engine_of(model, max_batch=8)
    params = SamplingParams(max_tokens=NEW, temperature=temperature, ignore_eos=True)
    seqs = [engine.add(Request(tuple(prompt), params, seed=n)) for n, prompt in enumerate(prompts)]
    while engine.busy:
        engine.step()
    texts = [seq.tokens for seq in seqs]
    teacher = Teacher(load_stock(folder, torch.float32, CPU))
    return prompts, texts, held_out_texts(prompts, texts, teacher, CPU, temperature)


@pytest.mark.parametrize("method", ["scylla", "eagle1"])
@pytest.mark.parametrize(("chain", "temperature"), [(True, 0.0), (False, 0.0), (True, 0.9)])
def test_counts_are_the_engines(checkpoint: Callable[..., str], method: str, chain: bool, temperature: float) -> None:
    folder = checkpoint("llama")
    options = {"style": "eagle1"} if method == "eagle1" else {"layers": 2}
    head = head_for(folder, load(folder), "eagle3" if method == "eagle1" else method, **options)
    prompts, texts, held_out = written(folder, temperature)
    nodes = head.levels if chain else 14
    found = measure(head, held_out, nodes, chain)
    assert sum(found.tokens) > 0
    if chain:
        head.tree = Tree  # type: ignore[method-assign, assignment]
    engine = engine_of(load(folder), draft=head, lengths=lambda seq: nodes, max_batch=1)
    for n, prompt in enumerate(prompts):
        longer = SamplingParams(max_tokens=NEW + nodes, temperature=temperature, ignore_eos=True)
        seq = engine.add(Request(tuple(prompt), longer, seed=n))  # near its limit a sequence gets fewer nodes
        engine.step()
        accepted = []
        for _ in range(found.cycles[n]):
            before = len(seq.tokens)
            engine.step()
            accepted.append(len(seq.tokens) - before - 1)
        while engine.busy:
            engine.step()
        assert seq.tokens[: len(texts[n])] == texts[n]
        assert sum(accepted) == found.tokens[n]
        assert len(texts[n]) - head.levels <= len(prompt) + found.tokens[n] + found.cycles[n] < len(texts[n])


def test_noise_is_the_engines() -> None:
    keys = noise_keys([3, 4], 6)
    assert keys.shape == (2, 6) and len(keys.unique()) == 12
