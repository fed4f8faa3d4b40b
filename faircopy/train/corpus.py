"""Training text from files: texts as they are, prompts with the target's own answers."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from faircopy.errors import ConfigError
from faircopy.llm import LLM
from faircopy.model.loader import load_tokenizer
from faircopy.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Answering:
    """How the target answers prompts."""

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    chat: bool = False  # through the tokenizer's chat template
    batch: int = 64
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Documents:
    """What the files hold."""

    texts: list[str]
    prompts: list[str]


def read_documents(files: Sequence[Path]) -> Documents:
    """.txt: one text. .jsonl: a line with `text` is one, a line with `prompt` or `turns` is to be answered.

    Both may be compressed: .txt.gz, .jsonl.gz.
    """
    found = Documents([], [])
    for file in files:
        content, kind = _read(file), Path(file.name.removesuffix(".gz")).suffix
        if kind == ".txt":
            found.texts.append(content)
        elif kind == ".jsonl":
            for number, line in enumerate(content.splitlines(), 1):
                if line.strip():
                    _sort_line(found, line, f"{file}:{number}")
        else:
            raise ConfigError("--data", str(file), "neither .txt nor .jsonl", "rename or convert it")
    if not found.texts and not found.prompts:
        raise ConfigError("--data", [str(file) for file in files], "no text in it", "pass files with text or prompts")
    return found


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError("--data", str(file), f"cannot be read ({error})", "pass UTF-8 files") from error


def _sort_line(found: Documents, line: str, place: str) -> None:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError("--data", place, f"not JSON ({error})", "one object per line") from error
    record = record if isinstance(record, dict) else {}
    turns = record.get("turns")
    prompt = record.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if isinstance(record.get("text"), str):
        found.texts.append(record["text"])
    elif isinstance(prompt, str):
        found.prompts.append(prompt)
    else:
        raise ConfigError("--data", place, "neither 'text' nor 'prompt' nor 'turns'", "give each line one of them")


def corpus(target: str, files: Sequence[Path], answering: Answering, keep: Path) -> Tensor:
    """All tokens of the files, flat; written to `keep`, and read from there if nothing has changed."""
    documents = read_documents(files)
    key = hashlib.sha256(json.dumps([target, asdict(answering), asdict(documents)]).encode()).hexdigest()
    note = keep.with_suffix(".json")
    if keep.exists() and _key_of(note) == key:
        return torch.from_numpy(np.load(keep))
    rows = [*_encoded(target, documents.texts), *_answered(target, documents.prompts, answering)]
    tokens = np.concatenate([np.asarray(row, np.int32) for row in rows])
    note.unlink(missing_ok=True)  # it must not speak of tokens that a kill leaves half written
    np.save(keep, tokens)
    counts = {"texts": len(documents.texts), "prompts": len(documents.prompts), "tokens": len(tokens)}
    note.write_text(json.dumps({"key": key, **counts}) + "\n")
    return torch.from_numpy(tokens)


def _key_of(note: Path) -> str | None:
    """Of the tokens that are kept; None if a kill left no note, or half of one."""
    try:
        return str(json.loads(note.read_text())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _encoded(target: str, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise ConfigError("--target", target, "it brings no tokenizer to read text with", "pass a complete checkpoint")
    return [list(tokenizer.encode(text, verbose=False)) for text in texts]


def _answered(target: str, prompts: list[str], how: Answering) -> list[list[int]]:
    """Each prompt with what the target makes of it, our own engine at work."""
    if not prompts:
        return []
    llm = LLM(target, max_batch=how.batch, device=how.device)
    params = SamplingParams(max_tokens=how.max_tokens, temperature=how.temperature, seed=how.seed)
    room = llm.model.context - 1
    asked = [llm.chat_prompt([{"role": "user", "content": p}]) if how.chat else llm.encode(p) for p in prompts]
    answers = llm.generate([ids[:room] for ids in asked], params)
    return [answer.prompt_token_ids + answer.token_ids for answer in answers]
