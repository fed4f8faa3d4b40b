"""Runs the server until it is told to end: the first signal drains it, a second one ends it at once."""

from __future__ import annotations

import asyncio
import logging
import sys
from types import FrameType

import uvicorn

from faircopy.llm import LLM
from faircopy.server import tracing
from faircopy.server.app import create_app
from faircopy.server.logs import report_speculation
from faircopy.server.service import Service
from faircopy.server.settings import ServerConfig

log = logging.getLogger("faircopy.server")
SWITCH_INTERVAL = 0.0005  # Python's 5 ms let the front end hold up the engine's thread for whole steps


class Server(uvicorn.Server):
    """uvicorn's server, which also tells the front end that it drains."""

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.service = service

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
        finally:
            reports.cancel()


def make_server(llm: LLM, config: ServerConfig) -> Server:
    """A server that is ready to run."""
    sys.setswitchinterval(SWITCH_INTERVAL)
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
