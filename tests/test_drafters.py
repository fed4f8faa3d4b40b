"""Drafters: what they guess, what they feed, and that they may fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from faircopy.drafters.base import NoDrafter
from faircopy.drafters.model import ModelDrafter
from faircopy.drafters.ngram import NgramDrafter
from faircopy.errors import DraftError
from faircopy.model.runner import Result, Runner
from faircopy.testing import SpyDrafter, TableModel
from faircopy.types import Batch, Draft, Request, SamplingParams, Sequence, Sources
from tests.helpers import assert_same, engine_of, load, random_prompts, references, requests_of, run


def lookup(drafter: NgramDrafter, tokens: list[int], max_nodes: int) -> list[int]:
    seq = Sequence(0, Request(tuple(tokens)), tokens)
    return drafter.propose(Batch([seq], [len(tokens)], [max_nodes])).tokens[0]


def test_ngram_takes_the_longest_suffix_and_its_latest_place() -> None:
    assert lookup(NgramDrafter(1, 3), [1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == [9, 2], "three tokens beat two"
    assert lookup(NgramDrafter(1, 2), [1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == [8, 1], "the later of two places"
    assert lookup(NgramDrafter(2, 3), [5, 6, 7], 4) == []
    assert lookup(NgramDrafter(1, 3), [4, 4], 3) == [4]
    assert lookup(NgramDrafter(1, 3), [7], 3) == []


def test_ngram_follows_a_growing_text() -> None:
    drafter, seq = NgramDrafter(2, 3), Sequence(0, Request((1,)), [1])
    for token in [2, 3, 4, 1, 2]:
        seq.tokens.append(token)
        draft = drafter.propose(Batch([seq], [len(seq.tokens)], [4])).tokens[0]
    assert draft == [3, 4, 1, 2]
    drafter.forget(seq)
    assert not drafter._indices


def test_a_draft_model_catches_up_without_special_cases(checkpoint: Callable[..., str]) -> None:
    """After a rejection one token, after a full acceptance two, after a prompt all of it: what it has not cached."""
    model = load(checkpoint("llama"))
    engine = engine_of(model, draft=load(checkpoint("llama")), k=3)
    assert isinstance(engine.drafter, ModelDrafter)
    engine.drafter = SpyDrafter(engine.drafter)  # type: ignore[assignment]
    rows = rows_of(engine.drafter.inner._runner)  # type: ignore[attr-defined]
    seq = engine.add(Request((1, 2, 3, 4, 5), SamplingParams(max_tokens=40)))
    for _ in range(4):
        engine.step()
    assert seq.accepted == 12
    assert rows == [5, 1, 1, *[2, 1, 1] * 3]
    worse = engine_of(model, draft=load(checkpoint("llama", 3)), k=3)
    rows = rows_of(worse.drafter._runner)  # type: ignore[attr-defined]
    seq = worse.add(Request((1, 2, 3, 4, 5), SamplingParams(max_tokens=40)))
    worse.step()
    worse.step()
    assert seq.accepted == 0
    assert rows == [5, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("verifier", ["exact", "rejection"])
@pytest.mark.parametrize("poison", [None, 9], ids=["sound", "broken"])
def test_drafts_are_the_same_whether_the_host_reads_each_token_or_all_at_once(
    verifier: str, poison: int | None
) -> None:
    """A bias of nothing makes it read each. Behind a token after which nothing is finite no token is drafted."""
    proposed, texts = [], []
    for bias in ({}, {0: 0.0}):
        model, draft = TableModel(vocab=12), TableModel(vocab=12)
        draft.poison = poison
        engine = engine_of(model, draft=draft, k=4, verifier=verifier, max_batch=3)
        engine.drafter = spy = SpyDrafter(engine.drafter)
        params = [SamplingParams(max_tokens=30, temperature=t, logit_bias=bias) for t in (0.0, 0.8)]
        seqs = run(engine, [Request((n, 5), params[n % 2], n) for n in range(6)])
        proposed.append([(drafted.tokens, drafted.parents) for drafted in spy.proposed])
        texts.append([seq.output for seq in seqs])
    assert proposed[0] == proposed[1] and texts[0] == texts[1]
    drafts = [tokens for trees, _ in proposed[0] for tokens in trees]
    assert max(map(len, drafts)) == 4
    assert poison is None or (any(poison in tokens for tokens in drafts) and all(poison not in d[:-1] for d in drafts))


def rows_of(runner: Runner) -> list[int]:
    """A list that grows by the number of rows of every pass."""
    rows: list[int] = []
    forward = runner.forward

    def counted(*args: Any, **options: Any) -> Result:
        result = forward(*args, **options)
        rows.append(result.packed.size)
        return result

    runner.forward = counted  # type: ignore[method-assign]
    return rows


def test_a_draft_model_may_start_late_and_pause(checkpoint: Callable[..., str]) -> None:
    model, draft = load(checkpoint("qwen3")), load(checkpoint("qwen3"))
    prompts = random_prompts(3, model.vocab, longest=30)
    params = [SamplingParams(max_tokens=24)] * 3
    expected = references(model, prompts, params, [0] * 3)
    engine = engine_of(model, draft=draft, lengths=lambda seq: 0 if seq.steps % 6 < 4 else 3)
    seqs = run(engine, requests_of(prompts, params, [0] * 3))
    assert_same(seqs, expected)
    assert engine.meter.acceptance == 1.0, "a twin that comes back is right again"


def test_a_draft_model_with_a_shorter_context_falls_silent(checkpoint: Callable[..., str]) -> None:
    model = load(checkpoint("llama"))
    draft = load(checkpoint("llama"))
    draft.context = 20
    prompts = [[1, 2, 3], [4] * 19, [5] * 40]
    params = [SamplingParams(max_tokens=30)] * 3
    expected = references(model, prompts, params, [0] * 3)
    seqs = run(engine_of(model, draft=draft, k=4), requests_of(prompts, params, [0] * 3))
    assert_same(seqs, expected)
    assert seqs[0].drafted > 0
    assert seqs[2].drafted == 0


def test_a_draft_model_that_goes_mad_is_only_wrong(checkpoint: Callable[..., str]) -> None:
    model, draft = load(checkpoint("llama")), load(checkpoint("llama"))
    draft.weights.embedding[3] = torch.nan  # type: ignore[attr-defined]
    prompts = [[1, 2, 3], [4, 5, 6]]
    params = [SamplingParams(max_tokens=20)] * 2
    expected = references(model, prompts, params, [0] * 2)
    seqs = run(engine_of(model, draft=draft, k=4), requests_of(prompts, params, [0] * 2))
    assert_same(seqs, expected)
    assert seqs[0].drafted == 0


def test_a_long_prompt_reaches_the_draft_model_in_chunks_too(checkpoint: Callable[..., str]) -> None:
    model, draft = load(checkpoint("llama")), load(checkpoint("llama"))
    prompt = [(i * i) % 128 for i in range(200)]
    engine = engine_of(model, draft=draft, k=3, chunk=32)
    largest = 0
    forward = draft.forward

    def watch(packed: object, cache: object) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, packed.size)  # type: ignore[attr-defined]
        return forward(packed, cache)  # type: ignore[arg-type]

    draft.forward = watch  # type: ignore[method-assign]
    (seq,) = run(engine, [Request(tuple(prompt), SamplingParams(max_tokens=8))])
    assert largest <= 32
    assert seq.accepted == seq.drafted > 0


class Fixed(NoDrafter):
    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def propose(self, batch: Batch) -> Draft:
        return self._draft


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        (Draft([[1] * 9], [list(range(-1, 8))]), "9 nodes where 4 are allowed"),
        (Draft([[1, 2]], [[-1, 1]]), "must come before"),
        (Draft([[1, 2]], [[-1]]), "must come before"),
        (Draft([[64]], [[-1]]), "not a token id below 64"),
        (Draft([[-1]], [[-1]]), "not a token id below 64"),
        (Draft([[1.5]], [[-1]]), "not a token id below 64"),  # type: ignore[list-item]
        (Draft([], []), "0 trees"),
        (Draft([[1]], []), "0 trees"),
        (Draft([[1]], [[-1]], Sources([[]], lambda: torch.ones(1, 64) / 64)), "0 rows"),
        (Draft([[1]], [[-1]], Sources([], lambda: torch.ones(1, 64) / 64)), "0 trees"),
        (Draft([[1]], [[-1]], [[0]]), "not Sources"),  # type: ignore[arg-type]
        (None, "not a Draft"),
    ],
)
def test_what_is_not_a_draft_is_refused(draft: Draft, problem: str) -> None:
    engine = engine_of(TableModel(), Fixed(draft), k=4)
    engine.add(Request((1, 2)))
    with pytest.raises(DraftError, match=problem):
        engine.step()
