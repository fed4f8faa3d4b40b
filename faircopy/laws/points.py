"""The points of a grid and their results: one JSON line per trained head."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faircopy.errors import CheckpointError
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


def _read(path: Path) -> list[Result]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Result(**json.loads(line)) for line in lines if line.endswith("}")]
    except (OSError, ValueError, TypeError) as error:
        problem, remedy = f"cannot be read ({error})", "pass a file that `faircopy laws run` wrote"
        raise CheckpointError("results", str(path), problem, remedy) from error
