"""The one thread that owns the engine: takes requests from a queue, makes steps, and posts what is new after each."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from faircopy.engine import Engine
from faircopy.errors import FaircopyError, RankError
from faircopy.server.shadow import ShadowAudit
from faircopy.types import FinishReason, Logprobs, Output, Request, Sequence

log = logging.getLogger("faircopy.server")
T = TypeVar("T")


class StepFailed(FaircopyError):
    """The step that a request took part in raised an error."""


class EngineStopped(FaircopyError):
    """The engine's thread has ended."""


class Update(NamedTuple):
    """What is new for one sequence after a step."""

    tokens: tuple[int, ...] = ()
    accepted: int = 0  # how many of them a draft had right
    drafted: int = 0  # draft tokens verified in this step
    logprobs: tuple[Mapping[int, float], ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None  # with the first tokens, if they were asked for
    finished: FinishReason | None = None
    error: FaircopyError | None = None
    at: float = 0.0  # time.monotonic() when the step ended


@dataclass(slots=True, eq=False)
class Ticket:
    """One sequence of a client's request. `seq`, `drafted` and `started` are the engine thread's."""

    request: Request
    sink: Callable[[Update], None]  # called in the front end's thread
    seq: Sequence | None = None
    drafted: int = 0  # of seq.drafted, what was posted before
    started: bool = False  # its first tokens were posted


Post = Callable[[list[tuple[Ticket, Update]]], None]


class EngineThread:
    """Owns the engine. The methods may be called from any thread; the work is done between two steps."""

    def __init__(self, engine: Engine, post: Post, audit: ShadowAudit | None = None) -> None:
        """post: hands updates to the front end; audit: what to do when there is nothing to do."""
        self._engine, self._post = engine, post
        self._audit = audit or ShadowAudit(engine, 0.0)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[int, Ticket] = {}  # by the sequence's id
        self._stopping = self._gone = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are still answered: not any more when the first of them is told that they are not."""
        return self._thread.is_alive() and not self._gone

    def submit(self, tickets: list[Ticket]) -> None:
        self._send(lambda: self._add(tickets))

    def cancel(self, tickets: list[Ticket]) -> None:
        """End requests whose client has left; their pages are free before the next step."""
        self._send(lambda: self._drop(tickets))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something between two steps, where the engine's state may be read."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # who asked has given up waiting
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._send(run)
        return future

    def stop(self) -> None:
        """End after the step in work; requests that are not finished fail."""
        self._send(self._stop)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _send(self, command: Callable[[], None]) -> None:
        self._inbox.put(command)
        if self._gone:
            self._take_sent()  # the thread that would have is gone

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._engine.linger()
                self._take_commands()
                self._work()
        except BaseException:
            log.exception("the engine's thread ended")
        finally:
            self._close_inbox()

    def _take_commands(self) -> None:
        """All that were sent; waits for one if there is nothing else to do."""
        if not self._engine.busy and not (self._audit.pending and not self._live):
            self._inbox.get()()
        self._take_sent()

    def _take_sent(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _work(self) -> None:
        if self._live:
            self._audit.pause()
        else:
            self._audit.resume()
        if self._engine.busy:
            self._step()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except RankError:  # no step can be made any more: the thread ends, and all are told
            raise
        except Exception as error:  # one step's requests fail, the others go on
            log.exception("a step failed")
            self._fail(error)
            return
        at = time.monotonic()
        updates = [
            (ticket, self._update(ticket, output, at))
            for output in outputs
            if (ticket := self._live.get(output.id)) is not None
        ]
        self._audit.see(outputs)
        for ticket, update in updates:
            if update.finished is not None:
                self._close(ticket)
        if updates:
            self._post(updates)

    def _update(self, ticket: Ticket, output: Output, at: float) -> Update:
        seq = ticket.seq
        assert seq is not None, "a ticket in work has a sequence"
        drafted, ticket.drafted = seq.drafted - ticket.drafted, seq.drafted
        wanted = seq.params.prompt_logprobs is not None and not ticket.started
        ticket.started = True
        return Update(
            output.tokens,
            output.accepted,
            drafted,
            output.logprobs,
            tuple(seq.prompt_logprobs) if wanted else None,
            output.finished,
            seq.error,
            at,
        )

    def _add(self, tickets: list[Ticket]) -> None:
        if self._gone:
            self._post([(ticket, STOPPED) for ticket in tickets])
            return
        for ticket in tickets:
            try:
                ticket.seq = self._engine.add(ticket.request)
            except FaircopyError as error:
                self._post([(ticket, Update(finished="error", error=error))])
            else:
                self._live[ticket.seq.id] = ticket

    def _drop(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.seq is not None and self._live.pop(ticket.seq.id, None) is not None:
                self._abort(ticket.seq)

    def _abort(self, seq: Sequence) -> None:
        """A pipeline first ends the sequence's step, which may fail like any other."""
        try:
            self._engine.abort(seq)
        except RankError:
            raise
        except Exception as error:
            log.exception("a step failed")
            self._fail(error)

    def _close(self, ticket: Ticket) -> None:
        assert ticket.seq is not None, "a ticket in work has a sequence"
        del self._live[ticket.seq.id]
        self._audit.consider(ticket.seq)

    def _fail(self, error: Exception) -> None:
        """The sequences of the failed step get an error; all, if the step could not even be planned."""
        failed = self._engine.failed or [ticket.seq for ticket in self._live.values() if ticket.seq is not None]
        self._engine.failed = []
        told = StepFailed("request", "", f"a step failed ({type(error).__name__})", "send it again")
        self._audit.give_up(failed)
        for seq in failed:
            self._engine.abort(seq)
        tickets = [ticket for seq in failed if (ticket := self._live.pop(seq.id, None)) is not None]
        self._post([(ticket, Update(finished="error", error=told)) for ticket in tickets])

    def _stop(self) -> None:
        self._stopping = True

    def _close_inbox(self) -> None:
        """Tell everyone who waits, or asks from now on, that no answer will come."""
        self._gone = True
        waiting, self._live = list(self._live.values()), {}
        self._post([(ticket, STOPPED) for ticket in waiting])
        self._take_sent()


STOPPED = Update(
    finished="error", error=EngineStopped("engine", "", "the server's engine has stopped", "restart the server")
)


def page_map(engine: Engine) -> dict[str, Any]:
    """Which sequence holds which pages; call it between steps."""
    return {
        "pages": engine.tables.pool.pages,
        "page": engine.tables.page,
        "held": {seq.id: list(engine.tables.table(seq)) for seq in engine.scheduler.running},
    }
