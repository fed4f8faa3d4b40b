"""Writes results to disk: whole lines only, and a file is replaced by a rename, never rewritten in place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faircopy.errors import ConfigError, OutputError

_BLOCK = 1 << 16  # bytes that are read at once, from the end of a file


def append_line(field: str, path: Path, line: str, again: str = "run it again") -> None:
    """Append one line. If it cannot be written in full, the file keeps its old length. field: for the error."""
    content = (line + "\n").encode("utf-8", errors="replace")
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            _append(file, content)
        finally:
            os.close(file)
    except OSError as error:
        raise _failed(field, path, error, f"the lines before this one are kept; free some space and {again}") from error


@contextmanager
def exclusive(field: str, path: Path) -> Iterator[None]:
    """Refuse a file that another process holds in the same way. A device or a pipe is nobody's."""
    if not replaceable(path):
        yield
        return
    import fcntl  # not on Windows

    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem, remedy = "another process writes it", "wait for its end, or pass another file"
            raise ConfigError(field, str(path), problem, remedy) from None
        try:
            yield
        finally:
            if not file.seek(0, os.SEEK_END):
                path.unlink(missing_ok=True)  # nothing came of it


def cut_unfinished_line(path: Path) -> None:
    """Cut off a last line that a kill has left without its end, so that the next line is not appended to it."""
    with path.open("rb+") as file:
        begin = file.seek(0, os.SEEK_END)
        found = -1  # the last end of a line, in the block that begins there
        while begin and found < 0:
            end, begin = begin, max(0, begin - _BLOCK)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
        file.truncate(begin + found + 1)


def replace_text(field: str, path: Path, text: str) -> None:
    """Write a temporary file beside the path and rename it. What was there stays until all of the new text is written.

    A device or a pipe cannot be replaced: the text is written to it.
    """
    path = path.resolve()  # a link keeps pointing at the file
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if not replaceable(path):
            path.write_text(text, encoding="utf-8", errors="replace")
            return
        try:
            with partial.open("w", encoding="utf-8", errors="replace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                partial.chmod(stat.S_IMODE(path.stat().st_mode))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _failed(field, path, error, "the file is as it was before; free some space and run again") from error


def replaceable(path: Path) -> bool:
    """Whether a path is a plain file, or nothing yet."""
    return path.is_file() or not path.exists()


def _append(file: int, content: bytes) -> None:
    """All of the content or nothing; a disk that fills up may take a part first."""
    plain = stat.S_ISREG(os.fstat(file).st_mode)
    before = os.fstat(file).st_size
    try:
        while content:
            content = content[os.write(file, content) :]
    except BaseException:
        if plain:
            os.ftruncate(file, before)
        raise


def _failed(field: str, path: Path, error: OSError, remedy: str) -> OutputError:
    return OutputError(field, str(path), f"cannot be written ({error.strerror or error})", remedy)
