"""What openapi.json cannot say in JSON Schema, for schemathesis: texts in a language, and fields that name each other.

Only requests that are meant to be valid are completed; the invalid ones are sent as they were made up.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"enum": ["yes", "no"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
]

schemathesis.openapi.format("token-id", st.integers(0, 255).map(str))
schemathesis.openapi.format("rust-regex", st.sampled_from(["[a-z]{1,4}", "yes|no", "\\d+(\\.\\d+)?"]))
schemathesis.openapi.format("lark", st.sampled_from(['start: "yes" | "no"', "start: /[a-z]+/"]))
schemathesis.openapi.format("json-object", st.dictionaries(st.text(max_size=3), st.integers()).map(json.dumps))
schemathesis.openapi.format("json-schema", st.sampled_from(SCHEMAS).map(json.dumps))


@schemathesis.hook
def map_case(context: Any, case: Any) -> Any:
    """JSON schemas become real ones, a tool that is called by name is one of the tools, and deadlines are long."""
    if case.meta.generation.mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
        complete(case.body)
    return case


def complete(body: dict[str, Any]) -> None:
    format = body.get("response_format") or {}
    if "json_schema" in format:
        format["json_schema"]["schema"] = SCHEMAS[0]
    outputs = body.get("structured_outputs") or {}
    if isinstance(outputs.get("json"), dict):
        outputs["json"] = SCHEMAS[1]
    for tool in body.get("tools") or ():
        tool["function"]["parameters"] = SCHEMAS[0]
    body.pop("continued", None)  # it must fit the number of choices
    if body.get("timeout") is not None:
        body["timeout"] = 60.0  # a deadline that passes is no answer to learn from
    if isinstance(body.get("tool_choice"), dict):
        body["tool_choice"]["function"]["name"] = body["tools"][0]["function"]["name"]
