"""The shadow audit: in idle time a share of the requests is run again, plainly, and must give the same tokens."""

from __future__ import annotations

import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from faircopy.engine import Engine
from faircopy.errors import OutputError, RequestError
from faircopy.files import replace_text
from faircopy.types import FinishReason, Output, Request, Sequence, TextStream

log = logging.getLogger("faircopy.server")
BACKLOG = 64  # answers that wait to be checked at most; the oldest are dropped


@dataclass(frozen=True, slots=True)
class Written:
    """What a client was given."""

    request: Request
    tokens: list[int]
    finished: FinishReason | None


class ShadowAudit:
    """Belongs to the engine's thread; the counters may be read from anywhere."""

    def __init__(
        self,
        engine: Engine,
        share: float,
        folder: Path | None = None,
        fresh_text: Callable[[Request], TextStream | None] = lambda request: None,
    ) -> None:
        """fresh_text: a request's watch for stop strings, made anew; folder: where mismatches are written."""
        self._engine, self._share, self._folder, self._fresh_text = engine, share, folder, fresh_text
        self._backlog: deque[Written] = deque(maxlen=BACKLOG)
        self._checking: tuple[Written, Sequence] | None = None
        self.checked = self.mismatches = 0

    @property
    def pending(self) -> bool:
        return bool(self._backlog) or self._checking is not None

    def consider(self, seq: Sequence) -> None:
        """A client's sequence has finished; perhaps it is run again later."""
        if seq.finished in ("stop", "length") and random.random() < self._share:
            self._backlog.append(Written(seq.request, seq.output, seq.finished))

    def pause(self) -> None:
        """Clients have come: the check in work begins anew later."""
        if self._checking is not None:
            written, seq = self._checking
            self._checking = None
            self._engine.abort(seq)
            self._backlog.append(written)

    def resume(self) -> None:
        if self._checking is None and self._backlog:
            written = self._backlog.popleft()
            try:
                self._checking = written, self._engine.add(self._plainly(written.request))
            except RequestError:
                log.exception("an answer cannot be run again")

    def see(self, outputs: list[Output]) -> None:
        """A step has ended."""
        if self._checking is not None and self._checking[1].finished is not None:
            written, seq = self._checking
            self._checking = None
            if (seq.output, seq.finished) != (written.tokens, written.finished):
                self.mismatches += 1
                self._report(written, seq)
            self.checked += 1

    def give_up(self, failed: list[Sequence]) -> None:
        """A step failed; the check is not repeated if it was part of it."""
        if self._checking is not None and self._checking[1] in failed:
            self._checking = None

    def state(self) -> dict[str, Any]:
        waiting = len(self._backlog) + (self._checking is not None)
        return {"share": self._share, "checked": self.checked, "mismatches": self.mismatches, "waiting": waiting}

    def _plainly(self, request: Request) -> Request:
        """The same request without drafts, behind the tokens that it brought.

        Its log probabilities of the prompt keep it from reusing cached pages.
        """
        params = replace(request.params, prompt_logprobs=0)
        text = self._fresh_text(request)
        return replace(request, params=params, k=0, drafter=None, prediction=(), text=text)

    def _report(self, written: Written, seq: Sequence) -> None:
        told = "not written: no folder was given" if self._folder is None else self._write(self._folder, written, seq)
        log.error("shadow audit: an answer is not what plain decoding writes; reproduction: %s", told)

    def _write(self, folder: Path, written: Written, seq: Sequence) -> str:
        file = folder / f"mismatch-{time.strftime('%Y%m%d-%H%M%S')}-{seq.id}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text("audit_folder", file, _reproduction(written, seq))
        except (OSError, OutputError) as error:  # a full disk is no reason to stop serving
            return f"not written ({error})"
        return str(file)


def _reproduction(written: Written, seq: Sequence) -> str:
    request = written.request
    return json.dumps(
        {
            "prompt": list(request.prompt),
            "params": asdict(request.params),
            "seed": request.seed,
            "k": request.k,
            "drafter": request.drafter,
            "prediction": list(request.prediction),
            "written": list(request.written),
            "constrained": request.constraint is not None,
            "served": {"tokens": written.tokens, "finish_reason": written.finished},
            "plain": {"tokens": seq.output, "finish_reason": seq.finished},
        },
        indent=1,
    )
