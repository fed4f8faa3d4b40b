"""What can go wrong: every error names the field that the user set, its value, the problem and the remedy."""

from __future__ import annotations

from typing import Any


class FaircopyError(Exception):
    """Base of all errors raised on purpose."""

    def __init__(self, field: str, value: Any, problem: str, remedy: str) -> None:
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        super().__init__(self.describe(field))

    def describe(self, field: str) -> str:
        """The message, with another name for the field: what a command line calls it."""
        return f"{field} = {_short(self.value)}: {self.problem}; {self.remedy}"


class ConfigError(FaircopyError, ValueError):
    """An option of the engine cannot be honoured."""


class RequestError(FaircopyError, ValueError):
    """One request cannot be served; others are not affected."""


class OutOfPages(RequestError):
    """One request alone needs more memory than the whole pool has."""


class NumericsError(RequestError):
    """The target produced NaN or infinite logits for this request."""


class CheckpointError(FaircopyError):
    """A checkpoint is missing, incomplete or corrupt."""


class UnsupportedModel(FaircopyError):
    """The model cannot be served, or not exactly."""


class OutputError(FaircopyError):
    """Results cannot be written: the disk is full, or the file may not be changed."""


class RankError(FaircopyError):
    """One of the processes that share a model has ended; the others are ended too."""


class DraftError(FaircopyError):
    """A drafter returned something that is not a draft."""


class BatchError(FaircopyError):
    """Some requests of a call failed; `outputs` holds every answer, the failed ones with their `error`."""

    def __init__(self, outputs: list[Any], failures: list[tuple[int, FaircopyError]]) -> None:
        self.outputs, self.failures = outputs, failures
        index, first = failures[0]
        super().__init__(
            f"prompts[{index}]",
            "failed",
            f"{len(failures)} of {len(outputs)} requests failed, first: {first}",
            "the others are finished: read them from this error's .outputs, or pass errors='return'",
        )


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    if len(text) <= limit:
        return text
    end = 2 * limit // 3  # a path's last part, and the line after it, tell most
    return f"{text[: limit - end - 3]}...{text[-end:]}"
