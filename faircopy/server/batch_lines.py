"""Lines of OpenAI's batch format: what names one, and which answers are final."""

from __future__ import annotations

import hashlib
import json
from typing import Any

Json = dict[str, Any]
ID = "batch_req_"  # every answer's `id` begins with it


def request_number(line: Json) -> str:
    """A request's number: another body, another number."""
    text = json.dumps([line["custom_id"], line["url"], line["body"]], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_final(answer: Json) -> bool:
    """Whether another run would give the same: not if the engine failed, and not the request."""
    response = answer["response"]
    return bool(response["status_code"] < 500 or response["body"]["error"]["code"] == "numerics")


def engine_stopped(answer: Json) -> bool:
    error = answer["response"]["body"].get("error")
    return error is not None and error["code"] == "engine_stopped"
