"""The points of a grid and their results: one JSON line per trained head."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faircopy.errors import CheckpointError, ConfigError
from faircopy.files import append_line

CHAIN, TREE = 7, 60  # draft nodes of the two drafts that every head is measured with


@dataclass(frozen=True, slots=True)
class Point:
    """One head of the grid."""

    tokens: int  # T: read in the first stage of training
    layers: int = 1  # D
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a point. `measures`: per kind of draft, accepted tokens and cycles of every held-out text."""

    target: str
    tokens: int
    layers: int
    seed: int
    distinct: int  # of the tokens, how many were different text; the others are later epochs
    answers: int  # tokens of the second stage
    parameters: int
    loss: float
    train_seconds: float
    measure_seconds: float
    measures: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # that heads of one grid share
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> Point:
        return Point(self.tokens, self.layers, self.seed)

    def accepted(self, measure: str) -> float:
        """A: accepted draft tokens per cycle."""
        found = self.measures[measure]
        return sum(found["tokens"]) / max(1, sum(found["cycles"]))


def grid(
    smallest: int, doublings: int, depths: Sequence[int], budgets: Sequence[int], seeds: Sequence[int]
) -> list[Point]:
    """In order of importance: T at one layer, then depths at some budgets, then seeds at the same budgets."""
    text = [Point(smallest << n, 1, seeds[0]) for n in range(doublings + 1)]
    deep = [Point(tokens, layers, seeds[0]) for layers in depths for tokens in budgets]
    again = [Point(tokens, 1, seed) for seed in seeds[1:] for tokens in budgets]
    return list(dict.fromkeys([*text, *deep, *again]))


def measure_name(kind: str, nodes: int, temperature: float) -> str:
    """How a measure is called in result files: "tree 60, T=0.8"."""
    return f"{kind} {nodes}, T={temperature:g}"


def append_result(path: Path, result: Result) -> None:
    append_line("--out", path, json.dumps(asdict(result)))


def read_results(paths: Iterable[Path]) -> list[Result]:
    """The lines of result files; a last line that was cut short by a kill is left out."""
    return [result for path in paths for result in _read(path)]


def refuse_other_settings(path: Path, results: Iterable[Result], settings: dict[str, Any]) -> None:
    """Heads that were trained or measured otherwise are no points of one law."""
    for result in results:
        for name, value in settings.items():
            if result.settings.get(name, value) != value:
                problem = f"{path} has heads with {result.settings[name]!r}"
                raise ConfigError(f"--{name}", value, problem, "pass the same options, or another --out")


def _read(path: Path) -> list[Result]:
    try:
        *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise _unreadable(str(path), error) from error
    return [_result(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _result(line: str, place: str) -> Result:
    try:
        result = Result(**json.loads(line))
        _check(result)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unreadable(place, error) from error
    return result


def _check(result: Result) -> None:
    """Refuse numbers that no law can be fitted to."""
    if not (1 <= result.tokens < math.inf and 1 <= result.layers < math.inf):
        raise ValueError(f"T = {result.tokens}, D = {result.layers}")
    for name, found in result.measures.items():
        if len(found["tokens"]) != len(found["cycles"]) or not sum(found["cycles"]) > 0 <= sum(found["tokens"]):
            raise ValueError(f"{name!r} is not measured")


def _unreadable(place: str, error: Exception) -> CheckpointError:
    return CheckpointError("results", place, f"cannot be read ({error})", "pass a file that `faircopy laws run` wrote")
