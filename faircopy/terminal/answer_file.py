"""The file of `faircopy generate --out`: one JSON line per answer, whole lines only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from faircopy.errors import ConfigError, OutputError
from faircopy.files import append_line, replace_text, replaceable

OPTION = "--out"


class AnswerFile:
    """Owns the file while answers are made. Answers are appended as they are finished, and sorted at the end."""

    def __init__(
        self, path: Path, prompts: list[str], params: dict[str, Any], resume: bool = False, overwrite: bool = False
    ) -> None:
        """Reads what is there; nothing is changed before `begin`. params: sampling parameters of all answers."""
        if resume and overwrite:
            raise ConfigError("--resume", True, "given beside --overwrite", "give one of the two")
        self._path, self._prompts, self._plain = path, prompts, replaceable(path)
        self._params = params
        self._records: dict[int, dict[str, Any]] = {}
        self._overwrite, self._repair = overwrite, False
        if not self._plain or not path.exists() or not path.stat().st_size:
            return
        if resume:
            self._records = self._read()
        elif not overwrite:
            remedy = "pass --resume to answer what is missing, --overwrite to replace it, or another file"
            raise ConfigError(OPTION, str(path), "exists and is not empty", remedy)

    @property
    def missing(self) -> list[int]:
        """The prompts without an answer, by their place."""
        return [index for index in range(len(self._prompts)) if index not in self._records]

    @property
    def answered(self) -> int:
        return len(self._records)

    def begin(self) -> None:
        """Leave only whole answers in the file: called when the model is loaded, just before the first answer."""
        if self._plain and (self._overwrite or self._repair):
            self._replace()

    def add(self, record: dict[str, Any]) -> None:
        append_line(OPTION, self._path, json.dumps(record), "go on with --resume")
        self._records[record["index"]] = record

    def sort(self) -> None:
        """Put the answers in the order of the prompts; without space for that they stay as they are."""
        if not self._plain or list(self._records) == sorted(self._records):
            return
        try:
            self._replace()
        except OutputError as error:
            print(f"faircopy: {error} (the answers are in the order in which they were finished)", file=sys.stderr)

    def _replace(self) -> None:
        lines = [json.dumps(self._records[index]) + "\n" for index in sorted(self._records)]
        replace_text(OPTION, self._path, "".join(lines))
        self._records = dict(sorted(self._records.items()))

    def _read(self) -> dict[int, dict[str, Any]]:
        """The answers of an earlier call. A last line that was cut, and answers that failed, are made again."""
        try:
            lines = self._path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(OPTION, str(self._path), f"cannot be read ({error})", "pass another file") from error
        found: dict[int, dict[str, Any]] = {}
        self._repair = bool(lines[-1])
        for number, line in enumerate(lines[:-1], 1):
            if line.strip():
                record = self._record(line, number)
                self._repair |= "error" in record or record["index"] in found
                if "error" not in record:
                    found[record["index"]] = record
        return found

    def _record(self, line: str, number: int) -> dict[str, Any]:
        place = f"{self._path}:{number}"
        try:
            record = json.loads(line)
            index, prompt = record["index"], record["prompt"]
        except (ValueError, TypeError, KeyError):
            problem, remedy = "not an answer that `faircopy generate` wrote", "remove the line, or pass another file"
            raise ConfigError(OPTION, place, problem, remedy) from None
        if not isinstance(index, int) or not 0 <= index < len(self._prompts) or self._prompts[index] != prompt:
            problem = f"answers prompt {index}, {prompt!r}, which is not among the prompts of this call"
            raise ConfigError(OPTION, place, problem, "pass the same prompts in the same order, or --overwrite")
        assert isinstance(record, dict)
        self._check_params(record.get("params", self._params), place)
        return record

    def _check_params(self, theirs: dict[str, Any], place: str) -> None:
        for name in sorted({*theirs, *self._params}):
            if theirs.get(name) != self._params.get(name):
                said = "left out" if name not in theirs else repr(theirs[name])
                problem = f"was made with {name} {said}, not {self._params.get(name, 'left out')!r}"
                raise ConfigError(OPTION, place, problem, "pass the same options, --overwrite, or another file")
