"""Log lines as text or as JSON; neither holds a prompt, an answer or a key."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time

from faircopy.server.service import Service

log = logging.getLogger("faircopy.server")
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
INTERVAL = 10.0  # seconds between two lines about speculation
_OWN = ("request_id", "seconds")


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in _OWN if hasattr(record, name)},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(form: str, level: str) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn.access").disabled = True  # the gate writes a line of its own


async def report_speculation(service: Service) -> None:
    """While there is work, a line about it every ten seconds, in the words that operators of vLLM look for."""
    before = dict(service.metrics.totals)
    while True:
        await asyncio.sleep(INTERVAL)
        now = dict(service.metrics.totals)
        new = {name: now[name] - before[name] for name in now}
        before = now
        if new["emitted"]:
            log.info("%s", _line(service, new))


def _line(service: Service, new: dict[str, int]) -> str:
    drafts, accepted, drafted = new["drafts"], new["accepted"], new["drafted"]
    length = 1 + accepted / drafts if drafts else 1.0
    rate = accepted / drafted if drafted else 0.0
    scheduler = service.engine.scheduler
    return (
        f"Running: {len(scheduler.running)}, waiting: {len(scheduler.waiting)}, "
        f"generation throughput: {new['emitted'] / INTERVAL:.1f} tokens/s, mean acceptance length: {length:.2f}, "
        f"accepted throughput: {accepted / INTERVAL:.1f} tokens/s, drafted throughput: {drafted / INTERVAL:.1f} "
        f"tokens/s, draft acceptance rate: {rate:.1%}"
    )
