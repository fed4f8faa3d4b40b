"""A server in a thread of the test, and clients for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from faircopy import LLM
from faircopy.server.run import Server, in_thread
from faircopy.server.settings import ServerConfig

PATIENCE = 60.0  # seconds after which what a test waits for does not come any more


class Running:
    """A server that runs, and a client for it."""

    def __init__(self, server: Server) -> None:
        self.server, self.service, self.url = server, server.service, server.url
        self.port = int(server.url.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

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

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """The engine makes no step in here: requests that are sent meanwhile are in its queue together."""
        stopped, go_on = threading.Event(), threading.Event()
        self.service._thread.call(lambda: (stopped.set(), go_on.wait()))
        assert stopped.wait(PATIENCE), "the engine did not come to the end of a step"
        try:
            yield
        finally:
            go_on.set()

    def wait_for_open(self, count: int) -> None:
        """Until the server has this many sequences that have not ended."""
        wait_until(lambda: self.service.open == count)

    def settle(self, held: int = 0) -> None:
        """Wait until no sequence is in work, and check the pages."""
        engine = self.service.engine
        wait_until(lambda: not engine.busy)
        assert engine.tables.held() == held
        engine.tables.check()


def wait_until(ready: Callable[[], bool]) -> None:
    """Wait for what must come; a machine that is busy may take its time."""
    end = time.monotonic() + PATIENCE
    while not ready() and time.monotonic() < end:
        time.sleep(0.005)
    assert ready()


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Running]:
    """Run a server for a model, and a client for it."""
    with in_thread(llm, ServerConfig(port=0, **options)) as server:
        running = Running(server)
        try:
            yield running
        finally:
            running.http.close()
