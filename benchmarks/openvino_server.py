"""A thin OpenAI-compatible server over OpenVINO GenAI's continuous batching, for comparisons of servers.

    /path/to/venv/bin/python benchmarks/openvino_server.py MODEL PORT [--draft DRAFT] [--dtype bfloat16]

OpenVINO GenAI has no server of its own, and OpenVINO Model Server is not on PyPI. Only what benchmarks.serve_load sends
is served: streams of /v1/completions with token ids. One thread makes steps; the event loop writes the events. The
environment needs openvino-genai, openvino-tokenizers, optimum-intel, fastapi and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.peer_workers import K, openvino_pipeline


class Steps:
    """Owns the pipeline: takes requests, makes steps, hands out tokens."""

    def __init__(self, pipe: Any, drafts: bool) -> None:
        self._pipe, self._drafts = pipe, drafts
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._live: dict[int, tuple[Any, Any, Any]] = {}
        self._ids = itertools.count()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, prompt: list[int], tokens: int, loop: Any, sink: asyncio.Queue[list[int] | None]) -> None:
        self._inbox.put((prompt, tokens, loop, sink))

    def _run(self) -> None:
        while True:
            if not self._live:
                self._add(*self._inbox.get())
            while not self._inbox.empty():
                self._add(*self._inbox.get())
            self._pipe.step()
            self._hand_out()

    def _add(self, prompt: list[int], tokens: int, loop: Any, sink: Any) -> None:
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
        config.num_assistant_tokens = K if self._drafts else 0
        number = next(self._ids)
        handle = self._pipe.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config)
        self._live[number] = handle, loop, sink

    def _hand_out(self) -> None:
        for number, (handle, loop, sink) in list(self._live.items()):
            ended = handle.get_status() != genai.GenerationStatus.RUNNING
            while handle.can_read():
                tokens = [token for output in handle.read().values() for token in output.generated_ids]
                loop.call_soon_threadsafe(sink.put_nowait, tokens)
            if ended:
                del self._live[number]
                loop.call_soon_threadsafe(sink.put_nowait, None)


def create_app(steps: Steps, tokenizer: Any) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        sink: asyncio.Queue[list[int] | None] = asyncio.Queue()
        steps.ask(body["prompt"], body["max_tokens"], asyncio.get_running_loop(), sink)

        async def events() -> AsyncIterator[str]:
            while (tokens := await sink.get()) is not None:
                choice = {"index": 0, "text": tokenizer.decode(tokens), "finish_reason": None}
                yield f"data: {json.dumps({'object': 'text_completion', 'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--draft", default="")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    pipe = openvino_pipeline(args.model, args.draft, args.dtype)
    app = create_app(Steps(pipe, bool(args.draft)), pipe.get_tokenizer())
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
