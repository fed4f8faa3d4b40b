"""Nodes that all sequences of a batch share: they go to the paths that a head is surest of, and change no text."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faircopy import ConfigError, SamplingParams, bundled
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.costs import CostTable, Curve
from faircopy.draft_length import FixedLength, shared_room
from faircopy.drafters.folder import load_head
from faircopy.drafters.per_request import PerRequestDrafter
from faircopy.drafters.trees import NodeBudgetTree, RerankedTree, Tree, share_nodes
from faircopy.kernels import tree_growth
from faircopy.kernels.tree_growth import Nodes
from faircopy.model.loader import load_tokenizer
from faircopy.planner import AutoLength
from faircopy.types import Batch, Decision, Draft, FinishedStep, Request, Sequence, Verdict
from tests.helpers import CPU, random_prompts, run
from tests.test_batched_trees import offer, paths_of
from tests.test_heads import head_for, load

HEADS = Path(__file__).parents[1] / "benchmarks" / "heads"


def sharing(k: int, most: int) -> FixedLength:
    """k nodes for every sequence, which all of them share."""
    return FixedLength(k, partial(shared_room, most=most))


def grown(kind: str, max_nodes: int, seed: int, levels: int) -> Tree:
    tree: Tree = RerankedTree(max_nodes, levels) if kind == "reranked" else NodeBudgetTree(max_nodes)
    for _ in range(levels):
        if tree.front:
            tree.grow([offer(seed, tuple(tree.path(node)), None, coarse=True) for node in tree.front])
    return tree


@pytest.mark.parametrize("kind", ["reranked", "spent"])
@settings(max_examples=40)
@given(seed=st.integers(0, 999), room=st.integers(1, 12), count=st.integers(0, 40))
def test_the_surest_nodes_of_all_trees_stay(kind: str, seed: int, room: int, count: int) -> None:
    trees = [grown(kind, room, seed + n, 4) for n in range(4)]
    whole = [tree.result() for tree in trees]
    values = sorted((value for tree in trees for value in _kept_values(tree)), reverse=True)
    share_nodes(trees, count)
    parts = [tree.result() for tree in trees]
    assert sum(len(tokens) for tokens, _ in parts) == min(count, len(values))
    assert all(paths_of(*part) <= paths_of(*all_) for part, all_ in zip(parts, whole, strict=True))
    left = sorted((value for tree in trees for value in _kept_values(tree)), reverse=True)
    assert left == values[: len(left)]


def _kept_values(tree: Tree) -> list[float]:
    return [tree.values[node] for node in tree.ranking()[: tree.max_nodes]]


@settings(max_examples=40)
@given(seed=st.integers(0, 999), room=st.integers(1, 12), count=st.integers(0, 40))
def test_tensors_share_as_trees_do(seed: int, room: int, count: int) -> None:
    trees = [grown("reranked", room, seed + n, 4) for n in range(4)]
    nodes = Nodes.empty(4, room, CPU)
    nodes = replace(nodes, values=torch.full((4, room), -torch.inf))
    nodes.tokens.fill_(-1)
    assert nodes.values is not None
    for n, tree in enumerate(trees):
        (tokens, parents), kept = tree.result(), sorted(tree.ranking()[: tree.max_nodes])
        nodes.tokens[n, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        nodes.parents[n, : len(tokens)] = torch.tensor(parents, dtype=torch.int32) + 1
        nodes.values[n, : len(tokens)] = torch.tensor([tree.values[node] for node in kept])
    tree_growth.share(nodes, count, torch.full((4,), room, dtype=torch.int32))
    share_nodes(trees, count)
    for n, tree in enumerate(trees):
        tokens = [token for token in nodes.tokens[n].tolist() if token >= 0]
        assert nodes.tokens[n, : len(tokens)].tolist() == tokens, "without gaps"
        assert paths_of(tokens, (nodes.parents[n, : len(tokens)] - 1).tolist()) == paths_of(*tree.result())


@pytest.mark.parametrize("method", ["clover", "eagle3"])
@pytest.mark.parametrize("graphs", [True, False])
def test_shared_nodes_change_nothing(checkpoint: Callable[..., str], method: str, graphs: bool) -> None:
    """Scarce pages, short contexts, requests with lengths of their own: captured by the kernels' twins, and eager."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import count_starts, fused, shorter

    folder = checkpoint("llama")
    model, head = shorter(fused(folder), 48), head_for(folder, load(folder), method)
    kinds = [SamplingParams(max_tokens=90, ignore_eos=True, temperature=t, logprobs=1) for t in (0.0, 0.9, 0.0, 0.0)]
    prompts = random_prompts(7, model.vocab, seed=5, longest=30)
    own = (None, None, 1, 0, None, None, None)
    requests = [Request(tuple(p), kinds[n % 4], n, own[n]) for n, p in enumerate(prompts)]
    plain = run(build_engine(model, config=EngineConfig(cache_memory="8MiB", graphs=False), suite=TWINS), requests)
    layers = len(model.layers) + len(head.layers)
    for k, most in ((1, 8), (5, 9)):
        memory = 26 * 8 * layers * 2 * 2 * 16 * 4
        config = EngineConfig(cache_memory=memory, page=8, max_batch=6, k=most, graphs=graphs)
        engine = build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=sharing(k, most))
        starts = count_starts(engine) if graphs else []
        seqs = run(engine, requests)
        assert [seq.output for seq in seqs] == [seq.output for seq in plain]
        assert [[*map(list, seq.logprobs)] for seq in seqs] == [[*map(list, seq.logprobs)] for seq in plain]
        assert engine.meter.drafted > 0 and seqs[3].drafted == 0 and seqs[2].drafted <= seqs[2].steps
        assert engine.meter.preemptions > 0
        assert len(starts) > 10 or not graphs


@pytest.mark.parametrize("graphs", [True, False])
def test_more_is_accepted_of_as_many_nodes(graphs: bool) -> None:
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    model, tokenizer = fused(bundled.target()), load_tokenizer(bundled.target())
    head = load_head(str(HEADS / "scylla"), load(bundled.target()))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [Request(tuple(tokenizer.encode(text))[:12], params) for text in bundled.prompts()[:8]]
    found, most = [], 0
    for lengths in (FixedLength(2), sharing(2, 8)):
        config = EngineConfig(cache_memory="64MiB", k=8, graphs=graphs, max_batch=8)
        engine = build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=lengths)
        rows: list[FinishedStep] = []
        lengths.observe = lambda step, seconds, rows=rows: rows.append(step)  # type: ignore[method-assign]
        seqs = run(engine, requests)
        full = [step for step in rows if len(step.batch) == 8 and max(step.batch.max_nodes) > 1]
        assert all(sum(map(len, step.draft.tokens)) <= 2 * 8 for step in full), "as many nodes as were paid for"
        assert not graphs or {step.rows for step in full} == {8 * 3}
        most = max(len(tokens) for step in full for tokens in step.draft.tokens)
        found.append((sum(seq.accepted for seq in seqs) / sum(seq.steps for seq in seqs), [s.output for s in seqs]))
    assert found[0][1] == found[1][1] and found[1][0] > 1.03 * found[0][0]
    assert 2 < most <= 4


def finished(
    seqs: Seq[Sequence], nodes: list[int], accepted: list[int], rows: int, k: int, captured: bool = False
) -> FinishedStep:
    batch = Batch(list(seqs), [1] * len(seqs), [2 * k] * len(seqs), shared_k=k)
    verdict = Verdict([Decision(list(range(n)), [0] * (n + 1)) for n in accepted])
    return FinishedStep(batch, Draft.chains([[0] * n for n in nodes]), verdict, rows, 0, captured)


def chooser_of(*drafted: tuple[int, float]) -> AutoLength:
    table = CostTable(Curve(((1, 1.0), (64, 1.1))), steps={(8, k): seconds for k, seconds in drafted})
    return AutoLength(8, table=table, room=partial(shared_room, most=8))


@pytest.mark.parametrize(
    ("options", "shares"),
    [({}, True), ({"share_nodes": False}, False), ({"quality": "implicit"}, False), ({"verifier": "rejection"}, False)],
)
def test_auto_shares_unless_it_is_told_not_to(options: dict[str, Any], shares: bool) -> None:
    model = load(bundled.target())
    head = load_head(bundled.named("clover"), model)
    config = EngineConfig(cache_memory="64MiB", k=8, auto=True, **options)
    engine = build_engine(model, draft=head, config=config)
    assert (engine.draft_lengths.room(2, 8) > 2) == shares
    with pytest.raises(ConfigError, match="share_nodes"):
        EngineConfig(share_nodes="yes")  # type: ignore[arg-type]


def test_what_shared_nodes_bring_is_learned_of_all_together() -> None:
    """A tree that got no nodes was unlikely to be right: alone it says nothing of trees of two."""
    chooser, seqs = chooser_of(), [Sequence(n, Request((1,)), [1]) for n in range(4)]
    for _ in range(3):
        chooser.costs.observe(4, 0, 4, 1.0)
    for _ in range(150):
        chooser.observe(finished(seqs, [4, 4, 0, 0], [3, 2, 0, 0], 12, 2), 1.0)
    assert chooser._trees.of(2) == pytest.approx(5 / 4, rel=0.05)
    assert chooser.acceptance.found.value == 1.0, "none was looked for in vain"
    said = chooser._why(4, 2, {0: 1.0, 2: 2.0})
    assert said == "2 draft tokens per sequence, shared by the batch: 2.00 times plain decoding at batch 4"
    assert chooser.costs.tried(4, 2) == 150 and chooser.room(2, 4) == 4 and chooser.room(2, 2) == 2


def test_steps_with_few_nodes_are_drafted_ones() -> None:
    """One sequence of eight found something: that is neither a plain step nor free."""
    chooser, seqs = chooser_of(), [Sequence(n, Request((1,)), [1]) for n in range(8)]
    for _ in range(3):
        chooser.costs.observe(8, 0, 8, 1.0)
    for _ in range(20):
        chooser.observe(finished(seqs, [2] + [0] * 7, [0] * 8, 10, 2), 2.0)
    assert chooser.costs.tried(8, 0) == 3 and chooser.costs.tried(8, 2) == 20
    assert chooser.ledger.saved < -10 and chooser.costs.of(8, 0) == pytest.approx(1.0, rel=0.1)


def test_ended_sequences_do_not_change_what_a_captured_step_cost() -> None:
    """Of eight that began two are left: the graph's rows were those of eight."""
    chooser, seqs = chooser_of((0, 1.0), (5, 1.5)), [Sequence(n, Request((1,)), [1]) for n in range(8)]
    for left in (8, 6, 2):
        chooser.observe(finished(seqs[:left], [5] * left, [1] * left, 48, 5, captured=True), 1.5)
    assert {k for _, k in chooser.costs._cells} == {5}


def test_a_requests_own_k_is_its_own() -> None:
    """In eager steps it shares with none; in captured ones it has no more than it asked for, and those are its best."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    model, tokenizer = fused(bundled.target()), load_tokenizer(bundled.target())
    head = load_head(str(HEADS / "scylla"), load(bundled.target()))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [tuple(tokenizer.encode(text))[:12] for text in bundled.prompts()[:4]]
    for graphs, own in ((False, (5, None, None, None)), (True, (3, 3, 3, 3))):
        requests = [Request(prompt, params, k=k) for prompt, k in zip(prompts, own, strict=True)]
        found = []
        for lengths in (FixedLength(1), sharing(1, 8)):
            config = EngineConfig(cache_memory="64MiB", k=8, graphs=graphs, max_batch=4)
            engine = build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=lengths)
            found.append([(seq.drafted, seq.accepted) for seq in run(engine, requests) if seq.request.k])
        drafted, accepted = zip(*(map(sum, zip(*one, strict=True)) for one in found), strict=True)
        assert drafted[0] == drafted[1] or graphs
        assert accepted[1] >= 0.97 * accepted[0]


def test_requests_with_a_drafter_of_their_own_have_their_share() -> None:
    """The lookup drafts no more than k; the head's sequences share the rest."""
    model = load(bundled.target())
    head = load_head(bundled.named("clover"), model)
    config = EngineConfig(cache_memory="64MiB", k=8, drafter_per_request=True, max_batch=8)
    engine = build_engine(model, draft=head, config=config, draft_lengths=sharing(2, 8))
    assert isinstance(engine.drafter, PerRequestDrafter) and engine.drafter.ranks_nodes
    prompt, params = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6), SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request((*prompt, n), params, drafter="ngram" if n % 2 else None) for n in range(6)]
    plain = run(build_engine(model, config=replace(config, drafter_per_request=False)), requests)
    seen: list[Draft] = []
    propose = engine.drafter.propose

    def watched(batch: Batch) -> Draft:
        draft = propose(batch)
        if len(batch) == 6 and batch.shared_k is not None:
            seen.append(draft)
            assert all(len(tokens) <= 2 for n, tokens in enumerate(draft.tokens) if n % 2)
            assert sum(map(len, draft.tokens)) <= 12
        return draft

    engine.drafter.propose = watched  # type: ignore[method-assign]
    assert [seq.output for seq in run(engine, requests)] == [seq.output for seq in plain] and seen
