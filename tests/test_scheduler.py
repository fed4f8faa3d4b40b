"""Step plans and outputs: values that say everything about a step, and draft lengths chosen for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.draft_length import DraftLengths
from faircopy.drafters.ngram import NgramDrafter
from faircopy.policy import MOST_HELD, FirstCome
from faircopy.testing import TableModel
from faircopy.types import Request, SamplingParams, Sequence
from tests.helpers import engine_of

PROMPTS = [(1, 2, 3, 1, 2), (4, 5), (6,) * 40]


class Shares(DraftLengths):
    """Six nodes for the whole batch, in equal shares; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        self.asked.append([seq.id for seq in seqs])
        return [6 // len(seqs)] * len(seqs)


def test_draft_lengths_are_chosen_for_the_whole_batch_at_once() -> None:
    lengths = Shares()
    config = EngineConfig(cache_memory="1MiB", max_batch=2)
    engine = build_engine(TableModel(), NgramDrafter(), config=config, draft_lengths=lengths)
    for prompt in PROMPTS:
        engine.add(Request(prompt, SamplingParams(max_tokens=6)))
    plan = engine.scheduler.schedule()
    assert lengths.asked == [[1, 2]] and plan.batch.max_nodes == [3, 3]
    assert plan.batch.upto == [5, 2] and not plan.captured
    while engine.busy:
        engine.step()
    assert max(map(len, lengths.asked)) == 2 and lengths.asked[-1] == [3]


def test_a_plan_says_how_far_each_is_fed_and_cuts_drafts_at_the_limit() -> None:
    engine = engine_of(TableModel(), NgramDrafter(), k=4, chunk=16)
    for prompt, most in zip(PROMPTS, (3, 50, 50), strict=True):
        engine.add(Request(prompt, SamplingParams(max_tokens=most)))
    batch = engine.scheduler.schedule().batch
    assert [seq.id for seq in batch.seqs] == [1, 2, 3]
    assert batch.upto == [5, 2, 9], "what is left of the chunk after 5 and 2 tokens"
    assert batch.max_nodes == [2, 4, 0], "the last of three tokens needs no guess; a prompt chunk gets no nodes"


def test_outputs_cannot_be_changed() -> None:
    engine = engine_of(TableModel(), k=0)
    seq = engine.add(Request((1, 2, 3), SamplingParams(max_tokens=2, logprobs=1)))
    (first,) = engine.step()
    assert (first.id, first.finished, first.accepted) == (seq.id, None, 0)
    assert first.tokens == tuple(seq.output) and dict(first.logprobs[0]) == seq.logprobs[0]
    with pytest.raises(AttributeError):
        first.tokens = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        first.logprobs[0][0] = 1.0  # type: ignore[index]
    (last,) = engine.step()
    assert last.finished == "length" and len(first.tokens) == 1, "a later step leaves earlier outputs alone"


def test_prompts_beside_running_texts_are_read_in_smaller_chunks() -> None:
    """A step in which a text goes on takes as many rows as it is allowed, those of the text included."""
    model = TableModel(vocab=64, context=512)
    engine = build_engine(model, config=EngineConfig(k=0, max_batch=4, cache_memory="1MiB", chunk=64))
    engine.scheduler._mixed_rows = lambda: 9  # type: ignore[method-assign]
    first = engine.add(Request(tuple(range(40)), SamplingParams(max_tokens=30)))
    engine.step()
    assert len(first.output) == 1  # alone, in one chunk
    second = engine.add(Request(tuple(range(20)), SamplingParams(max_tokens=3)))
    fed = []
    while not second.output:
        engine.step()
        fed.append(engine.target.layout.cached(second))
    assert fed == [8, 16, 20]


class Joins:
    """Captured steps that read prompts of up to 5 tokens, 24 in all, at these prices for up to 8 and 24."""

    def __init__(self, few: float, many: float) -> None:
        self._prices = few, many

    def interrupts(self, seq: Sequence) -> bool:
        return len(seq.tokens) > 5

    def joining_price(self, slots: int, rows: int) -> float | None:
        return self._prices[rows > 8] if rows <= 24 else None


def decoding(seq: Sequence) -> int:
    return len(seq.tokens) - 1


def joined(policy: FirstCome, running: list[Sequence], waiting: list[Sequence]) -> int:
    return len(policy.choose(running, waiting, decoding)) - len(running)


def test_those_that_interrupt_nothing_join_when_that_costs_least() -> None:
    """Many at a time where a longer step costs much, and where the places are soon free; one at a time where not."""
    seqs = [Sequence(n, Request((1,) * 4), [1] * 4) for n in range(80)]
    running, waiting = seqs[:32], seqs[32:]
    for price, every, wanted in (((0.01, 1.0), 16, 1), ((0.2, 9.0), 2, 2), ((1.0, 1.1), 1, 6), ((0.4, 0.5), 1, 6)):
        policy = FirstCome(32, 4, Joins(*price))
        for n in range(100):  # one leaves in so many choices
            policy.choose([seq for seq in running if n % every or seq is not running[n // every % 32]], [], decoding)
        found = [joined(policy, running[free:], waiting) for free in range(1, 8)]
        assert found == [0] * (wanted - 1) + [*range(wanted, 8)], (price, every)


def test_no_group_is_waited_for_where_nothing_runs_and_none_is_larger_than_a_batch() -> None:
    seqs = [Sequence(n, Request((1,)), [1]) for n in range(40)]
    policy = FirstCome(4, 1, Joins(10.0, 10.0))
    for n in range(40):  # two leave with every choice: places are free for a short time only
        policy.choose([seqs[n % 40], seqs[(n + 7) % 40]], [], decoding)
    assert joined(policy, [], seqs) == 4
    assert joined(policy, seqs[:1], seqs[1:]) == 0 and joined(policy, [], seqs[1:]) == 4


def test_those_that_interrupt_join_in_groups() -> None:
    long = [Sequence(n, Request((1,) * 9), [1] * 9) for n in range(20)]
    policy = FirstCome(8, 4, Joins(0.0, 0.0))
    assert [joined(policy, long[: 8 - free], long[8:]) for free in (2, 3, 4)] == [0, 0, 4]


def test_a_full_queue_joins_in_groups() -> None:
    """While more wait than there are places, new ones wait for some places; with fewer they join at once."""
    policy = FirstCome(8, together=2)
    seqs = [Sequence(n, Request((1,)), [1, 2]) for n in range(20)]
    assert len(policy.choose([], seqs, decoding)) == 8
    assert [len(policy.choose(seqs[:7], seqs[8:], decoding)) for _ in range(MOST_HELD + 1)] == [7] * MOST_HELD + [8]
    assert len(policy.choose(seqs[:7], seqs[8:], decoding)) == 8, "asked again before it was let in"
    assert len(policy.choose(seqs[:7], seqs[9:], decoding)) == 7, "the next one waits anew"
    assert len(policy.choose(seqs[:6], seqs[9:], decoding)) == 8
    assert len(policy.choose(seqs[:7], seqs[9:10], decoding)) == 8
    assert len(policy.choose(seqs[:7], seqs[9:], lambda seq: 0)) == 8  # prompts are being read anyway
