"""`faircopy chat --url`: the model of an OpenAI-compatible server, as `chat` talks to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from faircopy.errors import ConfigError, RequestError
from faircopy.types import SamplingParams

_OPENAI = ("temperature", "top_p", "seed", "max_tokens", "presence_penalty", "frequency_penalty")


class RemoteModel:
    """What `chat` needs of a model, from a server; parameters that are not OpenAI's are sent only if they were set."""

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout: float = 120.0) -> None:
        root = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._http = httpx.Client(base_url=f"{root}/v1/", headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ConfigError("url", url, "not an address", "pass something like http://localhost:8000") from error
        self._url, self._written, self._reused = url, 0, 0
        self._model = model or self._first_model()

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The server applies the template."""
        return messages

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[str]:
        body = {"model": self._model, "messages": prompt, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", "chat/completions", json=body | _parameters(params)) as reply:
                if reply.is_error:
                    reply.read()
                    raise RequestError("url", self._url, _problem(reply), "change it and ask again")
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        yield from self._take(json.loads(line[6:]))
        except httpx.HTTPError as error:
            raise RequestError("url", self._url, f"no answer ({error})", "check that the server runs") from error

    def metrics(self) -> dict[str, float]:
        return {"emitted": self._written, "tokens_reused": self._reused}

    def _take(self, event: dict[str, Any]) -> Iterator[str]:
        if "error" in event:
            raise RequestError("url", self._url, str(event["error"].get("message")), "ask again")
        usage = event.get("usage") or {}
        self._written += usage.get("completion_tokens", 0)
        self._reused += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) or 0
        for choice in event.get("choices", ()):
            if choice["delta"].get("content"):
                yield choice["delta"]["content"]

    def _first_model(self) -> str:
        try:
            reply = self._http.get("models")
        except httpx.HTTPError as error:
            raise ConfigError("url", self._url, f"cannot be reached ({error})", "check that the server runs") from error
        if reply.is_error:
            raise ConfigError("url", self._url, _problem(reply), "check the address and the API key")
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError("url", self._url, "lists no model", "name one with --model") from error


def _parameters(params: SamplingParams) -> dict[str, Any]:
    usual = SamplingParams()
    more = [name for name in SamplingParams.names() if getattr(params, name) != getattr(usual, name)]
    names = [name for name in dict.fromkeys([*_OPENAI, *more]) if getattr(params, name) is not None]
    return {name: getattr(params, name) for name in names}


def _problem(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {reply.status_code}"
