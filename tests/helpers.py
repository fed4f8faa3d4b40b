"""Small builders that many tests use."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from faircopy.config import EngineConfig
from faircopy.drafters.base import Drafter
from faircopy.engine import Engine, build_engine
from faircopy.model.base import Model
from faircopy.model.loader import load_model
from faircopy.testing import Plain, ScriptedDrafter, cacheless, plain
from faircopy.types import Request, SamplingParams, Sequence

CPU = torch.device("cpu")
WIDTHS = (4, 4, 2, 2, 1, 0, 1, 2)  # a k that changes within a run


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


def right(seq: Sequence, room: int) -> tuple[int, int]:
    return room, room


def wrong(seq: Sequence, room: int) -> tuple[int, int]:
    return room, 0


def mixed(seq: Sequence, room: int) -> tuple[int, int]:
    """Every acceptance 0..k in turn, each sequence at another place of the cycle."""
    return room, (seq.steps + seq.id) % (room + 1)


def changing(seq: Sequence) -> int:
    return WIDTHS[(seq.steps + seq.id) % len(WIDTHS)]


def engine_of(
    model: Model, drafter: Drafter | None = None, *, draft: Model | None = None, wish: object = None, **options: object
) -> Engine:
    config = EngineConfig(**{"memory": "64MiB", **options})  # type: ignore[arg-type]
    return build_engine(model, drafter, draft=draft, config=config, wish=wish)  # type: ignore[arg-type]


def assert_same(seqs: list[Sequence], expected: list[Plain]) -> None:
    for n, (seq, want) in enumerate(zip(seqs, expected, strict=True)):
        assert seq.output == want.tokens, f"request {n}: tokens differ"
        assert seq.finished == want.finish_reason, f"request {n}: finish reason differs"
        assert seq.logprobs == want.logprobs, f"request {n}: logprobs differ"
        assert seq.prompt_logprobs == want.prompt_logprobs, f"request {n}: prompt logprobs differ"
