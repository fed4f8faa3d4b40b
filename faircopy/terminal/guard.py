"""What every command does before it works and when it is stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from faircopy.errors import ConfigError


def stoppable(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C ends a command cleanly, whatever it is doing."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(1) from None

    return run


def writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written before hours are spent on what should go into it."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(
            option, str(path), f"cannot be written ({error.strerror})", "pass a file in a folder"
        ) from error
