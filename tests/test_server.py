"""The server: OpenAI's shapes, exact text whatever else runs, limits, failures, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="faircopy[serve] is not installed")

from faircopy import LLM, ConfigError, SamplingParams, bundled
from faircopy.model.loader import load_tokenizer
from faircopy.server.grammar import GrammarConstraint
from faircopy.server.settings import ServerConfig
from faircopy.terminal.serve import check_port, serve
from faircopy.testing import ByteTokenizer, TableModel
from tests.server_helpers import PATIENCE, Running, serving, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Once upon a time"
HELLO = [{"role": "user", "content": "Once upon a time there was a dog."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The bundled pair, with so few pages that sequences are preempted under load."""
    return LLM(
        bundled.target(),
        draft=bundled.draft(),
        k=4,
        drafter_per_request=True,
        max_batch=12,
        cache_memory="5MiB",
        dtype="float32",
        threads=1,
    )


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with serving(llm, max_body=20_000, max_n=4, max_prompts=8) as running:
        yield running


def table(context: int = 4096, **options: Any) -> LLM:
    """A model that costs nothing."""
    return LLM(
        TableModel(vocab=256, context=context),
        tokenizer=ByteTokenizer(),
        drafter_per_request=True,
        cache_memory="64MiB",
        **options,
    )


def worded_table() -> LLM:
    """A model that costs nothing, with a tokenizer that grammars can read."""
    tokenizer = load_tokenizer(bundled.target())
    return LLM(TableModel(len(tokenizer), 512), tokenizer=tokenizer, drafter_per_request=True, cache_memory="64MiB")


def slow(llm: LLM, seconds: float = 0.02) -> LLM:
    """The same model with steps that take time."""
    forward = llm.engine.target.model.forward

    def wait(*args: Any) -> Any:
        time.sleep(seconds)
        return forward(*args)

    llm.engine.target.model.forward = wait  # type: ignore[method-assign]
    return llm


# What it answers.


def test_a_completion_is_what_the_engine_writes(server: Running) -> None:
    alone = LLM(bundled.target(), cache_memory="12MiB", dtype="float32").generate(
        STORY, SamplingParams(max_tokens=20, logprobs=2)
    )[0]
    answer = server.post(COMPLETIONS, prompt=STORY, max_tokens=20, temperature=0, logprobs=2, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"] == alone.text and choice["token_ids"] == alone.token_ids
    assert choice["finish_reason"] == "length" and answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    assert alone.logprobs is not None
    scores = [found[token] for token, found in zip(alone.token_ids, alone.logprobs, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == scores
    assert "".join(choice["logprobs"]["tokens"]) == alone.text
    metrics = answer["metrics"]["speculative_decoding"]
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"] > 0


def test_echo_gives_the_log_probabilities_of_the_prompt(server: Running) -> None:
    """What lm-eval sends: token ids, echo, one token that it ignores."""
    ids = server.post("/tokenize", prompt="The cat sat on the mat.")["tokens"]
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0}
    with_one = server.post(COMPLETIONS, max_tokens=1, **body)["choices"][0]["logprobs"]
    with_none = server.post(COMPLETIONS, max_tokens=0, **body)["choices"][0]["logprobs"]
    assert len(with_one["token_logprobs"]) == len(ids) + 1 and len(with_none["token_logprobs"]) == len(ids)
    assert with_one["token_logprobs"][:-1] == with_none["token_logprobs"]
    assert with_none["token_logprobs"][0] is None and all(score < 0 for score in with_none["token_logprobs"][1:])


def test_prompts_and_samples_become_choices_in_order(server: Running) -> None:
    prompts = ["The cat", "The dog"]
    answer = server.post(COMPLETIONS, prompt=prompts, n=2, seed=5, max_tokens=8)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for place, prompt in enumerate(prompts):
        first = server.post(COMPLETIONS, prompt=prompt, seed=5, max_tokens=8)["choices"][0]
        second = answer["choices"][2 * place + 1]
        again = server.post(COMPLETIONS, prompt=prompt, seed=second["seed"], max_tokens=8)["choices"][0]
        assert answer["choices"][2 * place]["text"] == first["text"] and second["text"] == again["text"]


@pytest.mark.parametrize("more", [{}, {"stop": ["Lily", "."]}, {"n": 2, "temperature": 1, "seed": 3}, {"logprobs": 1}])
def test_a_stream_adds_up_to_the_whole_answer(server: Running, more: dict[str, Any]) -> None:
    body = {"prompt": STORY, "max_tokens": 24, "temperature": 0, **more}
    whole = server.post(COMPLETIONS, **body)
    events = server.events(COMPLETIONS, **body, stream_options={"include_usage": True}, return_origins=True)
    *chunks, last = events
    assert last["choices"] == [] and last["usage"] == whole["usage"] and "speculative_decoding" in last["metrics"]
    for choice in whole["choices"]:
        mine = [c for event in chunks for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert "".join(text for c in mine for text, _ in c["origins"]) == choice["text"]
        assert [c["finish_reason"] for c in mine][-1] == choice["finish_reason"]
        if more.get("logprobs"):
            assert [t for c in mine for t in c["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]


def test_a_chat_goes_through_the_template(server: Running, llm: LLM) -> None:
    answer = server.post(CHAT, messages=HELLO, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2)
    wanted = llm.decode(
        LLM(bundled.target(), cache_memory="12MiB", dtype="float32")
        .chat(HELLO, SamplingParams(max_tokens=12))[0]
        .token_ids
    )
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": wanted, "refusal": None}
    assert all(len(token["top_logprobs"]) == 2 for token in choice["logprobs"]["content"])
    parts = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    assert server.post(CHAT, messages=parts, max_tokens=12, temperature=0)["choices"][0]["message"]["content"] == wanted
    events = server.events(CHAT, messages=HELLO, max_tokens=12, temperature=0)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == wanted


def test_models_tokens_and_states(server: Running) -> None:
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "target"
    found = server.post("/tokenize", prompt=STORY, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", tokens=found["tokens"])["prompt"] == STORY
    assert server.post("/tokenize", messages=HELLO)["count"] > 3
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
    assert "/v1/completions" in server.http.get("/openapi.json").json()["paths"]


# Speculation and structured output.


def test_a_prediction_is_this_requests_draft(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 30, "temperature": 0}
    plain = server.post(CHAT, **body, speculative=False)
    text = plain["choices"][0]["message"]["content"]
    predicted = server.post(CHAT, **body, prediction={"type": "content", "content": text})
    wrong = server.post(CHAT, **body, prediction={"type": "content", "content": "No, never. " + text})
    assert predicted["choices"][0]["message"] == wrong["choices"][0]["message"] == plain["choices"][0]["message"]
    details = predicted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= 26 and details["rejected_prediction_tokens"] == 0
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_each_request_chooses_how_it_is_drafted(server: Running) -> None:
    body = {"prompt": STORY, "max_tokens": 24, "temperature": 0.8, "seed": 1}
    kinds = [False, True, {"k": 2}, {"drafter": "ngram"}, {"enabled": False}]
    answers = [server.post(COMPLETIONS, **body, speculative=kind) for kind in kinds]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    spec = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert spec[0]["num_draft_tokens"] == spec[4]["num_draft_tokens"] == 0 < spec[1]["num_draft_tokens"]
    assert spec[2]["num_spec_tokens"] == 2 and len(spec[2]["acceptance_histogram"]) <= 3
    error = server.fails(COMPLETIONS, 400, **body, speculative={"drafter": "magic"})
    assert error["param"] == "speculative.drafter"


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"response_format": {"type": "regex", "regex": "[A-Z][a-z]{2,8}, [0-9]{1,2} years"}},
        {"response_format": {"type": "grammar", "grammar": 'start: "the " ("cat" | "dog") " ran" ("!" | ".")'}},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    ],
)
def test_structured_output_is_the_same_with_and_without_drafts(server: Running, more: dict[str, Any]) -> None:
    for temperature in (0, 1):
        body = {"prompt": STORY, "max_tokens": 60, "temperature": temperature, "seed": 2, **more}
        kinds = [False, True, {"k": 8}, {"drafter": "ngram", "k": 6}]
        texts = {server.post(COMPLETIONS, **body, speculative=kind)["choices"][0]["text"] for kind in kinds}
        assert len(texts) == 1, texts
        text = texts.pop()
        if "json_schema" in str(more):
            assert set(json.loads(text)) == {"name", "age"}
        assert text.strip()


def test_text_of_a_grammar_that_becomes_too_complex_is_not_passed_off_as_complete(server: Running) -> None:
    lexer = [f"/.*[a-e].{{{10 + n % 20}}}x{n}/" for n in range(200)]
    parser = [f'"a" y{n}\ny{n}: "b{n}"?' for n in range(420)]
    for kind, between, rules in (("X", " | ", lexer), ("x", "? ", parser)):
        start = between.join(f"{kind}{n}" for n in range(len(rules)))
        grammar = f"start: {start}\n" + "\n".join(f"{kind}{n}: {rule}" for n, rule in enumerate(rules))
        format = {"type": "grammar", "grammar": grammar}
        error = server.fails(COMPLETIONS, 500, prompt=STORY, response_format=format, max_tokens=20)
        assert error["code"] == "numerics" and "grammar" in error["message"]


class StoppingMatcher:
    """A matcher that allows every token and stops to read at some length, without an error."""

    def deep_copy(self) -> StoppingMatcher:
        return self

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return min(len(tokens), 2)

    def is_error(self) -> bool:
        return False

    is_stopped = is_error

    def compute_bitmask(self) -> bytes:
        return b"\xff"


def test_a_matcher_that_stops_to_read_ends_no_text() -> None:
    constraint = GrammarConstraint(StoppingMatcher(), vocab=8, eos=[7])  # type: ignore[arg-type]
    assert constraint.allowed([1, 2]).all()
    assert not constraint.allowed([1, 2, 3]).any()  # the request fails
    for path in ([1, 2, 7], [1, 2, 3, 4], [1, 2, 7, 4]):  # an end, and what drafts put behind
        assert constraint.allowed(path).tolist() == [False] * 7 + [True]


def test_a_long_forbidden_path_may_only_end() -> None:
    """Clients send texts that go on (`continued`), which no grammar has seen."""
    constraint = GrammarConstraint(StoppingMatcher(), vocab=8, eos=[7])  # type: ignore[arg-type]
    assert constraint.allowed([3] * 5000).tolist() == [False] * 7 + [True]


def test_a_forced_call_has_the_arguments_of_its_schema(server: Running) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
        answer = server.post(CHAT, **body)["choices"][0]
        call = answer["message"]["tool_calls"][0]["function"]
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
        assert call["name"] == "weather" and json.loads(call["arguments"])["city"] in ("Bonn", "Rome")
        streamed = server.events(CHAT, **body)[-1]["choices"][0]
        assert streamed["delta"]["tool_calls"][0]["function"] == call and streamed["finish_reason"] == "tool_calls"


def test_schemas_of_tools_may_refer_to_their_own_definitions(server: Running) -> None:
    """Each to its own, as pydantic writes them."""
    tools = []
    for name, value in (("first", {"const": "Bonn"}), ("second", {"type": "boolean"})):
        schema = {"properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"], "$defs": {"X": value}}
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
    for name, values in (("first", ["Bonn"]), ("second", [True, False])):
        choice = {"type": "function", "function": {"name": name}}
        body = {"messages": HELLO, "tools": tools, "temperature": 0}
        call = server.post(CHAT, **body, tool_choice=choice)["choices"][0]["message"]["tool_calls"][0]["function"]
        assert json.loads(call["arguments"])["x"] in values
    call = server.post(CHAT, **body, tool_choice="required")["choices"][0]["message"]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"])["x"] in {"first": ["Bonn"], "second": [True, False]}[call["name"]]


def test_calls_in_a_models_own_format_are_read_by_transformers(llm: LLM) -> None:
    from faircopy.model.loader import response_template
    from faircopy.server.answers import ChatShape
    from faircopy.server.engine_thread import Update
    from faircopy.server.protocol import ChatRequest
    from faircopy.server.tools import ToolReader
    from faircopy.server.writing import Choice, TokenNames

    assert response_template(bundled.target(), llm.tokenizer) is None
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "Hello",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|end|>", "content": "text"},
        },
    }
    body = ChatRequest.model_validate({"messages": HELLO, "tools": [WEATHER]})
    reader = ToolReader(body, llm.tokenizer, template)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    prompt, ids = llm.encode("Hello"), llm.tokenizer.encode  # type: ignore[union-attr]
    message, called = reader.message("", prompt, ids(f"<think>Where?</think>{call}", add_special_tokens=False))
    assert called and message["reasoning_content"] == "Where?"
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    choice = Choice(llm, llm.request(prompt, SamplingParams(max_tokens=99)), 0)
    text = ids(f"<think>Where?</think>{call}", add_special_tokens=False)
    piece = choice.take([Update(tokens=tuple(text), finished="stop")])
    streamed = ChatShape(body, reader, TokenNames(llm)).delta(choice, piece)["delta"]
    assert streamed["reasoning_content"] == "Where?" and streamed["tool_calls"][0]["index"] == 0
    message, called = reader.message("x", prompt, ids("It rains.", add_special_tokens=False))
    assert not called and message["content"] == "It rains."
    assert not ToolReader(body, llm.tokenizer, None).active
    body.stop = ["ins", "."]
    tokens = ids("It rains", add_special_tokens=False)
    cut, called = ToolReader(body, llm.tokenizer, template).message("x", prompt, tokens)
    assert not called and cut["content"] == "It ra"


# What it refuses.


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": STORY, "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": STORY, "max_tokens": "8"}, "max_tokens"),
        (COMPLETIONS, {"prompt": [99_999]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": "word " * 600}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, "prompt"),
        (COMPLETIONS, {"prompt": STORY, "n": 5}, "n"),
        (COMPLETIONS, {"prompt": STORY, "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": STORY, "logit_bias": {"cat": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": STORY, "response_format": {"type": "regex", "regex": "[a-"}}, "response_format"),
        (COMPLETIONS, {"prompt": STORY, "response_format": {"type": "regex"}}, "response_format"),
        (COMPLETIONS, {"prompt": STORY, "min_tokens": 3, "response_format": {"type": "json_object"}}, "min_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages"),
        (CHAT, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        (CHAT, {"messages": HELLO, "skip_special_tokens": False}, "skip_special_tokens"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
    ],
)
def test_bad_requests_name_the_field(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    error = server.fails(path, 400, **body)
    assert (
        error["param"] == param and error["type"] == "invalid_request_error" and param.split(".")[0] in error["message"]
    )


def test_a_field_of_several_forms_is_refused_for_what_is_wrong_with_the_one_given(server: Running) -> None:
    assert "16 items" in server.fails(COMPLETIONS, 400, prompt=STORY, stop=["a"] * 17)["message"]
    assert "1 item" in server.fails(COMPLETIONS, 400, prompt=[])["message"]


def test_a_misspelt_field_is_refused_with_the_nearest_one(server: Running) -> None:
    for body, param, near in (
        ({"prompt": STORY, "temprature": 0}, "temprature", "temperature"),
        ({"promt": STORY}, "promt", "prompt"),
        ({"prompt": STORY, "speculative": {"draftr": "ngram"}}, "speculative", "drafter"),
        ({"prompt": STORY, "stream_options": {"includeUsage": True}}, "stream_options", "include_usage"),
    ):
        error = server.fails(COMPLETIONS, 400, **body)
        assert error["param"] == param and near in error["message"] and "unknown field" in error["message"]
    assert "openapi.json" in server.fails(COMPLETIONS, 400, prompt=STORY, zzz=1)["message"]


def test_what_clients_send_beside_the_request_is_accepted(server: Running) -> None:
    """Fields of OpenAI's and vLLM's clients that are not about the text, and an answer that is sent back whole."""
    extra = {"user": "a", "metadata": {"b": "c"}, "store": False, "service_tier": "auto", "skip_special_tokens": True}
    server.post(COMPLETIONS, prompt=STORY, max_tokens=2, best_of=1, suffix=None, **extra)
    said = server.post(CHAT, messages=HELLO, max_tokens=4, temperature=0, **extra)["choices"][0]["message"]
    back = [*HELLO, {**said, "annotations": [], "audio": None, "function_call": None}, *HELLO]
    plain = [*HELLO, {"role": "assistant", "content": said["content"]}, *HELLO]
    answers = [
        server.post(CHAT, messages=messages, max_tokens=4, temperature=0)["choices"][0]["message"]
        for messages in (back, plain)
    ]
    assert answers[0] == answers[1]


def test_a_stream_tells_the_usage_so_far_if_asked(server: Running) -> None:
    events = server.events(COMPLETIONS, prompt=STORY, max_tokens=6, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6


def test_no_tokens_may_be_asked_for(server: Running) -> None:
    answer = server.post(COMPLETIONS, prompt=STORY, max_tokens=0, return_token_ids=True, return_origins=True)
    choice = answer["choices"][0]
    assert choice["text"] == "" and choice["token_ids"] == choice["origins"] == []
    assert answer["usage"]["completion_tokens"] == 0


def test_other_refusals_have_the_same_shape(server: Running) -> None:
    assert server.fails(COMPLETIONS, 404, prompt=STORY, model="gpt-9")["code"] == "model_not_found"
    assert server.http.get("/v2").json()["error"]["type"] == "not_found_error"
    broken = server.http.post(COMPLETIONS, content=b'{"prompt": ', headers={"content-type": "application/json"})
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_json"
    assert server.fails(COMPLETIONS, 413, prompt="x" * 30_000)["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 1000

    unknown_length = server.http.post(COMPLETIONS, content=pieces())
    assert unknown_length.status_code == 413 and unknown_length.json()["error"]["code"] == "body_too_large"
    nested = server.http.post(COMPLETIONS, content=b"[" * 9000, headers={"content-type": "application/json"})
    assert nested.status_code == 400


def test_keys_are_asked_for_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    with serving(table(), api_keys=("secret-one", "secret-two")) as server, caplog.at_level("DEBUG"):
        body = {"prompt": "abc", "max_tokens": 2}
        assert server.fails(COMPLETIONS, 401, **body)["code"] == "invalid_api_key"
        for key, status in (("secret-two", 200), ("secret", 401), ("x", 401), ("secret-onesecret-two", 401)):
            reply = server.http.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == status
        assert server.http.get("/live").status_code == 401
        assert server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200
    assert "secret" not in caplog.text


def test_pages_of_other_origins_may_call_only_if_asked() -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(table()) as server:
        assert "access-control-allow-origin" not in server.http.options(COMPLETIONS, headers=headers).headers
    with serving(table(), cors=("https://a.example",)) as server:
        found = server.http.options(COMPLETIONS, headers=headers).headers
        assert found["access-control-allow-origin"] == "https://a.example"
    with serving(table(), cors=("https://a.example",), api_keys=("a",)) as server:
        refused = server.http.get("/v1/models", headers=headers)  # a page is told that it needs a key
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        refused = server.http.get("/v1/models", headers={"Origin": "https://b.example"})
        assert refused.status_code == 401 and "access-control-allow-origin" not in refused.headers


# Under load.


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Requests of many kinds, each with a seed."""
    source = random.Random(0)
    prompts = bundled.prompts()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.2, "top_k": 12, "min_p": 0.02},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.3, "logprobs": 2},
        {"temperature": 0.7, "stop": [".", "the"]},
        {"temperature": 1, "n": 2, "min_tokens": 4},
        {"temperature": 0, "response_format": {"type": "regex", "regex": "[a-z ]{5,30}"}},
        {"temperature": 0.5, "frequency_penalty": 0.5, "bad_words": ["was"], "speculative": {"k": 7}},
        {"temperature": 0, "speculative": {"drafter": "ngram"}, "echo": True},
    ]
    return [
        {
            "prompt": prompts[n % len(prompts)][: source.randint(20, 400)],
            "max_tokens": source.randint(8, 40),
            "seed": n,
            **kinds[n % len(kinds)],
        }
        for n in range(count)
    ]


def long_requests(pages: int, page: int) -> list[dict[str, Any]]:
    """Four texts of one length that gain a token a step: they begin in the pages there are, and end in more."""
    length = page * (pages // 4 - 1) - 6  # others fit beside them at first
    more = page * (pages // 4) + 16 - length  # for some steps each holds one page more than a quarter
    plain = {"max_tokens": more, "ignore_eos": True, "temperature": 0, "speculative": False}
    return [{"prompt": [200 + n, *range(300, 299 + length)], **plain} for n in range(4)]


def test_64_clients_get_what_each_gets_alone_without_drafts(server: Running) -> None:
    """Mixed parameters, joins, clients that leave, and too few pages for the batch: the same text to the last bit."""
    engine = server.service.engine
    first = long_requests(engine.tables.pool.pages, engine.tables.page)
    requests = first + mixed_requests(60)
    alone = [server.post(COMPLETIONS, **{**body, "speculative": False})["choices"] for body in requests]
    before = engine.scheduler.preemptions

    def ask(n: int) -> list[dict[str, Any]]:
        body = requests[n]
        if n % 3 == 0:
            return _joined(server.events(COMPLETIONS, **body))
        return list(server.post(COMPLETIONS, **body)["choices"])

    def leave(n: int) -> None:
        body = {**requests[n], "max_tokens": 200, "stream": True, "ignore_eos": True}
        body.pop("response_format", None)
        with server.http.stream("POST", COMPLETIONS, json=body) as reply:
            next(reply.iter_lines())

    with ThreadPoolExecutor(80) as pool:
        with server.held_back():  # the long ones are the oldest, and all others wait for a place beside them
            together = [pool.submit(ask, n) for n in range(len(first))]
            server.wait_for_open(len(first))
            together += [pool.submit(ask, n) for n in range(len(first), 64)]
            leaving = [pool.submit(leave, n) for n in range(len(first), 20)]
            server.wait_for_open(sum(body.get("n", 1) for body in requests + requests[len(first) : 20]))
        answers = [future.result() for future in together]
        for future in leaving:
            future.result()
    for mine, wanted in zip(answers, alone, strict=True):
        assert [(c["text"], c["finish_reason"]) for c in mine] == [(c["text"], c["finish_reason"]) for c in wanted]
        assert [c["logprobs"] for c in mine] == [c["logprobs"] for c in wanted]
    assert engine.scheduler.preemptions > before
    server.settle()
    assert server.service.open == 0


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            mine = found.setdefault(choice["index"], {**choice, "text": "", "logprobs": None})
            mine["text"] += choice["text"]
            mine["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"]:
                parts = mine["logprobs"] or {name: [] for name in choice["logprobs"]}
                mine["logprobs"] = {name: parts[name] + choice["logprobs"][name] for name in parts}
    return [found[index] for index in sorted(found)]


def test_a_client_that_leaves_frees_its_pages_within_a_step() -> None:
    with serving(slow(table())) as server:
        engine = server.service.engine
        for stream in (True, False):
            body = json.dumps({"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": stream})
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                wait_until(lambda: engine.tables.held() > 0)
                with server.held_back():
                    client.close()
                    server.wait_for_open(0)  # the close travels through two sockets
                    steps = engine.meter.steps
            server.settle()
            assert engine.meter.steps == steps
            assert server.metric("faircopy_pages_held") == server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_full_queue_answers_429_and_says_when_to_come_back() -> None:
    with serving(table(max_batch=1), max_queue=1) as server, ThreadPoolExecutor(6) as pool:
        body = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True}
        with server.held_back():
            admitted = [pool.submit(server.http.post, COMPLETIONS, json=body) for _ in range(2)]
            server.wait_for_open(2)
            refused = list(pool.map(lambda _: server.http.post(COMPLETIONS, json=body), range(4)))
        assert [reply.result().status_code for reply in admitted] == [200, 200]
        assert [reply.status_code for reply in refused] == [429] * 4
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        assert server.metric("faircopy_rejected_requests_total") == len(refused)
        server.settle()


def test_a_deadline_ends_a_request() -> None:
    with serving(slow(table()), deadline=5.0) as server:
        body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "timeout": 0.1}
        assert server.fails(COMPLETIONS, 408, **body)["code"] == "deadline_exceeded"
        assert server.events(COMPLETIONS, **body)[-1]["error"]["code"] == "deadline_exceeded"
        server.settle()


def test_a_failed_step_fails_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    llm = slow(table(max_batch=4), 0.005)
    forward = llm.engine.target.model.forward

    def fragile(packed: Any, *rest: Any) -> Any:
        if 250 in packed.ids.tolist():
            raise RuntimeError("a secret of the server")
        return forward(packed, *rest)

    llm.engine.target.model.forward = fragile  # type: ignore[method-assign]
    with serving(llm) as server:
        for stream in (False, True):
            body = {"prompt": [250], "max_tokens": 4, "stream": stream, "logit_bias": {"250": -100}}
            reply = server.http.post(COMPLETIONS, json=body)
            assert reply.status_code == (200 if stream else 500) and "secret" not in reply.text
            assert "server_error" in reply.text
            assert f"request {reply.headers['x-request-id']} failed" in caplog.text  # as the answer says
        good = server.post(COMPLETIONS, prompt="abc", max_tokens=4, logit_bias={"250": -100})
        assert good["usage"]["completion_tokens"] == 4 and server.http.get("/health").status_code == 200
        server.settle()


def test_the_engines_death_shows_in_health() -> None:
    with serving(slow(table())) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
        waiting = pool.submit(server.http.post, COMPLETIONS, json=body)
        wait_until(lambda: server.service.engine.busy)

        def die() -> None:
            raise SystemExit("gone")

        server.service._thread._send(die)
        assert waiting.result().status_code == 500
        for path in ("/health", "/ready"):
            assert server.http.get(path).status_code == 503
        assert server.http.post(COMPLETIONS, json=body).status_code == 503


def test_a_step_that_fails_while_a_client_leaves_a_pipeline_fails_its_requests_and_no_others() -> None:
    llm = slow(table(max_batch=4))
    engine, body = llm.engine, {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
    engine._stages = 2
    judge = engine.verifier.judge
    with serving(llm) as server, ThreadPoolExecutor(1) as pool:
        with server.http.stream("POST", COMPLETIONS, json={**body, "stream": True, "n": 3}) as leaving:
            lines = leaving.iter_lines()
            next(lines)
            other = pool.submit(server.http.post, COMPLETIONS, json=body)
            wait_until(lambda: len(engine.scheduler.running) == 4)
            with server.held_back():
                engine.verifier.judge = lambda *args: 1 / 0  # type: ignore
                leaving.close()
                server.wait_for_open(1)
        assert other.result().status_code == 500
        engine.verifier.judge = judge  # type: ignore[method-assign]
        assert server.post(COMPLETIONS, prompt="abc", max_tokens=4)["usage"]["completion_tokens"] == 4
        server.settle()


def test_who_gives_up_waiting_for_the_pages_does_not_end_the_engine() -> None:
    with serving(table()) as server:
        with server.held_back():
            assert server.service.pages().cancel()  # the live page does so when a step takes long
        assert server.post(COMPLETIONS, prompt="abc", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert server.http.get("/live").json()["pages"]["held"] == {}


def test_the_first_signal_drains_and_the_second_ends_at_once() -> None:
    with serving(slow(table())) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "abc", "ignore_eos": True}
        with server.held_back():
            short = pool.submit(server.http.post, COMPLETIONS, json={**body, "max_tokens": 20})
            long = pool.submit(server.http.post, COMPLETIONS, json={**body, "max_tokens": 4000})
            server.wait_for_open(2)
            server.server.handle_exit(signal.SIGTERM, None)
        assert short.result().status_code == 200 and server.service.draining
        assert httpx.get(f"{server.url}/ready").json()["status"] == "draining"
        refused = httpx.post(server.url + COMPLETIONS, json=body)
        assert refused.status_code == 503 and refused.headers["retry-after"] and "shutting_down" in refused.text
        server.server.handle_exit(signal.SIGTERM, None)
        with contextlib.suppress(httpx.HTTPError):  # it may be cut off before there is an answer
            assert long.result(timeout=PATIENCE).status_code == 500


def test_what_is_not_answered_when_the_drain_is_over_gets_an_error() -> None:
    with serving(slow(table()), drain=0.2) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "abc", "ignore_eos": True, "max_tokens": 4000}
        stream = pool.submit(server.events, COMPLETIONS, **body)
        whole = pool.submit(server.http.post, COMPLETIONS, json=body)
        server.wait_for_open(2)
        server.server.handle_exit(signal.SIGTERM, None)
        assert stream.result()[-1]["error"]["type"] == "server_error"
        assert whole.result().status_code == 500


def test_ctrl_c_ends_the_process_without_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from faircopy.server import logs, run

    seen: list[Any] = []

    class Quick:
        def run(self) -> None:
            seen.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr(run, "make_server", lambda *args: Quick())
    monkeypatch.setattr(logs, "set_up", lambda *args: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        serve(table(), "text", "info", None, port=0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_DFL]  # not Python's, which unwinds every task of the event loop


# The audit, metrics, options.


def test_the_shadow_audit_runs_answers_again_and_reports_what_differs(tmp_path: Path) -> None:
    llm = table(draft="ngram")
    with serving(llm, shadow_audit=1.0, audit_folder=tmp_path / "found") as server:
        for n in range(5):
            body = {"prompt": "abcabc", "max_tokens": 24, "seed": n, "stop": ["q"]}
            server.post(COMPLETIONS, **body)
        server.events(COMPLETIONS, **body, continued=[{"token_ids": [9, 9]}])  # what a client says it has is not ours
        wait_until(lambda: server.service.audit.checked == 6)
        assert server.metric("faircopy_shadow_audit_mismatches_total") == 0
        choose = llm.engine.verifier.judge
        broken = threading.Event()

        def wrong(batch: Any, draft: Any, result: Any) -> Any:
            result.logits[:, 7] += 0.0 if broken.is_set() else 1000.0
            return choose(batch, draft, result)

        llm.engine.verifier.judge = wrong  # type: ignore[method-assign]
        server.service._thread.call(lambda: None).result()
        finish = server.service.audit.consider
        server.service.audit.consider = lambda seq: (broken.set(), finish(seq))  # type: ignore
        served = server.post(COMPLETIONS, prompt="abc", max_tokens=6, temperature=0, return_token_ids=True)
        wait_until(lambda: server.service.audit.checked == 7)
        assert server.metric("faircopy_shadow_audit_mismatches_total") == 1
        report = json.loads(next((tmp_path / "found").glob("mismatch-*.json")).read_text())
        assert report["served"]["tokens"] == served["choices"][0]["token_ids"] == [7] * 6
        assert report["plain"]["tokens"] != [7] * 6 and report["prompt"] == [97, 98, 99]


def test_metrics_have_both_names_and_agree_with_the_answers(llm: LLM) -> None:
    with serving(llm) as server:
        answers = [server.post(COMPLETIONS, prompt=STORY, max_tokens=16, seed=n) for n in range(3)]
        spec = [answer["metrics"]["speculative_decoding"] for answer in answers]
        for prefix in ("faircopy_", "vllm:"):
            drafts = f"{prefix}spec_decode_num_"
            assert server.metric(f"{drafts}draft_tokens_total") == sum(s["num_draft_tokens"] for s in spec)
            accepted = sum(s["num_accepted_draft_tokens"] for s in spec)
            assert server.metric(f"{drafts}accepted_tokens_total") == accepted
            assert server.metric(f"{drafts}accepted_tokens_per_pos_total") == accepted
            assert server.metric(f"{drafts}drafts_total") == sum(s["num_spec_steps"] for s in spec)
            assert server.metric(f"{prefix}generation_tokens_total") == 48
            assert server.metric(f"{prefix}time_to_first_token_seconds_count") == 3
            assert server.metric(f"{prefix}e2e_request_latency_seconds_count") == 3
            assert server.metric(f"{prefix}num_requests_running") == 0
        live = server.http.get("/live").json()
        assert live["totals"]["emitted"] == 48 and sum(live["accepted_at"]) == accepted
        assert live["pages"]["held"] == {} and "draft tokens" in live["plan"]


@pytest.mark.parametrize("kind", ["yaml", "toml"])
def test_options_come_from_the_command_line_the_environment_and_a_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from faircopy import cli
    from faircopy.terminal import serve

    seen: dict[str, Any] = {}
    monkeypatch.setattr(cli, "_llm", lambda *args, **options: seen.update(options) or "llm")
    monkeypatch.setattr(serve, "serve", lambda llm, *rest, **options: seen.update(options))
    file = tmp_path / f"serve.{kind}"
    detail = "per-request-spec-decode-metrics"
    lines = {"max-queue": 3, "port": 1, "host": '"0.0.0.0"', "batch": 5, detail: '"none"', "cors": '"http://a"'}
    sign = ":" if kind == "yaml" else " ="
    file.write_text("".join(f"{name}{sign} {value}\n" for name, value in lines.items()))
    environment = {"FAIRCOPY_SERVE_PORT": "2", "FAIRCOPY_SERVE_HOST": "1.1.1.1", "FAIRCOPY_SERVE_DEADLINE": "9"}
    result = CliRunner().invoke(cli.app, ["serve", "--config", str(file), "--host", "::1"], env=environment)
    assert result.exit_code == 0, result.output
    assert (seen["max_batch"], seen["max_queue"], seen["port"], seen["host"], seen["deadline"]) == (5, 3, 2, "::1", 9.0)
    assert seen["spec_metrics"] == "none" and seen["cors"] == ("http://a",)
    file.write_text(f"prot{sign} 1\n")
    assert "did you mean 'port'" in str(CliRunner().invoke(cli.app, ["serve", "--config", str(file)]).exception)


def test_the_config_is_checked() -> None:
    for name, value in {
        "shadow_audit": 2.0,
        "deadline": 0.0,
        "max_queue": -1,
        "spec_metrics": "all",
        "max_prompt": 0,
        "drain": float("nan"),
    }.items():
        with pytest.raises(ValueError, match=name):
            ServerConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"log_level = 'loud'.*warning"):
        serve(LLM(TableModel(), cache_memory="1MiB"), "text", "loud", None)


def test_a_stream_begins_with_the_first_tokens() -> None:
    """Whoever hedges or measures takes the first event for a sign that the engine has begun."""
    from faircopy.server.endpoints import Endpoints
    from faircopy.server.engine_thread import Update
    from faircopy.server.metrics import Metrics
    from faircopy.server.protocol import ChatRequest
    from faircopy.server.service import Service

    begun: list[str] = []

    class FirstTokens:
        async def updates(self) -> AsyncIterator[dict[int, list[Update]]]:
            begun.append("engine")
            yield {0: [Update(tokens=(65,), finished="length")]}

    async def run() -> None:
        service = Service(table(), ServerConfig(), "table", Metrics)
        writer = Endpoints(service).writer(ChatRequest.model_validate({"messages": HELLO, "max_tokens": 1}), "1")
        events = [e async for e in writer.events(FirstTokens(), lambda error: {}) if begun]  # type: ignore[arg-type]
        assert len(events) == 3 and b'"role":"assistant"' in events[0] and b"length" in events[1]

    asyncio.run(run())


def test_slow_readers_do_not_hold_up_others() -> None:
    """A client that does not read its stream: the engine goes on, and others are served."""
    with serving(table()) as server:
        body = json.dumps(
            {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True, "stream": True, "return_origins": True}
        )
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert server.post(COMPLETIONS, prompt="abc", max_tokens=50)["usage"]["completion_tokens"] == 50
        wait_until(lambda: server.service.open == 0)
        server.settle()


def test_the_openai_client_works(server: Running) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert client.models.list().data[0].id == "target"
    text = client.completions.create(model="target", prompt=STORY, max_tokens=12, temperature=0).choices[0].text
    stream = client.completions.create(model="target", prompt=STORY, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text
    chat = client.chat.completions.create(
        model="target",
        messages=HELLO,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}},
    )
    assert set(json.loads(chat.choices[0].message.content)) == {"name", "age"}
    assert "speculative_decoding" in chat.model_extra["metrics"]
    called = client.chat.completions.create(model="target", messages=HELLO, tools=[WEATHER], tool_choice="required")
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="target", prompt=STORY, temperature=-3)
    assert refused.value.param == "temperature"

    async def streamed() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as other:
            events = await other.chat.completions.create(
                model="target", messages=HELLO, max_tokens=12, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            return "".join([e.choices[0].delta.content or "" async for e in events if e.choices])

    assert (
        asyncio.run(streamed())
        == server.post(CHAT, messages=HELLO, max_tokens=12, temperature=0)["choices"][0]["message"]["content"]
    )


def test_a_complete_grammar_ends_the_text_of_a_model_without_an_end_token() -> None:
    with serving(worded_table()) as server:
        for way in (False, {"drafter": "ngram", "k": 3}):
            asked = {"prompt": STORY, "max_tokens": 40, "temperature": 0, "speculative": way}
            (choice,) = server.post(COMPLETIONS, **asked, structured_outputs={"regex": "ab{3}(cd)?"})["choices"]
            assert choice["text"] in ("abbb", "abbbcd") and choice["finish_reason"] == "stop"


def test_schemathesis_finds_nothing() -> None:
    """Requests made from openapi.json: nothing invalid is accepted, nothing valid refused, no undocumented answer."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    command = [sys.executable, "-m", "schemathesis.cli", "run", "--no-color"]
    command += ["--seed=1", "--max-examples=5", "--request-timeout=30"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.schemathesis_hooks"}
    with serving(worded_table()) as server:
        found = subprocess.run(
            [*command, f"{server.url}/openapi.json"], capture_output=True, text=True, timeout=300, env=environment
        )
        assert found.returncode == 0, found.stdout
        server.settle()


def test_the_dashboard_asks_for_metrics_that_there_are(server: Running) -> None:
    server.post(COMPLETIONS, prompt=STORY, max_tokens=8)
    server.fails(COMPLETIONS, 400, prompt=STORY, temperature=-1)
    there = {line.partition("{")[0] for line in server.http.get("/metrics").text.splitlines()}
    board = json.loads((Path(__file__).parents[1] / "deploy" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"faircopy_\w+", target["expr"])
    }
    assert len(asked) > 15 and asked <= there


def test_chat_talks_to_a_server(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    from faircopy.terminal.chat import chat
    from faircopy.terminal.remote_chat import RemoteModel

    lines = iter(["Once upon a time there was a dog.", "/quit"])
    params = SamplingParams(max_tokens=12)
    chat(RemoteModel(server.url, None, None), params, read=lambda prompt: next(lines))
    wanted = server.post(CHAT, messages=HELLO, max_tokens=12, temperature=0)["choices"][0]["message"]["content"]
    shown = capsys.readouterr().out
    assert wanted in shown and "(12 tokens" in shown
    with pytest.raises(ValueError, match="cannot be reached"):
        RemoteModel("http://127.0.0.1:9", None, None)


def test_requests_are_spans_where_opentelemetry_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from faircopy.server import tracing

    spans, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=600_000))  # sent when the server ends
    monkeypatch.setattr(tracing.trace, "get_tracer", lambda name: provider.get_tracer(name))
    monkeypatch.setattr(tracing.trace, "get_tracer_provider", lambda: provider)
    with serving(table()) as server:
        server.post(COMPLETIONS, prompt="a secret", max_tokens=3)
        server.events(COMPLETIONS, prompt="a secret", max_tokens=5)
    sent = spans.get_finished_spans()  # FastAPI has some of its own
    written = [span.attributes["gen_ai.usage.output_tokens"] for span in sent if span.name == COMPLETIONS]
    assert written == [3, 5] and not any("secret" in span.to_json() for span in sent)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_there_is_none_of_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        check_port("127.0.0.1", port)
