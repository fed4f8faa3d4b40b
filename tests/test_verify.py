"""Verification: one walk for chains and trees; rejection sampling proved by enumeration in fractions."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from faircopy.acceptance import accept_path, children
from faircopy.drafters.base import Drafter
from faircopy.drafters.ngram import NgramDrafter
from faircopy.errors import DraftError
from faircopy.model.runner import Runner
from faircopy.testing import TableModel
from faircopy.testing.operators import HostCost
from faircopy.types import Batch, Draft, Request, SamplingParams, Sources
from faircopy.verify import rejection
from tests.helpers import engine_of, random_prompts, references, run, scripted

Law = dict[tuple[int, ...], Fraction]


def test_the_walk_follows_the_targets_choices() -> None:
    #        root -> 0:5 -> 2:7 -> 4:9     and root -> 1:6 -> 3:8
    draft = Draft([[5, 6, 7, 8, 9]], [[-1, -1, 0, 1, 2]])
    assert children(draft.parents[0]) == [[0, 1], [2], [3], [4], [], []]
    good = [False] * 6

    def walk(choices: list[int], broken: list[bool] = good) -> tuple[list[int], list[int]]:
        return accept_path(draft.tokens[0], draft.parents[0], choices, broken)

    assert walk([5, 7, 0, 9, 0, 3]) == ([0, 2, 4], [5, 7, 9, 3])
    assert walk([6, 7, 8, 9, 0, 3]) == ([1, 3], [6, 8, 0])
    assert walk([1, 7, 8, 9, 0, 3]) == ([], [1])
    assert walk([5, 7, 0, 9, 0, 3], [False, False, True, True, False, False]) == ([0, 2], [5, 7])
    assert walk([5, 7, 0, 9, 0, 3], [True] * 6) == ([], [])
    chain = Draft.chains([[4, 4, 4]])
    assert accept_path(chain.tokens[0], chain.parents[0], [4, 4, 1, 9], good) == ([0, 1], [4, 4, 1])
    assert accept_path([], [], [3], good) == ([], [3])


class Explorer:
    """Runs a random procedure once per outcome of its coins and draws, with the exact probability of each run."""

    def __init__(self) -> None:
        self._script: list[int] = []
        self._sizes: list[int] = []
        self._at = 0
        self.weight = Fraction(1)

    def runs(self, procedure: Callable[[], tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], Fraction]]:
        while True:
            self._at, self.weight, self._sizes = 0, Fraction(1), []
            outcome = procedure()
            yield outcome, self.weight
            self._script = self._script[: len(self._sizes)]
            while self._script and self._script[-1] + 1 == self._sizes[len(self._script) - 1]:
                self._script.pop()
            if not self._script:
                return
            self._script[-1] += 1

    def pick(self, options: list[tuple[int, Fraction]]) -> int:
        options = [(value, p) for value, p in options if p > 0]
        if self._at == len(self._script):
            self._script.append(0)
        value, p = options[self._script[self._at]]
        self._sizes.append(len(options))
        self._at += 1
        self.weight *= p
        return value

    def coin(self, node: int, p: Fraction) -> bool:
        return bool(self.pick([(1, p), (0, 1 - p)]))

    def draw(self, depth: int, p: np.ndarray) -> int:
        return self.pick(list(enumerate(p)))


def distributions(vocab: int, seed: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    """A fixed exact distribution after every prefix, some with zeros."""
    source: dict[tuple[int, ...], np.ndarray] = {}

    def after(prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in source:
            generator = np.random.default_rng([seed, *prefix])
            weights = generator.integers(0, 7, vocab)
            weights[generator.integers(vocab)] += 1
            source[prefix] = np.array([Fraction(int(w), int(weights.sum())) for w in weights], dtype=object)
        return source[prefix]

    return after


def law_of(target: Callable[[tuple[int, ...]], np.ndarray], length: int, vocab: int) -> Law:
    law: Law = {}
    for text in itertools.product(range(vocab), repeat=length):
        p = Fraction(1)
        for i, token in enumerate(text):
            p *= target(text[:i])[token]
        law[text] = p
    return law


def speculative_law(
    target: Callable[[tuple[int, ...]], np.ndarray],
    draft: Callable[[tuple[int, ...]], np.ndarray],
    parents: list[int],
    drawn: bool,
    length: int,
) -> Law:
    """The exact law of the first `length` tokens when this tree is drafted, verified and then continued plainly."""
    explorer, law = Explorer(), defaultdict(Fraction)

    def once() -> tuple[int, ...]:
        tokens: list[int] = []
        sources: list[np.ndarray | None] = []
        shape = Draft([[0] * len(parents)], [parents])
        for node, parent in enumerate(parents):
            prefix = tuple(tokens[n] for n in shape.path(0, parent)) if parent >= 0 else ()
            q = draft(prefix)
            for elder in range(node):
                if parents[elder] == parent:
                    q = rejection.without(q, tokens[elder])
            tokens.append(explorer.draw(0, q) if drawn else int(np.argmax(q)))
            sources.append(q if drawn else None)
        below = children(parents)
        paths = [(), *(tuple(tokens[n] for n in shape.path(0, node)) for node in range(len(parents)))]
        nodes, p = rejection.walk(tokens, below, [target(p) for p in paths], sources.__getitem__, explorer.coin)
        text = [*(tokens[node] for node in nodes), explorer.draw(0, p)]
        while len(text) < length:
            text.append(explorer.draw(0, target(tuple(text))))
        return tuple(text[:length])

    for text, weight in explorer.runs(once):
        law[text] += weight
    return dict(law)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "picked"])
@pytest.mark.parametrize(
    "parents",
    [[-1], [-1, 0], [-1, -1], [-1, 0, 0], [-1, -1, 0, 1], [-1, 0, -1, 0, 2]],
    ids=["one", "chain", "pair", "fork", "tree", "mixed order"],
)
def test_rejection_keeps_the_targets_law_exactly(parents: list[int], drawn: bool) -> None:
    for seed in range(3):
        vocab, length = 3, 2
        target, draft = distributions(vocab, seed), distributions(vocab, seed + 100)
        got = speculative_law(target, draft, parents, drawn, length)
        want = law_of(target, length, vocab)
        assert {t: p for t, p in got.items() if p} == {t: p for t, p in want.items() if p}


@pytest.mark.parametrize("nodes", [9, 20, 64])
def test_rejection_keeps_the_law_on_large_trees(nodes: int) -> None:
    """Random shapes, nodes picked; siblings may repeat a token, which then has probability zero left."""
    source = random.Random(nodes)
    for seed in range(2):
        parents = [source.randrange(-1, node) for node in range(nodes)]
        target, draft = distributions(3, seed), distributions(3, seed + 100)
        got, want = speculative_law(target, draft, parents, False, 3), law_of(target, 3, 3)
        assert {t: p for t, p in got.items() if p} == {t: p for t, p in want.items() if p}


def test_rejection_accepts_everything_from_a_perfect_draft() -> None:
    target = distributions(4, 1)
    assert rejection.accept_probability(target(()), target(()), int(np.argmax(target(())))) == 1


def test_rejection_in_the_engine_draws_from_the_target() -> None:
    """Chi-square of the second token over 3,000 requests against the target's own law (15 values: 37.7 is 0.1 %)."""
    model, draft = TableModel(vocab=16), TableModel(vocab=16, seed=0)
    model._table = model._table / 3
    draft._table = model._table + 0.3 * TableModel(vocab=16, seed=1)._table
    params = SamplingParams(max_tokens=3, temperature=1.0)
    engine = engine_of(model, draft=draft, k=2, verifier="rejection", max_batch=256)
    seqs = run(engine, [Request((3,), params, seed) for seed in range(3000)])
    first = torch.softmax(model._table[0, 3], 0)
    second = sum(first[t] * torch.softmax(model._table[1, t], 0) for t in range(16)) * 3000
    counts = torch.bincount(torch.tensor([seq.output[1] for seq in seqs]), minlength=16)
    assert float(((counts - second) ** 2 / second).sum()) < 37.7
    assert engine.meter.acceptance > 0.5


def near_pair(vocab: int, apart: float) -> tuple[TableModel, TableModel]:
    """A target, and a draft model whose logits are a little apart from its own."""
    model, draft = TableModel(vocab), TableModel(vocab)
    model._table = model._table / 3
    draft._table = model._table + apart * TableModel(vocab, seed=1)._table
    return model, draft


class DrawnSiblings(Drafter):
    """Draws two siblings without replacement, and a child of the first, from a draft model's table."""

    def __init__(self, model: TableModel) -> None:
        self._table = torch.softmax(model._table.double(), -1).numpy()

    def propose(self, batch: Batch) -> Draft:
        trees, rows, used = [], [], []
        for seq, most in zip(batch.seqs, batch.max_nodes, strict=True):
            source, at = np.random.default_rng([seq.seed, len(seq.tokens)]), len(seq.tokens)
            root = self._table[(at - 1) % 7, seq.tokens[-1]]
            elder = int(source.choice(len(root), p=root))
            younger = int(source.choice(len(root), p=rejection.without(root, elder)))
            below = self._table[at % 7, elder]
            trees.append([elder, younger, int(source.choice(len(root), p=below))][:most])
            rows.append([len(used), len(used), len(used) + 1][:most])
            used += [root, below]
        return Draft(
            trees, [[-1, -1, 0][: len(tree)] for tree in trees], Sources(rows, lambda: torch.tensor(np.array(used)))
        )


def test_siblings_drawn_without_replacement_keep_the_law_in_the_engine() -> None:
    """Chi-square of the first and the second token over 2,000 requests (5 values: 20.5 is 0.1 %)."""
    model, draft = near_pair(6, 1.0)
    engine = engine_of(model, DrawnSiblings(draft), k=3, verifier="rejection", max_batch=250)
    params = SamplingParams(max_tokens=9, temperature=1.0)
    seqs = [engine.add(Request((3,), params, seed)) for seed in range(2000)]
    for _ in range(8):
        engine.step()
        engine.step()
        for seq in list(engine.scheduler.running):
            engine.abort(seq)
    first = torch.softmax(model._table[0, 3], 0)
    second = sum(first[t] * torch.softmax(model._table[1, t], 0) for t in range(6))
    for place, law in enumerate((first, second)):
        counts = torch.bincount(torch.tensor([seq.output[place] for seq in seqs]), minlength=6)
        assert float(((counts - 2000 * law) ** 2 / (2000 * law)).sum()) < 20.5
    assert engine.meter.acceptance > 0.3


MIXED = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, logprobs=1),
    SamplingParams(max_tokens=24, temperature=1.2, top_k=5, top_p=0.9),
    SamplingParams(max_tokens=24, temperature=0.9, min_p=0.05, repetition_penalty=1.3),
]


@pytest.mark.parametrize("drafter", ["model", "siblings", "ngram"])
def test_texts_under_rejection_do_not_depend_on_the_batch(drafter: str) -> None:
    model, draft = near_pair(64, 0.1)
    own = {"siblings": DrawnSiblings(draft), "ngram": NgramDrafter(1, 3), "model": None}[drafter]
    texts = []
    for batch in (8, 1, 3):
        engine = engine_of(model, own, draft=draft if own is None else None, k=4, verifier="rejection", max_batch=batch)
        seqs = run(engine, [Request((n % 7, 3), MIXED[n % 4], n) for n in range(16)])
        texts.append([(seq.output, seq.logprobs) for seq in seqs])
    assert texts[0] == texts[1] == texts[2]


def test_what_rejections_left_is_computed_for_all_rows_as_for_one() -> None:
    source = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(2 * torch.randn(6, 50, generator=source), -1) for _ in range(2))
    rows = [rejection.Row(p, n) for n in range(6)]
    drawn = [rejection.residual(rows[n], rejection.Row(q, 5 - n), 7) for n in range(3)]
    picked = [rejection.residual(rows[n], None, n) for n in (5, 3)]
    younger = rejection.residual(drawn[1], rejection.without(rejection.Row(q, 2), 9), 11)
    asked = [rows[4], *drawn, younger, *picked]
    table = p.double().numpy(), q.double().numpy()
    left = [rejection.residual(table[0][n], table[1][5 - n], 7) for n in range(3)]
    last = rejection.residual(left[1], rejection.without(table[1][2], 9), 11)
    wanted = [table[0][4], *left, last, *(rejection.residual(table[0][n], None, n) for n in (5, 3))]
    for order in (range(7), range(6, -1, -1), (1,), (4,), (0, 5)):
        found = rejection.numbers_of([asked[n] for n in order]).numpy()
        assert np.allclose(found, [wanted[n] for n in order], rtol=1e-13, atol=0)
    assert younger[13] == pytest.approx(last[13], rel=1e-13)
    assert np.allclose(rejection.numbers_of(asked), wanted, rtol=1e-13, atol=0), "a row that was computed before"


@pytest.mark.parametrize("vocab", [5, 1024, 3000])
def test_tokens_are_drawn_where_the_running_sum_passes_a_number(vocab: int) -> None:
    source = torch.Generator().manual_seed(vocab)
    table = torch.rand(40, vocab, generator=source, dtype=torch.float64)
    table *= torch.rand(40, vocab, generator=source) < 0.3  # some tokens cannot be drawn
    table[:, 2] += 0.1
    table[0] = torch.eye(vocab)[4]
    table /= table.sum(-1, keepdim=True)
    numbers = torch.rand(40, generator=source, dtype=torch.float64).tolist()
    tokens = rejection.drawn_tokens(table, numbers)
    for row, number, token in zip(table, numbers, tokens, strict=True):
        assert row[:token].sum() <= number + 1e-12 and number <= row[: token + 1].sum() + 1e-12
        assert row[token] > 0
    last = [int(row.nonzero()[-1]) for row in table]
    assert rejection.drawn_tokens(table * (1 - 1e-12), [1 - 2**-53] * 40) == last


def highest_cost(drafter: str, batch: int, k: int) -> tuple[int, int]:
    """The most operators and waits of a step outside of its passes."""
    model, draft = near_pair(64, 0.03)
    own = {"model": None, "ngram": NgramDrafter(1, 3)}[drafter]
    engine = engine_of(model, own, draft=draft if own is None else None, k=k, verifier="rejection", max_batch=batch)
    for seed in range(batch):
        engine.add(Request((3, 4, 3, 4, 3), SamplingParams(max_tokens=400, temperature=0.8, top_p=0.9), seed))
    found = []
    for _ in range(40):
        with HostCost(engine) as cost:
            engine.step()
        found.append((sum(cost.operators.values()), sum(cost.waits.values())))
    return max(found[2:])


def test_the_hosts_operators_do_not_grow_with_a_batch_of_chains() -> None:
    few = highest_cost("model", 3, 4)
    assert few == highest_cost("model", 16, 4)
    assert few[1] == 1 + 3, "one read of the draft model's tokens, and three for the verdict"
    assert highest_cost("ngram", 3, 2) == highest_cost("ngram", 16, 8)
    (first, _), (second, _), (third, _) = (highest_cost("model", 8, k) for k in (2, 4, 6))
    assert third - second == second - first, "a level of the draft costs the same wherever it is"
    assert first < 140, "operators of two levels and the verdict, with filters"


def test_a_table_without_the_rows_of_drawn_nodes_is_refused() -> None:
    class Wrong(Drafter):
        def propose(self, batch: Batch) -> Draft:
            return Draft([[1]], [[-1]], Sources([[3]], lambda: torch.ones(2, 64) / 64))

    engine = engine_of(TableModel(), Wrong(), verifier="rejection")
    engine.add(Request((1, 2), SamplingParams(max_tokens=4, temperature=1.0)))
    with pytest.raises(DraftError, match=r"sources.*row 3.*64 tokens"):
        engine.step()


def test_rejection_with_greedy_requests_is_plain_decoding() -> None:
    model = TableModel()
    prompts = random_prompts(4, model.vocab)
    params = [SamplingParams(max_tokens=10)] * 4
    expected = references(model, prompts, params, [0] * 4)
    drafter = scripted(prompts, expected, lambda seq, max_nodes: (max_nodes, max_nodes // 2), model.vocab, wide=True)
    seqs = run(engine_of(model, drafter, k=6, verifier="rejection"), [Request(tuple(p), params[0]) for p in prompts])
    assert [seq.output for seq in seqs] == [e.tokens for e in expected]


def test_only_wanted_rows_reach_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of n tokens and k nodes: k + 1 rows of logits; a chunk that does not reach the end: none."""
    seen: list[int] = []
    forward = Runner.forward

    def watch(self: Runner, *args: object, **kwargs: object) -> object:
        result = forward(self, *args, **kwargs)  # type: ignore[arg-type]
        seen.append(result.logits.shape[0])
        return result

    monkeypatch.setattr(Runner, "forward", watch)
    model = TableModel()
    prompt = list(range(1, 21))
    expected = references(model, [prompt], [SamplingParams(max_tokens=6)], [0])
    seen.clear()
    drafter = scripted([prompt], expected, lambda seq, max_nodes: (max_nodes, max_nodes), model.vocab)
    run(engine_of(model, drafter, k=2, chunk=12), [Request(tuple(prompt), SamplingParams(max_tokens=6))])
    assert seen == [0, 3, 3]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("verifier", ["exact", "rejection"])
def test_a_draft_model_without_a_single_sound_logit_drafts_nothing(verifier: str, number: float) -> None:
    small = TableModel(32, seed=1)
    small.forward = lambda packed, cache: torch.full((len(packed.wanted), 32), number)  # type: ignore[method-assign]
    engine = engine_of(TableModel(32), draft=small, verifier=verifier, k=3)
    params = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=1.0, top_p=0.8)]
    seqs = run(engine, [Request((1, 2), one, n) for n, one in enumerate(params)])
    assert [len(seq.output) for seq in seqs] == [9, 9] and engine.meter.drafted == 0
