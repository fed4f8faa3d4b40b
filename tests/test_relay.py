"""Answers that move between replicas: whatever dies when, the client sees one answer without a gap or a copy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="faircopy[serve] is not installed")

from faircopy import LLM, bundled
from faircopy.server import relay
from faircopy.testing import ByteTokenizer, TableModel
from tests.server_helpers import Running, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Once upon a time there was a dog."}]
TOOL = {
    "type": "function",
    "function": {"name": "go", "parameters": {"properties": {"to": {"enum": ["Bonn", "Rome"]}}}},
}


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Running]]:
    """One without drafts, one with."""
    options: dict[str, Any] = {"drafter_per_request": True, "cache_memory": "6MiB", "dtype": "float32", "threads": 1}
    with (
        serving(LLM(bundled.target(), max_batch=2, **options)) as one,
        serving(LLM(bundled.target(), bundled.draft(), max_batch=6, **options)) as other,
    ):
        yield [one, other]


class Fragile:
    """Sends to the replicas in turn; each dies after some events until the deaths are used up."""

    def __init__(self, replicas: list[Running], path: str, lives: list[int]) -> None:
        self._replicas, self._path, self.lives, self.sent = replicas, path, lives, 0

    async def __call__(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        replica = self._replicas[self.sent % len(self._replicas)]
        self.sent += 1
        left = self.lives.pop(0) if self.lives else None
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", replica.url + self._path, json=body) as reply,
        ):
            async for line in reply.aiter_lines():
                if line:
                    if left == 0:
                        raise relay.ReplicaLost
                    left = None if left is None else left - 1
                    yield f"{line}\n\n".encode()


def streamed(replicas: list[Running], path: str, body: dict[str, Any], lives: list[int]) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any] | None]:
        send = Fragile(replicas, path, list(lives))
        return [event async for event in relay.events(relay.stream({**body, "stream": True}, send))]

    *found, last = asyncio.run(run())
    assert last is None and all(event is not None for event in found)
    return found  # type: ignore[return-value]


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Each choice of a stream: its text, calls, tokens, log probabilities and reason."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            mine = found.setdefault(
                choice["index"], {"text": "", "roles": 0, "calls": [], "offsets": [], "reasons": []}
            )
            delta = choice.get("delta", {})
            mine["text"] += choice.get("text", "") + (delta.get("content") or "")
            mine["roles"] += "role" in delta
            mine["calls"] += [call["function"] for call in delta.get("tool_calls", ())]
            mine["offsets"] += (choice.get("logprobs") or {}).get("text_offset", [])
            mine["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            assert "token_ids" not in choice, "the client did not ask for them"
    return found


BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}),
    (COMPLETIONS, {"prompt": ["The cat", "The dog"], "n": 2, "seed": 4, "max_tokens": 14, "stop": ["and", "."]}),
    (COMPLETIONS, {"prompt": "The sun", "max_tokens": 20, "seed": 7, "logprobs": 1, "echo": True, "min_tokens": 12}),
    (COMPLETIONS, {"prompt": "A", "seed": 1, "max_tokens": 40, "structured_outputs": {"regex": "[a-z ]{9,30}"}}),
    (CHAT, {"messages": HELLO, "max_tokens": 24, "seed": 2, "repetition_penalty": 1.2}),
    (CHAT, {"messages": HELLO, "n": 3, "max_tokens": 6, "seed": 2, "logprobs": True}),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 40}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_moves_without_a_gap_or_a_copy(replicas: list[Running], path: str, body: dict[str, Any]) -> None:
    usage = {"stream_options": {"include_usage": True}}
    undisturbed = streamed(replicas, path, {**body, **usage}, [])
    source = random.Random(0)
    for lives in ([0], [1], [2, 0, 3], [source.randrange(9) for _ in range(5)]):
        moved = streamed(replicas, path, {**body, **usage}, lives)
        assert joined(moved) == joined(undisturbed)
        assert len({event["id"] for event in moved}) == 1
        assert moved[-1]["usage"] == undisturbed[-1]["usage"]


def test_a_stream_that_a_client_continues_may_move_too(replicas: list[Running]) -> None:
    body = {"prompt": ["The cat", "The dog"], "seed": 9, "max_tokens": 16}
    whole = replicas[0].post(COMPLETIONS, **body, return_token_ids=True)["choices"]
    known = [{"token_ids": choice["token_ids"][:5]} for choice in whole]
    rest = joined(streamed(replicas, COMPLETIONS, {**body, "continued": known}, []))
    assert all(choice["text"].endswith(rest[n]["text"]) and rest[n]["text"] for n, choice in enumerate(whole))
    assert joined(streamed(replicas, COMPLETIONS, {**body, "continued": known}, [3, 1])) == rest


def test_an_answer_that_is_not_streamed_is_asked_for_again(replicas: list[Running]) -> None:
    body = {"prompt": "Once", "max_tokens": 12}
    send = Fragile(replicas, COMPLETIONS, [0, 0])
    answer = json.loads(asyncio.run(relay.whole(body, send)))
    assert send.sent == 3
    seed, text = answer["choices"][0]["seed"], answer["choices"][0]["text"]
    assert replicas[0].post(COMPLETIONS, **body, seed=seed)["choices"][0]["text"] == text


def test_a_request_that_ends_every_replica_is_given_up(replicas: list[Running]) -> None:
    send = Fragile(replicas, COMPLETIONS, [0] * 100)
    with pytest.raises(relay.ReplicaLost):
        asyncio.run(relay.whole({"prompt": "Once"}, send))
    assert send.sent == relay.MOVES + 1


def test_a_slow_answer_is_hedged() -> None:
    asked, closed = [], []

    async def send(body: dict[str, Any]) -> AsyncIterator[bytes]:
        number = len(asked)
        asked.append(body)
        try:
            await asyncio.sleep(3600.0 if number == 0 else 0.0)
            yield f"from {number}".encode()
        finally:
            closed.append(number)

    async def run() -> list[bytes]:
        return [piece async for piece in relay.hedged({"prompt": "x"}, send, 0.05)]

    assert asyncio.run(run()) == [b"from 1"] and len(asked) == 2 and sorted(closed) == [0, 1]


def test_a_hedge_that_is_refused_costs_nothing() -> None:
    """The first replica is slow, not lost: its answer is waited for."""
    refused, asked = asyncio.Event(), []

    async def send(body: dict[str, Any]) -> AsyncIterator[bytes]:
        asked.append(body)
        if len(asked) == 2:
            refused.set()
            raise relay.ReplicaLost("busy")
        await refused.wait()
        for _ in range(20):  # turns of the event loop, in which the refusal is noticed
            await asyncio.sleep(0)
        yield b"from 0"

    async def run() -> list[bytes]:
        return [piece async for piece in relay.hedged({"prompt": "x"}, send, 0.0)]

    assert asyncio.run(run()) == [b"from 0"] and len(asked) == 2


def test_an_application_is_called_without_a_network() -> None:
    """As a replica calls it: keys are asked for, a stream comes as it is written, and leaving frees the pages."""
    from faircopy.ray.asgi import Head, call
    from faircopy.server.app import create_app
    from faircopy.server.settings import ServerConfig

    llm = LLM(TableModel(256, 4096), tokenizer=ByteTokenizer(), cache_memory="64MiB")
    app = create_app(llm, ServerConfig(api_keys=("key",)))
    body = json.dumps({"prompt": "abc", "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    plain = [(b"content-type", b"application/json")]

    async def run() -> None:
        app.state.service.start()
        refused = [piece async for piece in call(app, "POST", COMPLETIONS, plain, body)]
        assert isinstance(refused[0], Head) and refused[0].status == 401
        known = [*plain, (b"authorization", b"Bearer key")]
        async with contextlib.aclosing(call(app, "POST", COMPLETIONS, known, body)) as pieces:
            head, first = await anext(pieces), await anext(pieces)
            assert isinstance(head, Head) and head.status == 200 and isinstance(first, bytes)
            assert first.startswith(b"data: {") and app.state.service.open == 1
        assert app.state.service.open == 0
        await app.state.service.stop()

    asyncio.run(run())
    assert llm.engine.tables.held() == 0


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False, "seed": 1, "continued": [{"token_ids": [1]}]},
        {"stream": True, "continued": [{"token_ids": [1]}]},
        {"stream": True, "seed": 1, "continued": []},
    ],
)
def test_what_cannot_go_on_is_refused(replicas: list[Running], more: dict[str, Any]) -> None:
    assert replicas[0].fails(COMPLETIONS, 400, prompt="Once", **more)["param"] == "continued"
