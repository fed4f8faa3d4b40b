"""Sequences that join in captured steps, which read their prompts: run on the CPU by the kernels' twins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from faircopy import SamplingParams, capture
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.base import Drafter
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.kernels.gpu.suite import TWINS
from faircopy.model.fused import Fused
from faircopy.planner import AutoLength
from faircopy.planning.memory import JOINING_ROWS
from faircopy.replay import graphs
from faircopy.replay.in_flight import InFlightStep
from faircopy.types import Request, Sequence
from tests.helpers import head_for, load, random_prompts
from tests.test_replay import fused, shorter

METHODS = ["none", "ngram", "model", "clover", "eagle3", "medusa"]
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": {5: 4.0}, "min_tokens": 4},
)


def requests(vocab: int, count: int = 14, tokens: int = 18) -> list[Request]:
    """Prompts of 1 to 30 tokens, texts of many lengths, four kinds of parameters."""
    prompts = random_prompts(count, vocab, seed=3, longest=30)
    return [
        Request(tuple(prompt), SamplingParams(max_tokens=4 + (7 * n) % tokens, ignore_eos=True, **KINDS[n % 4]), n)
        for n, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., str]) -> str:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def model(folder: str) -> Fused:
    return shorter(fused(folder), 64)


@pytest.fixture(scope="module")
def plain(model: Fused) -> list[tuple[list[int], Any]]:
    engine = build_engine(model, config=EngineConfig(cache_memory="8MiB", graphs=False, max_batch=1), suite=TWINS)
    return texts(engine, [engine.add(request) for request in requests(model.vocab)])


def build(folder: str, model: Fused, method: str, lengths: AutoLength | None = None, **options: Any) -> Engine:
    config = EngineConfig(**{"max_batch": 4, "cache_memory": "8MiB", "k": 0 if method == "none" else 3, **options})
    own: Drafter | None = NgramDrafter() if method == "ngram" else None
    drafts = {"model": model} if method == "model" else {}
    head = head_for(folder, load(folder), method) if method in ("clover", "eagle3", "medusa") else None
    draft = drafts.get(method, head)
    return build_engine(model, own, draft=draft, config=config, suite=TWINS, draft_lengths=lengths)


def texts(engine: Engine, seqs: list[Sequence]) -> list[tuple[list[int], Any]]:
    for _ in range(3000):
        if not engine.busy:
            return [(seq.output, [sorted(line) for line in seq.logprobs]) for seq in seqs]
        engine.step()
        engine.tables.check()
    raise AssertionError("the engine does not come to an end")


def watch(engine: Engine) -> list[InFlightStep]:
    """All captured steps that are started."""
    assert engine.captured is not None
    steps: list[InFlightStep] = []
    start = engine.captured.start

    def started(*args: Any, **named: Any) -> InFlightStep:
        steps.append(start(*args, **named))
        return steps[-1]

    engine.captured.start = started  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("warm", [False, True])
def test_texts_that_join_are_plain_decodings(folder: str, model: Fused, plain: Any, method: str, warm: bool) -> None:
    engine = build(folder, model, method)
    assert engine.captured is not None
    if warm:
        engine.warm_up()
    made, steps = engine.captured.graphs.keys, watch(engine)
    assert texts(engine, [engine.add(request) for request in requests(model.vocab)]) == plain
    joined = [step for step in steps if step.joined]
    assert len(joined) > 5 and sum(step.prompt_rows for step in joined) > 60
    assert engine.meter.steps - engine.meter.captured_steps <= 1, "prompts fit into captured steps"
    assert not warm or engine.captured.graphs.keys == made, "nothing is captured on a request's time"


@pytest.mark.parametrize("method", METHODS)
def test_prompts_may_share_the_launches_of_the_batch_slots(
    folder: str, model: Fused, plain: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, tiles of both are those of one plan; beside trees they have plans of their own."""
    monkeypatch.setattr(capture, "shared_height", lambda rows, *about: max(4, 1 << (rows - 1).bit_length()))
    engine = build(folder, model, method)
    steps = watch(engine)
    assert texts(engine, [engine.add(request) for request in requests(model.vocab)]) == plain
    joined = [step.graph for step in steps if step.graph.prompts is not None]
    assert len(joined) > 5
    assert all(graph.prompts.inputs.one_launch is (graph.trees is None) for graph in joined if graph.prompts)


@pytest.mark.parametrize("method", METHODS)
def test_steps_that_read_prompts_are_tried_with_made_up_ones(
    folder: str, model: Fused, plain: Any, method: str
) -> None:
    """All rows are those of prompts then, in places of their own, and nothing is left of them."""
    engine = build(folder, model, method)
    assert engine.captured is not None
    kinds, scratch = engine.captured.graphs, engine.target.layout.scratch  # type: ignore[attr-defined]
    k = 0 if method == "none" else 3
    seqs = [engine.add(request) for request in requests(model.vocab)]
    for _ in range(3):
        engine.step()
    for rows in (1, kinds.longest_joining):
        key = kinds.joining(4, k, rows)
        assert key is not None
        graph, step = kinds.get(key)
        with kinds.kept(graph):
            kinds.pretend(graph)
            for prompts in filter(None, (graph.prompts, graph.drafter_prompts)):
                found = prompts.inputs.tensors
                assert set(found["slots"].tolist()) == {scratch}
                tiled = torch.cat([found[name].flatten() for name in found if name.startswith("rows")])
                first = prompts.first
                assert sorted(row for row in tiled.tolist() if row >= 0) == [*range(first, first + prompts.count)]
            step.start()
    assert texts(engine, seqs) == plain


def test_plans_know_how_many_rows_of_prompts_steps_have_room_for() -> None:
    kinds = product(range(1, 257), ((0, 1, 2, 3, 5, 8), (0, 3), (0, 5), (0, 8), (0,)), (1, 160))
    keys = [graphs.joining_key(size, k, rows, known) for size, known, rows in kinds for k in known]
    assert max(key.prompts for key in keys if key is not None) <= max(JOINING_ROWS)


def test_made_up_prompts_fit_into_a_short_context(folder: str, model: Fused) -> None:
    """One batch slot has one of them: it is no longer than the model's context."""
    engine = build(folder, model, "none", max_batch=1)
    assert engine.captured is not None
    kinds = engine.captured.graphs
    key = kinds.joining(1, 0, kinds.longest_joining)
    assert key is not None and key.prompts > model.context
    graph, step = kinds.get(key)
    with kinds.kept(graph):
        kinds.pretend(graph)
        assert graph.prompts is not None
        assert int(graph.prompts.inputs.tensors["positions"].max()) == model.context - 2
        step.start()


@pytest.mark.parametrize("method", METHODS)
def test_scarce_pages_change_nothing(folder: str, model: Fused, plain: Any, method: str) -> None:
    layers = [layer for layout in build(folder, model, method).layouts for layer in layout.layers]
    page = 8 * sum(2 * 4 * layer.kv_heads * layer.head_dim for layer in layers)
    engine = build(folder, model, method, page=8, cache_memory=8 * page)
    assert texts(engine, [engine.add(request) for request in requests(model.vocab)]) == plain
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("method", ["model", "clover", "eagle3"])
def test_drafts_behind_a_prompt_read_in_a_captured_step_are_those_of_an_eager_one(
    folder: str, model: Fused, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text at a time: what was drafted and accepted shows that the drafter has read the whole prompt."""

    def counts() -> list[tuple[int, int]]:
        engine, found = build(folder, model, method), []
        for request in requests(model.vocab, 6, 30):
            seq = engine.add(request)
            texts(engine, [seq])
            found.append((seq.steps, seq.accepted))
        return found

    joined = counts()
    monkeypatch.setattr(graphs, "JOINING", {})
    eager = counts()
    if method == "model":  # it drafts in the step that reads the prompt, too
        assert all(mine[0] <= other[0] for mine, other in zip(joined, eager, strict=True))
    else:
        assert joined == eager and sum(accepted for _, accepted in joined) > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_shrinks_runs_in_smaller_graphs(
    folder: str, model: Fused, plain: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences move to free batch slots with all that the device keeps of them: drafts stay the same, too."""

    def counts(engine: Engine) -> list[tuple[int, int]]:
        seqs = [engine.add(request) for request in requests(model.vocab)]
        assert texts(engine, seqs) == plain
        return [(seq.steps, seq.accepted) for seq in seqs]

    engine = build(folder, model, method, max_batch=16)
    engine.warm_up()
    assert engine.captured is not None
    sizes, steps = sorted({size for size, _ in engine.captured.graphs.captured_sizes}), watch(engine)
    found = counts(engine)
    steady = [step for step in steps if not step.joined]
    assert all(step.graph.size == next(n for n in sizes if n >= len(step.plan.seqs)) for step in steady)
    moves = [
        seq
        for one, other in pairwise(steps)
        for seq, n in one.batch_slots.items()
        if other.batch_slots.get(seq, n) != n
    ]
    assert len(moves) > 3
    monkeypatch.setattr(graphs, "BUCKETS", (16,))
    assert counts(build(folder, model, method, max_batch=16)) == found


def test_a_known_prefix_is_not_read_again(folder: str, model: Fused) -> None:
    engine = build(folder, model, "eagle3", page=8)
    steps, prompt = watch(engine), tuple(range(20, 49))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first, second = (texts(engine, [engine.add(Request(prompt, params, 0))]) for _ in range(2))
    assert first == second
    rows = [step.prompt_rows for step in steps if step.joined]
    assert rows == [len(prompt) - 1, len(prompt) - 1 - 24] and engine.scheduler.reused == 24


def test_a_prefix_that_only_the_target_knows_is_read_by_the_drafter(folder: str, model: Fused) -> None:
    """It was read for a request without drafts, and all but the last token of the prompt is in full pages."""
    engine = build(folder, model, "model", page=8, k=3)
    prompt, params = tuple(range(20, 37)), SamplingParams(max_tokens=20, ignore_eos=True)
    texts(engine, [engine.add(Request(prompt, params, 0, k=0))])
    other = engine.add(Request((3, 4, 5), SamplingParams(max_tokens=30, ignore_eos=True), 1))
    for _ in range(2):
        engine.step()
    late = engine.add(Request(prompt, params, 0))  # joins behind a step in flight
    texts(engine, [other, late])
    assert late.accepted > 0.8 * late.drafted > 0, "a model drafts for itself: nearly everything must be accepted"


@pytest.mark.parametrize("where", ["start", "collect"])
@pytest.mark.parametrize("method", ["none", "model", "eagle3"])
def test_a_step_that_fails_costs_time_and_no_text(
    folder: str, model: Fused, plain: Any, method: str, where: str
) -> None:
    engine = build(folder, model, method)
    assert engine.captured is not None
    inner, fails = getattr(engine.captured, where), iter([False] * 6 + [True] + [False] * 5 + [True])

    def failing(*args: Any, **named: Any) -> Any:
        if next(fails, False):
            raise RuntimeError("once")
        return inner(*args, **named)

    setattr(engine.captured, where, failing)
    seqs, errors = [engine.add(request) for request in requests(model.vocab)], 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            errors += 1
        engine.tables.check()
    assert errors == 2 and texts(engine, seqs) == plain
    if method == "model":
        assert engine.meter.accepted > 0.8 * engine.meter.drafted, "what a step that failed had not read is read again"


def test_one_that_leaves_while_its_prompt_is_read(folder: str, model: Fused, plain: Any) -> None:
    engine = build(folder, model, "model")
    seqs = [engine.add(request) for request in requests(model.vocab)]
    gone: list[Sequence] = []
    while engine.busy:
        engine.step()
        step = engine._in_flight
        if step is not None and step.joined and len(gone) < 2:
            gone.append(step.plan.seqs[-1])
            engine.abort(gone[-1])
    kept = [n for n, seq in enumerate(seqs) if seq not in gone]
    assert len(gone) == 2 and [texts(engine, seqs)[n] for n in kept] == [plain[n] for n in kept]


@pytest.mark.parametrize("method", ["ngram", "model", "eagle3"])
def test_measured_lengths_and_joining(folder: str, model: Fused, plain: Any, method: str) -> None:
    engine = build(folder, model, method, AutoLength(5), k=5)
    engine.warm_up()
    steps = watch(engine)
    assert texts(engine, [engine.add(request) for request in requests(model.vocab)]) == plain
    assert any(step.joined for step in steps)


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"logprobs": 25}])
def test_prompts_that_need_the_host_are_read_by_it(folder: str, model: Fused, params: dict[str, Any]) -> None:
    engine = build(folder, model, "none")
    steps = watch(engine)
    texts(engine, [engine.add(Request((4, 5, 6), SamplingParams(max_tokens=5, **params), 0))])
    assert engine.meter.steps > engine.meter.captured_steps and not any(step.joined for step in steps)


def test_graphs_hold_what_is_asked_of_them() -> None:
    """Every number of rows up to the largest class has a graph, which exists among those that are captured."""
    for captured in ([], [0], [0, 4], [0, 8], [0, 1, 2, 3, 5, 8, 12]):
        for size in (8, 16, 32, 64):
            for k in captured or (0, 1, 4, 9):
                for rows in (0, 1, 40, 41, 100, 160):
                    found = graphs.joining_key(size, k, rows, captured)
                    assert found is not None and found.prompts >= rows
                    assert (found.k > 0) == (k > 0) and (not captured or found.k in captured)
                    assert graphs.joining_key(size, found.k, rows, captured).k == found.k  # type: ignore[union-attr]
        assert graphs.joining_key(8, 0, 1000, captured) is None
