"""A request that another engine began goes on at the token where it stopped, with the same text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from faircopy import LLM, SamplingParams, bundled
from faircopy.errors import RequestError
from faircopy.types import Request, Sequence

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.8, "seed": 3},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"stop": ["dog", "sad"], "min_tokens": 6},
    {"temperature": 1.1, "seed": 8, "logprobs": 2, "prompt_logprobs": 1, "bad_words": ["was"]},
]


@pytest.fixture(scope="module")
def first() -> LLM:
    """Plain, and alone in its batch."""
    return LLM(bundled.target(), cache_memory="8MiB", dtype="float32", threads=1, max_batch=1)


@pytest.fixture(scope="module")
def second() -> LLM:
    """With drafts, and with so few pages that sequences are preempted."""
    return LLM(bundled.target(), bundled.draft(), cache_memory="2MiB", dtype="float32", threads=1, max_batch=8)


def run(llm: LLM, requests: list[Request]) -> list[Sequence]:
    seqs = [llm.engine.add(request) for request in requests]
    while llm.engine.busy:
        llm.engine.step()
    return seqs


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_with_the_same_tokens(first: LLM, second: LLM, kind: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=32, **kind)

    def request() -> Request:
        return first.request("Once upon a time there was a", params)

    seed = request().seed
    (whole,) = run(first, [replace(request(), seed=seed)])
    cuts = [cut for cut in (0, 1, 7, 15, len(whole.output) - 1) if cut < len(whole.output)]
    moved = run(second, [replace(request(), seed=seed, written=tuple(whole.output[:cut])) for cut in cuts])
    for cut, seq in zip(cuts, moved, strict=True):
        assert (seq.output, seq.finished) == (whole.output, whole.finished)
        assert seq.logprobs == whole.logprobs[cut:] and seq.prompt_logprobs == whole.prompt_logprobs
        assert len(seq.origins) == len(seq.output)


def test_what_cannot_go_on_is_refused(first: LLM) -> None:
    request = first.request("Once", SamplingParams(max_tokens=3))
    for written in ((1, 2, 3), (9_999,)):
        with pytest.raises(RequestError, match="written"):
            first.engine.add(replace(request, written=written))
