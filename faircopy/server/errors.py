"""Errors in OpenAI's shape. They name a field of the request, and tell nothing of files, code or other clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faircopy.errors import ConfigError, FaircopyError, NumericsError, RequestError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
_CODES = {413: "body_too_large"}  # of errors that say no more than their status


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status_code, self.headers, self.param, self.code = status, dict(headers or {}), param, code

    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, str(self), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """What a client is told about an error: its own fault by field, ours by the number that the log has."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NumericsError):
        problem = "the model produced NaN or infinite logits, or the request's parameters or grammar allow no token"
        return ApiError(500, problem, code="numerics")
    if isinstance(error, RequestError | ConfigError):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, FaircopyError):
        return ApiError(500, f"this request failed; the server's log has it as {request_id}")
    return ApiError(500, f"internal error; the server's log has it as {request_id}", code="internal_error")


def invalid_body(errors: list[Any]) -> ApiError:
    """One error for what pydantic found: the first problem of the field that the client most likely meant."""
    first = max(errors, key=_likely_meant)
    names = [str(part) for part in first["loc"][1:] if _is_place(str(part))]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"body: not JSON ({first.get('ctx', {}).get('error', 'cannot be read')})", code="invalid_json"
        )
    if first["type"] == "unknown_field":
        names.append(first["ctx"]["field"])
    param = names[0] if names else None
    where = ".".join(names) or "body"
    given = "" if first["type"] in ("missing", "unknown_field") else f" = {_short(first.get('input'))}"
    return ApiError(400, f"{where}{given}: {first['msg']}", param=param, code="invalid_value")


def _likely_meant(error: Any) -> tuple[bool, int, bool]:
    """Of the forms that a field may have, the one whose type was given says more than one of another type."""
    kind = error["type"]
    return kind in ("json_invalid", "unknown_field"), len(error["loc"]), not kind.endswith("_type")


def _is_place(part: str) -> bool:
    """Whether a part of pydantic's path is a field or an index, and not one of the types that a field may have."""
    return part.isdigit() or (part.isidentifier() and part.islower() and part not in ("bool", "str", "int"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
