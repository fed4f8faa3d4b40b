"""Calls of tools in what a model wrote: read by the tokenizer's own parser, or as the JSON that was forced."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence as Seq
from typing import Any

from faircopy.server.protocol import ChatRequest
from faircopy.server.reading import forced_tools, plain_tool
from faircopy.text import IncrementalText

log = logging.getLogger("faircopy.server")
Json = dict[str, Any]


class ToolReader:
    """Turns a finished text into a message, with calls where there are some.

    A model whose format transformers knows has a response template, and its tokenizer's `parse_response` reads it.
    Without one the text is passed on as it is.
    """

    def __init__(self, body: ChatRequest, tokenizer: Any | None, template: Json | None) -> None:
        self._forced, self._template = forced_tools(body) is not None, template
        wanted = bool(body.tools) and body.tool_choice != "none"
        self._parser = tokenizer if template is not None and wanted and not self._forced else None
        self._tools = [plain_tool(tool) for tool in body.tools or ()]
        self._stop = [body.stop] if isinstance(body.stop, str) else body.stop or []

    @property
    def active(self) -> bool:
        """Whether a text may be a call, so that it cannot be sent before it is finished."""
        return self._forced or self._parser is not None

    def message(self, text: str, prompt: Seq[int], tokens: Seq[int]) -> tuple[Json, bool]:
        """The assistant's message, and whether it calls a tool."""
        if self._forced:
            return self._forced_call(text)
        if self._parser is not None:
            return self._parsed(text, prompt, tokens)
        return _plain(text), False

    def _forced_call(self, text: str) -> tuple[Json, bool]:
        """The grammar makes sure that a finished text is a call; a text that was cut off is passed on."""
        try:
            call = json.loads(text)
        except ValueError:
            return _plain(text), False
        return {**_plain(None), "tool_calls": [_call(call["name"], call["arguments"])]}, True

    def _parsed(self, text: str, prompt: Seq[int], tokens: Seq[int]) -> tuple[Json, bool]:
        assert self._parser is not None, "asked only where there is one"
        try:
            written = self._until_stop(prompt, tokens)
            found = self._parser.parse_response(written, self._template, prefix=list(prompt), tools=self._tools)
        except Exception:  # what a model writes need not be in its format
            log.warning("a text could not be parsed with the model's response template")
            return _plain(text), False
        calls = [call["function"] for call in found.get("tool_calls") or ()]
        message = _plain(found.get("content"))
        thought = found.get("reasoning_content") or found.get("thinking")
        if thought:
            message["reasoning_content"] = thought
        if not calls:
            return {**message, "content": message["content"] or ""}, False
        return {**message, "tool_calls": [_call(call["name"], call.get("arguments", {})) for call in calls]}, True

    def _until_stop(self, prompt: Seq[int], tokens: Seq[int]) -> str | list[int]:
        """What the parser reads: with special tokens, and without the stop string that ended it."""
        assert self._parser is not None, "asked only where there is one"
        if not self._stop:
            return list(tokens)
        text = IncrementalText(self._parser.decode, prompt, self._stop)
        for place, token in enumerate(tokens, 1):
            text.push(token, may_stop=place == len(tokens))
        return text.finish()


def _plain(text: str | None) -> Json:
    return {"role": "assistant", "content": text, "refusal": None}


def _call(name: str, arguments: Any) -> Json:
    given = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": given}}
