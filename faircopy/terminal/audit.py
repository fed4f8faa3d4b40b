"""`faircopy audit`: the estimate and each verdict are shown as they come; the report is kept on Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.status import Status
from rich.text import Text

from faircopy.audit.report import Estimate, Report, Run, print_report
from faircopy.files import replace_text
from faircopy.types import SamplingParams

SECONDS = 60.0  # an audit without options


class Sampling(NamedTuple):
    """How the audited texts are sampled."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None


Audit = Callable[["Shown"], Report]  # an audit that has been prepared; it tells how it goes


def audit_and_show(audit: Audit, as_json: bool, html: Path | None) -> bool:
    """Run an audit, print its report and write its page; true if nothing differed."""
    console = Console(stderr=as_json)
    with console.status("auditing") as status:
        report = audit(Shown(console, status))
    if as_json:
        print(report.to_json())
    else:
        print_report(report, console)
    if html:
        replace_text("--html", html, report.to_html())
    return report.passed


def servers_audit(urls: list[str], prompts: list[str], sampling: Sampling, **options: Any) -> Audit:
    """Servers against the first of them."""
    from faircopy.audit.servers import audit_servers

    chosen = {**sampling._asdict(), "seed": sampling.seed or 0}
    return lambda shown: audit_servers(urls, prompts, watch=shown, **chosen, **options)


def models_audit(target: str, drafts: list[str], prompts: list[str], sampling: Sampling, **options: Any) -> Audit:
    """A target with drafts against the target alone."""
    from faircopy.audit.models import audit_models

    params = SamplingParams(**sampling._asdict())
    return lambda shown: audit_models(
        target, drafts, prompts, params, watch=shown, progress=shown.on_progress, **options
    )


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
