"""What an audit found: runs, one finding per prompt and run, and the ways to show them."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rich.console import Console

Kind = Literal["tie", "bug", "unknown"]
SHOWN = 10  # differences printed on a terminal; files have them all


@dataclass(frozen=True, slots=True)
class Token:
    """One token as it was written; servers do not always tell the id."""

    text: str
    id: int | None = None

    def __str__(self) -> str:
        return repr(self.text) if self.id is None else f"{self.id} {self.text!r}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a text leaves the reference, and what is known about it."""

    position: int  # counted from the start of the output
    expected: Token | None  # None: the text ends here
    got: Token | None
    kind: Kind
    why: str
    unit: Literal["token", "character"] = "token"
    margin: float | None = None  # between the reference's best two tokens there
    threshold: float | None = None  # below this, rounding alone may choose either
    before: str = ""
    expected_text: str = ""  # how each side goes on, the differing token included
    got_text: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one prompt in one run."""

    prompt: int
    difference: Difference | None = None

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def verdict(self) -> str:
        return "IDENTICAL" if self.difference is None else _VERDICTS[self.difference.kind]


_VERDICTS: dict[Kind, str] = {"tie": "ROUNDING TIE", "bug": "BUG", "unknown": "DIFFERENT"}


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts once, under one set of circumstances."""

    drafter: str  # or the server's address
    batch: int
    k: int | None
    findings: list[Finding]
    tokens_per_step: float | None = None
    acceptance: float | None = None
    preemptions: int | None = None
    seconds: float = 0.0
    note: str = ""

    @property
    def identical(self) -> int:
        return sum(finding.identical for finding in self.findings)

    @property
    def total(self) -> int:
        return len(self.findings)

    @property
    def name(self) -> str:
        how = f"{self.batch} at a time" if self.k is None else f"batch {self.batch}, k {self.k}"
        return ", ".join(part for part in (self.drafter, how, self.note) if part)


@dataclass(slots=True)
class Report:
    """Every run of an audit. It passes only if nothing differs."""

    subject: str
    prompts: list[str]
    settings: dict[str, str]
    runs: list[Run] = field(default_factory=list)
    planned: int | None = None  # runs that were meant to be made
    stopped: str = ""  # why there are fewer: "interrupted", or the time that was over

    @property
    def identical(self) -> int:
        return sum(run.identical for run in self.runs)

    @property
    def total(self) -> int:
        return sum(run.total for run in self.runs)

    @property
    def percentage(self) -> float:
        """Identical texts of a hundred, rounded down: 100 means all of them."""
        return self.identical * 10000 // self.total / 100 if self.total else 0.0

    @property
    def passed(self) -> bool:
        """Nothing differs, and the audit was not interrupted."""
        return self.total > 0 and self.identical == self.total and self.stopped != "interrupted"

    @property
    def summary(self) -> str:
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        found = f"{self.percentage:.2f} % identical: {self.identical} of {self.total} texts in {runs}"
        return f"{found}; PARTIAL, {len(self.runs)} of {self.planned} runs: {self.stopped}" if self.stopped else found

    def differences(self) -> list[tuple[Run, Finding, Difference]]:
        return [(run, f, f.difference) for run in self.runs for f in run.findings if f.difference is not None]

    def to_json(self) -> str:
        """Everything, with the totals first; from_json reads it back."""
        totals = {"passed": self.passed, "percentage": self.percentage, "identical": self.identical}
        content = {**totals, "total": self.total, **asdict(self)}
        for run, written in zip(self.runs, content["runs"], strict=True):
            for finding, line in zip(run.findings, written["findings"], strict=True):
                line["verdict"] = finding.verdict
        return json.dumps(content, indent=2, ensure_ascii=False)

    def by_prompt(self) -> list[tuple[str, int, int]]:
        """(prompt, runs in which its text was identical, runs) of every prompt."""
        counts = [(0, 0)] * len(self.prompts)
        for run in self.runs:
            for finding in run.findings:
                same, total = counts[finding.prompt]
                counts[finding.prompt] = (same + finding.identical, total + 1)
        return [(prompt, *count) for prompt, count in zip(self.prompts, counts, strict=True)]

    @classmethod
    def from_json(cls, text: str) -> Report:
        data = json.loads(text)
        stopped = {name: data[name] for name in ("planned", "stopped") if name in data}  # older reports have neither
        return cls(data["subject"], data["prompts"], data["settings"], [_run(run) for run in data["runs"]], **stopped)

    def to_html(self) -> str:
        """One page that needs nothing else."""
        from faircopy.audit.page import page

        return page(self)


def ending(text: str, limit: int = 160) -> str:
    """The last of what both texts have in common, for people to find the place."""
    return text if len(text) <= limit else "…" + text[-limit:]


def versions() -> dict[str, str]:
    """What a difference may depend on besides the settings."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in ("faircopy", "torch", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a source tree
            continue
    return found


def print_report(report: Report, console: Console | None = None) -> None:
    """A table of runs, the first differences, and the percentage as the last line."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = console or Console()
    console.print(_table(report))
    for prompt, same, total in report.by_prompt():
        verdict = ("IDENTICAL" if total else "NOT COMPARED") if same == total else f"{total - same} of {total} DIFFER"
        console.print(
            Text(f"{verdict}  {prompt!r}", style="" if same == total else "red"), no_wrap=True, overflow="ellipsis"
        )
    differences = report.differences()
    for run, finding, difference in differences[:SHOWN]:
        console.print(Text(f"\n{finding.verdict}  prompt {finding.prompt + 1}, {run.name}", style="bold red"))
        for line in describe(difference):
            console.print(Padding(Text(line), (0, 0, 0, 2)))
    if len(differences) > SHOWN:
        console.print(Text(f"\nand {len(differences) - SHOWN} more differences: write a JSON or HTML report"))
    console.print(Text(report.summary, style="bold green" if report.passed else "bold red"))


def describe(difference: Difference) -> list[str]:
    """A difference in a few lines of text."""
    expected, got = _said(difference.expected), _said(difference.got)
    lines = [
        f"at {difference.unit} {difference.position}: expected {expected}, got {got}",
        difference.why,
        f"before:   {difference.before!r}",
        f"expected: {difference.expected_text!r}",
        f"got:      {difference.got_text!r}",
    ]
    return lines if difference.before else [*lines[:2], *lines[3:]]


def _said(token: Token | None) -> str:
    return "the end of the text" if token is None else str(token)


def _table(report: Report) -> Any:
    from rich.table import Table
    from rich.text import Text

    subject, names, rows = figures(report)
    table = Table(title=Text(report.subject))
    table.add_column(subject)
    for name in (*names, "identical"):
        table.add_column(name, justify="right")
    for run, numbers in zip(report.runs, rows, strict=True):
        style = "green" if run.identical == run.total else "red"
        label = f"{run.drafter} ({run.note})" if run.note else run.drafter
        table.add_row(Text(label), *numbers, Text(f"{run.identical}/{run.total}", style=style))
    return table


def figures(report: Report) -> tuple[str, list[str], list[list[str]]]:
    """What the runs are named by, the names of their numbers, and the numbers; columns without values are left out."""
    drafted = any(run.k is not None for run in report.runs)
    columns = {
        "batch" if drafted else "at a time": [str(run.batch) for run in report.runs],
        "k": [_number(run.k, "d") for run in report.runs],
        "tokens/step": [_number(run.tokens_per_step, ".2f") for run in report.runs],
        "accepted": [_number(run.acceptance, ".0%") for run in report.runs],
    }
    known = {name: texts for name, texts in columns.items() if any(text != _NOTHING for text in texts)}
    rows = [list(row) for row in zip(*known.values(), strict=True)]
    return "drafter" if drafted else "server", list(known), rows


_NOTHING = "–"


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)


def _run(data: dict[str, Any]) -> Run:
    return Run(**{**data, "findings": [_finding(finding) for finding in data["findings"]]})


def _finding(data: dict[str, Any]) -> Finding:
    if data["difference"] is None:
        return Finding(data["prompt"])
    sides = {side: _token(data["difference"][side]) for side in ("expected", "got")}
    return Finding(data["prompt"], Difference(**{**data["difference"], **sides}))


def _token(data: dict[str, Any] | None) -> Token | None:
    return None if data is None else Token(**data)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an audit would take, from the time of a few tokens."""

    prompts: int  # given
    taken: int  # that fit into the time
    runs: int
    seconds_all: float  # for the given prompts
    seconds_taken: float


class Watch(Protocol):
    """Told about an audit while it runs."""

    def on_estimate(self, estimate: Estimate) -> None: ...

    def on_run(self, run: Run) -> None: ...
