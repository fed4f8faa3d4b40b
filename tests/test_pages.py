"""Pages: nothing is lost, nothing is owned twice, nothing is padded or moved."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faircopy.engine import Engine
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.pool import PagePool
from faircopy.testing import TableModel
from faircopy.types import Request, SamplingParams, Sequence
from tests.helpers import assert_same, engine_of, random_prompts, references, scripted


def a_sequence(tokens: list[int]) -> Sequence:
    return Sequence(0, Request(tuple(tokens)), list(tokens))


def test_pages_are_taken_where_pages_were_used_before() -> None:
    tables = BlockTables(PagePool(64), 4)
    for _ in range(40):
        seqs = [a_sequence([n]) for n in range(4)]
        for seq in seqs:
            tables.open(seq)
        for length in range(1, 40):
            for seq in seqs:
                assert tables.reserve(seq, length)
        assert {page for seq in seqs for page in tables.table(seq)} == set(range(40))
        tables.check()
        for seq in seqs:
            tables.close(seq)
    assert len(tables.pool._lowest) <= 128


def test_a_prompt_lies_in_one_run() -> None:
    tables = BlockTables(PagePool(64), 4)
    seq = a_sequence([0])
    tables.open(seq)
    assert tables.reserve(seq, 40)
    assert tables.table(seq) == list(range(10))


def test_too_much_is_refused_and_changes_nothing() -> None:
    tables = BlockTables(PagePool(4), 4)
    one, two = a_sequence([1]), a_sequence([2])
    for seq in (one, two):
        tables.open(seq)
    assert tables.reserve(one, 9)
    assert not tables.reserve(two, 5)
    assert tables.table(two) == []
    assert tables.reserve(two, 4)
    tables.trim(one, 4)
    assert tables.reserve(two, 9)
    tables.close(one)
    tables.close(two)
    assert tables.pool.available == 4
    tables.check()


def test_known_pages_are_shared_kept_and_given_up_when_needed() -> None:
    tables = BlockTables(PagePool(4), 4)
    tokens = list(range(10))
    one, two = a_sequence(tokens), a_sequence([*tokens[:9], 99])
    assert tables.open(one) == 0
    tables.reserve(one, 10)
    tables.publish(one, 10)
    assert tables.open(two) == 8, "two full pages are the same"
    assert tables.table(two) == tables.table(one)[:2]
    tables.check()
    tables.close(one)
    tables.close(two)
    assert tables.pool.available == 4
    again = a_sequence(tokens)
    assert tables.open(again) == 8, "no sequence held them, but their content was kept"
    tables.close(again)
    other = a_sequence([7] * 16)
    tables.open(other)
    assert tables.reserve(other, 16), "kept pages give way"
    tables.check()
    tables.close(other)
    assert tables.open(a_sequence(tokens)) == 0


def test_the_last_token_is_never_taken_as_known() -> None:
    tables = BlockTables(PagePool(4), 4)
    one = a_sequence([1, 2, 3, 4])
    tables.open(one)
    tables.reserve(one, 4)
    tables.publish(one, 4)
    assert tables.open(a_sequence([1, 2, 3, 4])) == 0


def test_a_page_given_twice_is_noticed() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool._free.add(page)
    with pytest.raises(AssertionError, match="two states"):
        pool.check([[page]])


def test_the_worked_example_of_ragged_verification() -> None:
    """EMS-SD's table: rows of 5 and 3 tokens, predictions 5/2 then 2/5, acceptances 4/1 then 2/6 (bonus included).

    Padding would feed 12 + 12 tokens and hold rows of 15.
    """
    model = TableModel()
    prompts = [[1, 2, 3, 4], [5, 6]]
    params = SamplingParams(max_tokens=60)
    expected = references(model, prompts, [params] * 2, [0, 0])
    script = {1: [(0, 0), (5, 3), (2, 1)], 2: [(0, 0), (2, 0), (5, 5)]}  # (predicted, right) per step
    drafter = scripted(prompts, expected, lambda seq, max_nodes: script[seq.id][seq.steps], model.vocab)
    engine = engine_of(model, drafter, page=4, lengths=lambda seq: script[seq.id][seq.steps][0])
    seqs = [engine.add(Request(tuple(p), params)) for p in prompts]
    engine.step()
    assert [len(seq.tokens) for seq in seqs] == [5, 3]
    fed = []
    for _ in range(2):
        before = engine.meter.tokens_fed
        engine.step()
        fed.append(engine.meter.tokens_fed - before)
        engine.tables.check()
        assert [len(engine.tables.table(seq)) for seq in seqs] == [-(-len(seq.tokens) // 4) for seq in seqs]
    assert fed == [9, 9]
    assert [len(seq.tokens) for seq in seqs] == [11, 10]
    assert [seq.output for seq in seqs] == [e.tokens[: len(s.output)] for e, s in zip(expected, seqs, strict=True)]
    assert (engine.meter.tokens_padded, engine.meter.rows_moved) == (0, 0)


def bounded(engine: Engine) -> None:
    """Between steps no sequence holds more pages than its tokens need."""
    engine.tables.check()
    for seq in engine.scheduler.running:
        assert len(engine.tables.table(seq)) <= engine.tables.pages_for(len(seq.tokens))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 12),
    pages=st.integers(10, 30),
    page=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 6),
    chunk=st.integers(1, 20),
    wide=st.booleans(),
)
def test_any_traffic_leaves_every_page_in_place(
    seed: int, count: int, pages: int, page: int, batch: int, chunk: int, wide: bool
) -> None:
    """Random arrivals, lengths, aborts, acceptance and k, in a pool that forces preemption; output stays plain's."""
    source = random.Random(seed)
    model = TableModel(vocab=16, context=64, eos=(0,))
    size = 2 * 4 * page  # bytes of a page: one key and one value per token
    have = engine_of(model, max_batch=batch, page=page, cache_memory=pages * size).tables.pool.pages
    limit = min(have * page, 64)
    prompts = [[source.randrange(1, 16) for _ in range(source.randint(1, max(1, limit // 2)))] for _ in range(count)]
    params = [
        SamplingParams(max_tokens=source.randint(1, max(1, limit - len(p))), temperature=source.choice([0.0, 1.0]))
        for p in prompts
    ]
    seeds = [source.randrange(99) for _ in prompts]
    expected = references(model, prompts, params, seeds, eos=(0,))
    drafter = scripted(prompts, expected, lambda seq, max_nodes: (max_nodes, source.randint(0, max_nodes)), 16, wide)
    engine = engine_of(
        model,
        drafter,
        lengths=lambda seq: source.randint(0, 8),
        max_batch=batch,
        chunk=chunk,
        page=page,
        cache_memory=pages * size,
    )
    engine.eos = frozenset({0})
    seqs, aborted = [], set()
    for prompt, p, s in zip(prompts, params, seeds, strict=True):
        seqs.append(engine.add(Request(tuple(prompt), p, s)))
        for _ in range(source.randint(0, 3)):
            engine.step()
            bounded(engine)
        if source.random() < 0.2:
            victim = source.choice(seqs)
            engine.abort(victim)
            aborted |= {victim} if victim.finished == "abort" else set()
            bounded(engine)
    steps = 0
    while engine.busy:
        engine.step()
        bounded(engine)
        steps += 1
        assert steps < 5000, "no progress"
    assert engine.tables.held() == 0
    assert engine.tables.pool.available == have, "every page comes back"
    for seq, want in zip(seqs, expected, strict=True):
        if seq in aborted:
            assert want.tokens[: len(seq.output)] == seq.output
        else:
            assert_same([seq], [want])


def test_random_prompts_helper_is_deterministic() -> None:
    assert random_prompts(3, 9, seed=1) == random_prompts(3, 9, seed=1)
