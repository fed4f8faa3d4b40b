"""Runs the server until it is told to end: the first signal drains it, a second one ends it at once."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from faircopy.llm import LLM
from faircopy.server import tracing
from faircopy.server.app import create_app
from faircopy.server.logs import report_speculation
from faircopy.server.service import Service
from faircopy.server.settings import ServerConfig

log = logging.getLogger("faircopy.server")


class Server(uvicorn.Server):
    """uvicorn's server, which also tells the front end that it drains."""

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.service = service

    @property
    def url(self) -> str:
        """Where it listens; port 0 was any."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            log.warning("second signal: ending at once")
            self.force_exit = True
        else:
            log.info("draining %d sequences; a second signal ends at once", self.service.open)
        self.service.draining = True
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        reports = asyncio.create_task(report_speculation(self.service))
        try:
            await super().main_loop()
            if self.service.draining:
                await self._drain(time.monotonic() + self.service.config.drain)
        finally:
            reports.cancel()

    async def _drain(self, end: float) -> None:
        """Listen until requests are answered: who asks meanwhile is told that the server ends."""
        while self.service.open and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if self.service.open and not self.force_exit:
            await self.service.stop()  # who still waits is told
        self.config.timeout_graceful_shutdown = math.ceil(max(1.0, end - time.monotonic()))


def make_server(llm: LLM, config: ServerConfig) -> Server:
    """A server that is ready to run."""
    app = create_app(llm, config)
    tracing.set_up()
    options = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(config.drain),
        timeout_keep_alive=30,
    )
    return Server(app.state.service, options)


@contextmanager
def in_thread(llm: LLM, config: ServerConfig) -> Iterator[Server]:
    """A server in a thread of this process, for tests and benchmarks; it drains at the end."""
    server = make_server(llm, config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
