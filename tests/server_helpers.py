"""A server in a thread of the test, and clients for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from faircopy import LLM
from faircopy.server.run import Server, make_server
from faircopy.server.service import Service
from faircopy.server.settings import ServerConfig


class Running:
    """A server that runs, and a client for it."""

    def __init__(self, server: Server, service: Service) -> None:
        self.server, self.service = server, service
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
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
    """Run a server for a model; it drains at the end."""
    server = make_server(llm, ServerConfig(port=0, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    running = Running(server, server.service)
    try:
        yield running
    finally:
        running.http.close()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
