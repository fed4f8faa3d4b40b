"""A server in a thread of the test, and clients for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from faircopy import LLM
from faircopy.server.run import Server, in_thread
from faircopy.server.settings import ServerConfig


class Running:
    """A server that runs, and a client for it."""

    def __init__(self, server: Server) -> None:
        self.server, self.service, self.url = server, server.service, server.url
        self.port = int(server.url.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def fails(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """The error object of a request that is refused."""
        reply = self.http.post(path, json=body)
        assert reply.status_code == status, (reply.status_code, reply.text)
        return dict(reply.json()["error"])

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, without the last, which must be [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)

    def settle(self, held: int = 0, seconds: float = 10.0) -> None:
        """Wait until no sequence is in work, and check the pages."""
        until = time.monotonic() + seconds
        while self.service.engine.busy and time.monotonic() < until:
            time.sleep(0.01)
        engine = self.service.engine
        assert not engine.busy and engine.tables.held() == held
        engine.tables.check()


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Running]:
    """Run a server for a model, and a client for it."""
    with in_thread(llm, ServerConfig(port=0, **options)) as server:
        running = Running(server)
        try:
            yield running
        finally:
            running.http.close()
