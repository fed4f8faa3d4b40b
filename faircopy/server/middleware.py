"""What happens around every request: a number for the log, a limit on the body, the API key."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from faircopy.server.errors import ApiError, as_api_error
from faircopy.server.metrics import Metrics

log = logging.getLogger("faircopy.server")
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})  # answered without a key


class Gate:
    """Checks a request before the application sees it, and answers for the application when that fails."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], max_body: int, metrics: Metrics) -> None:
        self._app, self._keys, self._max_body, self._metrics = app, [key.encode() for key in keys], max_body, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, secrets.token_hex(8))
        scope.setdefault("state", {})["request_id"] = answer.id
        try:
            headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
            self._authorise(scope, headers)
            self._check_length(headers)
            await self._app(scope, _Limited(receive, self._max_body), answer)
        except Exception as error:
            known = as_api_error(error, answer.id)
            if known.status_code == 500:
                log.exception("request %s failed", answer.id)
            if answer.status is None:
                await answer.fail(known)
        finally:
            self._note(scope, answer)

    def _authorise(self, scope: Scope, headers: dict[str, bytes]) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        given = headers.get("authorization", b"")
        key = given[7:] if given[:7].lower() == b"bearer " else b""
        if not sum(hmac.compare_digest(key, known) for known in self._keys):  # all are compared, every time
            raise ApiError(
                401, "no API key, or not a known one", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )

    def _check_length(self, headers: dict[str, bytes]) -> None:
        length = headers.get("content-length", b"0")
        if not length.isdigit():
            raise ApiError(400, "content-length: not a number")
        if int(length) > self._max_body:
            raise _too_large(self._max_body)

    def _note(self, scope: Scope, answer: _Answer) -> None:
        status = answer.status or 499  # the client left before there was an answer
        if status >= 400:
            self._metrics.error(status)
        log.info(
            "%s %s %d",
            scope["method"],
            scope["path"],
            status,
            extra={"request_id": answer.id, "seconds": round(time.monotonic() - answer.began, 4)},
        )


class _Answer:
    """Passes an answer on, with the request's number in its headers."""

    def __init__(self, send: Send, id: str) -> None:
        self._send, self.id, self.began = send, id, time.monotonic()
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.id.encode())]
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": error.status_code, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})


class _Limited:
    """A body that is sent without its length is counted as it comes."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most, self._seen = receive, most, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._most:
                error = _too_large(self._most)
                raise HTTPException(error.status_code, str(error))  # FastAPI passes no other on from reading a body
        return message


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"body: larger than {most} bytes")


def request_id(request: Any) -> str:
    """The number that the log has for a request."""
    return str(request.scope["state"]["request_id"])
