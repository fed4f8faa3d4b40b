"""The published strategies: all write what plain decoding writes, and each pays what its paper says it pays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from faircopy import config
from faircopy.config import EngineConfig
from faircopy.drafters.heads import Head
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.errors import ConfigError
from faircopy.model.base import Model
from faircopy.papers.dense import AlignedLayout, DenseLayout
from faircopy.papers.policies import SameLength, WholeBatches
from faircopy.policy import FirstCome
from faircopy.strategy import STRATEGIES
from faircopy.testing import Plain, SpyDrafter, TableModel
from faircopy.types import Batch, Draft, Request, SamplingParams, Sequence
from tests.helpers import (
    HEADS,
    assert_same,
    changing,
    engine_of,
    expect,
    head_for,
    load,
    mixed,
    random_prompts,
    requests_of,
    run,
    scripted,
    speculate,
)

DENSE = sorted(set(STRATEGIES) - {"ragged"})
GREEDY = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.3, logprobs=1)


def test_every_name_has_a_strategy() -> None:
    assert tuple(STRATEGIES) == config.STRATEGIES


@pytest.mark.parametrize("name", ["mistral_window", "gemma2", "gemma4", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_windows_caps_sinks_and_odd_heads_are_honoured(checkpoint: Callable[..., str], name: str) -> None:
    model = load(checkpoint(name))
    prompts = random_prompts(4, model.vocab, seed=3, longest=24)
    params = [SamplingParams(max_tokens=14)] * 4
    expected = expect(model, prompts, params)
    for strategy in DENSE:
        for drafter in ("mixed", "tree"):
            speculate(model, model, drafter, prompts, params, expected, 4, strategy=strategy, max_batch=4)


@cache
def with_head(folder: str, method: str) -> tuple[Model, Head, list[list[int]], list[SamplingParams], list[Plain]]:
    model, params = load(folder), [GREEDY, SAMPLED] * 3
    prompts = random_prompts(6, model.vocab, seed=2)
    return model, head_for(folder, model, method), prompts, params, expect(model, prompts, params)


@cache
def guesses(folder: str, method: str, strategy: str, batch: int, k: int | None) -> list[tuple[int, int]]:
    """How many nodes each request got and kept, its text compared with plain decoding's; k None: it changes."""
    model, head, prompts, params, expected = with_head(folder, method)
    lengths = changing if k is None else (lambda seq: k)
    engine = engine_of(model, draft=head, lengths=lengths, max_batch=batch, chunk=16, strategy=strategy)
    seqs = run(engine, requests_of(prompts, params, list(range(6))))
    assert_same(seqs, expected, bits=strategy == "ragged")
    assert engine.meter.drafted > 0
    return [(seq.drafted, seq.accepted) for seq in seqs]


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("strategy", DENSE)
def test_heads_give_plain_decoding_and_the_guesses_of_ragged(
    checkpoint: Callable[..., str], strategy: str, method: str
) -> None:
    """Chains, changing widths and trees, greedy and sampled, chunked prompts, more requests than rows."""
    for name, batch, k in (("llama", 1, 4), ("llama", 3, None), ("llama", 5, 16), ("gpt_neox", 3, None)):
        case = checkpoint(name), method
        assert guesses(*case, strategy, batch, k) == guesses(*case, "ragged", batch, k)


@pytest.mark.parametrize("strategy", DENSE)
def test_a_heads_pages_are_no_more_than_the_rectangles(checkpoint: Callable[..., str], strategy: str) -> None:
    model, head, prompts, params, expected = with_head(checkpoint("llama"), "eagle3")
    layers = len(model.layers) + len(head.layers)
    memory = 16 * 8 * layers * 2 * 2 * 16 * 4
    engine = engine_of(model, draft=head, max_batch=4, page=8, cache_memory=memory, strategy=strategy)
    pages = engine.layouts[1].tables  # type: ignore[attr-defined]
    assert pages.pool.pages == engine.tables.pool.pages == 16
    seqs = [engine.add(request) for request in requests_of(prompts, params, list(range(6)))]
    while engine.busy:
        engine.step()
        assert pages.held() <= engine.tables.held()
    assert_same(seqs, expected, bits=False)
    assert engine.meter.preemptions > 0 and pages.held() == 0


@pytest.mark.parametrize("drafter", ["ngram", *HEADS])
@pytest.mark.parametrize("strategy", DENSE)
def test_a_broken_step_loses_nothing(checkpoint: Callable[..., str], strategy: str, drafter: str) -> None:
    class Stumbling(SpyDrafter):
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
    head = head_for(checkpoint("llama"), model, drafter) if drafter in HEADS else None
    engine = engine_of(model, NgramDrafter(1, 3), draft=head, strategy=strategy, max_batch=3)
    engine.drafter = Stumbling(engine.drafter)
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

    def script(seq: Sequence, max_nodes: int) -> tuple[int, int]:
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


def engine_with(strategy: str, count: int, **options: object) -> tuple[Engine, list[Sequence]]:
    """A table model and drafts of mixed quality, all requests queued."""
    model = TableModel()
    prompts = random_prompts(count, model.vocab, seed=7, longest=12)
    params = [SamplingParams(max_tokens=20)] * count
    expected = expect(model, prompts, params)
    engine = engine_of(model, scripted(prompts, expected, mixed, model.vocab), strategy=strategy, **options)
    return engine, [engine.add(request) for request in requests_of(prompts, params, [0] * count)]


def finish(engine: Engine) -> Engine:
    while engine.busy:
        engine.step()
    return engine


def test_what_each_strategy_pays() -> None:
    """The same work: who computes padding, who copies keys and values, who does neither."""
    meters = {name: finish(engine_with(name, 8, max_batch=8, k=4)[0]).meter for name in STRATEGIES}
    padded = {name for name, meter in meters.items() if meter.tokens_padded}
    moved = {name for name, meter in meters.items() if meter.rows_moved}
    assert padded == {"padded", "realign", "pool", "unpad_cache"}
    assert moved == {"realign", "pool"}
    assert len({meter.emitted for meter in meters.values()}) == 1
    assert len({meter.tokens_fed - meter.tokens_padded for meter in meters.values()}) == 1
    assert meters["padded"].pages_peak > meters["ems"].pages_peak >= meters["ragged"].pages_peak


def test_realigning_copies_every_row_every_step() -> None:
    engine, seqs = engine_with("realign", 4, max_batch=4, k=3)
    engine.step()
    held = 0
    for _ in range(3):
        held += sum(len(seq.tokens) - 1 for seq in seqs)
        engine.step()
        assert engine.meter.rows_moved == held
    layout = engine.target.layout
    assert isinstance(layout, AlignedLayout)
    assert layout._ends.tolist() != [layout._ends[0]] * 4, "the next step is to find them ragged"


def test_published_batches_are_whole_and_their_dead_rows_are_paid_for() -> None:
    for strategy, whole in (("padded", True), ("realign", True), ("pool", False), ("ragged", False)):
        engine, seqs = engine_with(strategy, 6, max_batch=3, k=4)
        joined = []
        while engine.busy:
            before = [seq.finished for seq in seqs]
            engine.step()
            started = sum(bool(seq.output) for seq in seqs)
            joined.append(started > 3 and sum(f is not None for f in before) < 3)
        assert any(joined) is not whole, strategy
    engine, seqs = engine_with("padded", 3, max_batch=3, k=0)
    seqs[0].limit = len(seqs[0].prompt) + 2
    finish(engine)
    assert engine.meter.tokens_padded >= 3 * max(len(s.prompt) for s in seqs) - sum(len(s.prompt) for s in seqs) + 18


def test_the_pool_groups_equal_lengths_and_runs_them_without_copying() -> None:
    model = TableModel()
    prompts = [[n + 1] * 5 for n in range(8)]
    engine = engine_of(model, strategy="pool", max_batch=4, pool_window=8)
    run(engine, [Request(tuple(p), SamplingParams(max_tokens=10)) for p in prompts])
    assert engine.meter.grouped_steps == engine.meter.steps == 20, "plain decoding never makes lengths differ"
    assert engine.meter.rows_moved == 0, "a group that stays together is left where it is"
    engine, _ = engine_with("pool", 24, max_batch=4, pool_window=24, k=2)
    meter = finish(engine).meter
    assert 0 < meter.grouped_steps < meter.steps
    assert meter.rows_moved > 0


def sequences(*lengths: int, waiting: int = 0) -> tuple[list[Sequence], list[Sequence], Callable[[Sequence], int]]:
    made = [Sequence(n, Request(tuple(range(size))), list(range(size))) for n, size in enumerate(lengths)]
    split = len(made) - waiting
    cached = {seq: len(seq.tokens) - 1 for seq in made[:split]}
    return made[:split], made[split:], lambda seq: cached.get(seq, 0)


def test_policies_choose() -> None:
    def ids(policy: FirstCome | SameLength, *lengths: int, waiting: int = 0) -> list[int]:
        return [seq.id for seq in policy.choose(*sequences(*lengths, waiting=waiting))]

    assert ids(FirstCome(3), 5, 6, 7, 8, waiting=2) == [0, 1, 2]
    assert ids(WholeBatches(3), 5, 6, 7, 8, waiting=2) == [0, 1]
    assert ids(WholeBatches(3), 5, 6, 7, 8, waiting=4) == [0, 1, 2]
    assert ids(SameLength(2, 4, sort=False), 5, 6, 7, 6, 5) == [1, 3], "the first length to fill a batch"
    assert ids(SameLength(2, 3, sort=False), 5, 6, 7, 6, waiting=1) == [0, 1], "a window of three does not see it"
    assert ids(SameLength(2, 9, sort=True), 9, 4, 7) == [1, 2], "shortest prompts first"
    assert ids(SameLength(2, 9, sort=False), 9, 4, 7, 7, waiting=4) == [2, 3], "newcomers of one length are a group"
    assert ids(SameLength(3, 9, sort=False), 9, 4, 7, waiting=1) == [2], "a prompt is read by itself"


def test_rejection_sampling_is_the_same_text_in_every_layout(checkpoint: Callable[..., str]) -> None:
    model, draft = load(checkpoint("llama")), load(checkpoint("llama_linear"))
    prompts = random_prompts(5, model.vocab, seed=12)
    params = [SamplingParams(max_tokens=16, temperature=0.9)] * 5
    texts = []
    for strategy in STRATEGIES:
        engine = engine_of(model, draft=draft, strategy=strategy, verifier="rejection", max_batch=3)
        texts.append([seq.output for seq in run(engine, requests_of(prompts, params, list(range(5))))])
    assert all(text == texts[0] for text in texts)


def test_a_nan_ends_only_its_own_request() -> None:
    for strategy in DENSE:
        model = TableModel()
        prompts = random_prompts(3, model.vocab, seed=5)
        expected = expect(model, prompts, [SamplingParams(max_tokens=8)] * 3)
        model.poison = next(
            token for token in expected[0].tokens if token not in (*expected[1].tokens, *expected[2].tokens)
        )
        engine = engine_of(model, strategy=strategy)
        seqs = run(engine, requests_of(prompts, [SamplingParams(max_tokens=8)] * 3, [0, 1, 2]))
        assert [seq.finished for seq in seqs] == ["error", "length", "length"]


def test_memory_is_kept_to_when_rows_die() -> None:
    """Vacant rows go before a rectangle becomes larger than memory."""
    for strategy in DENSE:
        engine, _ = engine_with(strategy, 6, max_batch=6, k=3, page=8, cache_memory=16 * 8 * 2 * 4)
        while engine.busy:
            engine.step()
            for layout in engine.layouts:
                assert isinstance(layout, DenseLayout)
                assert layout._positions.size <= engine.tables.pool.pages * 8 + 6 * 4, strategy


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"strategy": "paged"}, "strategy"),
        ({"refill": 1}, "refill"),
        ({"pool_sort": None}, "pool_sort"),
        ({"pool_window": 0}, "pool_window"),
        ({"pool_window": 8, "max_batch": 16}, "pool_window"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**options)  # type: ignore[arg-type]
