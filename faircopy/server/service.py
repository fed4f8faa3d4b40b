"""The front end's side of the engine: lets requests in, hands out their updates, ends those that are late or left."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from faircopy.engine import Engine
from faircopy.llm import LLM
from faircopy.server.engine_thread import EngineThread, Ticket, Update, page_map
from faircopy.server.errors import ApiError
from faircopy.server.settings import ServerConfig
from faircopy.server.shadow import ShadowAudit
from faircopy.types import Request, TextStream

if TYPE_CHECKING:  # this module must not need the packages of a web server: benchmarks use it without
    from faircopy.server.metrics import Metrics

MakeMetrics = Callable[[Engine, ShadowAudit, str, bool], "Metrics"]
SWITCH_INTERVAL = 0.0005  # Python's 5 ms let the front end hold up the engine's thread for whole steps
LATE = Update(finished="abort")


def served_name(llm: LLM, config: ServerConfig) -> str:
    """What clients call the model."""
    return config.name or llm.model.name.rstrip("/").rpartition("/")[2]


class Service:
    """Belongs to the event loop's thread; the engine belongs to another."""

    def __init__(self, llm: LLM, config: ServerConfig, name: str, metrics: MakeMetrics) -> None:
        self.llm, self.config, self.name = llm, config, name
        self.audit = ShadowAudit(llm.engine, config.shadow_audit, config.audit_folder, self._fresh_text)
        self.metrics = metrics(llm.engine, self.audit, name, config.vllm_metrics)
        self.draining = False
        self._open = 0  # tickets that have not ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(llm.engine, self._post, self.audit)

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @property
    def healthy(self) -> bool:
        return self._thread.alive

    @property
    def full(self) -> bool:
        return self._open >= self._most

    @property
    def open(self) -> int:
        return self._open

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        self._thread.stop()
        await asyncio.to_thread(self._thread.join, 10.0)

    def job(self, requests: list[Request], deadline: float | None) -> Job:
        """The sequences of one HTTP request; they are let in when the job is entered."""
        return Job(self, requests, _earlier(deadline, self.config.deadline))

    def admit(self, tickets: list[Ticket]) -> None:
        """Let a request in, or refuse it with 429 or 503."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        if not self.healthy:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        if len(tickets) > self._most:
            raise ApiError(400, f"{len(tickets)} sequences: more than this server ever has; send several requests", "n")
        if self._open + len(tickets) > self._most:
            self.metrics.rejected(1)
            raise ApiError(429, "the queue is full", code="queue_full", headers={"Retry-After": self._retry_after()})
        self._open += len(tickets)
        for ticket in tickets:
            self.metrics.began(len(ticket.request.prompt))
        self._thread.submit(tickets)

    def ended(self, reason: str) -> None:
        """One sequence needs its place no more."""
        self._open -= 1
        self.metrics.ended(reason)

    def cancel(self, tickets: list[Ticket]) -> None:
        if tickets:
            self._thread.cancel(tickets)

    def pages(self) -> Future[dict[str, Any]]:
        return self._thread.call(lambda: page_map(self.engine))

    @property
    def _most(self) -> int:
        return self.llm.config.max_batch + self.config.max_queue

    def _retry_after(self) -> str:
        """Seconds until a place may be free: one for each full batch in the queue."""
        return str(max(1, self._open // max(1, self.llm.config.max_batch)))

    def _post(self, updates: list[tuple[Ticket, Update]]) -> None:
        """Called by the engine's thread: one wake-up of the event loop per step."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: list[tuple[Ticket, Update]]) -> None:
        for ticket, update in updates:
            ticket.sink(update)

    def _fresh_text(self, request: Request) -> TextStream | None:
        stop = request.params.stop
        return self.llm.text(request.prompt, stop) if stop else None


class Job:
    """The sequences of one HTTP request. Use it as an asynchronous context: leaving it ends what is not finished."""

    def __init__(self, service: Service, requests: list[Request], deadline: float | None) -> None:
        self._service, self._deadline = service, deadline
        self._news: dict[int, list[Update]] = {}  # by choice: not read yet
        self._waiting: asyncio.Future[None] | None = None  # the reader, while there is no news
        self.tickets = [Ticket(request, self._sink(index)) for index, request in enumerate(requests)]
        self._open: dict[int, Ticket] = {}  # by choice: let in and not finished
        self._times = _Times(service.metrics, len(requests))
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Job:
        self._service.admit(self.tickets)
        self._open = dict(enumerate(self.tickets))
        if self._deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(self._deadline, self._tell, -1, LATE)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left, self._open = list(self._open.values()), {}
        self._service.cancel(left)
        for _ in left:
            self._service.ended("abort")

    async def updates(self) -> AsyncIterator[dict[int, list[Update]]]:
        """What is new since the last time, by choice, until all choices are finished."""
        unread = len(self.tickets)  # choices whose end was not read yet
        while unread:
            if not self._news:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
            news, self._news = self._news, {}
            for updates in news.values():
                self._check(updates[-1])
                unread -= updates[-1].finished is not None
            yield news

    def _check(self, last: Update) -> None:
        """An update that ends the whole request is the last one of its choice."""
        if last is LATE:
            raise ApiError(408, f"not finished within {self._deadline:g} s", "timeout", "deadline_exceeded")
        if last.error is not None:
            raise last.error

    def _tell(self, index: int, update: Update) -> None:
        """In the event loop's thread: news for the reader."""
        self._news.setdefault(index, []).append(update)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _sink(self, index: int) -> Any:
        def sink(update: Update) -> None:
            if index not in self._open:
                return  # its client has left
            self._service.metrics.took(update)
            self._times.note(index, update)
            if update.finished is not None:
                del self._open[index]
                self._service.ended(update.finished)
            self._tell(index, update)

        return sink


class _Times:
    """When the tokens of each sequence came, for the histograms."""

    def __init__(self, metrics: Metrics, count: int) -> None:
        self._metrics, self._arrival = metrics, time.monotonic()
        self._first: list[float | None] = [None] * count
        self._last, self._tokens = [0.0] * count, [0] * count

    def note(self, index: int, update: Update) -> None:
        if update.tokens:
            first = self._first[index]
            if first is None:
                self._first[index] = update.at
                self._metrics.first_token(update.at - self._arrival)
            else:
                self._metrics.between(update.at - self._last[index])
            self._last[index] = update.at
            self._tokens[index] += len(update.tokens)
        if update.finished in ("stop", "length"):
            self._end(index)

    def _end(self, index: int) -> None:
        self._metrics.end_to_end(self._last[index] - self._arrival)
        first, tokens = self._first[index], self._tokens[index]
        if first is not None and tokens > 1:
            self._metrics.per_token((self._last[index] - first) / (tokens - 1))


def _earlier(one: float | None, other: float | None) -> float | None:
    given = [deadline for deadline in (one, other) if deadline is not None]
    return min(given, default=None)
