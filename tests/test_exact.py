"""The promise: tokens, logprobs and finish reasons do not depend on drafter, k, batch, chunks, preemption or reuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model
from faircopy.model.runner import Runner
from faircopy.strategy import STRATEGIES
from faircopy.testing import Plain, TableModel, cacheless
from faircopy.types import Batch, Draft, Request, SamplingParams, Sequence
from tests.helpers import (
    CPU,
    DRAFTERS,
    HEADS,
    SAMPLING,
    assert_same,
    changing,
    engine_of,
    expect,
    head_for,
    is_ragged,
    load,
    mixed,
    random_prompts,
    requests_of,
    right,
    run,
    scripted,
    speculate,
)
from tests.zoo import ZOO, build

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, None)  # None: k changes within the run
K = Callable[[Sequence], int] | int | None
OTHERWISE = (("ragged", False), ("padded", True), ("realign", True), ("ems", True))  # not as published


def in_turn(lengths: Seq[int | None], strategy: str, *places: int) -> Seq[int | None]:
    """All of them for ragged. For a rectangle one, by a Latin square, so that every pair of the others is there."""
    if strategy == "ragged":
        return lengths
    return [lengths[(list(STRATEGIES).index(strategy) + sum(places)) % len(lengths)]]


def every_length(seq: Sequence) -> int:
    """All of LENGTHS in one batch."""
    k = LENGTHS[seq.id % len(LENGTHS)]
    return changing(seq) if k is None else k


def lengths_of(batch: int, strategy: str, *places: int) -> Seq[K]:
    """All of them for batches of 3, and for ragged: there a batch of 32 has them all at once."""
    if batch == 3:
        return LENGTHS
    return [every_length] if (strategy, batch) == ("ragged", 32) else in_turn(LENGTHS, strategy, *places, batch // 8)


@cache
def table_texts(sampling: str) -> tuple[list[list[int]], list[SamplingParams], list[Plain]]:
    model, params = TableModel(), [SAMPLING[sampling]] * 32
    prompts = random_prompts(32, model.vocab, seed=5, longest=12)
    return prompts, params, expect(model, prompts, params)


loaded = cache(load)


@cache
def layer_texts(folder: str, sampling: str) -> tuple[list[list[int]], list[SamplingParams], list[Plain]]:
    model, params = loaded(folder), [SAMPLING[sampling]] * 6
    prompts = random_prompts(6, model.vocab, seed=2)
    return prompts, params, expect(model, prompts, params)


@cache
def texts_with_one_beginning(folder: str) -> tuple[list[list[int]], list[SamplingParams], list[Plain]]:
    model = load(folder)
    stem = random_prompts(1, model.vocab, seed=8, longest=70)[0] * 2
    prompts = [stem[:40] + tail for tail in random_prompts(12, model.vocab, seed=9, longest=30)]
    sampled = SamplingParams(max_tokens=20, temperature=1.0, logprobs=1)
    params = [SamplingParams(max_tokens=20, logprobs=1), sampled, SamplingParams(max_tokens=20, prompt_logprobs=0)] * 4
    return prompts, params, expect(model, prompts, params)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_drafter_k_and_batch_gives_plain_decoding_on_a_table(strategy: str, sampling: str) -> None:
    """The whole product, on a model that costs nothing, with the draft lengths of `lengths_of`."""
    model, draft = TableModel(), TableModel(seed=0)
    draft._table = draft._table + 0.6 * TableModel(seed=1)._table  # right about half of the time
    texts, place = table_texts(sampling), list(SAMPLING).index(sampling)
    for n, drafter in enumerate(DRAFTERS):
        for batch in (1, 3, 8, 32):
            for k in lengths_of(batch, strategy, n, place):
                some = [part[: max(batch, 2)] for part in texts]
                speculate(model, draft, drafter, *some, k, max_batch=batch, strategy=strategy)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", ["llama", "phi"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_drafter_gives_plain_decoding_on_real_layers(
    checkpoint: Callable[..., str], strategy: str, name: str, sampling: str
) -> None:
    """Every drafter with every parameter set; a rectangle takes its k in turn, and two waves of requests."""
    model, draft = loaded(checkpoint(name)), loaded(checkpoint(name, 1))
    texts, place = layer_texts(checkpoint(name), sampling), list(SAMPLING).index(sampling)
    for n, drafter in enumerate(DRAFTERS):
        for k in in_turn((1, 3, 5, None), strategy, n, place):
            speculate(model, draft, drafter, *texts, k, max_batch=8 if strategy == "ragged" else 4, strategy=strategy)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_architecture_writes_what_generate_writes(checkpoint: Callable[..., str], name: str) -> None:
    """Greedy, float32, ragged batch with a draft of mixed quality, against transformers one prompt at a time."""
    reference = build(name)
    model = load(checkpoint(name))
    prompts = random_prompts(4, model.vocab, seed=3, longest=24)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, pad_token_id=0
        )
        expected.append(Plain(out[0, len(prompt) :].tolist()))
    params = [SamplingParams(max_tokens=16)] * len(prompts)
    for drafter in ("none", "mixed", "tree"):
        speculate(model, model, drafter, prompts, params, expected, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_verified_rows_have_the_bits_of_rows_decoded_alone(
    checkpoint: Callable[..., str], name: str, dtype: torch.dtype
) -> None:
    model = load(checkpoint(name), dtype)
    different, rows = compare_rows(model, lengths=(3, 31, 62), widths=(5, 11))
    assert (different, rows) == (0, 54)


def test_wide_layers_keep_their_bits(tmp_path: Path) -> None:
    """Inner dimensions beyond 1024, where one row alone would be summed in another order."""
    config = ZOO["llama"]()
    config.update({"hidden_size": 1152, "intermediate_size": 1600, "num_hidden_layers": 1, "head_dim": 64,
                   "num_attention_heads": 18, "num_key_value_heads": 6, "hidden_act": "gelu"})  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert compare_rows(load(str(tmp_path), dtype), (31,), (5, 11))[0] == 0


def test_a_prompt_fed_token_by_token_has_the_bits_of_a_prompt_fed_at_once(checkpoint: Callable[..., str]) -> None:
    for name in ("llama", "gemma3", "deepseek_v3"):
        model = load(checkpoint(name))
        tokens = [(7 * i * i + 3) % model.vocab for i in range(70)]
        assert torch.equal(decode_alone(model, tokens, 2), cacheless(model)(tokens)[1:]), name


def test_two_threads_change_no_bit(checkpoint: Callable[..., str]) -> None:
    torch.set_num_threads(2)
    for name in ("llama", "gpt_neox", "gemma2", "qwen3_moe"):
        for dtype in (torch.float32, torch.bfloat16):
            assert compare_rows(load(checkpoint(name), dtype), (31, 62), (5, 11))[0] == 0


def compare_rows(model: Model, lengths: tuple[int, ...], widths: tuple[int, ...]) -> tuple[int, int]:
    """How many of the verified rows differ from decoding alone, and how many there were."""
    source, different, rows = random.Random(1), 0, 0
    for length in lengths:
        for width in widths:
            tokens = [source.randrange(model.vocab) for _ in range(length + width)]
            others = [[source.randrange(model.vocab) for _ in range(n)] for n in (1, 7, 33, 64, 2)]
            alone, together = decode_alone(model, tokens, length), verify_in_company(model, tokens, length, others)
            different += int((alone != together).any(-1).sum())
            rows += len(together)
    return different, rows


def bench_of(model: Model) -> tuple[Runner, Callable[[list[int]], Sequence]]:
    tables = BlockTables(PagePool(64), 32, reuse=False)
    runner = Runner(model, PagedLayout(tables, model.layers, model.dtype, CPU))

    def start(tokens: list[int]) -> Sequence:
        seq = Sequence(0, Request(tuple(tokens)), list(tokens))
        tables.open(seq)
        assert tables.reserve(seq, len(tokens) + 16)
        return seq

    return runner, start


def decode_alone(model: Model, tokens: list[int], length: int) -> torch.Tensor:
    runner, start = bench_of(model)
    seq, rows = start(tokens), []
    runner.forward(Batch([seq], [length - 1], [0]), Draft.empty(1))
    for end in range(length, len(tokens) + 1):
        seq.tokens = tokens[:end]
        rows.append(runner.forward(Batch([seq], [end], [0]), Draft.empty(1)).logits[-1])
    return torch.stack(rows)


def verify_in_company(model: Model, tokens: list[int], length: int, others: list[list[int]]) -> torch.Tensor:
    runner, start = bench_of(model)
    seq, company = start(tokens[:length]), [start(other) for other in others]
    runner.forward(Batch([seq], [length // 2], [0]), Draft.empty(1))  # half of it as a chunk before
    seqs = [*company[:2], seq, *company[2:]]
    drafts = [[5, 6], [], tokens[length:], [1], [], [3, 4, 5]]
    result = runner.forward(Batch(seqs, [len(s.tokens) for s in seqs], [99] * 6), Draft.chains(drafts))
    return result.of(2)


def test_a_tree_has_the_bits_of_its_paths(checkpoint: Callable[..., str]) -> None:
    for name in ("llama", "mistral_window", "gpt_oss"):
        model = load(checkpoint(name))
        prompt, tokens, parents = [3, 9, 27] * 10, [5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, -1, 1, 3, 5]
        runner, start = bench_of(model)
        tree = runner.forward(Batch([start(prompt)], [30], [9]), Draft([tokens], [parents])).logits
        draft = Draft([tokens], [parents])
        for node in range(len(tokens)):
            path = [tokens[n] for n in draft.path(0, node)]
            runner, start = bench_of(model)
            chain = runner.forward(Batch([start(prompt)], [30], [9]), Draft.chains([path])).logits
            assert torch.equal(tree[node + 1], chain[-1]), (name, node)


@pytest.mark.parametrize(("strategy", "refill"), [*((name, None) for name in STRATEGIES), *OTHERWISE])
def test_joining_leaving_chunks_preemption_and_reuse_change_nothing(
    checkpoint: Callable[..., str], strategy: str, refill: bool | None
) -> None:
    """Requests with a common beginning arrive over time into a pool too small for them, some are aborted."""
    folder = checkpoint("llama")
    model = load(folder)
    prompts, params, expected = texts_with_one_beginning(folder)
    sampled = params[1]
    drafts = {"model": load(checkpoint("llama", 1)), **{name: head_for(folder, model, name) for name in HEADS}}
    for drafter in ("none", "mixed", *drafts):
        draft = drafts.get(drafter)
        layers = len(model.layers) + (len(draft.layers) if draft is not None else 0)
        engine = engine_of(
            model,
            scripted(prompts, expected, mixed, model.vocab) if drafter == "mixed" else None,
            draft=draft,
            lengths=changing,
            strategy=strategy,
            refill=refill,
            max_batch=6,
            chunk=16,
            page=8,
            cache_memory=24 * 8 * layers * 2 * 2 * 16 * 4,
        )
        seqs, victims = [], []
        for n, request in enumerate(requests_of(prompts, params, list(range(12)))):
            seqs.append(engine.add(request))
            if n % 4 == 3:
                victims.append(engine.add(Request(tuple(prompts[n][::-1]), sampled, 1)))
            engine.step()
            engine.step()
            if victims and n % 4 == 1:
                engine.abort(victims.pop())
            engine.tables.check()
        while engine.busy:
            engine.step()
            engine.tables.check()
        assert_same(seqs, expected, bits=is_ragged(engine))
        assert engine.meter.preemptions > 0, "the pool was to be too small"
        assert engine.meter.drafted > 0 or drafter == "none"
        assert engine.tables.held() == 0


def test_a_prefix_in_use_is_found_and_changes_nothing(checkpoint: Callable[..., str]) -> None:
    model, draft = load(checkpoint("qwen3")), load(checkpoint("qwen3", 1))
    prompt = [(11 * i * i + i) % model.vocab for i in range(120)]
    expected = expect(model, [prompt], [SamplingParams(max_tokens=20)])
    engine, fed = engine_of(model, draft=draft, k=3), []
    for _ in range(3):
        before = engine.meter.tokens_fed
        assert_same(run(engine, [Request(tuple(prompt), SamplingParams(max_tokens=20))]), expected)
        fed.append(engine.meter.tokens_fed - before)
    assert [fed[0] - later for later in fed[1:]] == [96, 96], "three full pages are known the second time"


def test_a_needle_reads_the_same_in_any_haystack(checkpoint: Callable[..., str]) -> None:
    model, draft = load(checkpoint("llama_bias")), load(checkpoint("llama_bias", 2))
    needle = random_prompts(1, model.vocab, seed=11)[0]
    params, found, source = SamplingParams(max_tokens=20, temperature=0.7), set(), random.Random(0)
    for size in (0, 1, 5, 17):
        for drafting in (True, False):
            prompts = random_prompts(size, model.vocab, seed=size)
            place = source.randint(0, size)
            prompts.insert(place, needle)
            engine = engine_of(model, draft=draft if drafting else None, k=source.randint(1, 6))
            seqs = run(engine, [Request(tuple(p), params, 42) for p in prompts])
            found.add(tuple(seqs[place].output))
    assert len(found) == 1


def test_acceptance_does_not_depend_on_the_batch(checkpoint: Callable[..., str]) -> None:
    model, draft = load(checkpoint("llama")), load(checkpoint("llama_linear"))
    prompts = random_prompts(8, model.vocab, seed=6)
    requests = [Request(tuple(p), SamplingParams(max_tokens=24)) for p in prompts]
    together = run(engine_of(model, draft=draft), requests)
    alone = [run(engine_of(model, draft=draft), [request])[0] for request in requests]
    assert [(s.drafted, s.accepted) for s in together] == [(s.drafted, s.accepted) for s in alone]
    assert sum(s.accepted for s in together) > 0


def test_seeds_belong_to_requests(checkpoint: Callable[..., str]) -> None:
    model = load(checkpoint("llama"))
    params, prompt = SamplingParams(max_tokens=16, temperature=1.0), (5, 6, 7)
    seqs = run(engine_of(model), [Request(prompt, params, seed) for seed in (1, 2, 1, 3)])
    outputs = [tuple(seq.output) for seq in seqs]
    assert outputs[0] == outputs[2]
    assert len(set(outputs)) == 3


def test_k_may_differ_per_request_and_be_zero() -> None:
    model = TableModel()
    prompts = random_prompts(5, model.vocab)
    params = [SamplingParams(max_tokens=20)] * 5
    expected = expect(model, prompts, params)
    engine = engine_of(model, scripted(prompts, expected, right, model.vocab), k=4)
    seqs = run(engine, [Request(tuple(p), params[0], 0, k) for p, k in zip(prompts, (0, 1, 2, 6, None), strict=True)])
    assert_same(seqs, expected)
    assert [seq.steps for seq in seqs] == [20, 10, 7, 3, 4]
    assert seqs[0].drafted == 0
