"""openapi.json: what FastAPI says about the routes, completed with what the served model and the limits allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from faircopy.drafters.per_request import drafter_names
from faircopy.server.protocol import PROMPT, TOKEN_ID
from faircopy.server.service import Service

Json = dict[str, Any]


def specification(app: FastAPI, service: Service) -> Json:
    """Made once. FastAPI's status for invalid bodies is left out: ours is 400."""
    if app.openapi_schema is None:
        schema: Json = FastAPI.openapi(app)
        for methods in schema["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        _complete(schema["components"]["schemas"], service)
        app.openapi_schema = schema
    return app.openapi_schema


def _complete(classes: Json, service: Service) -> None:
    llm, config = service.llm, service.config
    for node in _nodes(classes):
        if node.get("format") == TOKEN_ID and node.get("type") == "integer":
            node.pop("exclusiveMaximum", None)
            node["maximum"] = llm.model.vocab - 1
        if node.get("format") == PROMPT and llm.tokenizer is not None and not llm.tokenizer.encode(""):
            node["minLength"] = 1
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"):
        _variant(classes[name]["properties"]["model"], "string")["enum"] = [service.name]
    for name in ("CompletionRequest", "ChatRequest"):
        _variant(classes[name]["properties"]["n"], "integer")["maximum"] = config.max_n
    _variant(classes["Speculative"]["properties"]["drafter"], "string")["enum"] = drafter_names(llm.engine.drafter)
    for variant in classes["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        _limit_prompts(variant, config.max_prompts, min(config.max_prompt or llm.model.context, llm.model.context - 1))


def _limit_prompts(variant: Json, prompts: int, tokens: int) -> None:
    """One of the forms of a prompt: a text, token ids, or a list of either."""
    if variant["type"] == "array":
        ids = variant["items"].get("type") == "integer"
        variant["maxItems"] = tokens if ids else prompts
        if not ids and variant["items"]["type"] == "array":
            variant["items"]["maxItems"] = tokens


def _variant(field: Json, kind: str) -> Json:
    """The schema of a field that may be null, where it is not."""
    return next(variant for variant in field["anyOf"] if variant.get("type") == kind)


def _nodes(value: Any) -> Iterator[Json]:
    """All objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(inner)
