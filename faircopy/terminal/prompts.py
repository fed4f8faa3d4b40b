"""Prompts from arguments, files or standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from faircopy.errors import RequestError


def read_prompts(arguments: list[str], file: Path | None) -> list[str]:
    """Arguments and a file's prompts; standard input if there are neither."""
    if arguments or file is not None:
        return [*arguments, *(_read_file(file) if file is not None else [])]
    if sys.stdin.isatty():
        raise RequestError("prompts", "", "none given", "pass them as arguments, with --file, or on standard input")
    content = _decode(sys.stdin.buffer.read(), "standard input")
    return [line for _, line in _numbered(content, "standard input")]


def _read_file(file: Path) -> list[str]:
    try:
        content = _decode(file.read_bytes(), str(file))
    except OSError as error:
        raise RequestError("--file", str(file), f"cannot be read ({error})", "pass a .txt or .jsonl file") from error
    lines = _numbered(content, str(file))
    return [_prompt_of(line, file, n) if file.suffix == ".jsonl" else line for n, line in lines]


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError("prompts", name, f"not UTF-8 text ({error})", "convert it to UTF-8") from error


def _numbered(content: str, name: str) -> list[tuple[int, str]]:
    """Lines that are not blank, with their numbers in the file."""
    lines = [(n, line.rstrip("\r")) for n, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise RequestError("prompts", name, "empty", "write one prompt per line")
    return lines


def _prompt_of(line: str, file: Path, number: int) -> str:
    """A record's `prompt`, or the first of Spec-Bench's `turns`."""
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise RequestError("--file", f"{file}:{number}", f"not JSON ({error})", "one object per line") from error
    found = record.get("prompt") if isinstance(record, dict) else None
    if found is None and isinstance(record, dict) and isinstance(record.get("turns"), list) and record["turns"]:
        found = record["turns"][0]
    if not isinstance(found, str):
        raise RequestError("--file", f"{file}:{number}", "no 'prompt' text and no 'turns'", "give each line one")
    return found
