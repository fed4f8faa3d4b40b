"""benchmarks.recorded: in eager and captured steps another head drafts what was recorded of a trained one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import heads_wide, planner, quality
from benchmarks.recorded import Recorded, Texts, read_texts, small_head
from faircopy import LLM, build, bundled
from faircopy.build import build_engine, load_target
from faircopy.config import EngineConfig
from faircopy.draft_length import FixedLength, shared_room
from faircopy.drafters.folder import METHODS, new_head, save_head
from faircopy.drafters.heads import Head
from faircopy.drafters.trees import Tree
from faircopy.engine import Engine
from faircopy.laws.acceptance import measure
from faircopy.model.base import Model
from faircopy.types import Batch, Draft, FinishedStep, Request, SamplingParams
from tests.helpers import engine_of, head_for, load, random_prompts, run, shaken

NEW = 30
Seen = list[tuple[list[int], list[list[int]]]]  # texts, and the paths of the drafts behind them


@cache
def texts_of(folder: str) -> Texts:
    """Prompts, two of which begin alike, and what plain decoding writes behind them."""
    model = load(folder)
    prompts = random_prompts(4, model.vocab, seed=4)
    prompts.append([*prompts[0], 7, 9])
    seqs = run(engine_of(model, max_batch=8), requests_of(prompts, NEW))
    return {tuple(prompt): seq.output for prompt, seq in zip(prompts, seqs, strict=True)}


def requests_of(prompts: list[Any], tokens: int) -> list[Request]:
    return [Request(tuple(p), SamplingParams(max_tokens=tokens, ignore_eos=True)) for p in prompts]


def heads_of(folder: str, method: str, chain: bool) -> tuple[Head, Head]:
    """The trained head, and one of other weights."""
    pair = head_for(folder, load(folder), method), shaken(head_for(folder, load(folder), method), 5)
    for head in pair:
        if chain:
            head.tree = Tree  # type: ignore[method-assign]
    return pair


def recorded_of(head: Head, folder: str) -> Recorded:
    return Recorded(head.serve(), read_texts(head, texts_of(folder), folder))


def seen_in(batch: Batch, draft: Draft) -> Seen:
    """Eager steps number the nodes of Medusa's trees in another order, so that paths are compared."""
    return [
        (list(seq.tokens), sorted([draft.tokens[i][n] for n in draft.path(i, node)] for node in range(len(tokens))))
        for i, (seq, tokens) in enumerate(zip(batch.seqs, draft.tokens, strict=True))
        if tokens
    ]


def watch_eager(engine: Engine) -> Seen:
    """The drafts of eager steps, from now on."""
    seen: Seen = []
    propose = engine.drafter.propose

    def watched(batch: Batch) -> Draft:
        draft = propose(batch)
        seen.extend(seen_in(batch, draft))
        return draft

    engine.drafter.propose = watched  # type: ignore[method-assign]
    return seen


def watch_captured(engine: Engine) -> Seen:
    """The drafts of captured steps, from now on."""
    seen: Seen = []
    assert engine.captured is not None
    collect = engine.captured.collect

    def watched(step: Any) -> FinishedStep:
        done = collect(step)
        seen.extend(seen_in(done.batch, done.draft))
        return done

    engine.captured.collect = watched  # type: ignore[method-assign]
    return seen


def check(
    make: Callable[[Head], Engine], watch: Callable[[Engine], Seen], heads: tuple[Head, Head], folder: str
) -> None:
    texts = texts_of(folder)
    own, other = make(heads[0]), make(heads[1])
    recorded_of(heads[0], folder).attach(other)
    wanted, found = watch(own), watch(other)
    for engine in (own, other):
        assert [seq.output for seq in run(engine, requests_of([*texts], NEW))] == [*texts.values()]
    assert found == wanted and found
    assert own.meter.accepted == other.meter.accepted


@pytest.mark.parametrize(("chain", "nodes"), [(True, 3), (False, 14)], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_eager_steps_draft_what_was_recorded(
    checkpoint: Callable[..., str], method: str, chain: bool, nodes: int
) -> None:
    folder = checkpoint("llama")

    def make(head: Head) -> Engine:
        return engine_of(load(folder), draft=head, max_batch=3, k=nodes)

    check(make, watch_eager, heads_of(folder, method, chain), folder)


@pytest.mark.parametrize(
    ("chain", "nodes", "chains"),
    [(True, 3, 0), (False, 14, 0), (False, 3, 3), (False, 5, 5)],
    ids=["chain", "tree", "small chain", "longer chain"],
)
@pytest.mark.parametrize("method", ["clover", "medusa", "eagle3"])  # the others draft as one of these does
def test_captured_steps_draft_what_was_recorded(
    checkpoint: Callable[..., str], method: str, chain: bool, nodes: int, chains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """chains: drafts of at most this number of nodes are chains, of a head with trees; one more than levels, too."""
    pytest.importorskip("triton")
    monkeypatch.setattr(build, "_chain_nodes", lambda *_: chains)
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    model: Model = fused(folder)

    def make(head: Head) -> Engine:
        config = EngineConfig(cache_memory="8MiB", max_batch=3, k=nodes)
        return build_engine(model, draft=head, config=config, suite=TWINS)

    check(make, watch_captured, heads_of(folder, method, chain), folder)


def test_nothing_is_recorded_while_kernels_are_compiled_ahead(checkpoint: Callable[..., str]) -> None:
    """A trained head's own kernels do not run then, so that its drafts would be of zeros."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.launch import compiled_ahead
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    head, other = heads_of(folder, "eagle3", False)
    config = EngineConfig(cache_memory="8MiB", max_batch=3, k=4)
    engine, recorded = build_engine(fused(folder), draft=other, config=config, suite=TWINS), recorded_of(head, folder)
    recorded.attach(engine)
    assert engine.captured is not None
    with compiled_ahead():
        engine.captured.rehearse([4])
    assert not recorded._drafts
    engine.captured.warm([4])
    assert recorded._drafts


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("method", ["clover", "eagle3"])
def test_recorded_nodes_are_shared_as_a_heads_own(checkpoint: Callable[..., str], method: str, graphs: bool) -> None:
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    model: Model = fused(folder)

    def make(head: Head) -> Engine:
        config = EngineConfig(cache_memory="8MiB", max_batch=5, k=8, graphs=graphs)
        lengths = FixedLength(3, partial(shared_room, most=8))
        return build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=lengths)

    check(make, watch_captured if graphs else watch_eager, heads_of(folder, method, False), folder)


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_accepted_is_what_the_laws_count(checkpoint: Callable[..., str], method: str, chain: bool) -> None:
    folder = checkpoint("llama")
    head, other = heads_of(folder, method, chain)
    nodes, recorded = head.levels if chain else 14, recorded_of(head, folder)
    texts = texts_of(folder)
    shorter = {prompt: text[: NEW - nodes] for prompt, text in texts.items()}  # near its limit a text gets fewer nodes
    counted = measure(head, read_texts(head, shorter, folder), nodes, chain)
    engine = engine_of(load(folder), draft=other, max_batch=1, k=nodes)
    recorded.attach(engine)
    for n, (prompt, text) in enumerate(texts.items()):
        seq = engine.add(requests_of([prompt], NEW)[0])
        engine.step()
        for _ in range(counted.cycles[n]):
            engine.step()
        assert len(seq.output) == 1 + counted.tokens[n] + counted.cycles[n]
        while engine.busy:
            engine.step()
        assert seq.output == text
    assert sum(counted.tokens) > 0 or (method, chain) == ("eagle3", True)  # these random weights are never right


def test_other_texts_get_the_heads_own_drafts(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("llama")
    head, other = heads_of(folder, "clover", False)
    recorded = recorded_of(head, folder)
    model, texts = load(folder), texts_of(folder)
    prompt, text = next(iter(texts.items()))
    known = [*prompt, *text]
    for text, there in (
        (known, True), ([*known, 3], False), ([*known[:-1], known[-1] + 1], False), ([3, 4], False),
        (list(prompt), False),
    ):  # fmt: skip
        tree = Tree(5)
        recorded.replace(tree, text, head.levels)
        assert bool(tree.tokens) == there
    requests = requests_of(random_prompts(2, model.vocab, seed=77), 8)
    engines = [engine_of(model, draft=other, max_batch=2, k=5) for _ in range(2)]
    recorded.attach(engines[0])
    seen = [watch_eager(engine) for engine in engines]
    assert [seq.output for seq in run(engines[0], requests)] == [seq.output for seq in run(engines[1], requests)]
    assert seen[0] == seen[1] and seen[0]


def test_sampled_texts_are_refused(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("llama")
    head, _ = heads_of(folder, "clover", False)
    texts = replace(read_texts(head, texts_of(folder), folder), temperature=0.5)
    with pytest.raises(AssertionError, match="sampled"):
        Recorded(head, texts)
    assert torch.equal(texts.begins, torch.tensor([len(prompt) for prompt in texts_of(folder)]))


SMALL = ["--small", "--batches", "1", "2", "--tokens", "12", "--queue", "2"]


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def small_tokens_per_step(nodes: int, chain: bool) -> float:
    """Of the bundled target and its head themselves, with the queue of batch 2."""
    args = argparse.Namespace(
        small=True, queue=2, tokens=12, same=False, temperature=0.0, questions=None, own_text=False
    )
    target = load_target(bundled.target(), EngineConfig(dtype="float32"))
    head = small_head(bundled.named("clover"), target, chain)
    llm = LLM(target, head, k=nodes, dtype="float32", max_batch=2, prefix_reuse=False, cache_memory="64MiB")
    prompts, wanted = planner.queue(args, planner.Trial(args), 2)
    llm.generate(prompts, wanted, progress=False)
    return llm.metrics()["tokens_per_step"]


def test_wide_heads_accept_what_small_ones_do(tmp_path: Path) -> None:
    """The whole benchmark on tiny shapes: texts of plain decoding, at the trained head's tokens per step."""
    out, other = tmp_path / "wide.json", tmp_path / "eagle3"
    target = load_target(bundled.target(), EngineConfig(dtype="float32"))
    save_head(new_head("eagle3", bundled.target(), target.token_weights(), levels=3), other)
    heads = ["--head", f"clover={bundled.named('clover')}", "--head", f"eagle3={other}"]
    heads_wide.main([*SMALL, *heads, "--nodes", "8", "--memory", "64MiB", "--out", str(out)])
    rows = rows_of(out)
    names = ["plain", "clover, chain of 4", "clover, tree of 8", "eagle3, chain of 4", "eagle3, tree of 8"]
    assert [(row["variant"], row["batch"]) for row in rows] == [(name, batch) for name in names for batch in (1, 2)]
    assert all(row["identical"] == row["of"] >= 4 for row in rows)
    found = {row["variant"]: row["tokens_per_step"] for row in rows if row["batch"] == 2}
    assert found["clover, chain of 4"] == pytest.approx(small_tokens_per_step(4, chain=True))
    assert found["clover, tree of 8"] == pytest.approx(small_tokens_per_step(8, chain=False))
    assert json.loads(out.read_text())["settings"]["draft_vocab"] == 32000


def test_steps_of_random_heads_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    heads_wide.main([*SMALL, "--steps-only", "--step-tokens", "6", "--memory", "64MiB", "--out", str(out)])
    rows = rows_of(out)
    names = ["plain", "no head, the same rows", "eagle3", "clover", "medusa", "scylla"]
    assert [(row["variant"], row["batch"]) for row in rows] == [(name, batch) for name in names for batch in (1, 2)]
    assert all(row["step_ms"] > 0 for row in rows) and all("head_ms" in row for row in rows[4:])


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_the_planners_benchmark_takes_trees(tmp_path: Path, chain: bool) -> None:
    out = tmp_path / "planner.json"
    ways = ["--pair", "widened", "--drafters", "head", "--fixed", "12", "--head", bundled.named("clover")]
    planner.main([*SMALL, *ways, *(["--chain"] if chain else []), "--out", str(out)])
    rows = rows_of(out)
    assert [row["k"] for row in rows] == [0, 0, "auto", "auto", 12, 12]
    assert all(row["identical"] == row["of"] for row in rows)
    assert rows[3]["drafted"] > 0 and rows[5]["drafted"] > 0
    assert rows[5]["tokens_per_step"] == pytest.approx(small_tokens_per_step(12, chain))


def test_the_planners_benchmark_refuses_sampled_texts_for_wide_heads() -> None:
    with pytest.raises(SystemExit):
        planner.main([*SMALL, "--pair", "widened", "--drafters", "head", "--temperature", "0.8"])


def test_quality_is_measured_against_fixed_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "QUALITIES", ("both",))
    file = tmp_path / "quality.json"
    sizes = ["--batches", "1", "--rounds", "1", "--tokens", "8", "--queue", "1", "--fixed", "2"]
    quality.main(["--small", "--pair", "widened", *sizes, "--out", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["way"] for row in rows] == ["plain", "k 2", *(f"auto, {name}" for name in quality.QUALITIES)]
    assert all(row["identical"] == row["of"] for row in rows)
