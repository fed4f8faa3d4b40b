"""k="auto": acceptance and cost are learned, and drafting stops where it does not pay."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import faircopy.engine as engine_module
from faircopy import LLM, ConfigError, SamplingParams, bundled, measured_costs
from faircopy.acceptance_rates import Acceptance, Rate, TreeGains
from faircopy.build import build_engine
from faircopy.cache import KeptTable
from faircopy.config import EngineConfig
from faircopy.costs import REFERENCE, STALE, STALE_NEW, CostTable, Curve, Joining, StepCosts, bucket
from faircopy.draft_length import AUTO_MAX, AUTO_ROWS, LADDER, DraftLengths, auto_tree_nodes
from faircopy.drafters.base import Drafter
from faircopy.measured_acceptance import History
from faircopy.model.base import FINAL
from faircopy.model.loader import load_model
from faircopy.model.runner import Result
from faircopy.model.trial import plausible
from faircopy.planner import AutoLength, Trial, best_path
from faircopy.planning.drafts import shape_of_draft
from faircopy.planning.measured import Measured
from faircopy.testing import TableModel
from faircopy.testing.simulated_steps import Trees, sequences, simulate
from faircopy.types import Batch, Confidence, Decision, Draft, FinishedStep, Request, Sequence, Verdict
from tests.helpers import CPU, assert_same, random_prompts, references, requests_of, run


def plain_rate(cost, batch: int = 4) -> float:  # type: ignore[no-untyped-def]
    return batch / cost(batch, 0)


def test_acceptance_by_position_is_learned() -> None:
    found, (seq,) = Acceptance(), sequences(1)
    for _ in range(600):
        found.observe(seq, 3, 1)  # the first is always right, the second never
    first, second, third = found.survival(seq, 3)
    assert first > 0.95 and second < 0.1 and third <= second


def test_a_sequence_has_a_rate_of_its_own() -> None:
    found, (good, bad) = Acceptance(), sequences(2)
    for _ in range(60):
        found.observe(good, 2, 2)
        found.observe(bad, 2, 0)
    assert found.survival(good, 1)[0] > 1.3 * found.survival(bad, 1)[0]


def test_how_much_sequences_differ_is_learned() -> None:
    """Of drafts that are all right or all wrong for a while two say what comes; of mixed ones they say little."""
    after = []
    for runs in (True, False):
        found, seqs, source = Acceptance(), sequences(4), random.Random(0)
        for n in range(300):
            for m, seq in enumerate(seqs):
                right = (n // 30 + m) % 2 == 0 if runs else source.random() < 0.5
                found.observe(seq, 1, int(right))
        (new,) = sequences(1)
        found.observe(new, 1, 0)
        found.observe(new, 1, 0)
        after.append(found.survival(new, 1)[0])
    assert after[0] < 0.25 < 0.4 < after[1]


def test_a_sequences_own_rate_follows_its_text() -> None:
    found, (turns, good, idle) = Acceptance(), sequences(3)
    for _ in range(100):
        for seq in (turns, good, idle):
            found.observe(seq, 1, 1)
    found.observe(idle, 1, 0)
    for _ in range(12):
        found.observe(turns, 1, 0)
        found.observe(good, 1, 1)
    assert found.survival(turns, 1)[0] < 0.6 < 0.85 < found.survival(good, 1)[0]
    for _ in range(12):
        found.observe(turns, 1, 1)
    assert found.survival(turns, 1)[0] > 0.85  # and back
    before = found.survival(idle, 1)[0]
    for _ in range(200):
        found.pass_over(idle)
    assert before < found.survival(idle, 1)[0] == pytest.approx(found.survival(None, 1)[0], abs=0.01)


def test_costs_between_measured_sizes_lie_on_a_line() -> None:
    curve = Curve(((1, 1.0), (4, 4.0), (8, 5.0)))
    assert [curve(rows) for rows in (1, 2, 6, 8)] == pytest.approx([1.0, 2.0, 4.5, 5.0])
    assert curve(16) == pytest.approx(7.0) and curve(0) == 1.0
    captured = Curve(((16, 1.0), (64, 2.0)), stepped=True)
    assert [captured(rows) for rows in (1, 16, 17, 64)] == [1.0, 1.0, 2.0, 2.0]
    assert Curve(((8, 2.0),))(16) == pytest.approx(4.0)


def test_a_step_is_a_pass_and_its_drafts() -> None:
    table = CostTable(Curve(((1, 1.0), (101, 2.0))), Curve(((1, 0.1), (101, 1.1))), {(8, 2): 7.0, (8, 0): 3.0})
    assert table.step(1, 0) == 3.0 and table.step(11, 0) == pytest.approx(1.1)
    assert table.step(11, 1, rows=101) == pytest.approx(2.0 + 0.1 + 0.21)
    assert table.step(5, 2) == table.step(5, 1) == 7.0  # captured, and one node runs in the graph of two
    assert CostTable.of_json(table.as_json()) == table


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (9, 1.8)))))
    for _ in range(50):
        costs.observe(1, 0, 1, 3.0)  # three times as slow as when it was measured
        costs.observe(1, 4, 5, 6.0)  # and drafts cost more than the table knows
    assert costs.of(1, 0) == pytest.approx(3.0, rel=0.02) and costs.of(1, 4) == pytest.approx(6.0, rel=0.02)
    assert costs.of(1, 3) > costs.of(1, 0) and bucket(33) == 64
    for _ in range(200):
        costs.observe(1, 4, 5, 12.0)  # texts have grown: plain steps would take longer, too
    assert costs.of(1, 4) == pytest.approx(12.0, rel=0.05) and costs.of(1, 0) > 4.0


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_one_slow_step_of_a_trial_is_not_believed(slow: int) -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (9, 1.8)))))
    for _ in range(3):
        costs.observe(1, 0, 1, 0.010)
    for step in range(3):
        costs.observe(1, 3, 4, 0.013 * (2.9 if step == slow else 1.0))
    assert costs.of(1, 3) == pytest.approx(0.013, rel=0.02)


def test_drafts_do_not_look_cheap_beside_an_engines_first_steps() -> None:
    started = iter(range(6))

    def cost(batch: int, k: int) -> float:
        return (1.0 + 0.1 * k) * (1.3 if next(started, None) is not None else 1.0)

    chosen = simulate(AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0))))), 0.05, cost, batch=1)[2]
    assert sum(k > 0 for k in chosen) < 40


CAPTURED = CostTable(
    Curve(((1, 1.0), (64, 1.5))), steps={(size, k): 1.0 + 0.05 * k for size in (1, 4) for k in LADDER[:6]}
)


@pytest.mark.parametrize("table", [None, CostTable(Curve(((1, 1.0), (64, 2.0)))), CAPTURED])
@pytest.mark.parametrize(("first", "slower"), [(3, 1.5), (6, 1.3), (12, 1.4)])
def test_an_engines_first_steps_are_slow(table: CostTable | None, first: int, slower: float) -> None:
    """Drafts that cost more than they bring do not look cheap beside them."""
    for seed in range(3):
        started = iter(range(first))

        def cost(batch: int, k: int) -> float:
            return (1.0 + 0.05 * k + 0.05 * (k > 0)) * (slower if next(started, None) is not None else 1.0)  # noqa: B023

        tokens, seconds, _ = simulate(AutoLength(8, table=table), 0.05, cost, 1500, 1, seed)
        assert tokens / seconds > 0.97 * plain_rate(lambda batch, k: 1.0, 1)


def test_a_slow_moment_of_the_machine_says_nothing_of_drafts() -> None:
    for seed in range(3):
        calls, plain = iter(range(3000)), 0.0

        def cost(batch: int, k: int) -> float:
            nonlocal plain
            call = next(calls)  # noqa: B023
            slower = 3.0 if call // 17 % 23 == 3 else 1.0
            plain += slower
            return (1.0 + 0.02 * k + (0.13 if k and call > 100 else 0.0)) * slower

        tokens, seconds, _ = simulate(AutoLength(8, table=CAPTURED), 0.02, cost, 3000, 4, seed)
        assert tokens / 4 * (plain / 3000) > 0.98 * seconds


@pytest.mark.parametrize(("batch", "rate", "each"), [(1, 0.6, 0.2), (1, 0.4, 0.2), (1, 0.5, 0.1), (2, 0.6, 0.2)])
def test_drafting_is_not_free_where_no_table_tells_its_cost(batch: int, rate: float, each: float) -> None:
    best = max(sum(rate**j for j in range(k + 1)) / (1.0 + each * k) for k in range(9))
    for seed in range(3):
        chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 1.5)))))
        tokens, seconds, _ = simulate(chooser, rate, lambda size, k: 1.0 + each * k, 2500, batch, seed)
        assert tokens / seconds / batch > 0.93 * best


def test_lengths_that_were_never_tried_are_not_dearer_than_the_next_ones_tell() -> None:
    """Without a table, where a draft token costs little and is nearly always right."""
    tokens, seconds, _ = simulate(AutoLength(8), 0.97, lambda batch, k: 1.0 + 0.02 * k, 1500, batch=32)
    assert tokens / seconds / 32 > 0.9 * sum(0.97**j for j in range(9)) / 1.16


def test_positions_never_seen_are_as_likely_as_the_last_one() -> None:
    found, (seq,) = Acceptance(), sequences(1)
    for _ in range(50):
        found.observe(seq, 2, 2)
    assert min(found.survival(seq, 8)) > 0.85 and len(found.positions) == 2


def test_few_drafted_steps_of_a_slow_moment_are_forgotten() -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (9, 1.8)))))
    for _ in range(6):
        costs.observe(1, 0, 1, 1.0)
        costs.observe(1, 2, 3, 1.2)
    for _ in range(5):
        costs.observe(1, 4, 5, 2.8)
    assert costs.of(1, 4) > 1.9
    for _ in range(250):
        costs.observe(1, 2, 3, 1.2)
    assert costs.of(1, 4) == pytest.approx(1.4, rel=0.1)


def test_drafted_steps_that_seem_faster_show_that_plain_ones_were_slow() -> None:
    costs = StepCosts(CAPTURED)
    for n in range(40):
        costs.observe(1, 0, 1, 1.5 if n < 30 else 1.0)
    assert costs.known(1, 0)
    for _ in range(200):
        costs.observe(1, 1, 2, 1.05)
    assert not costs.known(1, 0), "they are to be measured again"


def test_plain_steps_between_drafted_ones_do_not_keep_the_slow_first_ones() -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (9, 1.8)))))
    for n in range(40):
        k = 2 * (n >= REFERENCE and n % 4 > 0)
        costs.observe(1, k, 1 + k, (1.0 + 0.1 * k) * (1.5 if n < REFERENCE else 1.0))
    assert costs.of(1, 0) == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("k", [0, 2])
def test_an_outlier_moves_costs_little(k: int) -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (9, 1.8)))))
    for _ in range(20):
        for length in (0, 2):
            costs.observe(1, length, 1 + length, 1.0 + 0.1 * length)
    before = [costs.of(1, length) for length in (0, 2)]
    costs.observe(1, k, 1 + k, 50.0)
    for _ in range(3):
        costs.observe(1, 2 - k, 3 - k, 1.2 - 0.1 * k)
    assert [costs.of(1, length) for length in (0, 2)] == pytest.approx(before, rel=0.15)


def test_drafted_steps_are_not_expected_to_be_faster_than_plain_ones() -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (9, 1.8)))))
    for _ in range(5):
        costs.observe(1, 0, 1, 1.3)
    for _ in range(5):
        costs.observe(1, 2, 3, 1.0)
    assert costs.of(1, 2) == costs.of(1, 0)


@pytest.mark.parametrize("table", [None, CostTable(Curve(((1, 1.0), (64, 2.0))))])
def test_drafts_that_become_dearer_are_told_from_a_slower_machine(table: CostTable | None) -> None:
    dear, machine = 1.0, 1.0

    def cost(batch: int, k: int) -> float:
        return machine * (1.0 + 0.1 * k) * (dear if k else 1.0)

    chooser = AutoLength(4, table=table)
    assert max(simulate(chooser, 0.6, cost)[2][-50:]) > 0
    machine = 2.0
    tokens, seconds, chosen = simulate(chooser, 0.6, cost, steps=2000)
    assert min(sum(k > 0 for k in chosen[n : n + 100]) for n in range(0, 2000, 100)) > 80, "all steps are slower"
    dear = 2.5
    chosen = simulate(chooser, 0.6, cost, steps=150)[2]
    assert sum(k > 0 for k in chosen) < 100, "it is found out soon"
    tokens, seconds, chosen = simulate(chooser, 0.6, cost, steps=2000)
    assert tokens / seconds > 0.98 * plain_rate(cost) and sum(k > 0 for k in chosen) < 60
    dear = 1.0
    assert sum(k > 0 for k in simulate(chooser, 0.6, cost, steps=2000)[2]) > 1000, "it is found out again"


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("longer", [20.0, 200.0])
@pytest.mark.parametrize("when", [0, 1, 2, 5, 40])
def test_one_slow_step_does_not_switch_a_good_drafter_off(when: int, longer: float, batch: int) -> None:
    """However slow it is, and however few drafted steps were measured before it."""
    slow = iter([False] * when + [True])

    def cost(batch: int, k: int) -> float:
        return 1.0 + 0.1 * k + (longer if k and next(slow, False) else 0.0)

    chosen = simulate(AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0))))), 0.8, cost, batch=batch)[2]
    assert sum(k > 0 for k in chosen[50:]) > 300


@pytest.mark.parametrize(("measured", "soon"), [(2.0, True), (9.0, False)])
def test_a_drafter_that_was_measured_in_a_slow_moment_is_tried_again(measured: float, soon: bool) -> None:
    """Soon if its drafts were accepted; if a trial would cost much by what was measured, once that is old."""
    chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0)))))
    for n in range(40):
        chooser.acceptance.observe(sequences(1)[0], 1, n % 2)
    chooser._drafts = 40
    for _ in range(5):
        chooser.costs.observe(1, 0, 1, 1.0)
        for k in chooser.lengths[1:]:
            chooser.costs.observe(1, k, k + 1, measured)
    chosen = simulate(chooser, 0.5, lambda batch, k: 1.0 + 0.1 * k, batch=1, steps=500)[2]
    assert not any(chosen[:30]) and any(chosen[:100]) == soon and sum(k > 0 for k in chosen[300:]) > 150


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("slower", "chance"), [(20.0, 0.05), (40.0, 0.05), (60.0, 0.02)])
def test_slow_moments_that_come_again_are_not_forgiven(slower: float, chance: float, batch: int) -> None:
    source = random.Random(3)

    def cost(size: int, k: int) -> float:
        return (1.0 + 0.1 * k) * (slower if k and source.random() < chance else 1.0)

    chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0)))))
    tokens, seconds, _ = simulate(chooser, 0.7, cost, steps=6000, batch=batch)
    assert tokens / seconds > 0.97 * plain_rate(cost, batch)


@pytest.mark.parametrize(("rate", "longer"), [(0.0, False), (0.9, True)])
def test_the_first_drafts_are_short(rate: float, longer: bool) -> None:
    """Before anything is known of acceptance a long draft that is wrong costs many plain steps."""
    chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 10.0)))))
    chosen = simulate(chooser, rate, lambda batch, k: 1.0 + 0.14 * k, 60, batch=1)[2]
    assert max(chosen[:5]) == 2 and (max(chosen[30:]) > 2) == longer


@pytest.mark.parametrize("pause", [200.0, 5_000.0, 30_000.0])
def test_a_pause_of_the_process_does_not_keep_a_good_drafter_off(pause: float) -> None:
    chooser, pauses = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0))))), [pause]
    simulate(chooser, 0.8, lambda batch, k: 1.0 + 0.1 * k, 500)

    def cost(batch: int, k: int) -> float:
        return pauses.pop() if k and pauses else 1.0 + 0.1 * k

    chosen = simulate(chooser, 0.8, cost, 2000, seed=1)[2]
    assert not pauses and sum(k > 0 for k in chosen) > 1900


@pytest.mark.parametrize("table", [None, CostTable(Curve(((1, 1.0), (64, 2.0))))])
@pytest.mark.parametrize("asked", [0, 5])
def test_requests_with_a_length_of_their_own_do_not_keep_others_from_drafts(
    asked: int, table: CostTable | None
) -> None:
    own = [Sequence(9 + n, Request((1,), k=asked), [1], limit=1 << 30) for n in range(4)]
    chooser, seqs = AutoLength(8, table=table), [*sequences(2), *own]
    simulate(chooser, 0.8, lambda batch, k: 1.0 + 0.05 * k, 400, seqs=seqs)
    lengths = chooser.choose(seqs)
    assert all(lengths[:2]) and lengths[2:] == [asked] * 4


def test_what_drafts_add_at_one_length_tells_it_of_others() -> None:
    """Drafts add a third of what the table says: once one length was measured, longer ones are known to pay."""
    lengths = (0, 1, 2, 3, 5, 8)
    table = CostTable(Curve(((1, 1.0), (64, 1.5)), True), steps={(16, k): 1.0 + 0.9 * k for k in lengths})
    tokens, seconds, _ = simulate(AutoLength(8, table=table), 0.91, lambda batch, k: 1.0 + 0.3 * k, 800, batch=16)
    best = max(sum(0.91**j for j in range(k + 1)) / (1.0 + 0.3 * k) for k in lengths)
    assert tokens / seconds / 16 > 0.9 * best


def test_plain_steps_that_are_asked_for_are_measured_while_drafting_is_off() -> None:
    chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0)))))
    chooser._choices = 8 * 1000 + 1  # one step in eight is
    plain = FinishedStep(Batch(sequences(2), [1, 1], [0, 0]), Draft.empty(2), Verdict([Decision([], [0])] * 2), 2, 0)
    chooser.observe(plain, 1.0)
    assert chooser.costs.tried(2, 0) == 0
    assert not chooser.costs.known(2, 0) and chooser._plain_steps.wanted(2, 0)
    chooser.observe(plain, 1.0)
    assert chooser.costs.tried(2, 0) == 1


@pytest.mark.parametrize(("taken", "known"), [(1.0, True), (1.04, True), (1.3, False), (0.7, False)])
def test_one_plain_step_confirms_what_is_known(taken: float, known: bool) -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (64, 1.0)))))
    for _ in range(20):
        costs.observe(1, 0, 1, 1.0)
    for _ in range(STALE):
        costs.observe(1, 2, 3, 1.0)
    assert not costs.known(1, 0)
    costs.observe(1, 0, 1, taken)
    assert costs.known(1, 0) == known


def test_plain_steps_are_few_where_batches_change_their_size() -> None:
    chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0)))))
    chosen: list[int] = []
    for n in range(100):
        chosen += simulate(chooser, 0.8, lambda batch, k: 1.0 + 0.1 * k, steps=30, batch=1 << n % 5, seed=n)[2]
    assert sum(k == 0 for k in chosen[300:]) < 0.06 * len(chosen)


def test_what_drafts_cost_in_one_batch_is_expected_of_others() -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (64, 2.0)))))  # a head's levels are in no table
    for _ in range(5):
        costs.observe(16, 0, 16, costs.table.step(16, 0))
        costs.observe(16, 2, 48, 2.0 * costs.table.step(16, 2))
        costs.observe(4, 0, 4, costs.table.step(4, 0))
    assert costs.of(4, 2) == pytest.approx(2.0 * costs.table.step(4, 2), rel=0.05)
    assert costs.of(4, 0) == pytest.approx(costs.table.step(4, 0), rel=0.05)


def test_a_good_drafter_is_used_and_a_useless_one_is_not() -> None:
    def cheap(batch: int, k: int) -> float:
        return 1.0 + 0.1 * k

    tokens, seconds, chosen = simulate(AutoLength(8), 0.9, cheap)
    assert tokens / seconds > 2.5 * plain_rate(cheap) and max(chosen[100:]) >= 4
    tokens, seconds, chosen = simulate(AutoLength(8), 0.0, cheap, steps=2000)
    assert tokens / seconds > 0.98 * plain_rate(cheap) and sum(k > 0 for k in chosen[300:]) < 60


def test_lookups_may_find_nothing_for_ever() -> None:
    chooser = AutoLength(8, "off", CostTable(Curve(((1, 1.0), (64, 2.0)))))
    for _ in range(20_000):
        chooser.acceptance.found.add(False)
    assert chooser._seconds(4, 3) == chooser.costs.of(4, 0)


def test_a_captured_step_that_finds_nothing_is_paid_for() -> None:
    """Its time belongs to the length that was asked for, not to plain decoding: the ledger sees what it cost."""
    seqs, steps = sequences(8), {(8, k): 1.0 + 0.1 * k for k in AutoLength(8).lengths}
    chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0))), steps=steps))
    plain, asked = chooser.costs.of(8, 0), 2
    nothing, verdict = Draft.empty(8), Verdict([Decision([], [0])] * 8)
    for _ in range(50):
        batch = Batch(seqs, [1] * 8, [asked] * 8)
        chooser.observe(FinishedStep(batch, nothing, verdict, 8 * (asked + 1), 8 * asked), 1.2)
    assert chooser.ledger.saved < 0 and chooser.costs.of(8, 0) < 1.05 * plain
    assert chooser.choose(seqs) == [0] * 8


def test_drafts_that_a_request_asked_for_are_not_charged_to_the_others() -> None:
    """Their acceptance says something of the drafter; what they cost was not chosen."""
    chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 1.1)))))
    asking, other = Sequence(1, Request((1,), k=64), [1]), sequences(1)[0]
    wrong = FinishedStep(Batch([asking], [1], [64]), Draft.chains([[0] * 64]), Verdict([Decision([], [0])]), 65, 0)
    right = wrong._replace(verdict=Verdict([Decision(list(range(64)), [0] * 65)]))
    for _ in range(50):
        chooser.observe(wrong, 30.0)
    before = chooser.acceptance.survival(None, 1)
    for _ in range(300):
        chooser.observe(right, 30.0)
    assert chooser.acceptance.survival(None, 1) > before
    assert max(chooser.choose([other])[0] for _ in range(40)) > 0
    assert chooser.ledger.saved == 0.0


def test_steps_that_only_read_are_no_lookups_without_a_result() -> None:
    """Before captured steps a draft model reads prompts and drafts nothing: that says nothing of its drafts."""
    chooser, seqs = (
        AutoLength(8, table=CostTable(Curve(((1, 1.0), (64, 2.0))), Curve(((1, 0.1), (99, 0.2))))),
        sequences(8),
    )
    reading = FinishedStep(
        Batch(seqs, [1] * 8, [1] * 8), Draft.empty(8), Verdict([Decision([], [0])] * 8), 300, 0, read=99
    )
    for _ in range(50):
        chooser.observe(reading, None)
    assert chooser.acceptance.found.value == 1.0
    assert chooser.ledger.saved == pytest.approx(50 * -0.2), "but what it read is booked"
    guessed = AutoLength(8)
    guessed.observe(reading, None)
    assert guessed.ledger.elapsed == 0.0, "a guessed table's numbers are no seconds"


def test_steps_without_a_draft_cost_what_plain_ones_do() -> None:
    """Lookups that find little and are right then pay, although every step of so few tokens would not."""
    chooser = AutoLength(8, table=CostTable(Curve(((1, 1.0), (2, 1.3), (16, 1.4)))))
    (seq,) = seqs = sequences(1)
    for _ in range(REFERENCE):
        assert chooser.choose(seqs) == [0], "plain steps first"
        chooser.costs.observe(1, 0, 1, 1.0)
    for n in range(60):
        chooser.acceptance.found.add(n % 4 == 0)
        if n % 4 == 0:
            chooser.acceptance.observe(seq, 3, 2)
            chooser._drafts += 1
    (k,) = chooser.choose(seqs)
    assert k > 0, "one step in four takes 1.4 times as long and gives three tokens"
    steps = {(1, k): 1.9 if k else 1.0 for k in chooser.lengths}
    captured = AutoLength(8, table=replace(chooser.costs.table, steps=steps))
    captured.acceptance, captured.costs._cells, captured._drafts = chooser.acceptance, chooser.costs._cells, 1
    assert captured._best(seqs)[0] == 0, "a captured step takes its time, whatever is found"
    for _ in range(100):
        chooser.acceptance.observe(seq, 3, 0)
    chooser._last_look = -100
    assert chooser.choose(seqs) == [0]


@pytest.mark.parametrize("seed", [0, 3, 8])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_trees_are_tried_beside_chains(batch: int, seed: int) -> None:
    """Of a head whose small drafts are chains: what larger ones bring is not that of longer chains, and chains that
    had bad luck at first are tried again."""

    def cost(size: int, k: int) -> float:
        return 1.0 + 0.003 * size * k + 0.03 * min(k, 7) + 0.1 * (k > 8)

    lengths = (0, 1, 2, 3, 5, 8, 12, 16, 24)
    table = CostTable(
        Curve(((64, 1.0),), True), steps={(size, k): cost(size, k) for size in (1, 2, 4) for k in lengths}
    )
    for tree, least in ((0.75, 0.9), (0.5, 0.97)):  # of trees that are better, and of trees that are not

        def best(rate: float, k: int) -> float:
            return sum(rate**level for level in range(min(k, 7) + 1)) / cost(batch, k)

        wanted = max(max(best(0.5, k) for k in lengths[:6]), max(best(tree, k) for k in lengths[6:]))
        chooser = AutoLength(24, table=table, chains=8)
        tokens, seconds, _ = simulate(chooser, 0.5, cost, 1500, batch, seed, trees=Trees(8, 7, tree))
        assert tokens / seconds / batch > least * wanted


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_a_table_that_is_wrong_for_drafts_is_found_out_soon(factor: float) -> None:
    """Drafted steps of a batch that begins with drafts do not tell that they cost more than the table says."""

    def says(batch: int, k: int) -> float:
        return 1.0 + 0.05 * k

    table = CostTable(Curve(((64, 1.0),), True), steps={(32, k): says(32, k) for k in (0, 1, 2, 3, 5, 8)})
    tokens, seconds, _ = simulate(
        AutoLength(8, table=table), 0.3, lambda batch, k: says(batch, k) * (factor if k else 1.0), 600, batch=32
    )
    assert tokens / seconds / 32 > 0.98


CPU_LIKE = CostTable(
    Curve(((1, 1.0), (8, 1.9), (32, 4.2), (128, 14.0))), Curve(((1, 0.3), (8, 0.5), (128, 3.0)))
)  # rows cost much, as on a CPU


def times_plain(auto: AutoLength, rate: float, steps: int, batch: int) -> float:
    """Tokens per second over plain decoding where steps take what the table says."""
    table = auto.costs.table
    tokens, seconds, _ = simulate(auto, rate, table.step, steps, batch, adds=table.adds)
    return tokens / seconds / plain_rate(table.step, batch)


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_what_earlier_runs_learned_is_a_beginning(batch: int) -> None:
    """Good drafters are used at once, in large batches too; useless ones are tried once, with two sequences."""
    table = CostTable(Curve(((64, 1.0), (512, 3.0)))) if batch == 64 else CPU_LIKE
    good, bad = History(500, (0.95,) * 5), History(500, (0.05,) * 5)
    _, _, chosen = simulate(AutoLength(8, table=table, history=good), 0.95, table.step, 24, batch)
    assert not any(chosen[:REFERENCE]) and all(chosen[REFERENCE : REFERENCE + STALE_NEW - 3])  # then plain ones again
    _, _, chosen = simulate(AutoLength(8, table=table, history=bad), 0.05, table.step, 250, batch)
    assert sum(map(bool, chosen)) <= 4


def test_earlier_runs_may_have_had_other_texts() -> None:
    good, bad = History(10_000, (0.95,) * 5), History(10_000, (0.05,) * 5)
    for batch in (1, 4):
        assert times_plain(AutoLength(8, table=CPU_LIKE, history=good), 0.0, 300, batch) > 0.98
        assert times_plain(AutoLength(8, table=CPU_LIKE, history=bad), 0.95, 250, batch) > 1.15


def test_an_unknown_drafter_is_tried_once_where_a_good_one_would_pay() -> None:
    """Nothing is known, and what is assumed of drafts would not pay: a good drafter must not wait for 256 steps."""
    assert times_plain(AutoLength(8, table=CPU_LIKE), 0.95, 250, batch=4) > 1.25
    assert times_plain(AutoLength(8, table=CPU_LIKE), 0.0, 60, batch=4) > 0.97  # a trial ends where nothing is right
    _, _, chosen = simulate(AutoLength(8, table=CPU_LIKE), 0.95, CPU_LIKE.step, 250, 32)
    assert not any(chosen)  # of 32 sequences even good drafts cost more than they bring


def test_what_the_host_adds_to_every_step_is_not_taken_for_slow_rows() -> None:
    """Plain steps take 3 where their pass takes 1, since the host works around it: drafts then cost less than three
    times what the table says, and are tried where they pay."""
    table = CostTable(Curve(((1, 1.0), (9, 2.0))), drafts={k: Curve(((1, 1.0), (64, 2.0))) for k in (1, 2, 3, 5, 8)})

    def really(batch: int, k: int) -> float:
        return table.step(batch, k) + 2.0

    costs = StepCosts(table)
    for _ in range(STALE_NEW + 2):  # an engine's first steps are slow: they are confirmed before that is believed
        costs.observe(1, 0, 1, really(1, 0))
    assert costs.of(1, 4) == pytest.approx(really(1, 4), rel=0.01)
    tokens, seconds, _ = simulate(AutoLength(8, table=table), 0.6, really, 400, batch=1)
    best = max(sum(0.6**place for place in range(k + 1)) / really(1, k) for k in (1, 2, 3, 5, 8))
    assert tokens / seconds > 0.95 * best > 1.05 * plain_rate(really, 1)


def test_slow_first_steps_are_not_taken_for_the_hosts_work() -> None:
    costs = StepCosts(CostTable(Curve(((1, 1.0), (9, 2.0)))))
    for _ in range(REFERENCE):
        costs.observe(1, 0, 1, 2.0)
    for _ in range(300):
        costs.observe(1, 0, 1, 1.0)
    assert costs.scale(1) == pytest.approx(1.0, rel=0.05) and costs.of(1, 8) == pytest.approx(2.0, rel=0.05)


def test_a_trial_is_over_by_its_own_drafts() -> None:
    """Others may have a draft length of their own."""
    seqs = sequences(6)
    trial, right = Trial(frozenset(seqs[:2]), 3), Decision([0], [0, 0])
    wrong = Verdict([Decision([], [0])] * 6)
    others = Draft.chains([[], [], [0], [0], [0], [0]])
    trial.observe(FinishedStep(Batch(seqs, [1] * 6, [1] * 6), others, wrong, 0, 0))
    assert not trial.over and not trial.steps
    own = Draft.chains([[0], [0], [0], [0], [0], [0]])
    for _ in range(2):
        trial.observe(
            FinishedStep(Batch(seqs, [1] * 6, [1] * 6), own, Verdict([*wrong.decisions[:2], *[right] * 4]), 0, 0)
        )
    assert trial.over, "four drafts of its own had no right token"


def test_what_the_table_does_not_know_of_drafting_is_the_same_for_other_lengths() -> None:
    """A drafter of a user's own: the table knows rows alone, and its drafts take a step's time, however long they
    are."""
    table = CostTable(Curve(((1, 1.0), (9, 1.2))))

    def really(batch: int, k: int) -> float:
        return table.step(batch, k) + bool(k)

    tokens, seconds, _ = simulate(AutoLength(8, table=table), 0.9, really, 400, batch=1)
    assert tokens / seconds > 0.93 * sum(0.9**place for place in range(9)) / really(1, 8)


def test_what_a_heads_drafts_take_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_costs, "_KEPT", KeptTable("costs"))
    options = {"max_batch": 4, "device": "cpu", "dtype": "float32", "cache_memory": "16MiB"}
    table = LLM(bundled.target(), bundled.named("clover"), **options).engine.draft_lengths.costs.table
    assert [*table.drafts] == [1, 2, 3, 5, 8] and all(curve.valid for curve in table.drafts.values())
    assert table.step(1, 2) > table.target(3)
    about = {"about": "", "levels": 4, "most": 1, "shared": False}
    contents: list[tuple[dict[str, list[list[float]]], float | None]] = [
        ({}, None), ({"1": [[1, -1.0]]}, None), ({"0": [[1, 0.25]]}, None), ({"2": [[1, 0.25]]}, 0.25),
    ]  # fmt: skip
    for content, wanted in contents:
        kept = measured_costs._kept_drafts({**about, "drafts": content})
        assert (None if kept is None else kept.drafts[2](1)) == wanted
    monkeypatch.setattr(measured_costs, "_KEPT_DRAFTS", KeptTable("drafts"))
    monkeypatch.setattr(measured_costs, "draft_curves", None)  # it is not measured again
    again = LLM(bundled.target(), bundled.named("clover"), **options).engine.draft_lengths.costs.table
    assert again.drafts == table.drafts
    (kept,) = measured_costs.kept_drafts(bundled.named("clover"))
    assert kept.drafts == table.drafts and kept.about.startswith("float32") and (kept.levels, kept.most) == (4, 4)
    shape = shape_of_draft(bundled.named("clover"), torch.float32, CPU)
    known = Measured.of(str(bundled.target()), [shape], torch.float32, CPU, 4)
    assert known.costs[shape.name].drafts == table.drafts  # plans use it, too
    name, here = bundled.named("clover"), torch.device("cpu")
    assert measured_costs.drafts_for(name, 4, torch.float32, here) and not measured_costs.drafts_for(
        name, 2, torch.float32, here
    ), "a head that guesses fewer tokens takes less"


def test_what_is_kept_knows_how_often_there_was_a_draft() -> None:
    """An n-gram lookup often finds nothing: plans must not take every step for a drafted one."""
    auto, (seq,), table = AutoLength(8, table=CPU_LIKE), sequences(1), CPU_LIKE
    for step in range(200):
        found = [[0, 0]] if step % 4 == 0 else [[]]
        decision = Decision([0, 1], [0, 0, 0]) if step % 4 == 0 else Decision([], [0])
        auto.observe(FinishedStep(Batch([seq], [1], [2]), Draft.chains(found), Verdict([decision]), 0, 0), 1.0)
    history = auto.history
    assert history is not None and history.found == pytest.approx(0.25, abs=0.05)
    assert history.accepted(2) == pytest.approx(0.5, abs=0.12)
    begun = AutoLength(8, table=table, history=history)
    assert begun.acceptance.survival(None, 1)[0] == pytest.approx(0.25, abs=0.06)


def test_kept_acceptance_tells_chains_from_trees() -> None:
    chains = History(500, (0.8, 0.7, 0.6), chains=4)
    assert chains.accepted(2) == pytest.approx(0.8 + 0.56) and chains.accepted(0) == 0.0
    assert chains.accepted(24) == pytest.approx(chains.accepted(4) * math.log(25) / math.log(5))
    both = replace(chains, trees=((24, 3.0),))
    assert both.accepted(24) == pytest.approx(3.0) and both.accepted(3) == chains.accepted(3)
    assert replace(both, chains=0).accepted(3) == pytest.approx(3.0 * math.log(4) / math.log(25))
    assert History(500, trees=((24, 3.0),), chains=4).accepted(2) is None


def test_drafting_stops_where_rows_cost_too_much() -> None:
    def dear(batch: int, k: int) -> float:
        return 1.0 + k

    tokens, seconds, _ = simulate(AutoLength(8), 0.6, dear, steps=2000)
    assert tokens / seconds > 0.98 * plain_rate(dear)


def test_a_drafter_that_turns_bad_is_left() -> None:
    def cheap(batch: int, k: int) -> float:
        return 1.0 + 0.15 * k

    chooser = AutoLength(8)
    simulate(chooser, 0.9, cheap, steps=300)
    tokens, seconds, chosen = simulate(chooser, 0.05, cheap, steps=1500)
    assert sum(k > 0 for k in chosen[400:]) < 100
    assert tokens / seconds > 0.9 * plain_rate(cheap)


def test_the_length_is_near_the_best_fixed_one() -> None:
    def cost(batch: int, k: int) -> float:
        return 1.0 + 0.2 * k

    def fixed(k: int, rate: float = 0.75) -> float:
        return sum(rate**j for j in range(k + 1)) / cost(4, k)

    tokens, seconds, _ = simulate(AutoLength(8), 0.75, cost, steps=2000)
    assert tokens / seconds / 4 > 0.93 * max(map(fixed, range(9)))


def test_texts_do_not_depend_on_it() -> None:
    prompts, params = bundled.prompts()[:3], SamplingParams(max_tokens=40, ignore_eos=True)
    plain = LLM(bundled.target(), device="cpu", dtype="float32").generate(prompts, params)
    llm = LLM(bundled.target(), bundled.draft(), k="auto", device="cpu", dtype="float32")
    assert [a.token_ids for a in llm.generate(prompts, params)] == [a.token_ids for a in plain]
    assert "batch" in llm.explain()["draft_length"] or "drafting" in llm.explain()["draft_length"]


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="k"):
        LLM(bundled.target(), bundled.draft(), k="many")


@pytest.mark.parametrize("taken", [0.0, 1e12])
@pytest.mark.parametrize("most", [0, 1, 8])
def test_absurd_times_break_nothing(taken: float, most: int) -> None:
    for table in (None, CostTable(Curve(((1, 0.0),)), steps={(4, 0): 0.0}), CostTable(Curve(((1, 1e30), (2, 1e300))))):
        tokens, _, chosen = simulate(AutoLength(most, table=table), 0.7, lambda batch, k: taken, batch=9)
        assert tokens >= 9 * 400 and max(chosen) <= most


def test_damaged_tables_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_costs, "_KEPT", KeptTable("costs"))
    model, config = load_model(bundled.draft(), torch.float32, torch.device("cpu")), EngineConfig(max_batch=1, k=1)
    assert measured_costs.cost_table(model, None, config)
    (key, kept), file = json.loads((tmp_path / "costs.json").read_text()).popitem(), tmp_path / "costs.json"
    no_points = {**kept, "table": {**kept["table"], "target": []}}
    for damaged in (5, [], {}, {**kept, "table": None}, {**kept, "table": {"target": "x"}}, no_points):
        file.write_text(json.dumps({key: damaged}))
        assert measured_costs.kept_costs(str(bundled.draft())) == []
        monkeypatch.setattr(measured_costs, "_KEPT", KeptTable("costs"))
        table = measured_costs.cost_table(model, None, config)
        assert table is not None and table.target.points
        assert [found for _, found in measured_costs.kept_costs(str(bundled.draft()))] == [table]


@pytest.mark.parametrize(
    "change",
    [{"target": [[0, 1.0]]}, {"target": [[4, 1.0], [1, 2.0]]}, {"target": [[1, float("nan")]]}, {"draft": [[1, -1.0]]},
     {"target": [[1, float("inf")]]}, {"steps": [["a", 1, 1.0]]}, {"steps": [[1, 0, "x"]]}, {"steps": [[1, 0, 0.0]]}],
    ids=str,
)  # fmt: skip
def test_impossible_costs_are_no_table(change: dict[str, object]) -> None:
    kept = CostTable(Curve(((1, 1.0), (8, 2.0))), steps={(4, 0): 1.0}).as_json()
    assert CostTable.of_json(kept).steps == {(4, 0): 1.0}
    with pytest.raises(ValueError):
        CostTable.of_json({**kept, **change})


def test_sentences_count_one_token() -> None:
    lengths = AutoLength(1)
    lengths.k = 1
    assert lengths.brief == "1 draft token"
    assert lengths._why(2, 1, {0: 1.0, 1: 1.5}) == "1 draft token: 1.50 times plain decoding at batch 2"


class Picky(DraftLengths):
    """Three draft tokens, of which hardly any is worth a row; another pass of the drafter always is."""

    @property
    def confidence(self) -> Confidence:
        return Confidence(0.9, 0.0, tuple((n + 0.5) / 10 for n in range(10)))

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [3] * len(seqs)


class Slow(DraftLengths):
    """Choosing takes one second and learning two; remembers the time of each step."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.seconds = clock, list[float | None]()

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        self.clock[0] += 1.0
        return [0] * len(seqs)

    def observe(self, step: FinishedStep, seconds: float | None) -> None:
        self.clock[0] += 2.0
        self.seconds.append(seconds)


def test_an_eager_step_takes_what_the_host_needs_around_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    lengths = Slow(clock)
    engine = build_engine(TableModel(), draft=TableModel(seed=1), draft_lengths=lengths)
    run(engine, requests_of([[1, 2, 3]], [SamplingParams(max_tokens=4, ignore_eos=True)], [0]))
    assert lengths.seconds == [None, 3.0, 3.0, 3.0], "the first one reads the prompt"
    clock[0] += 100.0
    lengths.seconds.clear()
    run(engine, requests_of([[1, 2, 3]], [SamplingParams(max_tokens=3, ignore_eos=True)], [1]))
    assert lengths.seconds == [None, 3.0, 3.0], "a pause between two requests is not a step's"


def test_a_draft_ends_where_a_token_was_taken_back() -> None:
    model = TableModel()
    prompts, params = random_prompts(5, model.vocab), [SamplingParams(max_tokens=20)] * 5
    config = EngineConfig(cache_memory="4MiB")
    engine = build_engine(model, draft=TableModel(seed=1), config=config, draft_lengths=Picky())
    seqs = run(engine, requests_of(prompts, params, [0] * 5))
    assert_same(seqs, references(model, prompts, params, [0] * 5))


def test_a_trial_drafts_all_it_asks_for() -> None:
    """Whatever tokens cost before: what they bring is to be found out."""
    chooser = AutoLength(8, "explicit", CostTable(Curve(((1, 1.0), (64, 4.0))), measured=False))
    simulate(chooser, 0.8, lambda batch, k: 1.0 + 0.1 * k, batch=2)
    assert chooser.k and chooser.confidence is not None and chooser.confidence.least > 0
    asked = set()
    for _ in range(40):  # a batch whose steps have not been measured
        simulate(chooser, 0.8, lambda batch, k: 1.0 + 0.1 * k, steps=1, batch=16)
        if chooser.reason.startswith("trying") and chooser.confidence is not None:
            asked.add(chooser.confidence[:2])
    assert asked == {(0.0, 0.0)}


def test_large_batches_are_not_asked_for_confidence() -> None:
    table = CostTable(Curve(((1, 1.0), (64, 4.0))), Curve(((1, 0.2), (64, 0.2))))
    for batch in (1, 2, 4, 8):
        chooser = AutoLength(8, "both", table)
        simulate(chooser, 0.8, lambda batch, k: 1.0 + 0.1 * k, batch=batch)
        assert chooser.k and (chooser.confidence is not None) == (batch == 1)


def test_a_table_that_is_off_is_found_out() -> None:
    """It says that rows are nearly free; they are not, and without plain steps those would be thought as slow."""

    def cost(batch: int, k: int) -> float:
        return 1.0 + 0.6 * k

    for rate in (0.5, 0.7):
        chooser = AutoLength(8, "off", CostTable(Curve(((1, 1.0), (72, 1.1)))))
        tokens, seconds, _ = simulate(chooser, rate, cost, steps=1500, batch=8)
        assert tokens / seconds > 0.98 * plain_rate(cost, 8)


def test_drafts_that_only_the_table_forbids_are_tried() -> None:
    """Drafts paid at batch 1; at batch 4 the table forbids them, and nothing else does."""

    def cost(batch: int, k: int) -> float:
        return 1.0 + 0.1 * k

    chooser = AutoLength(8, "off", CostTable(Curve(((1, 1.0), (7, 1.5), (8, 4.0), (64, 9.0)))))
    simulate(chooser, 0.7, cost, steps=200, batch=1)
    tokens, seconds, _ = simulate(chooser, 0.7, cost, steps=100, batch=4)
    assert tokens / seconds > 1.4 * plain_rate(cost, 4)


def test_slow_passes_do_not_raise_a_cost_table() -> None:
    measured = [(1, 5.0), (2, 1.1), (4, 1.2), (8, 9.0), (16, 9.0), (32, 4.0)]
    assert plausible(measured) == [(1, 1.1), (2, 1.1), (4, 1.2), (8, 2.4), (16, 4.0), (32, 4.0)]


def test_rows_are_weighed_against_drafts_that_were_found() -> None:
    """Lookups find a draft every third time, and its token is right every third time: a row of a tenth pays."""
    chooser = AutoLength(4, "implicit", CostTable(Curve(((1, 1.0), (2, 1.1), (40, 4.9)))))
    seqs = sequences(1)
    for n in range(300):
        chooser.acceptance.found.add(n % 3 == 0)
        if n % 9 < 3:
            chooser.acceptance.observe(seqs[0], 1, int(n % 9 == 0))
    for _ in range(REFERENCE):
        chooser.observe(FinishedStep(Batch(seqs, [1], [0]), Draft.empty(1), Verdict([Decision([], [0])]), 1, 0), 1.0)
    assert set(chooser.choose(seqs)) == {1}


def test_trees_of_auto_grow_with_the_room_in_a_batch() -> None:
    found = [auto_tree_nodes(batch) for batch in range(1, 257)]
    assert set(found) <= set(LADDER) and found == sorted(found, reverse=True)
    assert found[0] == 24 and found[63] == 12 and found[255] == AUTO_MAX
    assert all(nodes == AUTO_MAX or batch * (nodes + 1) <= AUTO_ROWS for batch, nodes in enumerate(found, 1))
    assert LLM(bundled.target(), bundled.named("clover"), device="cpu").config.k == AUTO_MAX  # rows cost time on a CPU


def test_unknown_trees_promise_less_per_node_the_larger_they_are() -> None:
    gains = TreeGains()
    per_node = [gains.of(nodes) / nodes for nodes in LADDER[1:]]
    assert gains.of(0) == 0.0 and per_node == sorted(per_node, reverse=True)
    gains.observe(8, 3)
    assert gains.of(0) == 0.0 and gains.of(24) > gains.of(8) > gains.of(2) > 0.0


class OffForLong(DraftLengths):
    """No drafts, and none for a while."""

    off_for_long = True

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [0] * len(seqs)


@pytest.mark.parametrize("skips", [False, True])
def test_hidden_states_are_left_out_for_drafters_that_can_do_without(skips: bool) -> None:
    class Watching(Drafter):
        wants, skips_states = (FINAL,), skips

        def propose(self, batch: Batch) -> Draft:
            raise AssertionError("no drafts are wanted")

        def observe(self, batch: Batch, draft: Draft, result: Result, verdict: Verdict) -> None:
            assert (FINAL in result.states) == (not skips)
            seen.append(len(batch))

    seen: list[int] = []
    engine = build_engine(load_model(bundled.target(), torch.float32, CPU), Watching(), draft_lengths=OffForLong())
    engine.add(Request((1, 2, 3), SamplingParams(max_tokens=3, ignore_eos=True)))
    while engine.busy:
        engine.step()
    assert seen == [1, 1, 1]


def captured_table(joining: float) -> CostTable:
    """Steps that read prompts take this much longer with 3 nodes and more, and no longer with 2."""
    steps = {(size, k): 1.0 + 0.1 * k for size in (8, 16) for k in (0, 1, 2, 3, 5, 8)}
    kinds = {k: [Joining(min(k, 5), 32, steps[8, min(k, 5)] + joining * (k > 2))] for k in (0, 1, 2, 3, 5, 8)}
    return CostTable(Curve(((16, 1.0),), True), steps=steps, joining={(8, k): kind for k, kind in kinds.items()})


@pytest.mark.parametrize(("joining", "prompts", "short"), [(0.0, True, False), (3.0, True, True), (3.0, False, False)])
def test_what_steps_take_in_which_sequences_join_counts_as_often_as_they_do(
    joining: float, prompts: bool, short: bool
) -> None:
    chooser, seqs = AutoLength(8, "implicit", captured_table(joining)), sequences(8)
    source, chosen = random.Random(0), []
    for n in range(400):
        lengths = chooser.choose(seqs)
        accepted = [next((i for i in range(k) if source.random() > 0.8), k) for k in lengths]
        verdict = Verdict([Decision([*range(good)], [0] * (good + 1)) for good in accepted])
        k, joins = max(lengths), prompts and n % 2 == 0
        rows = 8 * (k + 1) + 32 * joins
        step = FinishedStep(
            Batch(seqs, [1] * 8, lengths), Draft.chains([[0] * count for count in lengths]), verdict, rows, 0, True,
            prompt_rows=32 * joins, prompts_read=24 * joins,
        )  # fmt: skip
        chooser.observe(step, None if joins else 1.0 + 0.1 * k)
        chosen.append(k)
    assert (max(chosen[200:]) <= 2) is short, chosen[200:]


def test_a_shorter_length_that_was_not_tried_is_tried_where_it_may_be_better() -> None:
    """What steps of 5 take tells only about what those of 3 do, which take less than the table says."""
    table = CostTable(Curve(((16, 1.0),), True), steps={(8, k): 1.0 + 0.1 * k for k in (0, 1, 2, 3, 5, 8)})
    known = {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.15, 5: 1.5, 8: 1.8}
    for chains in (0, 8):
        chooser = AutoLength(8, table=table, chains=chains)
        tokens, seconds, chosen = simulate(chooser, 0.7, lambda batch, k: known[k], 800, 8)
        assert 3 in chosen and tokens / seconds > 0.95 * 8 * sum(0.7**n for n in range(4)) / known[3]


@pytest.mark.parametrize(("taken", "again"), [(1.1, False), (1.3, True)])
def test_captured_plain_steps_are_measured_twice_if_they_are_not_what_the_table_says(taken: float, again: bool) -> None:
    costs = StepCosts(CostTable(Curve(((8, 1.0),), True), steps={(8, 0): 1.0, (8, 2): 1.5}))
    for _ in range(5):
        costs.observe(8, 2, 24, 1.5)
    for _ in range(REFERENCE):
        costs.observe(8, 0, 8, taken)
    assert costs.doubted(8) is again
    for _ in range(STALE_NEW):
        costs.observe(8, 2, 24, 1.5)
    assert costs.known(8, 0) is not again


def test_trees_tell_what_chains_would_have_given() -> None:
    """Of each node the first child is the one that a chain has."""
    assert best_path([-1, -1, 0, 0, 1, 3]) == [0, 2] and best_path([]) == []
    chooser, (seq,) = AutoLength(24, chains=8), sequences(1)
    tree = Draft([[5] * 5], [[-1, -1, 0, 2, 0]])  # the chain 0 2 3, and 1 and 4 beside it
    for nodes in ([0, 2, 3], [0, 2], [0, 4], [1]):
        step = FinishedStep(Batch([seq], [1], [5]), tree, Verdict([Decision(nodes, [0] * (len(nodes) + 1))]), 6, 0)
        chooser._learn_drafts(step, asked=True)
    seen = [(rate.hits, rate.tries) for rate in chooser.acceptance.positions]
    assert [round(tries - Rate().tries) for _, tries in seen] == [4, 3, 2]
    assert round(seen[0][0] - Rate().hits) == 3
