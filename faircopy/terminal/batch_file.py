"""The files of `faircopy batch`: requests in OpenAI's batch format, and the answers that are there already."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faircopy.errors import ConfigError
from faircopy.files import append_line, replaceable

Json = dict[str, Any]
URLS = ("/v1/completions", "/v1/chat/completions")
BEGIN = b'{"id": "batch_req_'  # of every answer


class BatchFile:
    """Reads requests line by line and appends answers line by line; an answer that is there is not made again."""

    def __init__(self, requests: Path, answers: Path) -> None:
        """Checks all requests, and reads which are answered. A last line that was cut is cut off."""
        self._requests, self._answers = requests, answers
        self._ids = self._check()
        self._answered = self._read_answered()

    @property
    def requests(self) -> Path:
        return self._requests

    @property
    def answered_ids(self) -> frozenset[str]:
        return frozenset(self._answered)

    @property
    def total(self) -> int:
        return len(self._ids)

    @property
    def answered(self) -> int:
        return len(self._answered)

    def missing(self) -> Iterator[Json]:
        """The requests without an answer, in the order of the file."""
        for _, line in self._lines():
            if line["custom_id"] not in self._answered:
                yield line

    def add(self, answer: Json) -> None:
        append_line("--out", self._answers, json.dumps(answer))

    def _check(self) -> set[str]:
        found: set[str] = set()
        for place, line in self._lines():
            if line["custom_id"] in found:
                raise ConfigError("--in", place, f"custom_id {line['custom_id']!r} is there twice", "name it otherwise")
            found.add(line["custom_id"])
        return found

    def _lines(self) -> Iterator[tuple[str, Json]]:
        """Every request with its place in the file."""
        try:
            with self._requests.open(encoding="utf-8") as file:
                for number, text in enumerate(file, 1):
                    if text.strip():
                        place = f"{self._requests}:{number}"
                        yield place, read_request(text, place)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--in", str(self._requests), f"cannot be read ({error})", "pass a JSONL file") from error

    def _read_answered(self) -> set[str]:
        if not self._answers.exists() or not replaceable(self._answers):
            return set()
        found: set[str] = set()
        whole = 0  # bytes of lines that end
        with self._answers.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line[: len(BEGIN)] != BEGIN[: len(line)]:
                    raise self._no_answer(number)
                if line.endswith(b"\n"):
                    whole += len(line)
                    found.add(self._answer_id(line, number))
        if whole < self._answers.stat().st_size:
            with self._answers.open("rb+") as file:
                file.truncate(whole)
        return found

    def _answer_id(self, line: bytes, number: int) -> str:
        try:
            name = str(json.loads(line)["custom_id"])
        except (ValueError, TypeError, KeyError):
            raise self._no_answer(number) from None
        if name not in self._ids:
            place, problem = f"{self._answers}:{number}", f"answers {name!r}, which is not in {self._requests}"
            raise ConfigError("--out", place, problem, "pass the same requests, or another file")
        return name

    def _no_answer(self, number: int) -> ConfigError:
        """Nothing of a file that holds anything else may be cut off or taken for an answer."""
        place, remedy = f"{self._answers}:{number}", "remove the line, or pass another file"
        return ConfigError("--out", place, "not an answer of a batch", remedy)


def read_request(text: str, place: str) -> Json:
    """One line of the input; its body is checked when it is answered."""
    try:
        line = json.loads(text)
    except ValueError:
        raise ConfigError("--in", place, "not JSON", "write one request a line") from None
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(line, dict) or not isinstance(line.get(name), kind):
            raise ConfigError("--in", place, f"has no {name!r}", "use OpenAI's batch format: custom_id, url, body")
    if line["url"] not in URLS or line.get("method", "POST") != "POST":
        problem = f"{line.get('method', 'POST')} {line['url']} is not served"
        raise ConfigError("--in", place, problem, f"use POST and one of {', '.join(URLS)}")
    assert isinstance(line, dict)
    return line
