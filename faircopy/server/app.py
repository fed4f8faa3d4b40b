"""The HTTP application: routes and what they answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractContextManager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from faircopy import __version__
from faircopy.errors import FaircopyError, RequestError
from faircopy.llm import LLM
from faircopy.server import protocol, tracing
from faircopy.server.endpoints import CHAT, COMPLETIONS, Endpoints
from faircopy.server.errors import ApiError, as_api_error, error_body, invalid_body
from faircopy.server.live import live_state
from faircopy.server.metrics import Metrics
from faircopy.server.middleware import Gate, request_id
from faircopy.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from faircopy.server.service import Job, Service, served_name
from faircopy.server.settings import ServerConfig
from faircopy.server.specification import specification

log = logging.getLogger("faircopy.server")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": protocol.ErrorAnswer, "description": about}
    for status, about in {
        400: "the request cannot be served; the error names the field",
        401: "no API key, or not a known one",
        404: "no such path or model",
        408: "the deadline has passed",
        413: "the body is too large",
        429: "the queue is full",
        500: "the server failed",
        503: "the server is starting, ending or broken",
    }.items()
}


def create_app(llm: LLM, config: ServerConfig | None = None) -> FastAPI:
    """The application for a model; its engine's thread starts and ends with it."""
    config = config or ServerConfig()
    service = Service(llm, config, served_name(llm, config), Metrics)
    endpoints = Endpoints(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()
        await asyncio.to_thread(tracing.flush)

    app = FastAPI(title="faircopy", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _Routes(app, service, endpoints)
    _answer_errors(app)
    app.add_middleware(Gate, keys=config.api_keys, max_body=config.max_body, metrics=service.metrics)
    if config.cors:  # around the gate: a page must be able to read what the gate refuses
        app.add_middleware(CORSMiddleware, allow_origins=list(config.cors), allow_methods=["*"], allow_headers=["*"])
    app.openapi = lambda: specification(app, service)  # type: ignore[method-assign]
    return app


class _Routes:
    """The endpoints."""

    def __init__(self, app: FastAPI, service: Service, endpoints: Endpoints) -> None:
        self._service, self._endpoints, self._llm = service, endpoints, service.llm
        self._reader, self._started = endpoints.reader, int(time.time())
        events = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        stream = {"text/event-stream": {"schema": events}}
        for path, endpoint, model in (
            (COMPLETIONS, self.completions, protocol.CompletionAnswer),
            (CHAT, self.chat, protocol.ChatAnswer),
        ):
            good: dict[int | str, dict[str, Any]] = {200: {"model": model, "content": stream}}
            app.post(path, responses=_ERRORS | good, response_model=None)(endpoint)
        for path, post, answer in (
            ("/tokenize", self.tokenize, protocol.Tokens),
            ("/detokenize", self.detokenize, protocol.Detokenized),
        ):
            app.post(path, responses=_ERRORS | {200: {"model": answer}}, response_model=None)(post)
        state: dict[int | str, dict[str, Any]] = {200: {"model": protocol.State}, 503: {"model": protocol.State}}
        app.get("/v1/models", responses={401: _ERRORS[401], 200: {"model": protocol.ModelList}}, response_model=None)(
            self.models
        )
        app.get("/health", responses=state, response_model=None)(self.health)
        app.get("/ready", responses=state, response_model=None)(self.ready)
        app.get("/metrics", response_class=Response)(self.metrics)
        app.get("/live", include_in_schema=False)(self.live)
        app.get("/", include_in_schema=False)(self.page)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        return await self._answer(request, body)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        return await self._answer(request, body)

    async def tokenize(self, body: TokenizeRequest) -> Response:
        return as_json(await asyncio.to_thread(self._tokenize, body))

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        self._reader.check_model(body.model)
        for token in body.tokens:
            if token >= self._llm.model.vocab:
                raise RequestError("tokens", token, f"not a token id below {self._llm.model.vocab}", "use its own ids")
        return as_json({"prompt": await asyncio.to_thread(self._llm.decode, body.tokens)})

    async def models(self) -> Response:
        card = {
            "id": self._service.name,
            "object": "model",
            "created": self._started,
            "owned_by": "faircopy",
            "max_model_len": self._llm.model.context,
        }
        return as_json({"object": "list", "data": [card]})

    async def health(self) -> Response:
        """Whether the engine's thread lives."""
        good = self._service.healthy
        return as_json({"status": "ok" if good else "the engine has stopped"}, 200 if good else 503)

    async def ready(self) -> Response:
        """Whether a request sent now would be let in."""
        service = self._service
        problem = "draining" if service.draining else "queue full" if service.full else None
        problem = problem if service.healthy else "the engine has stopped"
        return as_json({"status": problem or "ok"}, 503 if problem else 200)

    async def metrics(self) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def live(self) -> Response:
        return as_json(await live_state(self._service))

    async def page(self) -> Response:
        return HTMLResponse(files("faircopy.server").joinpath("page.html").read_text())

    async def _answer(self, request: Request, body: CompletionRequest | ChatRequest) -> Response:
        number = request_id(request)
        writer = await asyncio.to_thread(self._endpoints.writer, body, number)
        job = self._service.job(writer.requests, body.timeout)
        span = tracing.traced(request.url.path, self._service.name, writer.asked.requests[0], writer.usage)
        if body.stream:
            return JobStream(job, writer.events(job, lambda error: _told(error, number).body()), span)
        with span:
            async with job:
                answer = await _unless_gone(request, writer.whole(job))
        return as_json(answer)

    def _tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        self._reader.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", body.prompt, "give a prompt or messages", "give exactly one of the two")
        if body.messages is not None:
            ids = self._reader.chat_ids(body.messages, None, {})
        else:
            tokenizer = self._llm.tokenizer
            if tokenizer is None:
                raise RequestError("prompt", "", "the server has no tokenizer", "send token ids to /v1/completions")
            ids = list(tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": self._llm.model.context, "tokens": ids}
        return found | (
            {"token_strs": [self._endpoints.names(token) for token in ids]} if body.return_token_strs else {}
        )


class JobStream(StreamingResponse):
    """The events of a job; it begins with the answer and ends with it, however that ends."""

    def __init__(self, job: Job, events: AsyncIterator[bytes], span: AbstractContextManager[None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._job, self._span = job, span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._span:
            async with self._job:
                await super().__call__(scope, receive, send)


async def _unless_gone(request: Request, whole: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The whole answer; a client that leaves meanwhile ends its request."""
    answer = asyncio.create_task(whole)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ApiError(499, "the client has left")
        return answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_json(body: Any, status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


def _told(error: Exception, number: str) -> ApiError:
    """What a client is told about an error; the log has more of it, under the request's number."""
    told = as_api_error(error, number)
    if told.status_code >= 500:
        expected = isinstance(error, FaircopyError)
        log.error("request %s failed: %s", number, error, exc_info=None if expected else error)
    return told


def _answer_errors(app: FastAPI) -> None:
    """Errors of any kind in OpenAI's shape."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError | HTTPException), "registered for these"
        body = error.body() if isinstance(error, ApiError) else error_body(error.status_code, str(error.detail))
        answer = as_json(body, error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for these"
        return await known(request, invalid_body(list(error.errors())))

    async def ours(request: Request, error: Exception) -> Response:
        return await known(request, _told(error, request_id(request)))

    app.add_exception_handler(FaircopyError, ours)
    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(RequestValidationError, invalid)
