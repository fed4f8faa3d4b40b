"""What a long operation is doing, in one line on the terminal; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TO_END_OF_LINE = "\x1b[K"  # erases it


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show `what` while the block runs."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"\r{what} ...{_TO_END_OF_LINE}", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(f"\r{_TO_END_OF_LINE}", end="", file=sys.stderr, flush=True)


def tell(what: str) -> None:
    """One line that stays."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


def counted(count: int, what: str) -> str:
    """1 token, 2 tokens."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def amount(count: int) -> str:
    """Bytes for people: 1.07 GB, 34 MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
