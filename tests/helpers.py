"""Small builders that many tests use."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
import torch

from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.draft_length import DraftLengths
from faircopy.drafters.base import Drafter
from faircopy.drafters.folder import new_head
from faircopy.drafters.heads import Head
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.layout.paged import PagedLayout
from faircopy.model.base import Model
from faircopy.model.loader import load_model
from faircopy.testing import Plain, ScriptedDrafter, cacheless, plain
from faircopy.types import Logprobs, Request, SamplingParams, Sequence

CPU = torch.device("cpu")
WIDTHS = (4, 4, 2, 2, 1, 0, 1, 2)  # a k that changes within a run

SAMPLING = {
    "greedy": SamplingParams(max_tokens=12, logprobs=2),
    "temperature": SamplingParams(max_tokens=12, temperature=0.9, logprobs=0),
    "top_p": SamplingParams(max_tokens=12, temperature=1.2, top_p=0.7),
    "top_k": SamplingParams(max_tokens=12, temperature=1.2, top_k=5),
    "min_p": SamplingParams(max_tokens=12, temperature=1.2, min_p=0.1),
    "all": SamplingParams(
        max_tokens=12,
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 2.0, 7: -4.0},
        logprobs=3,
    ),
    "penalised": SamplingParams(
        max_tokens=12, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.2, prompt_logprobs=1
    ),
}
HEADS = ("clover", "eagle3")  # one that reads, and one whose guesses need keys of their own
DRAFTERS = ("none", "ngram", "model", "right", "wrong", "mixed", "tree")


def load(folder: str, dtype: torch.dtype = torch.float32, **options: object) -> Model:
    return load_model(folder, dtype, CPU, **options)  # type: ignore[arg-type]


def random_prompts(count: int, vocab: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, vocab) for _ in range(source.randint(1, longest))] for _ in range(count)]


def run(engine: Engine, requests: list[Request]) -> list[Sequence]:
    """All requests at once, to the end; the pool is checked after every step and empty at the end."""
    seqs = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
        engine.tables.check()
    assert engine.tables.held() == 0, "a finished run still holds pages"
    return seqs


def references(
    model: Model, prompts: list[list[int]], params: list[SamplingParams], seeds: list[int], **options: object
) -> list[Plain]:
    forward = cacheless(model)
    return [
        plain(forward, prompt, p, context=model.context, seed=seed, **options)  # type: ignore[arg-type]
        for prompt, p, seed in zip(prompts, params, seeds, strict=True)
    ]


def requests_of(
    prompts: list[list[int]], params: list[SamplingParams], seeds: list[int], k: int | None = None
) -> list[Request]:
    return [Request(tuple(p), s, seed, k) for p, s, seed in zip(prompts, params, seeds, strict=True)]


def scripted(
    prompts: list[list[int]],
    expected: list[Plain],
    script: Callable[[Sequence, int], tuple[int, int]],
    vocab: int,
    wide: bool = False,
) -> ScriptedDrafter:
    truth = {tuple(p): e.tokens for p, e in zip(prompts, expected, strict=True)}
    return ScriptedDrafter(truth, script, vocab, wide)


def right(seq: Sequence, max_nodes: int) -> tuple[int, int]:
    return max_nodes, max_nodes


def wrong(seq: Sequence, max_nodes: int) -> tuple[int, int]:
    return max_nodes, 0


def mixed(seq: Sequence, max_nodes: int) -> tuple[int, int]:
    """Every acceptance 0..k in turn, each sequence at another place of the cycle."""
    return max_nodes, (seq.steps + seq.id) % (max_nodes + 1)


def changing(seq: Sequence) -> int:
    return WIDTHS[(seq.steps + seq.id) % len(WIDTHS)]


class Lengths(DraftLengths):
    """A draft length for each sequence by itself."""

    def __init__(self, of: Callable[[Sequence], int]) -> None:
        self._of = of

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [self._of(seq) for seq in seqs]


def engine_of(
    model: Model,
    drafter: Drafter | None = None,
    *,
    draft: Model | Head | None = None,
    lengths: Callable[[Sequence], int] | None = None,
    **options: object,
) -> Engine:
    config = EngineConfig(**{"cache_memory": "64MiB", **options})  # type: ignore[arg-type]
    chooser = None if lengths is None else Lengths(lengths)
    return build_engine(model, drafter, draft=draft, config=config, draft_lengths=chooser)


def expect(model: Model, prompts: list[list[int]], params: list[SamplingParams]) -> list[Plain]:
    return references(model, prompts, params, list(range(len(prompts))))


def speculate(
    model: Model, draft: Model, drafter: str, prompts: list[list[int]], params: list[SamplingParams],
    expected: list[Plain], k: Callable[[Sequence], int] | int | None, **options: object,
) -> Engine:  # fmt: skip
    """All prompts with one kind of drafter, to the end, compared with plain decoding.

    k: for all sequences, or of each; None: it changes.
    """
    scripts = {"right": right, "wrong": wrong, "mixed": mixed, "tree": mixed}
    made: Drafter | None = NgramDrafter(1, 3) if drafter == "ngram" else None
    if drafter in scripts:
        made = scripted(prompts, expected, scripts[drafter], model.vocab, wide=drafter == "tree")
    engine = engine_of(
        model,
        made,
        draft=draft if drafter == "model" else None,
        lengths=changing if k is None else k if callable(k) else (lambda seq: k),
        **{"max_batch": 8, **options},
    )
    seqs, ragged = run(engine, requests_of(prompts, params, list(range(len(prompts))))), is_ragged(engine)
    assert_same(seqs, expected, bits=ragged)
    assert not (ragged and engine.meter.tokens_padded)
    assert not (ragged and engine.meter.rows_moved) or drafter == "tree"
    return engine


def is_ragged(engine: Engine) -> bool:
    return isinstance(engine.target.layout, PagedLayout)


def assert_same(seqs: list[Sequence], expected: list[Plain], bits: bool = True) -> None:
    """What plain decoding writes; without bits, log probabilities as near as float32 sums in another order are."""
    for n, (seq, want) in enumerate(zip(seqs, expected, strict=True)):
        assert seq.output == want.tokens, f"request {n}: tokens differ"
        assert seq.finished == want.finish_reason, f"request {n}: finish reason differs"
        assert _same(seq.logprobs, want.logprobs, bits), f"request {n}: logprobs differ"
        assert _same(seq.prompt_logprobs, want.prompt_logprobs, bits), f"request {n}: prompt logprobs differ"


def _same(ours: list[Logprobs | None], theirs: list[Logprobs | None], bits: bool) -> bool:
    if bits or len(ours) != len(theirs):
        return ours == theirs
    return all(a is b is None or a == pytest.approx(b, abs=1e-3) for a, b in zip(ours, theirs, strict=True))


def shaken(head: Head, seed: int = 0) -> Head:
    """Random weights everywhere, so that no part of the network is idle."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head


def head_for(folder: str, model: Model, method: str, **options: object) -> Head:
    return shaken(new_head(method, folder, model.token_weights(), **options))  # type: ignore[arg-type]
