"""Passes an answer on from replicas that may die: a stream goes on from another one at the token where it stopped.

The text is a function of the prompt, the parameters and the seed, so the other replica writes the same. Here is no
transport: `send` takes a body and yields the bytes that one replica answers with, or raises `ReplicaLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Json = dict[str, Any]
T = TypeVar("T")
Send = Callable[[Json], AsyncGenerator[bytes]]
MOVES = 8  # of one answer at most: a request that ends every replica must not end all of them
DONE = "[DONE]"


class ReplicaLost(Exception):
    """A replica has gone before its answer was complete."""


@dataclass
class Choice:
    """What the client has of one choice."""

    token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    opened: bool = False  # it has the event that says whose text a chat's choice is


class Progress:
    """What the client has of a stream, and what is asked of the next replica."""

    def __init__(self, body: Json) -> None:
        self._body = seeded(body)
        self._choices: defaultdict[int, Choice] = defaultdict(Choice)
        self._head: Json = {}  # id and time of the first event: the client sees one answer

    @property
    def body(self) -> Json:
        """The request, and what the client has. Openings come before all tokens, and only if nothing is continued."""
        asked = {**self._body, "return_token_ids": True}
        if not self._head or 0 < self._opened < choice_count(self._body):
            return asked
        return {**asked, "continued": [self._known(index) for index in range(choice_count(self._body))]}

    @property
    def _opened(self) -> int:
        return sum(choice.opened for choice in self._choices.values())

    def _known(self, index: int) -> Json:
        """What the client has of a choice: what it said it had, and what came since. A replica has read the body."""
        given = self._body.get("continued") or []
        before, choice = given[index] if given else {"token_ids": []}, self._choices[index]
        finished = choice.finished or before.get("finished", False)
        return {"token_ids": [*before["token_ids"], *choice.token_ids], "finished": finished}

    def note(self, event: Json) -> Json | None:
        """Remember what an event brings; returns it as the client asked for it, None if the client has it."""
        self._head = self._head or {name: event[name] for name in ("id", "created") if name in event}
        for choice in event.get("choices", ()):
            mine = self._choices[choice["index"]]
            if "role" in choice.get("delta", ()):
                if mine.opened:
                    return None
                mine.opened = True
            mine.token_ids += choice.get("token_ids", ())
            mine.finished = mine.finished or choice.get("finish_reason") is not None
            if not self._body.get("return_token_ids"):
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        return {**event, **self._head}


async def stream(body: Json, send: Send) -> AsyncGenerator[bytes]:
    """The events of a streamed answer."""
    progress = Progress(body)
    for move in range(MOVES + 1):
        try:
            async with contextlib.aclosing(events(send(progress.body))) as coming:
                async for event in coming:
                    if event is None:
                        yield _event(DONE)
                        return
                    if (told := progress.note(event)) is not None:
                        yield _event(json.dumps(told))
            raise ReplicaLost("the stream ended early")
        except ReplicaLost:
            if move == MOVES:
                raise


def _event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


async def whole(body: Json, send: Send) -> bytes:
    """An answer that is not streamed: nothing of it was sent, so it is asked for again."""
    asked = seeded(body)

    async def attempt() -> bytes:
        return b"".join([piece async for piece in send(asked)])

    return await retried(attempt)


async def retried(attempt: Callable[[], Awaitable[T]]) -> T:
    """What an attempt returns; it is made again as often as an answer may move."""
    for _ in range(MOVES):
        with contextlib.suppress(ReplicaLost):
            return await attempt()
    return await attempt()


async def hedged(body: Json, send: Send, seconds: float) -> AsyncGenerator[bytes]:
    """One replica's answer; if its first bytes take too long, another one's if those come earlier.

    A second replica that refuses or dies leaves the first one's answer to come.
    """
    streams = [send(body)]
    firsts = [asyncio.ensure_future(anext(streams[0]))]
    try:
        done, _ = await asyncio.wait(firsts, timeout=seconds)
        if not done:
            streams.append(send(body))
            firsts.append(asyncio.ensure_future(anext(streams[1])))
        winner = await _winner(firsts)
        await _end(firsts, streams, but=winner)
        yield firsts[winner].result()
        async for piece in streams[winner]:
            yield piece
    finally:
        await _end(firsts, streams)


async def _winner(firsts: list[asyncio.Task[bytes]]) -> int:
    """The place of the first one that brings something; if none does, of the first one."""
    coming = set(firsts)
    while coming:
        done, coming = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
        for place, first in enumerate(firsts):
            if first in done and first.exception() is None:
                return place
    return 0


async def _end(firsts: list[asyncio.Task[bytes]], streams: list[AsyncGenerator[bytes]], but: int = -1) -> None:
    """Leave answers, so that their replicas stop writing them."""
    for place, (first, stream) in enumerate(zip(firsts, streams, strict=True)):
        if place != but:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()


async def events(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[Json | None]:
    """Server-sent events as objects, None for the last one; a piece may hold several or a part of one."""
    rest = b""
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            *complete, rest = (rest + piece).split(b"\n\n")
            for event in complete:
                text = event.decode().removeprefix("data: ")
                yield None if text == DONE else json.loads(text)


def seeded(body: Json) -> Json:
    """The body with a seed, so that every replica writes the same."""
    return body if body.get("seed") is not None else {**body, "seed": secrets.randbelow(1 << 53)}


def choice_count(body: Json) -> int:
    """How many choices the answer to a valid body has."""
    prompt = body.get("prompt", "")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int | float)
    return (len(prompt) if several else 1) * int(body.get("n") or 1)
