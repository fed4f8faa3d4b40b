"""Parameters: refused when wrong, effective when right, and each row for itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from faircopy import rng
from faircopy.errors import RequestError
from faircopy.kernels.filters import Filter, exclude, mass
from faircopy.kernels.gumbel import BROKEN
from faircopy.sampling import SamplingRow, choose, filtered, logprobs, noisy, probabilities
from faircopy.testing import TableModel, plain_choice, plain_scores
from faircopy.types import Request, SamplingParams, Sequence
from tests.helpers import engine_of, run

BAD: list[tuple[str, object]] = [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "hot"),
    ("temperature", 1e-50), ("temperature", 1e39), ("temperature", 10**400), ("top_p", 0.0), ("top_p", 1.1),
    ("top_k", -1), ("top_k", 2.5), ("min_p", -0.1), ("min_p", 2), ("seed", -1), ("seed", 1 << 63), ("seed", "x"),
    ("max_tokens", 0), ("max_tokens", True), ("min_tokens", -1), ("stop", ""), ("stop", ["a", ""]), ("stop", [3]),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("n", 0), ("logprobs", -1), ("prompt_logprobs", -1),
    ("logit_bias", {"a": 1}), ("logit_bias", [1]), ("logit_bias", {1: float("nan")}),
    ("logit_bias", {1: float("inf")}), ("logit_bias", {1: 10**400}), ("logit_bias", {1.5: 1}),
    ("repetition_penalty", 0), ("repetition_penalty", 1e-300), ("repetition_penalty", 1e300),
    ("presence_penalty", 1e39), ("frequency_penalty", -1e39),
    ("presence_penalty", float("inf")), ("frequency_penalty", "x"), ("bad_words", [""]), ("ignore_eos", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v))
def test_a_wrong_parameter_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
    assert name in str(caught.value)
    assert caught.value.remedy in str(caught.value)


def test_an_impossible_minimum_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_single_values_become_lists() -> None:
    params = SamplingParams(stop="a", stop_token_ids=3, bad_words=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("a",), (3,), ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def a_row(
    params: SamplingParams,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (3, 3),
    seed: int = 0,
    path: tuple[int, ...] = (),
    stops: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingRow:
    return SamplingRow(Sequence(0, Request(prompt, params, seed, bad_words=bad_words), [*prompt, *output], stops), path)


def test_choices_are_those_of_the_simple_twin() -> None:
    """Random rows under random parameters, alone and in company: the same tokens as the loop written plainly."""
    generator = torch.Generator().manual_seed(3)
    values = {
        "temperature": [0.0, 0.7, 1.5],
        "top_p": [1.0, 0.8, 0.3],
        "top_k": [0, 1, 7],
        "min_p": [0.0, 0.05, 0.3],
        "repetition_penalty": [1.0, 1.4],
        "presence_penalty": [0.0, 0.6],
        "frequency_penalty": [0.0, 0.4],
        "min_tokens": [0, 9],
    }
    rows, expected = [], []
    logits = torch.randn(200, 40, generator=generator) * 3
    for n in range(200):
        pick = {k: v[int(torch.randint(len(v), (1,), generator=generator))] for k, v in values.items()}
        row = a_row(
            SamplingParams(**pick, logit_bias={5: 1.0}),
            seed=n,
            path=(4,) * (n % 3),
            stops=frozenset({0, 6}),
            bad_words=((3, 9), (8,)),
        )
        rows.append(row)
        params, output = row.seq.params, [3, 3, *row.path]
        scores = plain_scores(logits[n], (1, 2), output, params, {0, 6}, [])
        for word in row.seq.request.bad_words:
            if len(word) == 1 or output[-1] == word[0]:
                scores[word[-1]] = -torch.inf
        expected.append(plain_choice(scores, params, n, 2 + len(output)))
    assert choose(logits, rows) == expected
    assert [choose(logits[n : n + 1], rows[n : n + 1])[0] for n in range(200)] == expected


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 50)
    logits[1, [7, 30]] = 4.0
    greedy = a_row(SamplingParams())
    assert choose(logits, [greedy, greedy]) == [0, 7]


def test_a_row_without_a_token_left_is_broken() -> None:
    words = tuple((token,) for token in range(4))
    rows = [a_row(SamplingParams(temperature=t, top_p=p), bad_words=words) for t in (0.0, 1.0) for p in (1.0, 0.5)]
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    free = a_row(SamplingParams())
    assert choose(logits, [*rows, free]) == [*[BROKEN] * 4, int(logits[4].argmax())]
    drawn = a_row(SamplingParams(temperature=1.0))
    assert probabilities(logits[2:], [*rows[2:], drawn]).isnan().all(-1).tolist() == [True] * 2 + [False]


@pytest.mark.parametrize("verifier", ["exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_excluded_token_is_written(verifier: str, temperature: float) -> None:
    """A text ends with an error where every token is excluded; the others of its batch go on."""
    engine = engine_of(TableModel(vocab=4), verifier=verifier)
    params = SamplingParams(temperature=temperature, max_tokens=9)
    words = tuple((first, second) for first in range(4) for second in range(4))
    stuck, free = run(engine, [Request((1,), params, 1, bad_words=words), Request((1,), params, 1)])
    assert stuck.output == free.output[:1] and len(free.output) == 9
    assert stuck.error is not None and "exclude every token" in str(stuck.error)


def test_filters_keep_what_they_should() -> None:
    scores = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))

    def kept(**options: float) -> list[int]:
        row = a_row(SamplingParams(temperature=1.0, **options))  # type: ignore[arg-type]
        return torch.isfinite(filtered(scores.clone(), [row])[0]).nonzero()[:, 0].tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=99) == [0, 1, 2, 3]
    assert kept(top_p=0.5) == [0, 1]
    assert kept(top_p=0.39) == [0]
    assert kept(top_p=1e-50) == [0]
    assert kept(min_p=0.6) == [0, 1]
    assert kept(top_k=3, top_p=0.5, min_p=0.9) == [0]


def test_probabilities_are_those_of_the_filtered_scores() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    rows = [a_row(SamplingParams(temperature=t, top_k=k), output=()) for t, k in ((1.0, 0), (2.0, 2))]
    table = probabilities(logits, rows)
    assert torch.equal(table[0], torch.softmax(torch.tensor([0.0, 3.0, 1.0]), 0))
    assert torch.allclose(table[1], torch.softmax(torch.tensor([-torch.inf, 1.5, 0.5]), 0))
    assert logits.tolist() == [[0.0, 3.0, 1.0]] * 2, "logits are not written to"


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_row_that_is_not_finite_has_no_probabilities(options: dict[str, float], number: float) -> None:
    """One number of a row shows it."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 17] = number
    row = a_row(SamplingParams(temperature=0.8, **options))  # type: ignore[arg-type]
    assert probabilities(logits, [row, row]).isnan().tolist() == [[False] * 50, [True] * 50]


def test_logprobs_name_the_token_first_then_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    (table,) = logprobs(logits, [0], 2)
    assert list(table) == [0, 1, 2]
    assert table[1] == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]))


@pytest.mark.parametrize(
    "change",
    [{"temperature": 1.0}, {"repetition_penalty": 3.0}, {"presence_penalty": 9.0}, {"frequency_penalty": 9.0},
     {"logit_bias": {9: 50.0}}],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_each_parameter_changes_the_text(change: dict[str, object]) -> None:
    model = TableModel(vocab=12)
    before, after = (
        run(engine_of(model), [Request((3, 4), SamplingParams(max_tokens=30, **options), 5)])[0].output  # type: ignore[arg-type]
        for options in ({}, change)
    )
    assert before != after


def test_random_bits_differ_by_seed_position_and_use() -> None:
    keys = {rng.key(s, p, u, i) for s in range(6) for p in range(6) for u in range(3) for i in range(3)}
    assert len(keys) == 6 * 6 * 3 * 3
    assert all(0 <= rng.uniform(s, 1, rng.COIN) < 1 for s in range(100))
    assert rng.sample_seed(7, 0) == 7
    assert len({rng.sample_seed(7, i) for i in range(50)}) == 50
    assert rng.fresh_seed() != rng.fresh_seed()


def kept_tokens(scores: torch.Tensor, what: Filter) -> set[int]:
    scores = scores.clone()[None]
    exclude(scores, [what])
    return set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_masses_are_probabilities(temperature: float) -> None:
    """The integer masses, over their sum, are the softmax in float64."""
    torch.manual_seed(0)
    scores = torch.randn(5000) * 4
    weights = mass(scores, scores.max(), torch.tensor(Filter.of(temperature, 0, 0.9, 0.0).steps)).double()
    wanted = torch.softmax(scores.double() / temperature, 0)
    likely = wanted > 1e-6
    assert torch.allclose((weights / weights.sum())[likely], wanted[likely], rtol=5e-6, atol=0)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("top_k", [0, 40])
def test_top_p_is_the_float64_cumulative_sum_away_from_its_border(top_p: float, top_k: int) -> None:
    for seed in range(20):
        scores = torch.randn(3000, generator=torch.Generator().manual_seed(seed)) * 3
        found = kept_tokens(scores, Filter.of(0.8, top_k, top_p, 0.0))
        exact = scores.double() / 0.8
        if top_k:
            exact = exact.masked_fill(exact < exact.topk(top_k).values[-1], -torch.inf)
        ordered, ids = exact.sort(descending=True)
        probs = torch.softmax(ordered, 0)
        before = probs.cumsum(0) - probs
        certain = (before - top_p).abs() > 1e-6
        wanted, unsure = set(ids[certain & (before < top_p)].tolist()), set(ids[~certain].tolist())
        assert wanted <= found <= wanted | unsure


def test_of_equal_scores_the_lowest_ids_are_kept() -> None:
    scores = torch.zeros(100)
    scores[70] = 1.0
    found = kept_tokens(scores, Filter.of(1.0, 0, 0.5, 0.0))
    assert found == {70, *range(len(found) - 1)}
    assert kept_tokens(scores, Filter.of(1.0, 3, 1.0, 0.0)) == set(range(100))  # top-k keeps all that equal the third


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 50.0])
def test_filters_at_extreme_temperatures(temperature: float) -> None:
    scores = torch.tensor([0.0, 5.0, 4.0, -torch.inf, 5.0])
    found = kept_tokens(scores, Filter.of(temperature, 0, 0.6, 0.0))
    assert 1 in found and 3 not in found


def test_a_filter_that_is_off_excludes_nothing() -> None:
    assert not Filter.of(0.7, 0, 1.0, 0.0).active
    assert kept_tokens(torch.randn(50), Filter.of(0.7, 0, 1.0, 0.0)) == set(range(50))


def test_scores_with_noise_are_best_where_the_token_is_drawn() -> None:
    wanted = [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_k=5, repetition_penalty=1.3),
        SamplingParams(temperature=0.6, top_p=0.7, logit_bias={3: 4.0}),
        SamplingParams(frequency_penalty=2.0),
    ]
    for seed in range(8):
        logits = torch.randn(len(wanted), 300, generator=torch.Generator().manual_seed(seed))
        rows = [
            SamplingRow(Sequence(n, Request((5, 7, 9), params, seed), [5, 7, 9]), (n, 3))
            for n, params in enumerate(wanted)
        ]
        assert noisy(logits, rows).argmax(-1).tolist() == choose(logits, rows)
