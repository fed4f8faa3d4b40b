"""The planner: memory from sizes alone, the ladder under a budget, a limit that an LLM keeps, the batch law."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import faircopy.llm as llm_module
from benchmarks import batch_law
from benchmarks.specmemo import PublishedMedusa, buffer_bytes, default_tree, paths_of
from faircopy import (
    LLM,
    ConfigError,
    RequestError,
    SamplingParams,
    UnsupportedModel,
    bundled,
    measured_acceptance,
    measured_costs,
)
from faircopy.bench.shapes import random_model, shape_config
from faircopy.build import build_engine
from faircopy.cache import KeptTable
from faircopy.config import EngineConfig, parse_bytes
from faircopy.costs import CostTable, Curve
from faircopy.drafters.folder import head_skeleton, load_head, save_head
from faircopy.drafters.trees import best_shape, node_values
from faircopy.kernels.cpu.product import PackedWeight, fits, packed_bytes
from faircopy.layout.base import Cache, Packed
from faircopy.measured_acceptance import History, HistoryKeeper, known_history
from faircopy.measured_costs import keep_costs
from faircopy.model.base import FINAL, ModelShape, Taps
from faircopy.model.loader import load_model
from faircopy.model.pass_bytes import activation_bytes
from faircopy.model.shape import shape_of_checkpoint, shape_of_config, shape_of_model
from faircopy.model.shape_share import WHOLE, Split
from faircopy.model.transformers_backend import TransformersModel
from faircopy.planner import AutoLength
from faircopy.planning.devices import DEVICES, named_device
from faircopy.planning.drafts import NGRAM, NO_DRAFT, DraftShape, shape_of_draft
from faircopy.planning.ladder import (
    AS_ASKED,
    FEWER_LEVELS,
    FEWER_NODES,
    LEAST_CHUNK,
    NONE,
    SMALLER,
    Speed,
    climb,
    rungs,
)
from faircopy.planning.limit import fit_into_memory
from faircopy.planning.memory import (
    GRAPH_ROWS,
    GRAPH_WANTED,
    Setup,
    memory_items,
    speculation_bytes,
    total,
    weight_bytes,
)
from faircopy.planning.plan import estimate, make_plan, roofline, smallest
from faircopy.planning.roofline import BatchLaw, Roofline, best_k, fit
from faircopy.terminal.plan import Wish, plan_for
from faircopy.testing import TableModel
from faircopy.types import Batch, Draft, Request, Sequence
from faircopy.verify.rejection import drawing_bytes
from tests.helpers import CPU, load
from tests.test_cli import run as run_command
from tests.test_heads import head_for
from tests.zoo import REFUSED, ZOO

SPLITS = {"whole": WHOLE, "tensor": Split(tensor=2), "stages": Split(stages=2)}
H200 = DEVICES["h200"]
SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 320, "vocab_size": 512,
}  # fmt: skip


def qwen(name: str = "qwen3-8b", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> ModelShape:
    return shape_of_config(shape_config(name, 8192, **changes), dtype, name)


EIGHT, HALF = qwen(), qwen("qwen3-0.6b")
DRAFT = DraftShape(name="0.6B", kind="model", model=HALF)
HEAD = DraftShape(name="head", kind="head", sizes=tuple(n * 600_000_000 for n in range(1, 6)), inputs=4096, levels=5)


def a_setup(**changes: Any) -> Setup:
    base = Setup(target=EIGHT, draft=NO_DRAFT, nodes=0, levels=0, batch=8, tokens=2048, device=torch.device("cuda"))
    return replace(base, **changes)


# Sizes


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "phi3", "qwen3_moe", "gpt2", "gpt_bigcode", "gemma4_moe"])
def test_a_configuration_alone_tells_what_the_loaded_model_holds(checkpoint: Callable[..., str], name: str) -> None:
    path = checkpoint(name)
    known, model = shape_of_checkpoint(path, torch.float32, CPU), load(path)
    if isinstance(model, TransformersModel):
        model.release_weights()
    loaded = shape_of_model(model)
    assert (known.vocab, known.context, known.backend) == (loaded.vocab, model.context, loaded.backend)
    own = [(layer.kv_heads, layer.head_dim) for layer in model.layers]
    assert [(layer.kv_heads, layer.head_dim) for layer in known.layers] == own
    assert weight_bytes(known, CPU) == pytest.approx(model.weight_bytes, rel=0.2)  # tiny ones have large tables
    assert known.qk_norm == loaded.qk_norm


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_architecture_that_is_served_can_be_planned(name: str) -> None:
    shape = shape_of_config(ZOO[name](), torch.bfloat16, name)
    for device in (CPU, torch.device("cuda")):
        assert total(memory_items(a_setup(target=shape, device=device, tokens=64))) > weight_bytes(shape, device)


@pytest.mark.parametrize("name", ["mamba", "t5", "qwen3_next", "phi3_longrope"])
def test_a_plan_for_what_cannot_be_served_is_refused(name: str, tmp_path: Path) -> None:
    REFUSED[name]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=str(tmp_path)):
        shape_of_checkpoint(str(tmp_path), torch.float32, CPU)


def test_parameters_of_known_models() -> None:
    assert EIGHT.parameters == 8_190_735_360
    assert EIGHT.read == EIGHT.parameters - 151936 * 4096, "an embedding is looked up, not multiplied with"
    assert HALF.read == HALF.parameters == 596_049_920, "a shared one is"


@given(st.integers(1, 200), st.integers(1, 60), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=20)
def test_packed_weights_take_the_declared_bytes(outputs: int, pairs: int, dtype: torch.dtype) -> None:
    weight = torch.zeros(outputs, 2 * pairs, dtype=dtype)
    if fits(weight):
        assert packed_bytes(outputs, 2 * pairs, dtype.itemsize) == PackedWeight(weight, None).nbytes


@contextmanager
def without_collection() -> Iterator[None]:
    """No cyclic garbage is left, and none is collected within."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def most_bytes_alive(run: Callable[[], None]) -> int:
    """The most bytes of tensors, made by `run`, that are alive at a time."""
    with without_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    live = most = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [{}, {"intermediate_size": 2048}])
def test_a_pass_allocates_what_is_declared(dtype: torch.dtype, change: dict[str, int]) -> None:
    """The most bytes of tensors alive at a time in one pass, by torch's profiler."""
    config = shape_config("qwen3-0.6b", 1024, **{**SMALL, **change})
    model = random_model(config, dtype, CPU)
    if not fits(torch.zeros(64, 64, dtype=dtype)):
        pytest.skip("other kernels than those that are counted")
    engine, rows = build_engine(model, config=EngineConfig(cache_memory="16MiB", k=0, device="cpu")), 480
    seq = Sequence(0, Request(tuple(range(rows))), list(range(rows)))
    engine.tables.open(seq)
    engine.tables.reserve(seq, rows)

    def run() -> None:
        engine.target.layout.set_cached(seq, 0)  # type: ignore[attr-defined]
        engine.target.forward(Batch([seq], [rows], [0]), Draft.empty(1))

    run()
    assert activation_bytes(shape_of_model(model), rows, CPU) == pytest.approx(most_bytes_alive(run), rel=0.06)


class WideModel(TableModel):
    """A table of few rows over many tokens."""

    def __init__(self, vocab: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__(16)
        self.vocab, self.dtype = vocab, dtype
        self._rows = (3 * torch.randn(16, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)

    def forward(self, packed: Packed, cache: Cache, taps: Taps | None = None) -> torch.Tensor:
        return self._rows[packed.ids[packed.wanted] % 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "k"), [(4, 2), (8, 4), (4, 12)])
def test_rejection_sampling_allocates_what_is_declared(dtype: torch.dtype, batch: int, k: int) -> None:
    """In a step of the engine, with drafts that are rejected; most where many tokens could be drawn."""
    vocab, rows = 20_000, batch * (k + 1)
    target, draft = (WideModel(vocab, dtype, seed) for seed in range(2))
    config = EngineConfig(k=k, verifier="rejection", max_batch=batch, cache_memory="16MiB")
    engine = build_engine(target, draft=draft, config=config)
    for seed in range(batch):
        engine.add(Request((seed, 3), SamplingParams(temperature=0.8, max_tokens=200), seed))
    for _ in range(2):
        engine.step()
    most = max(most_bytes_alive(lambda: engine.step() and None) for _ in range(3))
    logits, declared = rows * vocab * dtype.itemsize, drawing_bytes(batch, rows, batch * k, vocab, dtype)
    assert 0.85 * declared < most - logits < 1.01 * declared


def test_memory_of_earlier_profiles_is_not_counted() -> None:
    """Cyclic garbage that an earlier profile saw, freed within a later one, counts as negative bytes there."""

    def leave_garbage() -> None:
        cycle: list[Any] = [torch.empty(1000)]
        cycle.append(cycle)

    assert most_bytes_alive(leave_garbage) == 4000
    assert most_bytes_alive(leave_garbage) == 4000, "the first one's garbage is collected before, not within"


# The memory model


@given(st.integers(1, 64), st.integers(32, 8000), st.integers(0, 16), st.sampled_from([NGRAM, DRAFT, HEAD]))
@settings(max_examples=25)
def test_more_of_anything_takes_more_memory(batch: int, tokens: int, nodes: int, draft: DraftShape) -> None:
    """But for partial results of attention: beyond a limit there are none."""
    setup = a_setup(batch=batch, tokens=tokens, nodes=nodes, levels=min(nodes, 5), draft=draft)
    assert all(item.bytes > 0 for item in memory_items(setup))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("faircopy.planning.memory.partial_attention_bytes", lambda *about: 0)
        size = total(memory_items(setup))
        assert total(memory_items(replace(setup, batch=batch + 1))) > size
        assert total(memory_items(replace(setup, tokens=tokens + 32))) > size
        assert total(memory_items(replace(setup, nodes=nodes + 1))) >= size
    assert speculation_bytes(setup) >= 0


def test_keys_and_values_are_counted_as_pages() -> None:
    items = {item.name: item.bytes for item in memory_items(a_setup(batch=8, tokens=2040, draft=DRAFT, nodes=4))}
    per_token = 36 * 2 * 8 * 128 * 2
    assert items["keys and values"] == (8 * 64 + 1) * 32 * per_token
    assert items["draft keys and values"] == (8 * 64 + 1) * 32 * 28 * 2 * 8 * 128 * 2


def test_graphs_are_counted_as_they_are_captured() -> None:
    passes = pytest.importorskip("faircopy.replay.passes")
    assert (GRAPH_ROWS, GRAPH_WANTED) == (passes.ROWS, passes.WANTED)


def test_specmemo_candidate_buffers() -> None:
    """Its 55 MB and 19.5 MB for Vicuna-7B: three heads, fp16, a vocabulary of 32,000."""
    tree = default_tree()
    leaves = len(paths_of([parent for parent, _ in tree]))
    assert (len(tree), leaves) == (63, 42)
    assert buffer_bytes(3, leaves, 5, 32000, 2) == pytest.approx(55e6, rel=0.03)
    assert buffer_bytes(3, 19, 4, 32000, 2) == pytest.approx(19.5e6, rel=0.003)


def test_medusa_as_published_writes_the_targets_text(checkpoint: Callable[..., str]) -> None:
    path = checkpoint("llama")
    model = load(path)
    head = head_for(path, model, "medusa")
    tree = best_shape([[0.6, 0.3, 0.1]] * head.levels, 12)
    config = EngineConfig(cache_memory="4MiB", k=12, device="cpu")
    texts = []
    for drafter in (None, PublishedMedusa(head, tree, head.levels)):
        engine = build_engine(model, drafter, config=config)
        engine.verifier = drafter or engine.verifier
        seq = engine.add(Request((5, 6, 7), SamplingParams(max_tokens=24)))
        while engine.busy:
            engine.step()
        texts.append(seq.output)
    assert texts[0] == texts[1]
    assert PublishedMedusa.wants == (FINAL,)


# Acceptance and the ladder


@given(st.lists(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 20))
@settings(max_examples=40)
def test_a_trees_value_is_the_sum_of_its_paths(table: list[list[float]], size: int) -> None:
    table = [sorted(level, reverse=True) for level in table]
    shape, values = best_shape(table, size), node_values(table, size)
    depths: list[int] = []
    for n, (parent, rank) in enumerate(shape):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        above = 1.0 if parent < 0 else values[parent]
        assert values[n] == pytest.approx(above * table[depths[n]][rank])


def test_the_ladder_gives_up_nodes_then_levels_then_the_drafter() -> None:
    order = [rung for rung, _ in rungs([HEAD, NGRAM], 63)]
    assert order[:2] == [AS_ASKED, FEWER_NODES]
    assert order[2:6] == [FEWER_LEVELS] * 4
    assert set(order[6:-1]) == {SMALLER} and order[-1] == NONE
    fewer = dict(rungs([HEAD], 63))[FEWER_NODES]
    assert all(levels == 5 and nodes < 63 for _, nodes, levels in fewer)


def test_a_chain_becomes_shorter() -> None:
    shapes = [(nodes, levels) for _, group in rungs([DRAFT], 3) for _, nodes, levels in group]
    assert shapes == [(3, 3), (2, 2), (1, 1), (0, 0)]


def test_of_a_rung_the_fastest_that_fits_is_taken() -> None:
    speeds = {63: 2.0, 47: 1.5, 31: 1.9, 23: 1.7, 15: 1.2, 7: 1.1, 0: 1.0}
    base, speed = a_setup(chunk=LEAST_CHUNK), lambda setup: Speed(1.0, speeds[setup.nodes])
    sizes = {n: total(memory_items(replace(base, draft=HEAD, nodes=n, levels=5))) for n in speeds if n}
    everything = climb(base, [HEAD], 63, sizes[63], speed)
    assert [c.setup.nodes for c in everything] == [63]
    less = climb(base, [HEAD], 63, sizes[63] - 1, speed)
    assert (less[-1].rung, less[-1].setup.nodes) == (FEWER_NODES, 31)


def test_prompt_chunks_are_shortened_before_anything_of_a_draft_is_given_up() -> None:
    base = a_setup(chunk=4096)
    asked = replace(base, draft=HEAD, nodes=63, levels=5)
    (kept,) = climb(base, [HEAD], 63, total(memory_items(asked)) - 1, lambda setup: Speed(1.0, 1.0 + setup.nodes))
    assert kept.setup == replace(asked, chunk=2048) and kept.rung == AS_ASKED
    least = total(memory_items(replace(asked, chunk=LEAST_CHUNK)))
    given_up = climb(base, [HEAD], 63, least - 1, lambda setup: Speed(1.0, 1.0 + setup.nodes))
    assert given_up[0].bytes == least and given_up[-1].rung == FEWER_NODES


@given(st.integers(14_000, 60_000), st.integers(1, 32), st.integers(64, 4000), st.integers(0, 8))
@settings(max_examples=15)
def test_a_plan_fits_its_budget_or_names_the_smallest_that_works(mib: int, batch: int, tokens: int, k: int) -> None:
    base = a_setup(batch=batch, tokens=tokens, chunk=8192)

    def plan(budget: int) -> int:
        return make_plan(base, [DRAFT, NGRAM], k, budget, H200).chosen.bytes

    least = smallest(base)
    if mib << 20 >= least:
        assert plan(mib << 20) <= mib << 20
    else:
        with pytest.raises(ConfigError, match=f"pass at least {-(-least // 2**20)}MiB"):
            plan(mib << 20)
    assert plan(least) <= least


def test_a_plan_says_what_was_given_up_and_why() -> None:
    base = a_setup(batch=8, tokens=5120, chunk=8192)
    assert "as asked for" in make_plan(base, [DRAFT], 4, 40 << 30, H200).reason
    less = make_plan(base, [DRAFT, NGRAM], 4, 24 << 30, H200)
    assert less.setup.draft is NGRAM
    assert "smaller drafter, because 4 draft tokens by 0.6B would take" in less.reason
    none = make_plan(base, [DRAFT], 4, 24 << 30, H200)
    assert none.reason.startswith("no drafter: 4 draft tokens by 0.6B would take")


# The batch law


@pytest.mark.parametrize("name", [*DEVICES])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_at_the_law_reading_takes_as_long_as_arithmetic(name: str, batch: int) -> None:
    roof = Roofline(EIGHT, DEVICES[name], 2048)
    rows = roof.law.rows(batch) * batch
    assert roof.seconds(batch, int(rows)) == pytest.approx(roof.seconds(batch, 1))
    assert roof.seconds(batch, int(1.1 * rows) + 1) > roof.seconds(batch, 1)


def test_the_law_has_scyllas_form() -> None:
    """Qwen2.5-72B, 10K tokens, H800 (989 TFLOP/s, 3.35 TB/s): Scylla's k_opt is 474 / b + 7 within a percent."""
    changes = {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 29568,
        "vocab_size": 152064,
    }  # fmt: skip
    law = Roofline(qwen(**changes), DEVICES["h100"], 10_000).law
    assert law.own == pytest.approx(6.6, abs=1.2)
    assert 200 < law.shared < 300, "every factor of the roofline counted; Scylla's 474 includes activations"
    published = [(b, 27904 * (1 + 0.034 / b) ** 0.5 - 27897) for b in (1, 2, 4, 8, 16, 32, 64)]
    fitted = fit(published)
    assert fitted.shared == pytest.approx(474, rel=0.01) and fitted.own == pytest.approx(7, abs=0.5)


@given(st.floats(1, 500), st.floats(0, 20))
def test_two_constants_are_found_again(shared: float, own: float) -> None:
    law = BatchLaw(shared, own)
    assert fit([(b, law.rows(b)) for b in (1, 2, 8, 64)]) == pytest.approx(law, abs=1e-6)


def test_the_best_k_weighs_tokens_against_time() -> None:
    assert best_k(lambda k: 1 + 0.8 * k, lambda k: 1.0, 5) == 5
    assert best_k(lambda k: 1 + 0.8 * k, lambda k: 1.0 + k, 5) == 0
    setup = a_setup(tokens=1024)
    rates = {b: estimate(replace(setup, batch=b, draft=DRAFT, nodes=4, levels=4), H200) for b in (1, 64)}
    plain = {b: estimate(replace(setup, batch=b), H200) for b in (1, 64)}
    gain = {b: rates[b].tokens_per_second / plain[b].tokens_per_second for b in (1, 64)}
    assert gain[1] > gain[64], "drafting pays less in large batches"
    assert roofline(setup, H200).law.k(64) > 0


def test_devices_are_found_by_name() -> None:
    assert named_device("A100").name == "a100-80"
    assert named_device("RTX 4090").memory == 24 << 30
    assert named_device("cpu").kind == "cpu"
    with pytest.raises(ConfigError, match="gpu = 'h300': not a device we know; use one of h200"):
        named_device("h300")


# The limit


def test_a_limit_is_shared_out_before_anything_is_loaded() -> None:
    config = EngineConfig(memory="160MiB", dtype="float32", device="cpu", max_batch=4, k=4, planned_tokens=400)
    draft, fitted, plan = fit_into_memory(bundled.target(), bundled.draft(), config)
    assert draft == bundled.draft() and fitted.k == 4
    spent = total(memory_items(plan.setup)) + int(fitted.cache_memory or 0) - _cache_bytes(plan.setup)
    assert spent <= 160 << 20
    assert plan.setup.pool_pages >= 4 * 13


def _cache_bytes(setup: Setup) -> int:
    return setup.pool_pages * sum(setup.page_bytes())


def test_a_tight_limit_gives_up_levels_of_a_head(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    path = checkpoint("llama")
    save_head(head_for(path, load(path), "medusa").to(torch.bfloat16).float(), tmp_path / "head")
    plain = LLM(path, dtype="float32", cache_memory="4MiB").generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch": 1, "k": 12, "chunk": LEAST_CHUNK}
    config = EngineConfig(memory="1GiB", **options)
    base = fit_into_memory(path, str(tmp_path / "head"), config)[2]
    least = next(c for c in base.tried if c.rung == AS_ASKED).bytes
    sizes = {
        levels: total(memory_items(replace(base.setup, nodes=levels, levels=levels)))
        for levels in range(1, base.setup.levels + 1)
    }
    assert sorted(sizes.values()) == list(sizes.values()) and max(sizes.values()) <= least
    llm = LLM(path, tmp_path / "head", memory=sizes[2] + 4096, **options)
    assert llm.config.draft_levels == 2 and llm.explain()["memory_plan"].startswith("2 draft tokens on 2 levels")
    (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    assert answer.token_ids == plain[0].token_ids
    head = load_head(str(tmp_path / "head"), load(path), 2)
    assert head.size == head_skeleton(str(tmp_path / "head"), 2).size < head_skeleton(str(tmp_path / "head")).size


def test_what_the_limit_does_not_count_is_refused(checkpoint: Callable[..., str]) -> None:
    llm = LLM(checkpoint("llama"), "ngram", k=2, dtype="float32", device="cpu", memory="64MiB", max_batch=2)
    with pytest.raises(RequestError, match="prompt_logprobs = 1: the logits of a whole prompt are not counted"):
        llm.generate([[5, 6]], SamplingParams(prompt_logprobs=1))
    assert llm.request([5, 6], SamplingParams(), k=9).k == 2
    assert llm.explain()["memory"] == 64 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "1GiB", "cache_memory": "1GiB"}, "cache_memory = '1GiB': given beside memory"),
        ({"planned_tokens": 100}, "planned_tokens = 100: given without memory"),
        ({"memory": "1GiB", "strategy": "padded"}, "memory = '1GiB': counts the memory of strategy 'ragged' alone"),
        ({"memory": "1GiB", "planned_tokens": 0}, "planned_tokens = 0: not a whole number"),
        ({"memory": "much"}, "memory = 'much': not a positive amount"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_an_engine_without_an_llm_takes_no_limit_for_everything() -> None:
    with pytest.raises(ConfigError, match="memory = '1MiB': a limit for everything is shared out"):
        build_engine(TableModel(), config=EngineConfig(memory="1MiB"))


def test_an_impossible_limit_names_the_smallest_that_works() -> None:
    with pytest.raises(ConfigError, match="pass at least") as refused:
        LLM(bundled.target(), memory="20MiB", dtype="float32", device="cpu", max_batch=2)
    least = refused.value.remedy.split("pass at least ")[1].split(",")[0]
    assert LLM(bundled.target(), memory=least, dtype="float32", device="cpu", max_batch=2).engine.tables.pool.pages


CHAT = """
import gc, sys
from benchmarks.memory import Peak
from faircopy import LLM, SamplingParams, bundled
from faircopy.kernels.memory import give_back_free_memory
options = {"dtype": "float32", "device": "cpu", "max_batch": 2, "threads": 1}
params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
small = LLM(bundled.draft(), "ngram", memory="64MiB", **options)  # libraries, kernels
small.generate(["Once upon a time", "Tom"], params)
del small
gc.collect()
give_back_free_memory()
peak = Peak()
with peak.watched():
    llm = LLM(bundled.target(), bundled.draft(), k=4, memory=LIMIT, planned_tokens=500, **options)
    texts, turns = ["Once upon a time there was a little dog.", "Tom had a red ball."], 0
    while max(len(llm.encode(text)) for text in texts) < 450:
        answers = llm.generate(texts, params)
        texts = [text + answer.text + " Then she said:" for text, answer in zip(texts, answers)]
        turns += 1
print(peak.grown, turns, llm.metrics()["preemptions"], llm.explain()["memory_plan"])
"""


def test_a_dialogue_stays_within_the_limit_to_its_last_turn() -> None:
    """Anonymous memory of a process of its own, looked at every millisecond; no smaller limit holds it all."""
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch": 2, "threads": 1, "k": 4}
    config = EngineConfig(memory="1GiB", planned_tokens=500, **options)
    limit = fit_into_memory(bundled.target(), bundled.draft(), config)[2].chosen.bytes
    command = [sys.executable, "-c", CHAT.replace("LIMIT", str(limit))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "FAIRCOPY_CACHE": ""}, check=True)
    grown, turns, preemptions, *why = done.stdout.split()
    assert " ".join(why).startswith("4 draft tokens by draft: as asked for")
    assert int(grown) <= limit
    assert int(turns) > 10 and float(preemptions) == 0, "the whole dialogue was planned for"


# The command


@pytest.mark.parametrize(("text", "size"), [("1.5TiB", 3 << 39), ("2 TB", 2 * 10**12), ("24 gib", 24 << 30), ("7", 7)])
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_plan_prints_tables_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape_config("qwen3-8b", 8192, dtype="bfloat16").save_pretrained(tmp_path)
    ask = ("plan", "--target", str(tmp_path), "--draft", "ngram", "--gpu", "h200", "--turns", "4", "--batch", "2")
    code, out, _ = run_command(capsys, monkeypatch, *ask, "--explain", "--memory", "24GiB")
    assert code == 0
    assert "8,190,735,360 numbers" in out and "nothing can run" in out and "/ batch +" in out
    picture = tmp_path / "law.png"
    code, out, _ = run_command(capsys, monkeypatch, *ask, "--json", "--plot", str(picture))
    plan = json.loads(out)
    assert code == 0 and picture.stat().st_size > 1000
    assert plan["chosen"]["draft"] == "ngram" and sum(plan["items"].values()) == plan["total"] <= plan["budget"]
    code, _, error = run_command(capsys, monkeypatch, *ask, "--memory", "12GiB")
    assert code == 2
    assert "--memory = '12GiB': below the" in error and "pass at least" in error
    code, _, error = run_command(capsys, monkeypatch, *ask, "--gpu", "t4")
    assert code == 2 and "memory = 'all of t4: 13,211 MiB': below the" in error
    code, _, error = run_command(capsys, monkeypatch, *ask, "--dtype", "int3")
    assert code == 2 and "--dtype = 'int3'" in error
    code, _, error = run_command(capsys, monkeypatch, *ask, "--plot", str(tmp_path / "law.txt"))
    assert code == 2 and "law.txt" in error and ".svg" in error
    code, _, error = run_command(capsys, monkeypatch, *ask, "--draft", bundled.named("clover"))
    assert code == 2 and f"--draft = '{bundled.named('clover')}': a head for" in error


def test_plan_knows_heads_by_their_folders() -> None:
    shape = shape_of_draft(bundled.named("clover"), torch.float32, CPU)
    assert shape.kind == "head" and shape.sizes[-1] == 2_313_216 and shape.levels == 4


def test_rungs_are_compared_by_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limit: accepted tokens of earlier runs and timed passes decide, and the sentence says so."""
    monkeypatch.setattr(measured_acceptance, "_KEPT", KeptTable("acceptance"))
    monkeypatch.setattr(measured_costs, "_KEPT", KeptTable("costs"))
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path))
    target, draft = str(bundled.target()), str(bundled.draft())
    config = EngineConfig(memory="600MiB", dtype="float32", device="cpu", max_batch=4, k=8, planned_tokens=64)
    draft_, fitted, plan = fit_into_memory(target, draft, config)
    assert draft_ == draft and fitted.k == 8 and "measured later" in plan.reason
    models = [load_model(path, torch.float32, CPU) for path in (target, draft)]
    keep_costs(models[0], models[1], CostTable(Curve(((1, 1.0), (100, 3.0))), Curve(((1, 0.2), (100, 0.4)))))
    HistoryKeeper(target, draft).see(History(500, (0.8, 0.7, 0.3)))
    known, _, plan = fit_into_memory(target, draft, config)
    assert known == draft and "times plain decoding expected" in plan.reason
    assert "by measured passes and 500 drafts that were measured" in plan.reason
    HistoryKeeper(target, draft).see(History(900, (0.05, 0.05)))
    none, fitted, plan = fit_into_memory(target, draft, config)
    assert none is None and "would not pay" in plan.reason
    wish = Wish(target=target, drafts=[draft], k=4, batch=1, turns=1, turn_tokens=64, memory="600MiB", dtype="float32")
    HistoryKeeper(target, draft).see(History(1700, (0.9, 0.9, 0.9, 0.9)))
    assert "1700 drafts that were measured" in plan_for(wish).reason
    assert "an assumed acceptance" in plan_for(replace(wish, drafts=["ngram"])).reason


def test_a_history_is_kept_by_those_who_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_acceptance, "_KEPT", KeptTable("acceptance"))
    monkeypatch.setattr(measured_acceptance, "ENOUGH", 10)
    monkeypatch.setattr(AutoLength, "_decide", lambda self, live, batch: 4)  # whatever steps take on this machine
    monkeypatch.setenv("FAIRCOPY_CACHE", str(tmp_path))
    llm = LLM(bundled.target(), bundled.draft(), device="cpu", dtype="float32", max_batch=1)
    llm.generate(bundled.prompts()[:2], SamplingParams(max_tokens=96, ignore_eos=True))
    monkeypatch.setattr(measured_acceptance, "_KEPT", KeptTable("acceptance"))
    found = known_history(str(bundled.target()), str(bundled.draft()))
    assert found is not None and found.drafts >= 10 and found.rates[0] > 0.5
    assert found.accepted(2) == pytest.approx(found.rates[0] * (1 + found.rates[1]))
    llm = LLM(bundled.target(), bundled.draft(), device="cpu", dtype="float32", max_batch=1)
    assert llm.explain()["draft_length"] == f"nothing is measured yet but {found.drafts} drafts of earlier runs"
    assert "".join(llm.stream(bundled.prompts()[0], SamplingParams(max_tokens=200, ignore_eos=True)))
    monkeypatch.setattr(measured_acceptance, "_KEPT", KeptTable("acceptance"))
    again = known_history(str(bundled.target()), str(bundled.draft()))
    assert again is not None and again != found and again.rates[0] > 0.5
    apart = LLM(bundled.target(), bundled.draft(), device="cpu", dtype="float32", acceptance_history=False)
    assert apart.explain()["draft_length"] == "nothing is measured yet"
    (tmp_path / "acceptance.json").write_text('{"' + "x" * 40 + '": 5}')
    monkeypatch.setattr(measured_acceptance, "_KEPT", KeptTable("acceptance"))
    assert known_history(str(bundled.target()), str(bundled.draft())) is None


@pytest.mark.parametrize("memory", ["160MiB", None])
def test_engines_under_a_limit_are_told_so(memory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    build = llm_module.build_engine
    monkeypatch.setattr(llm_module, "build_engine", lambda *a, limited, **b: told.append(limited) or build(*a, **b))
    LLM(bundled.target(), memory=memory, max_batch=2, dtype="float32")
    assert told == [memory is not None]


def test_the_controller_stands_beside_the_law(tmp_path: Path) -> None:
    """What k="auto" chooses with the times of a table is within 5 % of the best length, and drawn."""
    file = Path(batch_law.__file__).parent / "results" / "costs-h200.json"
    table = CostTable.of_json(json.loads(file.read_text())["rows"][0])
    for batch in (1, 8, 64):

        def rate(k: int, batch: int = batch) -> float:
            return sum(0.7**place for place in range(k + 1)) / table.step(batch, k)

        assert rate(batch_law.controller_k(table, batch, 0.7)) > 0.95 * max(map(rate, range(17)))
    asked = ["--shape", "qwen3-0.6b", "--layers", "1", "--device", "cuda", "--gpu", "h200", "--costs", str(file)]
    batch_law.main(
        [*asked, "--batches", "1", "64", "--plot", str(tmp_path / "law.png"), "--out", str(tmp_path / "law")]
    )
    assert (tmp_path / "law.png").stat().st_size > 1000
    assert [batch for batch, _ in json.loads((tmp_path / "law").read_text())["settings"]["auto"]] == [1, 64]


def test_a_plan_for_several_devices_is_that_of_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the target and its keys is less than the whole; a number of devices that cannot share it is refused."""
    wish = Wish(target=str(bundled.target()), drafts=["ngram"], k=4, batch=4, turns=1, turn_tokens=64, gpu="l4")
    plans = {name: plan_for(replace(wish, split=split)) for name, split in SPLITS.items()}
    whole = {item.name: item.bytes for item in plans["whole"].items}
    for name in ("tensor", "stages"):
        mine = {item.name: item.bytes for item in plans[name].items}
        assert 0.4 < mine["weights"] / whole["weights"] < 0.8 and mine["keys and values"] < whole["keys and values"]
        assert "graphs" in whole and "graphs" not in mine  # steps on several devices are not captured
        assert plans[name].lower_bound < plans["whole"].lower_bound
    status, out, err = run_command(capsys, monkeypatch, "plan", "--gpu", "l4", "--tensor-parallel", "2", "--json")
    assert status == 0 and json.loads(out)["devices"] == 2, err
    status, _, err = run_command(capsys, monkeypatch, "plan", "--gpu", "l4", "--tensor-parallel", "3")
    assert status == 2 and "--tensor-parallel = 3" in err
    status, out, _ = run_command(capsys, monkeypatch, "plan", "--gpu", "l4", "--pipeline-parallel", "2")
    assert status == 0 and "the first of 2 devices" in out
