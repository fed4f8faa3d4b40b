"""The files of `faircopy batch`: requests in OpenAI's batch format, and the answers that are there already."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faircopy.errors import ConfigError
from faircopy.files import append_line, cut_unfinished_line, replaceable
from faircopy.server.batch_lines import ID, request_number

Json = dict[str, Any]
URLS = ("/v1/completions", "/v1/chat/completions")
BEGIN = f'{{"id": "{ID}'.encode()  # of every answer


class BatchFile:
    """Reads requests line by line and appends answers line by line; an answer that is there is not made again."""

    def __init__(self, requests: Path, answers: Path) -> None:
        """Checks all requests, and reads which are answered. A last line that was cut is cut off."""
        self._requests, self._answers = requests, answers
        self.refused = 0  # of the answers, those that are none
        self._fingerprint: str | None = None  # of the model that wrote the answers
        self._numbers = self._check()
        self._answered: set[str] = set()
        self._read_answered()

    @property
    def requests(self) -> Path:
        return self._requests

    @property
    def answered_ids(self) -> frozenset[str]:
        return frozenset(self._answered)

    @property
    def total(self) -> int:
        return len(self._numbers)

    @property
    def answered(self) -> int:
        return len(self._answered)

    def missing(self) -> Iterator[Json]:
        """The requests without an answer, in the order of the file; those that came since it was checked are left."""
        for _, line in self._lines():
            if line["custom_id"] in self._numbers and line["custom_id"] not in self._answered:
                yield line

    def add(self, answer: Json) -> None:
        self._count(answer["custom_id"], *_outcome(answer))
        append_line("--out", self._answers, json.dumps(answer))

    def _count(self, name: str, status: int, written_by: str | None) -> None:
        """Note an answer; one of another model than those before is refused. written_by: its model's fingerprint."""
        self._fingerprint = self._fingerprint or written_by
        if written_by not in (None, self._fingerprint):
            problem = "has answers of another target, dtype, device, order of sums or version"
            raise ConfigError("--out", str(self._answers), problem, "use those again, or pass another file")
        self._answered.add(name)
        self.refused += status != 200

    def _check(self) -> dict[str, str]:
        """The number of each request, by its custom_id."""
        found: dict[str, str] = {}
        for place, line in self._lines():
            if line["custom_id"] in found:
                raise ConfigError("--in", place, f"custom_id {line['custom_id']!r} is there twice", "name it otherwise")
            found[line["custom_id"]] = request_number(line)
        return found

    def _lines(self) -> Iterator[tuple[str, Json]]:
        """Every request with its place in the file."""
        try:
            with self._requests.open(encoding="utf-8-sig") as file:
                for number, text in enumerate(file, 1):
                    if text.strip():
                        place = f"{self._requests}:{number}"
                        yield place, read_request(text, place)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--in", str(self._requests), f"cannot be read ({error})", "pass a JSONL file") from error

    def _read_answered(self) -> None:
        if not self._answers.exists() or not replaceable(self._answers):
            return
        with self._answers.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line[: len(BEGIN)] != BEGIN[: len(line)]:
                    raise self._no_answer(number)
                if line.endswith(b"\n"):
                    self._read_answer(line, number)
        cut_unfinished_line(self._answers)

    def _read_answer(self, line: bytes, number: int) -> None:
        try:
            answer = json.loads(line)
            name, made_for = str(answer["custom_id"]), str(answer["id"]).removeprefix(ID)
            outcome = _outcome(answer)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._no_answer(number) from None
        self._refuse_other(name, made_for, number)
        self._count(name, *outcome)

    def _refuse_other(self, name: str, made_for: str, number: int) -> None:
        """An answer to a request that is not there, or that has changed since."""
        if self._numbers.get(name) != made_for:
            problem = "which has changed since" if name in self._numbers else f"which is not in {self._requests}"
            place, remedy = f"{self._answers}:{number}", "pass the same requests, or another file"
            raise ConfigError("--out", place, f"answers {name!r}, {problem}", remedy)

    def _no_answer(self, number: int) -> ConfigError:
        """Nothing of a file that holds anything else may be cut off or taken for an answer."""
        place, remedy = f"{self._answers}:{number}", "remove the line, or pass another file"
        return ConfigError("--out", place, "not an answer of a batch", remedy)


def _outcome(answer: Json) -> tuple[int, str | None]:
    """An answer's status, and the fingerprint of the model that wrote it."""
    response = answer["response"]
    return int(response["status_code"]), response["body"].get("system_fingerprint")


def read_request(text: str, place: str) -> Json:
    """One line of the input; its body is checked when it is answered."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("--in", place, "not JSON", "write one request a line") from None
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(line, dict) or not isinstance(line.get(name), kind):
            raise ConfigError("--in", place, f"has no {name!r}", "use OpenAI's batch format: custom_id, url, body")
    if line["url"] not in URLS or line.get("method", "POST") != "POST":
        problem = f"{line.get('method', 'POST')} {line['url']} is not served"
        raise ConfigError("--in", place, problem, f"use POST and one of {', '.join(URLS)}")
    assert isinstance(line, dict)
    return line
