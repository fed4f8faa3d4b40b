"""The published strategies: all write what plain decoding writes, and each pays what its paper says it pays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from faircopy import config
from faircopy.config import EngineConfig
from faircopy.drafters.base import NoDrafter
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.errors import ConfigError
from faircopy.layout.dense import AlignedLayout, DenseLayout
from faircopy.model.base import Model
from faircopy.policy import FirstCome, SameLength, WholeBatches
from faircopy.strategy import STRATEGIES
from faircopy.testing import Plain, TableModel
from faircopy.types import Batch, Draft, Request, SamplingParams, Sequence
from tests.helpers import (
    changing,
    engine_of,
    load,
    mixed,
    random_prompts,
    references,
    requests_of,
    right,
    run,
    scripted,
    wrong,
)

DENSE = sorted(set(STRATEGIES) - {"ragged"})
DRAFTERS = ("none", "ngram", "model", "right", "wrong", "mixed", "tree")
GREEDY = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.3, logprobs=1)


def speculate(
    model: Model, draft: Model, drafter: str, prompts: list[list[int]], expected: list[Plain], k: int | None,
    params: list[SamplingParams], **options: object,
) -> Engine:  # fmt: skip
    """All prompts with one kind of drafter, to the end, compared with plain decoding; k None: it changes."""
    scripts = {"right": right, "wrong": wrong, "mixed": mixed, "tree": mixed}
    made: NoDrafter | None = NgramDrafter(1, 3) if drafter == "ngram" else None
    if drafter in scripts:
        made = scripted(prompts, expected, scripts[drafter], model.vocab, wide=drafter == "tree")
    engine = engine_of(
        model,
        made,
        draft=draft if drafter == "model" else None,
        wish=changing if k is None else (lambda seq: k),
        **{"max_batch": 4, **options},
    )
    assert_same(run(engine, requests_of(prompts, params, list(range(len(prompts))))), expected)
    return engine


def assert_same(seqs: list[Sequence], expected: list[Plain]) -> None:
    """Tokens are equal; log probabilities are as near as float32 sums in another order are."""
    for seq, want in zip(seqs, expected, strict=True):
        assert (seq.output, seq.finished) == (want.tokens, want.finish_reason)
        ours, theirs = [*seq.logprobs, *seq.prompt_logprobs], [*want.logprobs, *want.prompt_logprobs]
        assert len(ours) == len(theirs)
        for got, wanted in zip(ours, theirs, strict=True):
            assert got is wanted is None or got == pytest.approx(wanted, abs=1e-3)


def expect(model: Model, prompts: list[list[int]], params: list[SamplingParams]) -> list[Plain]:
    return references(model, prompts, params, list(range(len(prompts))))


def test_every_name_has_a_strategy() -> None:
    assert tuple(STRATEGIES) == config.STRATEGIES


@pytest.mark.parametrize("strategy", DENSE)
def test_every_drafter_k_and_batch_gives_plain_decoding_on_a_table(strategy: str) -> None:
    model, draft = TableModel(), TableModel(seed=0)
    draft._table = draft._table + 0.6 * TableModel(seed=1)._table  # right about half of the time
    prompts = random_prompts(9, model.vocab, seed=5, longest=12)
    params = [GREEDY, SAMPLED, GREEDY] * 3
    expected = expect(model, prompts, params)
    for drafter in DRAFTERS:
        for batch in (1, 3, 8):
            for k in (1, 2, 5, None):
                speculate(model, draft, drafter, prompts, expected, k, params, max_batch=batch, strategy=strategy)


@pytest.mark.parametrize("strategy", DENSE)
def test_every_drafter_gives_plain_decoding_on_real_layers(checkpoint: Callable[..., str], strategy: str) -> None:
    for name in ("llama", "gpt_neox"):
        model, draft = load(checkpoint(name)), load(checkpoint(name, 1))
        prompts = random_prompts(6, model.vocab, seed=2)
        params = [GREEDY, SAMPLED] * 3
        expected = expect(model, prompts, params)
        for drafter in DRAFTERS:
            for k in (3, None):
                speculate(model, draft, drafter, prompts, expected, k, params, strategy=strategy)


@pytest.mark.parametrize("name", ["mistral_window", "gemma2", "gemma4", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_windows_caps_sinks_and_odd_heads_are_honoured(checkpoint: Callable[..., str], name: str) -> None:
    model = load(checkpoint(name))
    prompts = random_prompts(4, model.vocab, seed=3, longest=24)
    params = [SamplingParams(max_tokens=14)] * 4
    expected = expect(model, prompts, params)
    for strategy in DENSE:
        for drafter in ("mixed", "tree"):
            speculate(model, model, drafter, prompts, expected, 4, params, strategy=strategy)


@pytest.mark.parametrize("strategy", DENSE)
@pytest.mark.parametrize("refill", [None, True, False])
def test_joining_leaving_chunks_and_preemption_change_nothing(
    checkpoint: Callable[..., str], strategy: str, refill: bool | None
) -> None:
    """Requests arrive over time into memory too small for them, some are aborted."""
    model, draft = load(checkpoint("llama")), load(checkpoint("llama", 1))
    prompts = random_prompts(10, model.vocab, seed=9, longest=60)
    params = [SamplingParams(max_tokens=24, logprobs=1, prompt_logprobs=0), SAMPLED] * 5
    expected = expect(model, prompts, params)
    for drafting in (True, False):
        engine = engine_of(
            model,
            None if drafting else scripted(prompts, expected, mixed, model.vocab),
            draft=draft if drafting else None,
            wish=changing,
            strategy=strategy,
            refill=refill,
            max_batch=5,
            chunk=16,
            page=8,
            memory=26 * 8 * (2 + 2 * drafting) * 2 * 2 * 16 * 4,
        )
        seqs, victims = [], []
        for n, request in enumerate(requests_of(prompts, params, list(range(10)))):
            seqs.append(engine.add(request))
            if n % 4 == 2:
                victims.append(engine.add(Request(tuple(prompts[n][::-1]), params[0], 1)))
            engine.step()
            if victims and n % 4 == 1:
                engine.abort(victims.pop())
            engine.tables.check()
        while engine.busy:
            engine.step()
            engine.tables.check()
        assert_same(seqs, expected)
        assert engine.meter.preemptions > 0, "memory was to be too small"
        assert engine.tables.held() == 0


@pytest.mark.parametrize("strategy", DENSE)
def test_a_broken_step_loses_nothing(checkpoint: Callable[..., str], strategy: str) -> None:
    class Stumbling(NgramDrafter):
        calls = 0

        def propose(self, batch: Batch) -> Draft:
            self.calls += 1
            if self.calls % 4 == 0:
                raise RuntimeError("stumbled")
            return super().propose(batch)

    model = load(checkpoint("llama"))
    prompts = random_prompts(5, model.vocab, seed=4)
    params = [SamplingParams(max_tokens=12)] * 5
    expected = expect(model, prompts, params)
    engine = engine_of(model, Stumbling(1, 3), strategy=strategy, max_batch=3)
    seqs = [engine.add(request) for request in requests_of(prompts, params, list(range(5)))]
    stumbles = 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            stumbles += 1
    assert_same(seqs, expected)
    assert stumbles > 2


def test_the_example_of_the_ems_paper() -> None:
    """Prompts of 5 and 3 tokens; their Table 1: vanilla feeds 12 + 12 tokens, EMS 9 + 9; rows are 15, or 11 and 10."""
    model = TableModel()
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    params = [SamplingParams(max_tokens=40)] * 2
    expected = expect(model, prompts, params)
    plan = {(0, 1): (5, 3), (1, 1): (2, 0), (0, 2): (2, 1), (1, 2): (5, 5)}  # (request, step) -> (nodes, right)

    def script(seq: Sequence, room: int) -> tuple[int, int]:
        return plan.get((seq.id - 1, seq.steps), (0, 0))

    widths = {"padded": [15, 15], "unpad_inputs": [15, 15], "unpad_cache": [11, 10], "ems": [11, 10]}
    fed = {"padded": 24, "unpad_inputs": 18, "unpad_cache": 24, "ems": 18}
    for strategy in widths:
        engine = engine_of(model, scripted(prompts, expected, script, model.vocab), strategy=strategy, k=5)
        for request in requests_of(prompts, params, [0, 0]):
            engine.add(request)
        engine.step()  # the prompts
        before, layout = engine.meter.tokens_fed, engine.target.layout
        engine.step()
        engine.step()
        assert isinstance(layout, DenseLayout)
        assert engine.meter.tokens_fed - before == fed[strategy], strategy
        assert [layout._first(row) for row in (0, 1)] == widths[strategy], strategy
