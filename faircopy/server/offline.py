"""Answers lines of OpenAI's batch format with an engine in this process: no HTTP, the same endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from pydantic import ValidationError

from faircopy.errors import FaircopyError
from faircopy.llm import LLM
from faircopy.server.batch_lines import ID, request_number
from faircopy.server.endpoints import BODIES, Endpoints
from faircopy.server.errors import ApiError, as_api_error, invalid_body
from faircopy.server.metrics import Metrics
from faircopy.server.service import Service, served_name
from faircopy.server.settings import ServerConfig

log = logging.getLogger("faircopy.server")
Json = dict[str, Any]
UNLIMITED = 1 << 40


class Offline:
    """One engine and its thread; lines are answered as they are brought."""

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        """name: what requests call the model."""
        config = ServerConfig(name=name, max_queue=UNLIMITED, vllm_metrics=False, spec_metrics="none")
        self._service = Service(llm, config, served_name(llm, config), Metrics)
        self._endpoints = Endpoints(self._service)

    async def answers(self, lines: Iterable[Json], together: int) -> AsyncGenerator[Json]:
        """The answer to each line, as it is finished. together: lines in work at most."""
        self._service.start()
        open_ones: set[asyncio.Task[Json]] = set()
        try:
            for line in lines:
                open_ones.add(asyncio.create_task(self.answer(line)))
                if len(open_ones) >= together:
                    done, open_ones = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
            for finished in asyncio.as_completed(open_ones):
                yield await finished
        finally:
            for task in open_ones:
                task.cancel()
            await self._service.stop()

    async def answer(self, line: Json) -> Json:
        """The answer to a line; what is wrong with its request is the answer's status and body."""
        number = request_number(line)
        try:
            status, body = 200, await self._body(line, number)
        except Exception as error:
            told = invalid_body(_located(error)) if isinstance(error, ValidationError) else as_api_error(error, number)
            status, body = told.status_code, told.body()
            if not isinstance(error, ApiError | FaircopyError | ValidationError):
                log.exception("request %s failed", number)
        response = {"status_code": status, "request_id": number, "body": body}
        return {"id": ID + number, "custom_id": line["custom_id"], "response": response, "error": None}

    async def _body(self, line: Json, number: str) -> Json:
        body = BODIES[line["url"]].model_validate_json(json.dumps(line["body"]))
        if body.stream:
            raise ApiError(400, "stream = True: a batch is not streamed; leave it out", "stream", "invalid_value")
        writer = await asyncio.to_thread(self._endpoints.writer, body, number)
        async with self._service.job(writer.requests, body.timeout) as job:
            return await writer.whole(job)


def _located(error: ValidationError) -> list[Any]:
    """pydantic's errors with places as FastAPI gives them: in the body."""
    return [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
