"""What an operator chooses about the server, checked once."""

from __future__ import annotations

import math
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from faircopy.errors import ConfigError

SPEC_METRICS = ("none", "summary", "detailed")
KEYS_VARIABLE = "FAIRCOPY_API_KEYS"  # keys, separated by commas or spaces


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All options of the server that are not the engine's."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None  # what clients call the model; None: the name of its folder
    api_keys: tuple[str, ...] = ()  # empty: everyone may ask
    cors: tuple[str, ...] = ()  # origins whose pages may call this server
    max_queue: int = 256  # sequences waiting for a place in the batch at most
    max_body: int = 4 << 20  # bytes
    max_prompt: int | None = None  # tokens; None: the model's context
    max_prompts: int = 128  # prompts of one request
    max_n: int = 16
    deadline: float | None = None  # seconds a request may take at most
    drain: float = 30.0  # seconds that running requests get when the server is told to end
    shadow_audit: float = 0.0  # share of the requests that are run again, plainly, in idle time
    audit_folder: Path = Path("faircopy-mismatches")  # where a mismatch is written
    spec_metrics: str = "summary"  # metrics.speculative_decoding in answers
    vllm_metrics: bool = True  # /metrics has each counter under vLLM's name too

    def __post_init__(self) -> None:
        for name, least in (("max_queue", 0), ("max_body", 1), ("max_prompts", 1), ("max_n", 1), ("port", 0)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"below {least}", f"pass {least} or more")
        if self.max_prompt is not None and self.max_prompt < 1:
            raise ConfigError("max_prompt", self.max_prompt, "below 1", "pass 1 or more, or leave it out")
        if not 0.0 <= self.shadow_audit <= 1.0:
            raise ConfigError("shadow_audit", self.shadow_audit, "not a share", "pass a number from 0 to 1")
        if self.deadline is not None and not (0 < self.deadline < math.inf):
            raise ConfigError("deadline", self.deadline, "not a time", "pass seconds, or leave it out")
        if not 0 <= self.drain < math.inf:
            raise ConfigError("drain", self.drain, "not a time", "pass seconds, 0 or more")
        if self.spec_metrics not in SPEC_METRICS:
            raise ConfigError("spec_metrics", self.spec_metrics, "unknown", f"use one of {', '.join(SPEC_METRICS)}")


def read_keys(file: Path | None) -> tuple[str, ...]:
    """API keys from a file, one a line, and from the environment."""
    lines: list[str] = []
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeError) as error:
            raise ConfigError("api_keys", str(file), "cannot be read", "name a text file with a key a line") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    keys += os.environ.get(KEYS_VARIABLE, "").replace(",", " ").split()
    if file is not None and not keys:
        raise ConfigError("api_keys", str(file), "holds no key", "write a key a line, or leave the option out")
    return tuple(keys)


def read_config(path: Path) -> dict[str, Any]:
    """The options in a YAML or TOML file, by their names on the command line."""
    try:
        text = path.read_text()
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError("config", str(path), f"cannot be read ({error})", "pass a YAML or TOML file") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("config", str(path), "not a list of options", "write one 'option: value' a line")
    return {str(name).replace("-", "_"): value for name, value in values.items()}
