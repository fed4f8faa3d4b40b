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
from faircopy.model.runner import Runner
from faircopy.testing import TableModel
from faircopy.types import Draft, Request, SamplingParams
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
