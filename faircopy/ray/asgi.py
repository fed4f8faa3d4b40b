"""Calls an ASGI application without a network: one request in, the status first and then the pieces of the body out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

Headers = list[tuple[bytes, bytes]]


class Head(NamedTuple):
    """The beginning of an answer."""

    status: int
    headers: Headers


async def call(app: Any, method: str, path: str, headers: Headers, body: bytes) -> AsyncGenerator[Head | bytes]:
    """The answer's head, then its body as it is written; leaving early ends the request in the application."""
    sent: asyncio.Queue[Any] = asyncio.Queue()
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    never = asyncio.Event()

    async def receive() -> Any:
        if unread:
            return unread.pop()
        return await never.wait()

    async def run() -> None:
        try:
            await app(_scope(method, path, headers), receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield Head(message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]])
            elif message.get("body"):
                yield message["body"]
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _scope(method: str, path: str, headers: Headers) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
