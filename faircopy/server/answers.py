"""Answers in OpenAI's shape, whole or as a stream of events, for completions and for chats."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from faircopy.server.protocol import ChatRequest, CompletionRequest, Sampling
from faircopy.server.reading import Asked, wants_logprobs
from faircopy.server.service import Job, Service
from faircopy.server.tools import ToolReader
from faircopy.server.writing import (
    Choice,
    Piece,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    speculative_metrics,
    usage,
)
from faircopy.types import Request

Json = dict[str, Any]
_compact = json.JSONEncoder(separators=(",", ":")).encode
_IN_DELTAS = ("reasoning_content", "content", "tool_calls")  # of a message that is sent when it is complete
DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """How one endpoint writes choices."""

    kind: str  # the answer's `object`
    chunk_kind: str

    def choice(self, choice: Choice) -> Json:
        """A finished choice."""

    def opening(self, choice: Choice) -> Json | None:
        """What a stream sends of a choice before its first tokens."""

    def delta(self, choice: Choice, piece: Piece) -> Json:
        """What a stream sends of a choice after a step."""


@dataclass(slots=True)
class Writer:
    """One HTTP request's answer."""

    service: Service
    body: Sampling
    asked: Asked
    shape: Shape
    id: str
    fingerprint: str
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        origins = bool(self.body.return_origins)
        self.choices = [
            Choice(self.service.llm, request, index, origins) for index, request in enumerate(self.asked.requests)
        ]
        for choice in self.choices:
            choice.resume()

    @property
    def requests(self) -> list[Request]:
        """What is to be written, in the order of the job's sequences."""
        return [self.asked.requests[index] for index in self.asked.open]

    async def whole(self, job: Job) -> Json:
        async for news in job.updates():
            for index, updates in news.items():
                self.choices[index].take(updates)
        answer = self._head(self.shape.kind)
        answer["choices"] = [self.shape.choice(choice) for choice in self.choices]
        return answer | self._counts()

    async def events(self, job: Job, fail: Callable[[Exception], Json]) -> AsyncIterator[bytes]:
        """Server-sent events; an error becomes the last one. fail: an error as a body."""
        head, options = self._head(self.shape.chunk_kind), self.body.stream_options
        running_usage = options is not None and bool(options.continuous_usage_stats)
        try:
            openings = self._openings() if self.body.continued is None else []
            async for news in job.updates():
                while openings:  # with the first tokens: a first event says that the engine has begun
                    yield event({**head, "choices": [openings.pop(0)]})
                for place, updates in news.items():
                    choice = self.choices[self.asked.open[place]]
                    piece = choice.take(updates)
                    delta = self.shape.delta(choice, piece)
                    yield event({**head, "choices": [delta], **({"usage": self.usage()} if running_usage else {})})
            if options is not None and options.include_usage:
                yield event({**head, "choices": [], **self._counts()})
        except Exception as error:
            yield event(fail(error))
        yield DONE

    def _openings(self) -> list[Json]:
        found = [self.shape.opening(choice) for choice in self.choices]
        return [opening for opening in found if opening is not None]

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.service.name,
            "system_fingerprint": self.fingerprint,
        }

    def usage(self) -> Json:
        """The tokens so far."""
        return usage(self.asked.prompts, self.choices, count_output=not nothing_wanted(self.body))

    def _counts(self) -> Json:
        found: Json = {"usage": self.usage()}
        k = self.choices[0].request.k
        counts = [choice.counts for choice in self.choices]
        default = self.service.llm.config.k
        metrics = speculative_metrics(counts, default if k is None else k, self.service.config.spec_metrics)
        if metrics is not None:
            found["metrics"] = {"speculative_decoding": metrics}
        return found


def nothing_wanted(body: Sampling) -> bool:
    """Whether only the prompt is asked about; the engine writes one token at least."""
    return isinstance(body, CompletionRequest) and body.max_tokens == 0


def event(body: Json) -> bytes:
    return f"data: {_compact(body)}\n\n".encode()


class CompletionShape:
    """/v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionRequest, decode: Callable[[list[int]], str], names: TokenNames) -> None:
        self._body, self._decode, self._names = body, decode, names
        self._offsets: dict[int, int] = {}  # per choice of a stream: characters before the next token

    def choice(self, choice: Choice) -> Json:
        return self._written(choice, choice.whole, first=True)

    def opening(self, choice: Choice) -> Json | None:
        return None

    def delta(self, choice: Choice, piece: Piece) -> Json:
        return self._written(choice, piece, first=len(choice.whole.tokens) == len(piece.tokens))

    def _written(self, choice: Choice, piece: Piece, first: bool) -> Json:
        echo = self._body.echo and first
        nothing = nothing_wanted(self._body)
        text = "" if nothing else piece.text
        written: Json = {
            "index": choice.index,
            "text": (self._decode(list(choice.request.prompt)) if echo else "") + text,
            "finish_reason": "length" if nothing else piece.finished,
            "logprobs": self._logprobs(choice, piece, bool(echo), nothing),
            "seed": choice.request.seed,
        }
        if self._body.return_token_ids:
            written["token_ids"] = [] if nothing else list(piece.tokens)
            written |= {"prompt_token_ids": list(choice.request.prompt)} if first else {}
        if self._body.return_origins:
            written["origins"] = [] if nothing else piece.origins
        return written

    def _logprobs(self, choice: Choice, piece: Piece, echo: bool, nothing: bool) -> Json | None:
        if self._body.logprobs is None:
            return None
        tokens, scores = ([], []) if nothing else (list(piece.tokens), list(piece.logprobs))
        if echo:
            tokens = [*choice.request.prompt, *tokens]
            scores = [*(choice.whole.prompt_logprobs or ()), *scores]
        offset = self._offsets.get(choice.index, self._known_characters(choice))
        found = completion_logprobs(self._names, tokens, scores, self._body.logprobs, offset)
        self._offsets[choice.index] = offset + sum(map(len, found["tokens"]))
        return found

    def _known_characters(self, choice: Choice) -> int:
        """What a continued stream has before its first event."""
        known = [*(choice.request.prompt if self._body.echo else ()), *choice.request.written]
        return sum(len(self._names(token)) for token in known) if choice.request.written else 0


class ChatShape:
    """/v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, tools: ToolReader, names: TokenNames) -> None:
        self._body, self._tools, self._names = body, tools, names

    def choice(self, choice: Choice) -> Json:
        message, called = self._tools.message(choice.whole.text, choice.request.prompt, choice.whole.tokens)
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": "tool_calls" if called else choice.whole.finished,
            **self._extras(choice, choice.whole),
        }

    def opening(self, choice: Choice) -> Json | None:
        return {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def delta(self, choice: Choice, piece: Piece) -> Json:
        """With tools the text waits until it is known whether it is a call."""
        finished, content = piece.finished, piece.text
        delta: Json = {"content": content} if content else {}
        if self._tools.active:
            delta = {}
            if finished is not None:
                message, called = self._tools.message(choice.whole.text, choice.request.prompt, choice.whole.tokens)
                delta = {name: message[name] for name in _IN_DELTAS if message.get(name)}
                for index, call in enumerate(delta.get("tool_calls", ())):
                    call["index"] = index
                return self._chunk(choice, piece, delta, "tool_calls" if called else finished)
        return self._chunk(choice, piece, delta, finished)

    def _chunk(self, choice: Choice, piece: Piece, delta: Json, reason: str | None) -> Json:
        return {"index": choice.index, "delta": delta, "finish_reason": reason, **self._extras(choice, piece)}

    def _extras(self, choice: Choice, piece: Piece) -> Json:
        best = self._body.top_logprobs or 0
        found: Json = {"logprobs": None, "seed": choice.request.seed}
        if wants_logprobs(self._body):
            found["logprobs"] = chat_logprobs(self._names, piece.tokens, piece.logprobs, best)
        if self._body.return_token_ids:
            found["token_ids"] = list(piece.tokens)
        if self._body.return_origins:
            found["origins"] = piece.origins
        return found
