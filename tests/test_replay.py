"""Captured steps, run on the CPU by the kernels' twins: the same tokens as plain decoding."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from faircopy import bundled
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.draft_length import DraftLengths
from faircopy.drafters.base import Drafter, NoDrafter
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine
from faircopy.kernels.gpu.suite import TWINS
from faircopy.layout.pool import PagePool
from faircopy.meter import Meter
from faircopy.model import loader
from faircopy.model.base import Model
from faircopy.model.fused import Fused, fused_weights
from faircopy.model.transformers_backend import TransformersModel
from faircopy.model.weights import Source, decoder_spec
from faircopy.replay import graphs, runner
from faircopy.replay import passes as host_passes
from faircopy.replay.graphs import GraphKey
from faircopy.replay.steps import ROWS
from faircopy.testing.simulated_device import FreeModel
from faircopy.types import Batch, Draft, Request, SamplingParams, Sequence
from tests import zoo

PROMPTS = [[5, 9, 9, 5, 9], [7], list(range(40, 75)), [3, 4] * 20, [11, 12, 13]]


def fused(folder: str) -> Fused:
    """A checkpoint in the GPU's decoder, with torch's own products."""
    config, cpu = loader.load_config(Path(folder)), torch.device("cpu")
    tensors = loader.CheckpointTensors(Path(folder), torch.float32, cpu)
    spec, size = decoder_spec(config, *loader.rope_frequencies(config)), config.vocab_size
    source = Source(folder, spec, tensors, size, config.max_position_embeddings, torch.float32, False)
    return Fused(fused_weights(source))


@pytest.fixture(autouse=True)
def every_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack the smallest batches too."""
    monkeypatch.setattr(graphs, "FEW_ROWS", 0)


@pytest.fixture
def prompts_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps read no prompts."""
    monkeypatch.setattr(graphs, "JOINING", {})


@pytest.fixture(scope="module")
def pair() -> tuple[Fused, Fused]:
    return fused(str(bundled.draft())), fused(str(bundled.draft()))


def build(pair: tuple[Model, Model], drafter: str | Drafter | None, **options: object) -> Engine:
    lengths = options.pop("draft_lengths", None)
    settings = {"max_batch": 4, "cache_memory": "4MiB", **options}
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    own = NgramDrafter() if drafter == "ngram" else drafter if isinstance(drafter, Drafter) else None
    draft = pair[1] if drafter == "model" else None
    more: dict[str, Any] = {"eos": frozenset({0}), "suite": TWINS, "draft_lengths": lengths}
    return build_engine(pair[0], own, draft=draft, config=config, **more)


def finish(engine: Engine, seqs: list[Sequence]) -> list[list[int]]:
    for _ in range(2000):
        if not engine.busy:
            return [seq.output for seq in seqs]
        engine.step()
        engine.tables.check()
    raise AssertionError("the engine does not come to an end")


def ask(engine: Engine, params: SamplingParams, k: int | None = None) -> list[Sequence]:
    return [engine.add(Request(tuple(p), params, seed=n, k=k)) for n, p in enumerate(PROMPTS)]


def count_starts(engine: Engine) -> list[None]:
    """A list that grows by one with every captured step."""
    starts: list[None] = []
    start = engine.captured.start

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        starts.append(None)
        return start(*args, **kwargs)

    engine.captured.start = counted
    return starts


GREEDY = SamplingParams(max_tokens=23)
WARM = SamplingParams(max_tokens=23, temperature=0.8)


@pytest.fixture(scope="module")
def plain(pair: tuple[Fused, Fused]) -> dict[SamplingParams, list[list[int]]]:
    def alone(params: SamplingParams) -> list[list[int]]:
        engine = build(pair, None, k=0, max_batch=1, graphs=False)
        return finish(engine, ask(engine, params))

    return {repr(params): alone(params) for params in (GREEDY, WARM)}  # type: ignore[misc]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("drafter,k", [(None, 0), ("ngram", 3), ("ngram", 7), ("model", 1), ("model", 4)])
def test_replayed_steps_write_what_plain_decoding_writes(pair, plain, params, drafter, k) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, drafter, k=k)
    assert engine.captured is not None
    assert finish(engine, ask(engine, params)) == plain[repr(params)]
    assert engine.meter.steps > 5
    if drafter == "model" and k == 4:
        assert engine.meter.acceptance > 0.9, "a model drafts for itself: nearly everything must be accepted"


def test_replay_is_really_used(pair, plain) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, "model", k=4)
    starts = count_starts(engine)
    finish(engine, ask(engine, GREEDY))
    assert len(starts) >= engine.meter.steps // 2


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_scarce_pages_preempt_and_change_nothing(pair, plain, drafter) -> None:  # type: ignore[no-untyped-def]
    models = pair if drafter == "model" else pair[:1]
    per_token = sum(2 * 4 * layer.kv_heads * layer.head_dim for model in models for layer in model.layers)
    engine = build(pair, drafter, k=4, page=8, cache_memory=per_token * 8 * 14)
    assert finish(engine, ask(engine, WARM)) == plain[repr(WARM)]
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_joining_aborting_and_own_lengths(pair, plain, drafter) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, drafter, k=4, chunk=16)
    wanted = plain[repr(GREEDY)]
    first = [engine.add(Request(tuple(PROMPTS[n]), GREEDY, seed=n, k=n)) for n in (0, 2)]
    doomed = engine.add(Request((1, 2, 3), GREEDY))
    for _ in range(4):
        engine.step()
    engine.abort(doomed)
    late = [engine.add(Request(tuple(PROMPTS[n]), GREEDY, seed=n)) for n in (1, 3, 4)]
    finish(engine, [])
    assert [seq.output for seq in (*first, *late)] == [wanted[n] for n in (0, 2, 1, 3, 4)]


@pytest.mark.parametrize("drafter,k", [(None, 0), ("ngram", 3)])
def test_a_broken_model_ends_its_requests_and_nothing_else(pair, plain, drafter, k) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, drafter, k=k)
    engine.captured.warm((k,))
    seqs = ask(engine, GREEDY)
    for _ in range(3):
        engine.step()
    forward, calls = pair[0].forward, 0

    def broken(packed, cache):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        logits = forward(packed, cache)
        if calls == 2:
            logits[0] = torch.nan
        return logits

    pair[0].forward = broken  # type: ignore[method-assign]
    try:
        finish(engine, seqs)
    finally:
        del pair[0].forward
    ends = [seq.finished for seq in seqs]
    assert ends.count("error") == 1
    for seq, text in zip(seqs, plain[repr(GREEDY)], strict=True):
        assert seq.output == text[: len(seq.output)]
        assert seq.finished == "error" or seq.output == text


@pytest.mark.parametrize("drafter,where", [("model", "collect"), ("ngram", "collect"), ("ngram", "read")])
def test_an_exception_in_a_captured_step_costs_time_and_no_text(pair, plain, drafter, where) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, drafter, k=2)
    seqs = ask(engine, WARM)
    for _ in range(3):
        engine.step()
    owner = engine.captured._host if where == "read" else engine.captured
    setattr(owner, where, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    delattr(owner, where)
    assert finish(engine, seqs) == plain[repr(WARM)]


@pytest.mark.parametrize("drafter,k", [(None, 0), ("ngram", 5)])
def test_smaller_graphs_are_made_while_steps_are_in_flight(pair, drafter, k) -> None:  # type: ignore[no-untyped-def]
    """As sequences end one by one, smaller batches are captured; steps in flight must not change."""

    def run(name: str | None, **options: object) -> list[list[int]]:
        engine = build(pair, name, **options)
        each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (21, 5, 9, 13)]
        return finish(engine, [engine.add(Request(tuple(p), q)) for p, q in zip(PROMPTS, each, strict=False)])

    assert run(drafter, k=k) == run(None, k=0, max_batch=1, graphs=False)


def test_warming_up_captures_once_and_for_all(pair, plain) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, "model", k=3)
    engine.captured.warm((3,))
    made = engine.captured.graphs.captured_sizes
    assert {k for _, k in made} == {0, 3} and {4, 2, 1} <= {size for size, _ in made}
    assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]
    assert engine.captured.graphs.captured_sizes == made


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_one_without_drafts_does_not_keep_the_others_from_captured_steps(pair, plain, drafter) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, drafter, k=3)
    ks = [None, 0, None, 0, None]
    seqs = [engine.add(Request(tuple(p), WARM, seed=n, k=ks[n])) for n, p in enumerate(PROMPTS)]
    starts = count_starts(engine)
    assert finish(engine, seqs) == plain[repr(WARM)]
    assert len(starts) > 10 and [seq.drafted for seq in seqs if seq.request.k == 0] == [0, 0]


def spy(thing: object, name: str) -> list[tuple[Any, Any]]:
    """A list that grows by the first argument and the result of every call."""
    calls: list[tuple[Any, Any]] = []
    call = getattr(thing, name)

    def noted(first: object, *more: object, **options: object) -> object:
        calls.append((first, call(first, *more, **options)))
        return calls[-1][1]

    setattr(thing, name, noted)
    return calls


@pytest.mark.usefixtures("prompts_by_the_host")
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_only_nodes_that_were_found_are_fed(pair, plain, params) -> None:  # type: ignore[no-untyped-def]
    """The rows of the packed path from the host, and what a bucket has to spare."""
    ways: list[dict[str, object]] = [{"graphs": False}, {}, {"pack_rows": False}]
    host, engine, padded = (build(pair, "ngram", k=7, **way) for way in ways)
    engine.captured.warm((7,))
    reads, starts = spy(engine.captured._host, "read"), spy(engine.captured, "start")
    for other in (host, engine, padded):
        assert finish(other, ask(other, params)) == plain[repr(params)]
    meters = [other.meter for other in (host, engine, padded)]
    assert len({meter.tokens_fed - meter.tokens_padded for meter in meters}) == 1
    assert meters[0].tokens_padded == 0 < meters[1].tokens_padded < meters[2].tokens_padded / 2
    assert len({meter.drafted for meter in meters}) == len({meter.accepted for meter in meters}) == 1
    for (_, step), (_, real) in zip(starts, reads, strict=True):
        most = step.graph.size * 8
        assert step.rows == min(n for n in (*ROWS, most) if real <= n <= most)


def test_warming_up_captures_every_number_of_rows(pair, plain) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, "ngram", k=7)
    engine.captured.warm((7,))
    made = engine.captured.graphs.captured_sizes
    assert {size: rows for (size, k), rows in made.items() if k} == {4: {8, 16, 32}, 2: {8, 16}, 1: {8}}
    assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]
    assert engine.captured.graphs.captured_sizes == made


@pytest.mark.usefixtures("prompts_by_the_host")
def test_empty_batch_slots_feed_no_rows(pair) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, NgramDrafter(30, 30), k=3)  # nothing is found
    reads, starts = spy(engine.captured._host, "read"), spy(engine.captured, "start")
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 12, 20)]
    finish(engine, [engine.add(Request(tuple(p), q)) for p, q in zip(PROMPTS, each, strict=False)])
    seen = {(f.graph.size, len(f.batch_slots), total) for (_, f), (_, total) in zip(starts, reads, strict=True)}
    assert seen == {(4, 3, 3), (2, 2, 2)}


@pytest.mark.parametrize("k", [None, 2])
def test_plain_decoding_feeds_one_row_per_sequence_whatever_k_is(pair, plain, k) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, None, k=4)
    engine.captured.warm((4,))
    starts = count_starts(engine)
    assert finish(engine, ask(engine, GREEDY, k)) == plain[repr(GREEDY)]
    assert len(starts) > 10 and {k for _, k in engine.captured.graphs.captured_sizes} == {0}
    assert engine.meter.drafted == 0


class Repeats(NoDrafter):
    """A user's drafter: the last token again and again. It inherits everything but `propose`."""

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, batch: Batch) -> Draft:
        self.asked += 1
        nodes = [n if batch.complete(i) else 0 for i, n in enumerate(batch.max_nodes)]
        return Draft.chains([[seq.tokens[-1]] * n for seq, n in zip(batch.seqs, nodes, strict=True)])


class Lookup(NgramDrafter):
    """A user's drafter over one that can be captured."""

    propose = Repeats.propose
    asked = 0


class Mixed(Repeats, NgramDrafter):
    """The same by a parent class: `propose` of the first, and nothing that the second could capture."""

    def __init__(self) -> None:
        NgramDrafter.__init__(self)
        self.asked = 0


@pytest.mark.parametrize("drafter", [Repeats, Lookup, Mixed])
def test_a_drafter_with_its_own_propose_is_asked_by_the_host(pair, plain, drafter) -> None:  # type: ignore[no-untyped-def]
    """It must not be captured because a parent class could be: then `propose` would never be called."""
    own = drafter()
    engine = build(pair, own, k=3)
    seqs = ask(engine, GREEDY)
    assert finish(engine, seqs) == plain[repr(GREEDY)]
    assert own.asked == engine.meter.steps > 5
    assert engine.captured is None
    assert engine.meter.drafted > 50


def test_a_propose_or_observe_given_later_is_called_too(pair, plain) -> None:  # type: ignore[no-untyped-def]
    class Later(NgramDrafter):
        asked = 0

    class Watches(NgramDrafter):
        seen = 0

        def observe(self, *step: object) -> None:
            self.seen += 1

    Later.propose = Repeats.propose  # type: ignore[method-assign]
    own, watching, later = NgramDrafter(), Watches(), Later()
    own.asked, own.propose = 0, lambda batch: Repeats.propose(own, batch)  # type: ignore
    for drafter in (own, later, watching):
        engine = build(pair, drafter, k=3)
        assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]
        calls = drafter.seen if drafter is watching else drafter.asked
        assert calls == engine.meter.steps > 5


def shorter(model: Fused, context: int) -> Fused:
    other = copy(model)
    other.context = context
    return other


@pytest.mark.parametrize("context", [64, 60])
@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_texts_run_into_the_end_of_the_context(pair, context, drafter) -> None:  # type: ignore[no-untyped-def]
    """Nodes behind the last page must not be looked for: the table ends there."""
    short = (shorter(pair[0], context), pair[1])
    params = SamplingParams(max_tokens=None, ignore_eos=True)

    def run(name: str | None, **options: object) -> list[list[int]]:
        engine = build(short, name, page=16, **options)
        return finish(engine, ask(engine, params))

    assert run(drafter, k=4 if drafter else 0) == run(None, k=0, max_batch=1, graphs=False)


def test_a_draft_model_of_shorter_context_is_captured_too(pair, plain) -> None:  # type: ignore[no-untyped-def]
    engine = build((pair[0], shorter(pair[1], 30)), "model", k=3, page=8)
    assert finish(engine, ask(engine, WARM)) == plain[repr(WARM)]
    reach = engine.captured._batch_slots.control.shape[1] * 8
    plans = [
        p
        for graph, _ in engine.captured.graphs._made.values()
        for p in graph.node_rows(engine.target.layout, 0).plans.values()
    ]
    assert all(plan.blocks * 128 >= pair[0].context for plan in plans) and reach >= pair[0].context


def test_a_step_in_flight_whose_sequences_have_finished_is_dropped(pair, plain) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, "model", k=2)
    first = engine.add(
        Request((5, 9, 9, 5, 9), SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=tuple(range(4096))))
    )
    finish(engine, [first])
    seqs = ask(engine, GREEDY)
    assert engine.step(), "a step advances some sequence"
    assert finish(engine, seqs) == plain[repr(GREEDY)]


def test_long_chains_are_verified_from_the_host(pair, plain) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, "ngram", k=200)
    assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]


def test_a_draft_model_that_breaks_for_one_node_costs_nothing(pair, plain) -> None:  # type: ignore[no-untyped-def]
    """A node that is missing takes those behind it along."""
    engine, forward, calls = build(pair, "model", k=4), pair[1].forward, 0

    def broken(packed, cache):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        logits = forward(packed, cache)
        return logits if calls % 3 else torch.full_like(logits, torch.nan)

    pair[1].forward = broken  # type: ignore[method-assign]
    try:
        assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]
    finally:
        del pair[1].forward


@pytest.mark.usefixtures("prompts_by_the_host")
def test_eager_steps_before_captured_ones_draft_one_node(pair, plain) -> None:  # type: ignore[no-untyped-def]
    """The host makes one draft pass per step; requests that cannot be captured still get all their nodes."""
    for params, passes in ((GREEDY, 1), (SamplingParams(max_tokens=23, logprobs=21), 4)):
        engine = build(pair, "model", k=4)
        forward, calls = engine.drafter._runner.forward, []

        def counted(*args, forward=forward, calls=calls, meter=engine.meter, **kwargs):  # type: ignore[no-untyped-def]
            calls.append(meter.steps)
            return forward(*args, **kwargs)

        engine.drafter._runner.forward = counted
        assert finish(engine, ask(engine, params)) == plain[repr(GREEDY)]
        assert calls and max(Counter(calls).values()) == passes


def stock_model() -> TransformersModel:
    """A model on the transformers backend whose passes captured steps can run, on a CPU by the kernels' twins."""
    torch.manual_seed(0)
    return TransformersModel("tiny", zoo.build("gemma3"), True)


@pytest.mark.parametrize(("drafter", "k"), [(None, 0), ("ngram", 3), ("model", 2)])
def test_transformers_backend_in_captured_steps(drafter: str | None, k: int) -> None:
    """Models on the transformers backend write the same texts in captured and in eager steps."""
    pair = (stock_model(), stock_model())
    for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.8)):
        eager = build(pair, None, graphs=False)
        wanted = finish(eager, ask(eager, params))
        engine = build(pair, drafter, k=k)
        starts = count_starts(engine)
        assert engine.eager_because is None
        assert finish(engine, ask(engine, params)) == wanted
        assert starts


@pytest.mark.parametrize("captured", [True, False])
def test_stock_modules_are_given_long_ids_and_positions(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers documents them: modules may use them as an index or make one-hot vectors of them."""
    model, kinds = stock_model(), set()
    call = model._call

    def watched(*args: torch.Tensor) -> torch.Tensor:
        kinds.update(x.dtype for x in args)
        return call(*args)

    monkeypatch.setattr(model, "_call", watched)
    engine = build((model, model), None, k=0, graphs=captured)
    finish(engine, ask(engine, SamplingParams(max_tokens=2)))
    assert kinds == {torch.int64}


MIXED = [
    SamplingParams(max_tokens=17, temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(max_tokens=17, temperature=1.1, top_k=5, repetition_penalty=1.3, seed=2),
    SamplingParams(max_tokens=17, temperature=0.7, min_p=0.1, frequency_penalty=0.4, presence_penalty=0.2, seed=3),
    SamplingParams(max_tokens=17, logit_bias={7: 3.0, 9: -4.0}, repetition_penalty=1.7),
    SamplingParams(max_tokens=17, min_tokens=9, temperature=1.0, top_k=8, top_p=0.7, logprobs=3, seed=5),
]
BAD_WORDS = ((5,), (9, 11), (11, 12, 13))


@pytest.mark.parametrize(("drafter", "k"), [(None, 0), ("ngram", 3), ("model", 2)])
@pytest.mark.parametrize("few_rows", [0, 64])
def test_every_sampling_parameter_in_captured_steps(pair, drafter, k, few_rows, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Requests of all kinds share captured steps and get the tokens they get alone in eager ones."""
    monkeypatch.setattr(graphs, "FEW_ROWS", few_rows)

    def ask_all(engine: Engine) -> list[Sequence]:
        nonlocal asked
        requests = zip(PROMPTS, MIXED, strict=True)
        asked = [
            engine.add(Request(tuple(p), params, seed=n, bad_words=BAD_WORDS if n in (1, 4) else ()))
            for n, (p, params) in enumerate(requests)
        ]
        return asked

    asked: list[Sequence] = []
    alone = build(pair, None, k=0, max_batch=1, graphs=False)
    wanted = finish(alone, ask_all(alone))
    logprobs = asked[-1].logprobs
    engine = build(pair, drafter, k=k, max_batch=8)
    starts = count_starts(engine)
    assert finish(engine, ask_all(engine)) == wanted
    assert len(starts) > 4
    assert [list(table) for table in asked[-1].logprobs] == [list(table) for table in logprobs]
    for ours, theirs in zip(asked[-1].logprobs, logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)  # torch's own products: rows are not exact here


@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_passes_of_the_host_run_in_graphs_of_fixed_size(pair, plain, drafter, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Prompts in chunks and host drafts go through padded passes of the next larger size, and change no token."""
    monkeypatch.setattr(host_passes, "ROWS", (4, 8, 16))
    monkeypatch.setattr(host_passes, "WANTED", 6)
    sizes = []
    graph = host_passes.CapturedPasses._graph

    def counted(self, rows):  # type: ignore[no-untyped-def]
        sizes.append(rows)
        made = graph(self, rows)
        assert len(made._logits) == min(rows, 6), "the wanted rows' logits alone"
        return made

    monkeypatch.setattr(host_passes.CapturedPasses, "_graph", counted)
    far = SamplingParams(max_tokens=23, logprobs=21)  # not for captured steps
    for params in (GREEDY, far):
        engine = build(pair, drafter, k=3, chunk=13)
        assert finish(engine, ask(engine, params)) == plain[repr(GREEDY)]
    assert {4, 16} <= set(sizes)


@pytest.mark.usefixtures("prompts_by_the_host")
def test_steps_that_read_prompts_draft_no_more_than_a_graph_has_logits_for(pair, plain, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """N-gram drafts beside prompts: with all nodes of k the pass would be launched kernel by kernel."""
    for module in (host_passes, runner):
        monkeypatch.setattr(module, "WANTED", 8)
    by_kernels, wanted = [], []
    monkeypatch.setattr(host_passes.CapturedPasses, "_forward", lambda *args: by_kernels.append(args))
    size = host_passes.CapturedPasses._size
    monkeypatch.setattr(
        host_passes.CapturedPasses,
        "_size",
        lambda self, listed, batch: (wanted.append(len(listed.wanted)), size(self, listed, batch))[1],
    )
    engine = build(pair, "ngram", k=4)
    assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]
    assert not by_kernels and max(wanted) > 4, "some steps that read prompts have drafts, none has too many"
    assert [engine.captured.eager_nodes(4, n) for n in (1, 2, 4, 8, 9)] == [4, 3, 1, 0, 0]


@pytest.mark.parametrize("limited", [False, True])
def test_under_a_memory_limit_no_larger_passes_are_rehearsed_than_were_planned(pair, limited: bool) -> None:  # type: ignore[no-untyped-def]
    model, draft = (copy(one) for one in pair)
    largest = {"rows": 0, "wanted": 0}
    for one in (model, draft):

        def forward(packed: Any, *rest: Any, inner: Any = one.forward) -> Any:
            largest["rows"] = max(largest["rows"], packed.size)
            largest["wanted"] = max(largest["wanted"], len(packed.wanted))
            return inner(packed, *rest)

        one.forward = forward
    config = EngineConfig(k=2, max_batch=4, chunk=48, cache_memory="4MiB")
    engine = build_engine(model, draft=draft, config=config, suite=TWINS, limited=limited)
    for passes in (engine.target.passes, engine.drafter.passes):
        assert passes is not None
        passes.rehearse()
    rows, wanted = 48 + 12, 12
    assert (largest["rows"] <= max(host_passes.ROWS) and largest["wanted"] <= host_passes.WANTED) is limited
    assert engine.target.passes._most_rows == (rows if limited else host_passes.TILE_ROWS[-1])
    assert engine.target.passes._most_wanted == (wanted if limited else host_passes.MOST_WANTED)


def test_passes_are_warmed_and_timed(pair) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, "model", k=2)
    engine.warm_up()
    found = engine.target.passes
    assert set(found.times) == set(host_passes.ROWS)
    assert found.mixed_step_rows(1e-9) == min(host_passes.ROWS)
    assert found.mixed_step_rows(1e9) == max(host_passes.ROWS)


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_nothing_is_captured_after_warm_up(pair, plain, drafter) -> None:  # type: ignore[no-untyped-def]
    """Requests with fewer draft tokens, or none, run in the graphs that are there."""
    engine = build(pair, drafter, k=3)
    engine.warm_up()
    before = {size: set(rows) for size, rows in engine.captured.graphs.captured_sizes.items()}
    passes = set(engine.target.passes._graphs)
    for k in (None, 1, 0, 2):
        assert finish(engine, ask(engine, GREEDY, k)) == plain[repr(GREEDY)]
    assert engine.captured.graphs.captured_sizes == before
    assert set(engine.target.passes._graphs) == passes


def test_a_draft_model_of_shorter_context_reads_its_share_of_the_pages(pair) -> None:  # type: ignore[no-untyped-def]
    """Target and draft share page tables, which may be longer than the draft's graphs have room for."""
    target, draft = pair[0], shorter(pair[1], 40)
    prompts, params = [tuple(range(5, 43)), (5, 6, 7)], SamplingParams(max_tokens=10, ignore_eos=True)
    for options in ({"k": 7}, {"k": 4, "verifier": "rejection"}):
        engine = build((target, draft), "model", cache_memory="8MiB", page=8, **options)
        seqs = [engine.add(Request(prompt, params)) for prompt in prompts]
        finish(engine, seqs)
        assert [len(seq.output) for seq in seqs] == [10, 10]


def test_numbers_beyond_32_bits_are_no_failure(pair) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, "ngram", k=2)
    asked = [
        SamplingParams(max_tokens=5, temperature=0.8, top_k=2**31),
        SamplingParams(max_tokens=None, min_tokens=2**31, ignore_eos=True),
    ]
    first, second = (engine.add(Request((5, 9, 9), params)) for params in asked)
    while len(second.output) < 9:
        engine.step()
    assert len(first.output) == 5


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_every_sampling_parameter_survives_preemption(pair, drafter) -> None:  # type: ignore[no-untyped-def]
    """A sequence that comes back has its token counts, biases and bans again, whatever batch slot it gets."""
    models = pair if drafter == "model" else pair[:1]
    per_token = sum(2 * 4 * layer.kv_heads * layer.head_dim for model in models for layer in model.layers)
    params = [replace(one, max_tokens=23, ignore_eos=True) for one in MIXED]

    def texts(engine: Engine) -> list[list[int]]:
        requests = enumerate(zip(PROMPTS, params, strict=True))
        return finish(engine, [engine.add(Request(tuple(p), q, n, bad_words=BAD_WORDS)) for n, (p, q) in requests])

    wanted = texts(build(pair, None, k=0, max_batch=1, graphs=False))
    engine = build(pair, drafter, k=4, page=8, cache_memory=per_token * 8 * 14)
    starts = count_starts(engine)
    assert texts(engine) == wanted
    assert engine.scheduler.preemptions > 0 and len(starts) > 4


class Wandering(DraftLengths):
    """Another draft length in every step, often none."""

    lengths = (0, 1, 2, 4)

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        most = self._source.choice(self.lengths)
        return [self._source.randint(0, most) for _ in seqs]


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("warm", [False, True])
def test_draft_lengths_may_change_between_captured_steps(pair, plain, drafter: str, warm: bool) -> None:  # type: ignore[no-untyped-def]
    """A drafter that is off for some steps reads what it has missed; nothing is captured after warm_up()."""
    for seed, params in enumerate((GREEDY, WARM, GREEDY)):
        engine = build(pair, drafter, k=4, draft_lengths=Wandering(seed))
        if warm:
            engine.warm_up()
        known = engine.captured.graphs.captured_sizes
        starts = count_starts(engine)
        assert finish(engine, ask(engine, params)) == plain[repr(params)]
        assert len(starts) > 4 and (not warm or engine.captured.graphs.captured_sizes == known)


class EverySecond(DraftLengths):
    """No drafts for every second sequence, though none asked for that."""

    lengths = (0, 3)

    def choose(self, seqs: Seq[Sequence]) -> list[int]:
        return [3 * (seq.id % 2) for seq in seqs]


def test_a_sequence_without_drafts_does_not_keep_the_others_eager(pair, plain) -> None:  # type: ignore[no-untyped-def]
    """A draft model need not read it; what is drafted for it in captured steps with drafts is ignored."""
    engine = build(pair, "model", k=3, max_batch=5, draft_lengths=EverySecond())
    starts = count_starts(engine)
    assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]
    assert len(starts) >= engine.meter.steps - 2


def test_costs_of_a_target_whose_passes_are_no_graphs_are_learned(pair, plain) -> None:  # type: ignore[no-untyped-def]
    """The draft model's passes alone are timed when warming up: that is no table of costs."""
    engine = build(pair, "model", k=3, auto=True)
    engine.target.passes, engine.captured, engine.scheduler._capture = None, None, None
    engine.warm_up()
    assert engine.drafter.passes.times
    assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_measured_lengths_in_captured_steps(pair, plain, drafter: str) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, drafter, k=3, auto=True)
    engine.warm_up()
    known = {size: set(rows) for size, rows in engine.captured.graphs.captured_sizes.items()}
    assert finish(engine, ask(engine, WARM)) == plain[repr(WARM)]
    assert engine.captured.graphs.captured_sizes == known


@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_steps_are_timed_with_texts_and_change_none(pair, plain, drafter) -> None:  # type: ignore[no-untyped-def]
    """The texts whose pages are read while a step is timed keep their keys, and steps in flight their state."""
    engine = build(pair, drafter, k=3 if drafter else 0)
    seqs = ask(engine, GREEDY)
    for _ in range(6):
        engine.step()
    captured, scratch = engine.captured, engine.target.layout.scratch
    pools = [pool for layout in engine.layouts for pool in layout.all_pools()]
    before = [pool[:scratch].clone() for pool in pools]
    captured.warm(engine.draft_lengths.lengths)
    for size, k in captured.graphs.captured_sizes:
        graph, step = captured.graphs.get(GraphKey(size, k))
        with captured.graphs.kept(graph):
            captured.graphs.pretend(graph)
            step.start()
            lengths = graph.batch_slots.lengths.tolist()
            assert min(lengths) > 300 and max(lengths) < 512
    assert all(torch.equal(pool[:scratch], old) for pool, old in zip(pools, before, strict=True))
    assert finish(engine, seqs) == plain[repr(GREEDY)]


def test_chunks_without_wanted_rows_change_nothing(pair: tuple[Fused, Fused]) -> None:
    """Behind the last layer's attention only wanted rows go on; of a chunk amid a prompt there are none."""
    prompt, params = tuple(n % 90 + 3 for n in range(230)), SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = []
    for chunk in (16, 100, 230):
        engine = build(pair, None, chunk=chunk)
        outputs.append(finish(engine, [engine.add(Request(prompt, params)), engine.add(Request(prompt[:70], params))]))
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_warm_up_counts_nothing(pair) -> None:  # type: ignore[no-untyped-def]
    """The text it writes, so that libraries load their kernels, is not one of the requests."""
    engine = build(pair, "model", k=2)
    engine.warm_up()
    assert engine.meter.snapshot() == Meter().snapshot() and not engine.busy and not engine.tables.held()
    assert engine.add(Request((5, 6), SamplingParams(max_tokens=1))).id == 1


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_warm_up_teaches_the_planner_costs_alone(pair, monkeypatch, drafter: str) -> None:  # type: ignore[no-untyped-def]
    """Its text takes an eager step and captured ones."""
    engine, kinds, record = build(pair, drafter, k=3, auto=True), [], Engine._record
    monkeypatch.setattr(
        Engine, "_record", lambda self, step, outputs: (kinds.append(step.captured), record(self, step, outputs))
    )
    before = learned(engine)
    engine.warm_up()
    assert learned(engine) == before and engine.draft_lengths.history is None
    assert kinds[0] is False and kinds[-1] is True


def learned(engine: Engine) -> bytes:
    """What an engine's planner knows besides costs."""
    known = vars(engine.draft_lengths).items()
    return pickle.dumps({name: value for name, value in known if name not in ("costs", "_plain_steps")})


class OnlyKnownPrompts(NgramDrafter):
    """A user's drafter, which drafts on the host."""

    def propose(self, batch: Batch) -> Draft:
        assert all(list(seq.prompt) in PROMPTS for seq in batch.seqs), "a request that nobody made"
        return super().propose(batch)

    def capture(self, num_slots: int) -> None:
        return None


def test_a_warm_up_asks_no_drafter_of_a_user(pair, plain) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, OnlyKnownPrompts(), k=2)
    engine.warm_up()
    assert finish(engine, ask(engine, GREEDY)) == plain[repr(GREEDY)]


def test_a_warm_up_that_fails_leaves_no_request(pair, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    engine = build(pair, None, k=0)
    meter = engine.meter
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr(engine.target, "start", raising(RuntimeError("out of memory")))
        engine.warm_up()
    assert not engine.busy and not engine.tables.held() and engine.meter is meter
    engine.warm_up()


def raising(error: Exception) -> Any:
    def fails(*args: Any) -> None:
        raise error

    return fails


@pytest.mark.parametrize(("page", "tokens"), [(1, 1), (1, 2), (2, 2), (1, 3), (16, 16)])
def test_a_warm_up_needs_no_more_memory_than_requests(page: int, tokens: int) -> None:
    engine = build_engine(FreeModel(16, 64), config=EngineConfig(k=0, page=page, cache_memory="1MiB"), suite=TWINS)
    engine.tables.pool = PagePool(tokens // page)
    engine.warm_up()
    assert not engine.busy and not engine.tables.held()


@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_a_warm_up_keeps_to_the_context(context: int) -> None:
    engine = build_engine(FreeModel(16, context), config=EngineConfig(k=0, cache_memory="1MiB"), suite=TWINS)
    engine.warm_up()
    assert not engine.busy and not engine.tables.held()
