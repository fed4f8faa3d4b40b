"""`faircopy audit`: the estimate and each verdict are shown as they come; the report is kept on Ctrl-C."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text

from faircopy.audit.models import Estimate
from faircopy.audit.report import Run

SECONDS = 60.0  # an audit without options


class Shown:
    """Shows an audit on a console while it runs."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status

    def on_estimate(self, estimate: Estimate) -> None:
        """One line: what all would take, and what is audited."""
        line = f"estimate: {estimate.prompts} prompts in {estimate.runs} runs take about {_time(estimate.seconds_all)}"
        if estimate.taken < estimate.prompts:
            line += f"; {estimate.taken} prompts are audited, about {_time(estimate.seconds_taken)}"
            line += " (--seconds sets the time; 0: no limit)"
        self._console.print(Text(line))

    def on_run(self, run: Run) -> None:
        same = run.identical == run.total
        line = f"{run.identical} of {run.total} texts identical  {run.name}  ({run.seconds:.1f} s)"
        self._console.print(Text(line, style="" if same else "red"))

    def on_progress(self, done: int, total: int, name: str) -> None:
        self._status.update(f"{name} ({done} of {total} runs done; Ctrl-C keeps the report)")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
