"""Requests with a drafter, a prediction or a constraint of their own write what they write without drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from faircopy.build import build_engine
from faircopy.config import EngineConfig
from faircopy.drafters.base import Drafter, permitted
from faircopy.drafters.ngram import NgramDrafter
from faircopy.drafters.per_request import PerRequestDrafter
from faircopy.engine import Engine
from faircopy.testing import ScriptedDrafter, SpyDrafter, TableModel
from faircopy.types import Batch, Confidence, Draft, Request, SamplingParams, Sequence

VOCAB = 64
PROMPTS = [(1, 2, 3), (9, 8, 7, 6), (20,), (5, 5, 5)]


class Thirds:
    """Token t may follow an output whose sum, with t, is not divisible by three."""

    def allowed(self, output: Seq[int]) -> torch.Tensor:
        return (torch.arange(VOCAB) + sum(output)) % 3 != 0

    def complete(self, output: Seq[int]) -> bool:
        return False


def engine(drafter: Drafter | None = None, **options: object) -> Engine:
    config = EngineConfig(drafter_per_request=True, cache_memory="1MiB", **options)  # type: ignore[arg-type]
    return build_engine(TableModel(VOCAB), drafter, config=config)


def run(made: Engine, requests: list[Request]) -> list[Sequence]:
    seqs = [made.add(request) for request in requests]
    while made.busy:
        made.step()
    made.tables.check()
    return seqs


def texts(made: Engine, requests: list[Request]) -> list[list[int]]:
    return [seq.output for seq in run(made, requests)]


def requests(**more: object) -> list[Request]:
    kinds = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.1, top_k=9)]
    return [
        Request(prompt, params, seed=n, **more)  # type: ignore[arg-type]
        for n, prompt in enumerate(PROMPTS)
        for params in kinds
    ]


def plain(asked: list[Request]) -> list[list[int]]:
    return texts(build_engine(TableModel(VOCAB), config=EngineConfig(k=0, cache_memory="1MiB")), asked)


def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing() -> None:
    wanted = plain(requests())
    right = [replace(r, prediction=tuple(text), k=8) for r, text in zip(requests(), wanted, strict=True)]
    wrong = [replace(r, prediction=tuple(t + 1 for t in text), k=8) for r, text in zip(requests(), wanted, strict=True)]
    edited = [
        replace(r, prediction=(*text[:6], 63, *text[6:]), k=8) for r, text in zip(requests(), wanted, strict=True)
    ]
    for asked in (right, wrong, edited):
        assert texts(engine(), asked) == wanted
    assert all(seq.accepted == 21 and seq.steps == 3 for seq in run(engine(), right))  # 8 + 1 tokens a step
    assert sum(seq.accepted for seq in run(engine(), edited)) >= 15 * len(
        edited
    )  # found again after the inserted token


def test_requests_choose_their_drafter_within_one_batch() -> None:
    wanted = plain(requests())
    truth = dict(zip(PROMPTS, wanted[::2], strict=True))
    served: set[str | None] = set()

    def script(seq: Sequence, nodes: int) -> tuple[int, int]:
        served.update([seq.request.drafter] if nodes else [])
        return nodes, nodes

    drafter = ScriptedDrafter(truth, script, VOCAB)
    names = [None, "ngram"] * len(PROMPTS)
    asked = [replace(r, drafter=name) for r, name in zip(requests(), names, strict=True)]
    assert texts(engine(drafter), asked) == wanted
    assert served == {None}


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("wide", [False, True])
def test_a_constraint_holds_with_and_without_drafts(k: int, wide: bool) -> None:
    asked = requests(constraint=Thirds())
    wanted = plain(asked)
    assert wanted != plain(requests())
    for text in wanted:
        assert all(sum(text[: n + 1]) % 3 for n in range(len(text)))
    truth = dict(zip(PROMPTS, wanted[::2], strict=True))
    drafter = ScriptedDrafter(truth, lambda seq, nodes: (nodes, 2), VOCAB, wide=wide)
    assert texts(engine(drafter, k=k), asked) == wanted


def test_forbidden_nodes_are_not_verified() -> None:
    asked = [Request((1, 2), SamplingParams(max_tokens=9), constraint=Thirds())]
    spy = SpyDrafter(ScriptedDrafter({}, lambda seq, nodes: (nodes, nodes), VOCAB))  # proposes zeros
    made = engine(spy)
    seen: list[Draft] = []
    forward = made.target.forward
    made.target.forward = lambda batch, draft, **more: (seen.append(draft), forward(batch, draft, **more))[1]  # type: ignore
    seq = run(made, asked)[0]
    for draft, proposed in zip(seen, spy.proposed, strict=True):
        assert all(len(kept) <= len(given) for kept, given in zip(draft.tokens, proposed.tokens, strict=True))
    assert seq.drafted == sum(len(tokens) for draft in seen for tokens in draft.tokens)


class Unsure(Drafter):
    """Drafts the last token again, and says how sure it is."""

    def __init__(self) -> None:
        self.asked: list[Confidence | None] = []

    def propose(self, batch: Batch) -> Draft:
        self.asked.append(batch.confidence)
        tokens = [[seq.tokens[-1]][:most] for seq, most in zip(batch.seqs, batch.max_nodes, strict=True)]
        return Draft.chains(tokens, confidence=[[0.3] * len(chain) for chain in tokens])


def test_the_engines_drafter_is_asked_how_sure_it_is() -> None:
    """k="auto" uses it in a server too, whose requests may name a drafter."""
    own, asked = (
        Unsure(),
        [Sequence(n, Request((1, 2), drafter=name), [1, 2]) for n, name in enumerate((None, "ngram"))],
    )
    wrapped = PerRequestDrafter(own, {"ngram": NgramDrafter()})
    wanted = Confidence(0.1, 0.2, (0.1, 0.9))
    draft = wrapped.propose(Batch(asked, [2, 2], [2, 2], wanted))
    assert own.asked == [wanted] and draft.confidence == [[0.3], []]


def test_what_a_constraint_leaves_of_a_draft_keeps_its_confidence() -> None:
    seqs = [Sequence(n, Request((1,), constraint=constraint), [1]) for n, constraint in enumerate((Thirds(), None))]
    draft = Draft.chains([[1, 3, 2], [5, 6]], confidence=[[0.9, 0.8, 0.7], [0.6, 0.5]])
    kept = permitted(draft, Batch(seqs, [1, 1], [3, 2]))
    assert kept.tokens == [[1, 3], [5, 6]], "1 + 3 + 2 is divisible by three"
    assert kept.confidence == [[0.9, 0.8], [0.6, 0.5]]
