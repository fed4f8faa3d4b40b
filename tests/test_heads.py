"""Draft heads: exact output whatever they guess, the same guesses as from scratch, folders that know their target."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faircopy import LLM, CheckpointError, ConfigError, build, bundled
from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.draft_length import DraftLengths, FixedLength, shared_room
from faircopy.drafters.base import NoDrafter
from faircopy.drafters.folder import METHODS, load_head, new_head, save_head
from faircopy.drafters.head_drafter import MAX_UNREAD, HeadDrafter
from faircopy.drafters.heads import Head
from faircopy.drafters.networks.blocks import packed_linears
from faircopy.drafters.trees import NodeBudgetTree, RerankedTree, StaticTree, Tree, best_shape
from faircopy.kernels.cpu.product import fits
from faircopy.layout.block_tables import BlockTables
from faircopy.layout.paged import PagedLayout
from faircopy.layout.pool import PagePool
from faircopy.model.base import Model, Taps
from faircopy.model.loader import load_tokenizer
from faircopy.model.runner import Runner
from faircopy.replay.graphs import GraphKey
from faircopy.testing import Plain, SpyDrafter, TableModel
from faircopy.types import Batch, Draft, Request, SamplingParams, Sequence
from tests.helpers import (
    CPU,
    Lengths,
    assert_same,
    changing,
    engine_of,
    head_for,
    load,
    random_prompts,
    references,
    requests_of,
    run,
)

GREEDY = SamplingParams(max_tokens=12, logprobs=1)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9)
PENALISED = SamplingParams(max_tokens=12, repetition_penalty=1.4, logit_bias={3: 1.5})


@cache
def texts_of(folder: str) -> tuple[list[list[int]], list[SamplingParams], list[Plain]]:
    """Prompts, parameters and plain decoding's answers, the same for every head."""
    model, params = load(folder), [GREEDY, SAMPLED, PENALISED, GREEDY] * 2
    prompts = random_prompts(8, model.vocab, seed=2)
    return prompts, params, references(model, prompts, params, list(range(8)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_every_head_gives_plain_decoding(checkpoint: Callable[..., str], name: str, method: str) -> None:
    folder = checkpoint(name)
    model = load(folder)
    head = head_for(folder, model, method)
    prompts, params, expected = texts_of(folder)
    for batch, k in ((1, 4), (3, None), (8, 3), (8, 16)):
        count = 8 if batch > 1 else 3
        engine = engine_of(
            model, draft=head, lengths=changing if k is None else (lambda seq, k=k: k), max_batch=batch, chunk=16
        )
        seqs = run(engine, requests_of(prompts[:count], params[:count], list(range(count))))
        assert_same(seqs, expected[:count])
        assert engine.meter.drafted > 0


@pytest.mark.parametrize("method", METHODS)
def test_preemption_chunks_and_reuse_change_nothing(checkpoint: Callable[..., str], method: str) -> None:
    folder = checkpoint("llama")
    model = load(folder)
    head = head_for(folder, model, method)
    stem = random_prompts(1, model.vocab, seed=8, longest=70)[0] * 2
    prompts = [stem[:40] + tail for tail in random_prompts(6, model.vocab, seed=9, longest=30)]
    params = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0)] * 3
    expected = references(model, prompts, params, list(range(6)))
    layers = len(model.layers) + len(head.layers)
    engine = engine_of(
        model,
        draft=head,
        lengths=changing,
        max_batch=6,
        chunk=16,
        page=8,
        cache_memory=20 * 8 * layers * 2 * 2 * 16 * 4,
    )
    assert_same(run(engine, requests_of(prompts, params, list(range(6)))), expected)
    assert engine.meter.preemptions > 0 and engine.meter.tokens_reused > 0 and engine.meter.drafted > 0


def states_from_scratch(model: Model, head: Head, tokens: list[int]) -> torch.Tensor:
    """What the head reads beside these tokens, with nothing kept from before."""
    taps = Taps(head.wants)
    tables = BlockTables(PagePool(-(-len(tokens) // 32)), 32, reuse=False)
    layout = PagedLayout(tables, model.layers, model.dtype, CPU)
    seq = Sequence(0, Request(tuple(tokens)), tokens)
    tables.open(seq)
    tables.reserve(seq, len(tokens))
    with torch.no_grad():
        model.forward(layout.pack(Batch([seq], [len(tokens)], [0]), Draft.empty(1)), layout, taps)
        states = torch.cat([taps.states[layer] for layer in head.wants], -1)
    return torch.cat([torch.zeros_like(states[:1]), states[:-1]])[None]


def check_from_scratch(model: Model, head: Head, tokens: list[int], draft: Draft, i: int) -> int:
    """The slow twin: the first child of every node is the head's best guess after the path to it."""
    states, seen = states_from_scratch(model, head, tokens), set()
    for node, parent in enumerate(draft.parents[i]):
        if parent not in seen:
            seen.add(parent)
            path = [draft.tokens[i][n] for n in draft.path(i, parent)] if parent >= 0 else []
            assert draft.tokens[i][node] == last_guess(head, states, torch.tensor([tokens]), path)
    return len(seen)


@torch.no_grad()
def last_guess(head: Head, states: torch.Tensor, tokens: torch.Tensor, before: list[int]) -> int:
    """Unrolled as in training: the last row of the level that these guesses lead to."""
    more = torch.cat([tokens, torch.tensor([[*before, 0]])], 1)
    padded = torch.cat([states, torch.zeros_like(states[:, : len(before) + 1])], 1)
    guess = [*head.unroll(padded, more, len(before) + 1)][-1]
    return int(head.over_vocabulary(guess.logits)[0, tokens.shape[1] - 1].argmax())


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_guesses_are_those_from_scratch(checkpoint: Callable[..., str], method: str, chain: bool) -> None:
    """In company, in chunks, after rejections and preemption: what is kept equals what would be computed anew."""
    folder = checkpoint("llama")
    model = load(folder)
    head = head_for(folder, model, method)
    if chain:
        head.tree = Tree  # type: ignore[assignment, method-assign]
    prompts = random_prompts(5, model.vocab, seed=4, longest=30)
    layers = len(model.layers) + len(head.layers)
    engine = engine_of(
        model,
        draft=head,
        lengths=changing if chain else (lambda seq: 3 * changing(seq)),
        chunk=8,
        page=4,
        prefix_reuse=False,
        cache_memory=24 * 4 * layers * 2 * 2 * 16 * 4,
    )
    drafter = engine.drafter
    compared = 0

    class Checked(SpyDrafter):
        def propose(self, batch: Batch) -> Draft:
            nonlocal compared
            draft = super().propose(batch)
            for i, seq in enumerate(batch.seqs):
                compared += check_from_scratch(model, head, list(seq.tokens), draft, i)
            return draft

    engine.drafter = Checked(drafter)
    run(engine, [Request(tuple(p), SamplingParams(max_tokens=14)) for p in prompts])
    assert compared > 20 and engine.meter.preemptions > 0
    assert isinstance(drafter, HeadDrafter) and not drafter._known


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_is_for_one_target(checkpoint: Callable[..., str], tmp_path: Path, method: str) -> None:
    folder, other = checkpoint("llama"), checkpoint("llama", 1)
    model = load(folder)
    head = head_for(folder, model, method).to(torch.bfloat16).float()
    save_head(head, tmp_path / "head")
    llm = LLM(folder, draft=tmp_path / "head", k=4, cache_memory="16MiB")
    assert llm.explain()["drafter"] == "HeadDrafter"
    (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    assert (
        answer.token_ids
        == LLM(folder, cache_memory="16MiB").generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0].token_ids
    )
    loaded = load_head(str(tmp_path / "head"), model)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(ConfigError, match=f"a head for {folder}, not for {other}"):
        LLM(other, draft=str(tmp_path / "head"))


def test_a_folder_that_is_no_head_is_refused(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    folder = checkpoint("llama")
    model = load(folder)
    save_head(head_for(folder, model, "clover"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "method": "magic"}))
    with pytest.raises(CheckpointError, match="not a head we know"):
        load_head(str(tmp_path), model)
    (tmp_path / "config.json").write_text(json.dumps({**config, "levels": 9}))
    with pytest.raises(CheckpointError, match="do not fit"):
        load_head(str(tmp_path), model)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_head(str(tmp_path), model)
    with pytest.raises(ConfigError, match="use one of"):
        new_head("magic", folder, model.token_weights())


def offers(*shares: float) -> list[tuple[int, float]]:
    return [(100 + n, math.log(share)) for n, share in enumerate(shares)]


def test_clovers_tree_spends_its_room_level_by_level() -> None:
    tree = NodeBudgetTree(4)
    tree.grow([offers(0.5, 0.2, 0.15, 0.1)])
    assert tree.tokens == [100, 101, 102], "the fourth is below a quarter of the best, and 0.8 is reached"
    tree.grow([offers(0.9, 0.1), offers(0.6, 0.4), offers(1.0)])
    assert tree.result() == ([100, 101, 102, 100], [-1, -1, -1, 0])
    assert tree.front == [], "nothing is left for deeper levels"
    sure = NodeBudgetTree(3)
    for _ in range(3):
        sure.grow([offers(0.95, 0.05)])
    assert sure.result() == ([100, 100, 100], [-1, 0, 1]), "a sure head goes deep"


def test_eagles_tree_keeps_the_likeliest_nodes_of_all_levels() -> None:
    tree = RerankedTree(4, depth=2)
    tree.grow([offers(0.6, 0.3, 0.1)])
    assert tree.front == [0, 1]
    tree.grow([offers(0.9, 0.1), offers(0.5, 0.5)])
    assert tree.result() == ([100, 101, 100, 100], [-1, -1, 0, 1])
    assert len(tree.expanded) <= 4
    for max_nodes in range(1, 65):
        big = RerankedTree(max_nodes, depth=6)
        for _ in range(7):
            if big.front:
                big.grow([offers(*(0.5**n for n in range(1, 11)))] * len(big.front))
        tokens, parents = big.result()
        assert len(tokens) == max_nodes and len(big.expanded) <= max_nodes
        assert all(parent < node for node, parent in enumerate(parents))


def test_medusas_tree_is_the_best_of_its_size() -> None:
    table = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1]]
    shape = best_shape(table, 5)
    assert shape == [(-1, 0), (0, 0), (-1, 1), (0, 1), (-1, 2)]
    tree = StaticTree(shape, 4)
    tree.grow([[(7, -0.1), (8, -1.0), (9, -2.0)]])
    tree.grow([[(5, -0.1), (6, -1.0)]])
    assert tree.result() == ([7, 8, 5, 6], [-1, -1, 0, 0]) and tree.front == []
    assert len(best_shape(table, 63)) == 3 + 9, "no more than there are"


class RandomTrees(NoDrafter):
    """Trees of up to `most` nodes of any shape, chains and nothing, with right nodes among them."""

    def __init__(self, truth: dict[tuple[int, ...], list[int]], vocab: int, most: int) -> None:
        self._truth, self._vocab, self._most, self._source = truth, vocab, most, random.Random(7)
        self.largest = 0

    def propose(self, batch: Batch) -> Draft:
        draft = Draft.empty(len(batch))
        for i, seq in enumerate(batch.seqs):
            max_nodes = min(batch.max_nodes[i], self._most) if batch.complete(i) else 0
            kind = self._source.choice(["tree", "tree", "chain", "none"])
            for node in range(0 if kind == "none" else max_nodes):
                parent = node - 1 if kind == "chain" else self._source.randrange(-1, node)
                draft.tokens[i].append(self._token(seq, draft, i, parent))
                draft.parents[i].append(parent)
            self.largest = max(self.largest, len(draft.tokens[i]))
        return draft

    def _token(self, seq: Sequence, draft: Draft, i: int, parent: int) -> int:
        depth = len(draft.path(i, parent)) if parent >= 0 else 0
        future = self._truth[seq.prompt][len(seq.output) :]
        right = future[depth] if depth < len(future) and self._source.random() < 0.6 else None
        return self._source.randrange(self._vocab) if right is None else right


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_random_trees_of_up_to_64_nodes_change_nothing(checkpoint: Callable[..., str], name: str) -> None:
    model = load(checkpoint(name))
    prompts = random_prompts(6, model.vocab, seed=3)
    params = [SamplingParams(max_tokens=80, logprobs=0), SamplingParams(max_tokens=80, temperature=0.8)] * 3
    expected = references(model, prompts, params, list(range(6)))
    truth = {tuple(p): e.tokens for p, e in zip(prompts, expected, strict=True)}
    drafter = RandomTrees(truth, model.vocab, 64)
    engine = engine_of(model, drafter, k=64, max_batch=6, chunk=16)
    assert_same(run(engine, requests_of(prompts, params, list(range(6)))), expected)
    assert drafter.largest == 64 and engine.meter.rows_moved > 0
    assert engine.meter.tokens_per_step > 1.5


def test_random_trees_keep_the_law_under_rejection() -> None:
    """Chi-square of the second token over 1,000 requests (15 values: 37.7 is 0.1 %); trees are picked, not drawn."""
    model = TableModel(vocab=16)
    model._table = model._table / 3
    params = SamplingParams(max_tokens=66, temperature=1.0)
    drafter = RandomTrees({(3,): [4, 5, 6]}, 16, 64)
    engine = engine_of(model, drafter, k=64, verifier="rejection", max_batch=50)
    seqs = []
    for seed in range(1000):
        seqs.append(engine.add(Request((3,), params, seed)))
        if seed % 50 == 49:
            engine.step()
            engine.step()
            for seq in seqs[-50:]:
                engine.abort(seq)
    assert drafter.largest == 64
    first = torch.softmax(model._table[0, 3], 0)
    second = sum(first[t] * torch.softmax(model._table[1, t], 0) for t in range(16)) * 1000
    counts = torch.bincount(torch.tensor([seq.output[1] for seq in seqs]), minlength=16)
    assert float(((counts - second) ** 2 / second).sum()) < 37.7


@pytest.mark.parametrize("method", METHODS)
def test_heads_under_rejection_write_greedy_text_as_ever(checkpoint: Callable[..., str], method: str) -> None:
    folder = checkpoint("llama")
    model = load(folder)
    head = head_for(folder, model, method)
    prompts = random_prompts(4, model.vocab, seed=3)
    params = [SamplingParams(max_tokens=10)] * 2 + [SamplingParams(max_tokens=10, temperature=0.7)] * 2
    expected = references(model, prompts[:2], params[:2], [0, 1])
    seqs = run(engine_of(model, draft=head, k=5, verifier="rejection"), requests_of(prompts, params, list(range(4))))
    assert_same(seqs[:2], expected)
    assert all(len(seq.output) == 10 for seq in seqs)


@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_goes_mad_is_only_wrong(checkpoint: Callable[..., str], method: str) -> None:
    folder = checkpoint("llama")
    model = load(folder)
    head = new_head(method, folder, model.token_weights())
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(torch.nan)
    prompts, params = [[1, 2, 3], [4, 5, 6]], [GREEDY, SAMPLED]
    expected = references(model, prompts, params, [0, 1])
    assert_same(run(engine_of(model, draft=head, k=4), requests_of(prompts, params, [0, 1])), expected)


def test_a_request_that_wants_no_drafts_costs_no_states(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("llama")
    model = load(folder)
    engine = engine_of(model, draft=head_for(folder, model, "clover"), k=4)
    quiet = engine.add(Request((1, 2, 3), GREEDY, 0, 0))
    loud = engine.add(Request((1, 2, 4), GREEDY, 0))
    while engine.busy:
        engine.step()
        assert isinstance(engine.drafter, HeadDrafter) and quiet not in engine.drafter._known
    assert quiet.drafted == 0 < loud.drafted


@pytest.mark.parametrize("method", ["clover", "eagle3"])
def test_states_are_kept_alike_where_drafting_is_off(checkpoint: Callable[..., str], method: str) -> None:
    """Steps in which all are idle are kept by a shorter way: the same states of the same sequences, whoever waits."""
    folder = checkpoint("llama")
    model = load(folder)

    def seen(short: bool) -> list[dict[int, list[tuple[int, int]]]]:
        source, found = random.Random(3), []
        off: list[bool] = [False]
        engine = engine_of(
            model,
            draft=head_for(folder, model, method),
            lengths=lambda seq: 0 if off[0] else 4 if seq.request.k is None else seq.request.k,
            max_batch=4,
            chunk=24,
            page=8,
            cache_memory="160KiB",
        )
        drafter = engine.drafter
        assert isinstance(drafter, HeadDrafter)
        if not short:
            drafter.observe = lambda batch, draft, result, verdict: drafter._keep(  # type: ignore[method-assign]
                batch, result, [decision.nodes for decision in verdict.decisions]
            )
        for n in range(9):
            prompt = tuple(source.randrange(3, 60) for _ in range((1, 9, 40)[n % 3])) if n % 4 else (5, 6, 7, 8) * 5
            engine.add(Request(prompt, SamplingParams(max_tokens=source.randint(6, 40)), k=0 if n % 5 == 4 else None))
        while engine.busy:
            off[0] = source.random() < 0.7 if len(found) % 6 == 0 else off[0]
            engine.step()
            found.append({seq.id: [piece[:2] for piece in known._pieces] for seq, known in drafter._known.items()})
        assert engine.meter.drafted > 20
        return found

    assert seen(True) == seen(False)


def test_states_that_wait_are_read_in_the_end(checkpoint: Callable[..., str]) -> None:
    """A sequence that is given no room for long does not pile up states."""
    folder = checkpoint("llama")
    model = load(folder)
    engine = engine_of(model, draft=head_for(folder, model, "eagle3"), lengths=lambda seq: 0)
    seq = engine.add(Request((1, 2, 3), SamplingParams(max_tokens=200)))
    most = 0
    while engine.busy:
        engine.step()
        known = engine.drafter._known.get(seq)  # type: ignore[attr-defined]
        most = max(most, sum(end - first for first, end, *_ in known._pieces) if known else 0)
    assert 0 < most <= MAX_UNREAD + 2


@pytest.mark.parametrize("method", METHODS)
def test_heads_beside_the_gpus_decoder_change_nothing(checkpoint: Callable[..., str], method: str) -> None:
    """The fused decoder hands over its states, and its attention serves the head's layers; kernels' twins on a CPU."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    model, own = fused(folder), load(folder)
    head = head_for(folder, own, method)
    kinds = [SamplingParams(max_tokens=10), SamplingParams(max_tokens=10, logprobs=1)]  # the latter run eagerly
    requests = [Request(tuple(p), kinds[n % 2]) for n, p in enumerate(random_prompts(4, model.vocab, seed=5))]
    config = EngineConfig(cache_memory="8MiB", chunk=16)
    plain = run(build_engine(model, config=config, suite=TWINS), requests)
    for k in (3, 14):
        engine = build_engine(model, draft=head, config=replace(config, k=k), suite=TWINS)
        seqs = run(engine, requests)
        assert [seq.output for seq in seqs] == [seq.output for seq in plain]
        assert engine.meter.drafted > 0
    for layer, states in states_of(model, head, TWINS).items():
        torch.testing.assert_close(states, states_of(own, head)[layer], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_heads_may_be_off_for_some_captured_steps(checkpoint: Callable[..., str], method: str) -> None:
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import Wandering, fused

    folder = checkpoint("llama")
    model, own = fused(folder), load(folder)
    head = head_for(folder, own, method)
    params = SamplingParams(max_tokens=24)
    requests = [Request(tuple(p), params) for p in random_prompts(4, model.vocab, seed=6)]
    config = EngineConfig(cache_memory="8MiB", chunk=16, k=4)
    plain = run(build_engine(model, config=config, suite=TWINS), requests)
    for seed in range(2):
        engine = build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=Wandering(seed))
        assert [seq.output for seq in run(engine, requests)] == [seq.output for seq in plain]
        assert engine.meter.drafted > 0


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_chunks_of_fewer_rows_than_a_head_has_levels_are_read_too(
    checkpoint: Callable[..., str], method: str, chunk: int
) -> None:
    """Captured steps follow behind a prompt that was read a few rows at a time."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    head = head_for(folder, load(folder), method)
    assert head.levels > chunk
    config = EngineConfig(cache_memory="8MiB", chunk=chunk, k=3)
    engine = build_engine(fused(folder), draft=head, config=config, suite=TWINS)
    run(engine, [Request(tuple(range(3, 20)), SamplingParams(max_tokens=8, ignore_eos=True))])
    assert engine.meter.captured_steps > 0 and engine.meter.drafted > 0
    captured = engine.meter.captured_steps
    engine.add(Request((5, 6), SamplingParams(max_tokens=15, ignore_eos=True, logprobs=21)))  # not for captured steps
    run(engine, [Request(tuple(range(4, 26)), SamplingParams(max_tokens=30, ignore_eos=True))])
    assert engine.meter.captured_steps > captured, "rows that were left beside it are made up for"


@pytest.mark.parametrize("method", METHODS)
def test_heads_that_are_off_read_nothing_and_timing_writes_nothing(checkpoint: Callable[..., str], method: str) -> None:
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    model = fused(folder)
    head = head_for(folder, load(folder), method)
    prompts = random_prompts(4, model.vocab, seed=6)
    lengths = Lengths(lambda seq: 0)
    for graphs in (True, False):
        config = EngineConfig(cache_memory="8MiB", chunk=16, k=4, graphs=graphs)
        engine = build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=lengths)
        run(engine, [Request(tuple(prompt), SamplingParams(max_tokens=24)) for prompt in prompts])
        assert engine.meter.drafter_rows == 0
    engine = build_engine(model, draft=head, config=EngineConfig(cache_memory="8MiB", k=3), suite=TWINS)
    assert engine.captured is not None
    graph, step = engine.captured.graphs.get(GraphKey(4, 3))
    pools = [pool for layout in engine.layouts for pool in layout.all_pools()]  # type: ignore[attr-defined]
    with engine.captured.graphs.kept(graph):
        engine.captured.graphs.pretend(graph)
        step.start()
    assert not any(pool[: graph.scratch].any() for pool in pools)


def states_of(model: Model, head: Head, suite: Any = None) -> dict[int, torch.Tensor]:
    """The target's states over a short text, by either decoder."""
    tables = BlockTables(PagePool(4), 32, reuse=False)
    runner = Runner(model, PagedLayout(tables, model.layers, model.dtype, CPU, False, suite), head.wants)
    seq = Sequence(0, Request((3, 1, 4, 1, 5)), [3, 1, 4, 1, 5])
    tables.open(seq)
    tables.reserve(seq, 5)
    return runner.forward(Batch([seq], [5], [0]), Draft.empty(1)).states


@pytest.mark.parametrize("method", ["clover", "clover2", "scylla", "eagle3"])
def test_a_head_may_guess_the_frequent_tokens_alone(checkpoint: Callable[..., str], method: str) -> None:
    folder = checkpoint("llama")
    model = load(folder)
    head = head_for(folder, model, method, draft_vocab=20)
    counts = torch.zeros(model.vocab, dtype=torch.int64)
    frequent = torch.arange(7, model.vocab, 2)[:20]
    counts[frequent] = 5
    head.keep_frequent(counts)
    assert head.words is not None and head.words.tolist() == frequent.tolist()
    prompts = random_prompts(4, model.vocab, seed=5)
    params = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.9)] * 2
    engine = engine_of(model, draft=head, lengths=lambda seq: 3)
    proposed: set[int] = set()
    propose = engine.drafter.propose

    def watched(batch: Batch) -> Draft:
        draft = propose(batch)
        proposed.update(token for tokens in draft.tokens for token in tokens)
        return draft

    engine.drafter.propose = watched  # type: ignore[method-assign]
    seqs = run(engine, requests_of(prompts, params, [0] * 4))
    assert proposed and proposed <= set(frequent.tolist())
    assert_same(seqs, references(model, prompts, params, [0] * 4))


ON_KERNELS = ("eagle3", "scylla", "clover")


@pytest.mark.parametrize(
    ("method", "kernels", "words"),
    [
        *((method, False, None) for method in METHODS),
        *((method, True, words) for method in ON_KERNELS for words in (None, 20)),
    ],
)
def test_captured_guesses_are_those_from_scratch(
    checkpoint: Callable[..., str], method: str, kernels: bool, words: int | None
) -> None:
    """Captured steps, on a CPU by the kernels' twins: the host sees no states, and every chain is the head's own.

    kernels: the head's layers run on kernels too, as they do on a GPU. words: tokens that it guesses.
    """
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    model, own = fused(folder), load(folder)
    head = head_for(folder, own, method, **({"draft_vocab": words} if words else {}))
    if words:
        head.keep_frequent(torch.arange(model.vocab).flip(0) % 3)
    if kernels:
        head.run_on_kernels(exact=False)
    engine = build_engine(model, draft=head, config=EngineConfig(cache_memory="8MiB", k=3, max_batch=4), suite=TWINS)
    assert engine.captured is not None
    collect, compared = engine.captured.collect, 0

    def watched(in_flight: Any) -> Any:
        nonlocal compared
        step = collect(in_flight)
        for i, seq in enumerate(step.batch.seqs):
            if seq.params.greedy:  # the others guess with their noise
                compared += check_from_scratch(own, head, list(seq.tokens), step.draft, i)
        return step

    engine.captured.collect = watched  # type: ignore[method-assign]
    prompts = random_prompts(4, model.vocab, seed=5)
    seqs = run(engine, [Request(tuple(p), SamplingParams(max_tokens=12 + 3 * n)) for n, p in enumerate(prompts)])
    assert compared > 60
    expected = references(own, prompts, [SamplingParams(max_tokens=12 + 3 * n) for n in range(4)], [0] * 4)
    assert [seq.output for seq in seqs] == [e.tokens for e in expected]
    late = engine.add(Request((5, 6, 7), SamplingParams(max_tokens=12)))
    engine.add(Request((5, 6, 8), SamplingParams(max_tokens=12), 0, 0))
    for n in range(3):
        engine.step()
        engine.add(Request((8, n), SAMPLED, n))  # each arrival brings the batch down and up again
    while engine.busy:
        engine.step()
    assert late.output == references(own, [[5, 6, 7]], [SamplingParams(max_tokens=12)], [0])[0].tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_serves_on_a_cpu_is_the_network(
    checkpoint: Callable[..., str], tmp_path: Path, method: str
) -> None:
    """Its products run on the CPU's kernels, where there are some; it has its size, and can be saved."""
    folder = checkpoint("llama")
    model = load(folder)
    head, saved = head_for(folder, model, method), tmp_path / "head"
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, 5, head.input_size, generator=generator)
    tokens = torch.randint(0, model.vocab, (2, 5), generator=generator)
    before, about = dict(head.state_dict()), (head.size, head.dtype, head.device)

    def guesses() -> list[torch.Tensor]:
        with torch.no_grad():
            return [head.over_vocabulary(guess.logits) for guess in head.eval().unroll(states, tokens, 2)]

    wanted = guesses()
    for _ in range(2):  # of two engines
        head.serve()
        for ours, theirs in zip(guesses(), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert bool(packed_linears(head)) == fits(torch.zeros(2, 2))
    assert (head.size, head.dtype, head.device) == about and head.weight_bytes >= 4 * head.size
    save_head(head, saved)
    kept = load_head(str(saved), model).state_dict()
    assert all(torch.equal(weight.bfloat16(), before[name].bfloat16()) for name, weight in kept.items())


@pytest.mark.parametrize("gated", [True, False])
def test_clovers_decoder_on_kernels_is_the_network(checkpoint: Callable[..., str], gated: bool) -> None:
    pytest.importorskip("triton")
    folder = checkpoint("llama")
    model = load(folder)
    head = head_for(folder, model, "clover", decoder=gated)
    generator = torch.Generator().manual_seed(1)
    memory = torch.randn(1, 7, head.config.shape.hidden, generator=generator)
    tokens = torch.randint(0, model.vocab, (1, 7), generator=generator)
    with torch.no_grad():
        wanted = [head.step(level, memory, tokens) for level in range(head.levels)]
        head.run_on_kernels(exact=False)
        found = [head.step(level, memory, tokens) for level in range(head.levels)]
    for ours, theirs in zip(found, wanted, strict=True):
        for part, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("method", "k"), [("eagle3", 1), ("eagle3", 13), ("scylla", 4), ("clover", 4), ("clover", 12)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_grow_the_trees_of_their_twins(checkpoint: Callable[..., str], method: str, k: int) -> None:
    """A whole draft of a captured step, in Triton's interpreter; guesses of the two may differ in their last bits."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import KERNELS, TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    drafts = []
    for suite in (KERNELS, TWINS):
        model = fused(folder)
        head = head_for(folder, load(folder), method, draft_vocab=40)
        head.run_on_kernels(exact=False)
        config = EngineConfig(cache_memory="8MiB", k=k, max_batch=2)
        engine = build_engine(model, draft=head, config=config, suite=suite)
        assert engine.captured is not None
        graph = engine.captured.graphs.make_state(GraphKey(2, k))
        work = engine.captured._drafter.plan_fill(graph)
        engine.captured.graphs.pretend(graph)
        generator = torch.Generator().manual_seed(3)
        states = engine.captured._drafter.reads_hidden_states
        assert states is not None and graph.trees is not None
        for table in states.buffers():
            if table.is_floating_point():
                table.copy_(torch.randn(table.shape, generator=generator))
        graph.batch_slots.history.copy_(
            torch.randint(0, model.vocab, graph.batch_slots.history.shape, generator=generator)
        )
        with torch.no_grad():
            suite.prepare(graph.batch_slots, graph.inputs, graph.page, graph.scratch)
            work()
        drafts.append((graph.inputs.ids.tolist(), graph.trees.parents.tolist()))
    assert drafts[0] == drafts[1]
    assert all(token >= 0 for token in drafts[0][0][0])


@pytest.mark.parametrize("method", METHODS)
def test_captured_trees_change_nothing(checkpoint: Callable[..., str], method: str) -> None:
    """Trees of all sizes in captured steps, by the kernels' twins: scarce pages, short contexts, neighbours."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import count_starts, fused, shorter

    folder = checkpoint("llama")
    own = load(folder)
    model, head = shorter(fused(folder), 60), head_for(folder, own, method)
    prompts = random_prompts(4, model.vocab, seed=5, longest=30)
    params = [
        SamplingParams(max_tokens=90, ignore_eos=True, temperature=temperature) for temperature in (0.0, 0.9, 0.0, 0.0)
    ]
    requests = [
        Request(tuple(p), q, n, k) for n, (p, q, k) in enumerate(zip(prompts, params, (None, None, 1, 0), strict=True))
    ]
    plain = run(build_engine(model, config=EngineConfig(cache_memory="8MiB", graphs=False), suite=TWINS), requests)
    assert all(len(seq.tokens) == 60 for seq in plain)
    layers = len(model.layers) + len(head.layers)
    for k in (1, 5, 24):
        config = EngineConfig(cache_memory=22 * 8 * layers * 2 * 2 * 16 * 4, page=8, max_batch=4, k=k)
        engine = build_engine(model, draft=head, config=config, suite=TWINS)
        starts = count_starts(engine)
        seqs = run(engine, requests)
        assert [seq.output for seq in seqs] == [seq.output for seq in plain]
        assert len(starts) > 20 and engine.meter.drafted > 0
        assert seqs[3].drafted == 0 and seqs[2].drafted <= seqs[2].steps


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_small_drafts_may_be_chains_beside_trees(
    checkpoint: Callable[..., str], method: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with k="auto" on a GPU: a head with trees drafts chains up to a number of nodes, and trees above it."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import Wandering, fused

    folder = checkpoint("llama")
    model, head = fused(folder), head_for(folder, load(folder), method)
    requests = [Request(tuple(p), SamplingParams(max_tokens=30)) for p in random_prompts(5, model.vocab, seed=6)]
    config = EngineConfig(cache_memory="8MiB", k=12, max_batch=4, graphs=graphs)
    plain = [seq.output for seq in run(build_engine(model, config=config, suite=TWINS), requests)]

    def drafts(lengths: DraftLengths, chains: int) -> list[Draft]:
        monkeypatch.setattr(build, "_chain_nodes", lambda *_: chains)
        engine, seen = build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=lengths), list[Draft]()
        observe = engine.draft_lengths.observe
        engine.draft_lengths.observe = lambda step, seconds: (seen.append(step.draft), observe(step, seconds))[1]
        assert [seq.output for seq in run(engine, requests)] == plain
        return seen

    class Sizes(Wandering):
        lengths = (0, 2, head.levels + 1, 12)

    most = head.levels + 1  # the last node of the longest chains has no level
    assert not all(draft.is_chain(i) for draft in drafts(Sizes(3), most) for i in range(len(draft.tokens))), (
        "trees fork"
    )
    chains = [draft.tokens for draft in drafts(FixedLength(most), most)]
    assert max(len(tokens) for step in chains for tokens in step) == head.levels
    monkeypatch.setattr(head, "tree", Tree)
    assert [draft.tokens for draft in drafts(FixedLength(head.levels), 0)] == chains


@pytest.mark.parametrize("method", ["clover", "eagle3"])
def test_few_unread_rows_are_read_alone(
    checkpoint: Callable[..., str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that read no more rows than the step before can have left draft what those for full batch slots do."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from faircopy.replay import graphs as step_graphs
    from tests.test_replay import fused

    folder = checkpoint("llama")
    model, head = fused(folder), head_for(folder, load(folder), method, levels=5)
    prompts = random_prompts(9, model.vocab, seed=6, longest=30)
    requests = [Request(tuple(p), SamplingParams(max_tokens=20 + 3 * n), n) for n, p in enumerate(prompts)]
    config = EngineConfig(cache_memory="8MiB", k=7, max_batch=4)
    monkeypatch.setattr(build, "_chain_nodes", lambda *_: 3)

    class Sizes(DraftLengths):
        """Up and down, a few steps each; at times a sequence has fewer."""

        lengths = (1, 3, 7)
        calls = 0

        def choose(self, seqs: Seq[Sequence]) -> list[int]:
            self.calls += 1
            most = (7, 3, 1, 3, 7, 1, 0)[self.calls // 5 % 7]
            return [min(most, 1) if self.calls % 11 == seq.id else most for seq in seqs]

    def drafts(few_read: int) -> tuple[list[Draft], set[tuple[int, int]]]:
        monkeypatch.setattr(step_graphs, "FEW_READ", few_read)
        engine = build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=Sizes())
        engine.warm_up()
        assert engine.captured is not None
        made, read, seen = engine.captured.graphs.keys, set[tuple[int, int]](), list[Draft]()
        start, observe = engine.captured.start, engine.draft_lengths.observe

        def started(*args: Any, **named: Any) -> Any:
            step = start(*args, **named)
            read.add((step.graph.k, step.graph.unread))
            return step

        engine.captured.start = started  # type: ignore[method-assign]
        engine.draft_lengths.observe = lambda step, seconds: (seen.append(step.draft), observe(step, seconds))[1]
        outputs = [seq.output for seq in run(engine, requests)]
        assert outputs == plain and engine.captured.graphs.keys == made, "nothing is captured on a request's time"
        return seen, read

    plain = [seq.output for seq in run(build_engine(model, config=config, suite=TWINS), requests)]
    (few, read), (full, other) = drafts(0), drafts(1 << 20)
    assert other == {(k, 6) for k in (0, 1, 3, 7)} and read == other | {(1, 2), (3, 4)}
    assert [draft.tokens for draft in few] == [draft.tokens for draft in full]
    assert sum(len(tokens) for draft in few for tokens in draft.tokens) > 100


@pytest.mark.parametrize(("seed", "shared"), [(0, True), (1, False)])
def test_few_unread_rows_are_all_that_there_are(seed: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a trained head, whose accepted paths are long, lengths that change at random, requests of their own k,
    preemptions and sequences that come later."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from faircopy.replay import graphs as step_graphs
    from tests.test_replay import fused

    model, source = fused(bundled.target()), random.Random(seed)
    head = load_head(str(bundled.folder() / "clover"), load(bundled.target()))
    tokenizer = load_tokenizer(bundled.target())
    requests = [
        Request(
            tuple(tokenizer.encode(text))[:30],
            SamplingParams(
                max_tokens=source.randint(5, 60), ignore_eos=True, temperature=source.choice((0.0, 0.0, 0.7))
            ),
            n,
            source.choice((None, None, None, 0, 2, 5)),
        )
        for n, text in enumerate(bundled.prompts()[12 * seed : 12 * seed + 12])
    ]
    config = EngineConfig(cache_memory="1500KiB", page=8, k=7, max_batch=6)
    monkeypatch.setattr(build, "_chain_nodes", lambda *_: 3 * seed)

    class Lengths(DraftLengths):
        lengths = (1, 2, 3, 7)

        def __init__(self) -> None:
            self.source, self.most = random.Random(seed), 7

        def room(self, k: int, batch: int) -> int:
            return shared_room(k, batch, 14) if shared else k

        def choose(self, seqs: Seq[Sequence]) -> list[int]:
            self.most = self.source.choice((self.most, *self.lengths))
            return [self.most if seq.request.k is None else seq.request.k for seq in seqs]

    def outputs(few_read: int) -> tuple[list[list[int]], list[list[list[int]]], int]:
        monkeypatch.setattr(step_graphs, "FEW_READ", few_read)
        engine = build_engine(model, draft=head, config=config, suite=TWINS, draft_lengths=Lengths())
        drafts, observe = list[list[list[int]]](), engine.draft_lengths.observe
        engine.draft_lengths.observe = lambda step, seconds: (drafts.append(step.draft.tokens), observe(step, seconds))[
            1
        ]
        coming, seqs, later = list(requests), list[Sequence](), random.Random(seed)
        while coming or engine.busy:
            while coming and (not engine.busy or later.random() < 0.4):
                seqs.append(engine.add(coming.pop(0)))
            engine.step()
        assert engine.captured is not None
        return [seq.output for seq in seqs], drafts, sum(key.unread > 0 for key in engine.captured.graphs.keys)

    alone = EngineConfig(cache_memory="8MiB", graphs=False)
    plain = [seq.output for seq in run(build_engine(model, config=alone, suite=TWINS), requests)]
    few, full = outputs(0), outputs(1 << 20)
    assert few[0] == full[0] == plain and few[1] == full[1]
    assert few[2] > 0 == full[2]


def test_captured_trees_with_every_sampling_parameter() -> None:
    """Penalties, bans, filters and log probabilities follow each node's own path, and forks are accepted."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import BAD_WORDS, MIXED, count_starts, fused

    model = fused(bundled.target())
    head = load_head(str(bundled.folder() / "clover"), load(bundled.target()))
    tokenizer = load_tokenizer(bundled.target())
    prompts = [list(tokenizer.encode(text))[:12] for text in bundled.prompts()[: len(MIXED)]]
    requests = [
        Request(tuple(p), replace(params, max_tokens=24, ignore_eos=True), n, bad_words=BAD_WORDS if n == 1 else ())
        for n, (p, params) in enumerate(zip(prompts, MIXED, strict=True))
    ]
    plain = run(build_engine(model, config=EngineConfig(cache_memory="64MiB", graphs=False), suite=TWINS), requests)
    engine = build_engine(model, draft=head, config=EngineConfig(cache_memory="64MiB", k=8, max_batch=8), suite=TWINS)
    starts = count_starts(engine)
    seqs = run(engine, requests)
    assert [seq.output for seq in seqs] == [seq.output for seq in plain]
    assert [[*map(list, seq.logprobs)] for seq in seqs] == [[*map(list, seq.logprobs)] for seq in plain]
    assert len(starts) > 4 and sum(seq.accepted for seq in seqs) > 10


@pytest.mark.parametrize("graphs", [True, False])
def test_chains_are_drafted_with_the_requests_filters(graphs: bool) -> None:
    """Drawn from the best token alone, a text is the greedy one, and as much of it is drafted right."""
    pytest.importorskip("triton")
    from faircopy import bundled
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    model = fused(str(bundled.target()))
    head = load_head(bundled.named("clover"), load(str(bundled.target())))
    head.tree = Tree  # type: ignore[assignment, method-assign]
    prompts = [tuple(range(900, 900 + 7 * n)) for n in (1, 2, 3)]
    penalty = {"repetition_penalty": 1.2, "max_tokens": 32, "ignore_eos": True}
    for more in ({"max_tokens": 32, "ignore_eos": True}, penalty):
        found = []
        for params in (SamplingParams(**more), SamplingParams(temperature=1.0, top_k=1, **more)):  # type: ignore[arg-type]
            config = EngineConfig(cache_memory="64MiB", k=4, graphs=graphs)
            engine = build_engine(model, draft=head, config=config, suite=TWINS)
            seqs = run(engine, [Request(prompt, params) for prompt in prompts])
            found.append(([seq.output for seq in seqs], [seq.accepted for seq in seqs]))
        assert found[0] == found[1] and sum(found[0][1]) > 20


@pytest.mark.parametrize("graphs", [True, False])
def test_sampled_requests_get_trees_with_their_noise(graphs: bool) -> None:
    """Forks are drafted and accepted, more tokens are right than of chains, and the text is plain decoding's."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    model = fused(str(bundled.target()))
    params = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)
    requests = [Request(tuple(range(900, 900 + 7 * n)), params, n) for n in range(1, 5)]
    plain = run(build_engine(model, config=EngineConfig(cache_memory="64MiB", graphs=False), suite=TWINS), requests)
    accepted = []
    for rule in (None, Tree):
        head = load_head(bundled.named("clover"), load(str(bundled.target())))
        head.tree = rule or head.tree  # type: ignore[method-assign]
        config = EngineConfig(cache_memory="64MiB", k=12, graphs=graphs, max_batch=8)
        engine = build_engine(model, draft=head, config=config, suite=TWINS)
        seqs = run(engine, requests)
        assert [seq.output for seq in seqs] == [seq.output for seq in plain]
        accepted.append(sum(seq.accepted for seq in seqs) / sum(seq.steps for seq in seqs))
    assert accepted[0] > accepted[1] > 0.5


def test_accepted_paths_are_moved_into_line() -> None:
    """The bundled head and its target, trees in captured steps: forks are accepted, and what follows is right."""
    pytest.importorskip("triton")
    from faircopy import bundled
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    model = fused(str(bundled.target()))
    head = load_head(bundled.named("clover"), load(str(bundled.target())))
    requests = [Request(tuple(range(900, 900 + 7 * n)), SamplingParams(max_tokens=24)) for n in (1, 2)]
    plain = run(build_engine(model, config=EngineConfig(cache_memory="64MiB", graphs=False), suite=TWINS), requests)
    head.tree = lambda max_nodes: NodeBudgetTree(max_nodes, 0.99, 0.01)  # type: ignore[method-assign]
    engine = build_engine(model, draft=head, config=EngineConfig(cache_memory="64MiB", k=12), suite=TWINS)
    seqs = run(engine, requests)
    assert [seq.output for seq in seqs] == [seq.output for seq in plain]
    assert engine.target.layout.moved > 0 and engine.meter.accepted > 5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_head_of_shorter_context_only_guesses_worse(
    checkpoint: Callable[..., str], method: str, graphs: bool
) -> None:
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    model, own = fused(folder), load(folder)
    shape = head_for(folder, own, method).config
    head = METHODS[method](replace(shape, shape=replace(shape.shape, context=20))).bind(own.token_weights())
    request = Request((1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True))
    (plain,) = run(build_engine(model, config=EngineConfig(cache_memory="8MiB", graphs=False), suite=TWINS), [request])
    config = EngineConfig(cache_memory="8MiB", k=4, max_batch=2, graphs=graphs)
    (seq,) = run(build_engine(model, draft=head, config=config, suite=TWINS), [request])
    assert seq.output == plain.output


def test_a_rule_of_ones_own_is_a_captured_chain(checkpoint: Callable[..., str]) -> None:
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    class Own(Tree):
        """A chain by another name."""

    folder = checkpoint("llama")
    model, head = fused(folder), head_for(folder, load(folder), "clover")
    head.tree = Own  # type: ignore[method-assign, assignment]
    engine = build_engine(model, draft=head, config=EngineConfig(cache_memory="8MiB", k=4), suite=TWINS)
    assert engine.captured is not None
    collect, shapes = engine.captured.collect, []

    def watched(in_flight: Any) -> Any:
        step = collect(in_flight)
        shapes.extend(tuple(parents) for parents in step.draft.parents)
        return step

    engine.captured.collect = watched  # type: ignore[method-assign]
    run(engine, [Request((1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True))])
    assert (-1, 0, 1, 2) in shapes and all(shape == tuple(range(-1, len(shape) - 1)) for shape in shapes)


def test_those_without_drafts_leave_no_pages_for_the_head(checkpoint: Callable[..., str]) -> None:
    """A request that wants no drafts is not read by the head, so its pages must not count as read."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from tests.test_replay import fused

    folder = checkpoint("llama")
    model, head = fused(folder), head_for(folder, load(folder), "clover")
    engine = build_engine(model, draft=head, config=EngineConfig(cache_memory="8MiB", k=4, page=8), suite=TWINS)
    run(engine, [Request((1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True), 0, 0)])
    assert not engine.layouts[1]._full  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{"decoder": False}, {"decoder": "sum"}, {"regress": False}, {"augment": False}])
def test_a_clover_without_some_of_its_parts_is_a_head_too(
    checkpoint: Callable[..., str], tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = checkpoint("llama")
    model = load(folder)
    save_head(head_for(folder, model, "clover", **options), tmp_path)
    prompts, params, expected = texts_of(folder)
    engine = engine_of(model, draft=load_head(str(tmp_path), model), k=4, max_batch=3)
    assert_same(run(engine, requests_of(prompts[:3], params[:3], [0, 1, 2])), expected[:3])
    assert engine.meter.drafted > 0


@pytest.mark.parametrize("method", METHODS)
def test_rehearsing_leaves_nothing_behind(checkpoint: Callable[..., str], method: str) -> None:
    folder = checkpoint("llama")
    model = load(folder)
    engine = engine_of(model, draft=head_for(folder, model, method))
    free = engine.tables.pool.available
    engine.drafter.rehearse()
    engine.tables.check()
    assert engine.tables.pool.available == free


@pytest.mark.parametrize("context", [1, 2, 40, 512])
def test_rehearsing_keeps_to_the_context(
    checkpoint: Callable[..., str], context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position that a model does not know is an error, on a GPU one that no later launch survives."""
    pytest.importorskip("triton")
    from faircopy.kernels.gpu.suite import TWINS
    from faircopy.replay import passes
    from tests.test_replay import fused, shorter

    folder, seen = checkpoint("llama"), []
    model = shorter(fused(folder), context)
    head = head_for(folder, load(folder), "clover")
    engine = build_engine(model, draft=head, config=EngineConfig(cache_memory="8MiB", k=1), suite=TWINS)
    monkeypatch.setattr(passes, "ROWS", (4,))
    monkeypatch.setattr(passes, "LARGER", ())
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda packed, *more: (seen.append(int(packed.positions.max())), forward(packed, *more))[1]
    )
    assert engine.target.passes is not None
    engine.target.passes.rehearse()
    assert max(seen) < context


@pytest.mark.parametrize(("group", "levels", "nodes"), [(4, 7, 8), (4, 4, 5), (16, 7, 7), (32, 7, 3)])
def test_chains_of_auto_fit_a_tile(group: int, levels: int, nodes: int) -> None:
    """All rows of a chain are one tile of attention, whatever the number of heads per key head."""
    layer = SimpleNamespace(group=group)
    target = SimpleNamespace(device=torch.device("cuda"), layers=[layer])
    head = SimpleNamespace(grows_trees=True, levels=levels, layers=[SimpleNamespace(group=1)])
    auto = EngineConfig(k=24, auto=True)
    assert build._chain_nodes(target, head, auto) == nodes
    assert build._chain_nodes(target, head, replace(auto, share_nodes=True)) == 0
    assert build._chain_nodes(target, SimpleNamespace(**{**vars(head), "grows_trees": False}), auto) == 0
    assert build._chain_nodes(SimpleNamespace(**{**vars(target), "device": CPU}), head, auto) == 0
