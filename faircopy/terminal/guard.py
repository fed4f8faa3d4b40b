"""What every command does before it works and when it is stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from faircopy.errors import ConfigError, FaircopyError

OPTIONS = {  # fields that the command line has another name for
    "batches": "--batch",
    "ks": "--k",
    "max_batch": "--batch",
    "model": "--target",
    "spec_metrics": "--per-request-spec-decode-metrics",
    "urls": "--url",
}

PICTURES = (".png", ".svg", ".pdf", ".jpg")


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


def drawable(option: str, path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before what it should show is computed."""
    if path is not None and path.suffix.lower() not in PICTURES:
        problem = "its name does not end like a picture's"
        raise ConfigError(option, str(path), problem, f"let it end in {', '.join(PICTURES)}")
    writable(option, path)


def writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written before hours are spent on what should go into it."""
    if path is None:
        return
    new = not path.exists()
    try:
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            option, str(path), f"cannot be written ({error.strerror})", "pass a file in a folder"
        ) from error


def option_of(error: FaircopyError, arguments: list[str]) -> str:
    """The option that the user typed for an error's field; the field itself if none was."""
    typed, value = _typed(arguments), str(error.value)
    for option, given in typed.items():  # a path was given to one option; errors name it, or a file in it
        if "/" in value and (value == given or value.startswith(given.rstrip("/") + "/")):
            return option
    own = OPTIONS.get(error.field, "--" + error.field.replace("_", "-"))
    return own if own in typed else error.field


def _typed(arguments: list[str]) -> dict[str, str]:
    """Options and their values, written as `--option value` or `--option=value`."""
    found: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            found[option] = value if equals else following
    return found
