"""A report as one HTML page: verdict, runs with a cell per prompt, differences, settings. Needs no other file."""

from __future__ import annotations

from html import escape

from faircopy.audit.report import Difference, Finding, Report, Run, Token, figures
from faircopy.html import document

_CELL, _GAP, _ROW = 12, 3, 40  # pixels per cell and between cells, cells per row
_MOST = 200  # differences shown; a longer page is no clearer
_LABELS = {"tie": "rounding tie", "bug": "bug", "unknown": "different"}


def page(report: Report) -> str:
    """The whole page; every text in it is escaped."""
    body = f"{_top(report)}\n{_runs(report)}\n{_differences(report)}\n{_settings(report)}"
    return document(f"{report.subject}: {report.percentage:.2f} % identical", body)


def _top(report: Report) -> str:
    tone = "good" if report.passed else "bad"
    share = 100 * report.identical / max(1, report.total)
    return (
        f'<h1>{escape(report.subject)}</h1><p class="verdict {tone}">{report.percentage:.2f} % identical</p>'
        f'<p class="soft">{escape(report.summary.partition(": ")[2])}. {_conclusion(report)}</p>'
        '<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="100" height="1" class="{"bad" if report.total else "none"}"/>'
        f'<rect width="{share:.3f}" height="1" class="good"/></svg>'
    )


def _conclusion(report: Report) -> str:
    if report.passed:
        return "Passed: no text differs from its reference in any token."
    kinds = [difference.kind for _, _, difference in report.differences()]
    if report.stopped and not kinds:
        return "Not passed: interrupted before all was compared."
    counts = [f"{kinds.count(kind)} × {label}" for kind, label in _LABELS.items() if kind in kinds]
    return f"Not passed: {', '.join(counts) or 'nothing was compared'}."


def _runs(report: Report) -> str:
    subject, names, numbers = figures(report)
    head = f"<th>{subject}</th>" + "".join(f'<th class="n">{name}</th>' for name in names)
    rows = "".join(_run_row(run, row, report.prompts) for run, row in zip(report.runs, numbers, strict=True))
    return (
        f'<h2>Runs</h2><div class="scroll"><table><thead><tr>{head}<th class="n">identical</th><th>prompts</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div>{_legend()}"
    )


def _run_row(run: Run, row: list[str], prompts: list[str]) -> str:
    tone = "good" if run.identical == run.total else "bad"
    numbers = "".join(f'<td class="n">{text}</td>' for text in row)
    note = f'<br><span class="soft">{escape(run.note)}</span>' if run.note else ""
    return (
        f'<tr><td>{escape(run.drafter)}{note}</td>{numbers}<td class="n {tone}">{run.identical}/{run.total}</td>'
        f"<td>{_cells(run.findings, prompts)}</td></tr>"
    )


def _cells(findings: list[Finding], prompts: list[str]) -> str:
    """One square per prompt, in the same place in every run."""
    step = _CELL + _GAP
    columns, rows = min(len(findings), _ROW), -(-len(findings) // _ROW)
    cells = "".join(
        f'<rect class="{_tone(f)}" x="{n % _ROW * step}" y="{n // _ROW * step}" {_shape(f.identical, _CELL)}>'
        f"<title>prompt {f.prompt + 1}: {f.verdict}. {escape(_short(prompts[f.prompt], 60))}</title></rect>"
        for n, f in enumerate(findings)
    )
    size = f'width="{columns * step - _GAP}" height="{rows * step - _GAP}"'
    return f'<svg {size} role="img" aria-label="one cell per prompt">{cells}</svg>'


def _shape(identical: bool, size: int) -> str:
    """A square, or a disc for what differs: readable without telling red from green."""
    return f'width="{size}" height="{size}" rx="{2 if identical else size // 2}"'


def _legend() -> str:
    names = {"good": "identical", "bad": "bug", "tie": "rounding tie", "unknown": "different, cause unknown"}
    cells = (
        f'<svg width="10" height="10"><rect class="{tone}" {_shape(tone == "good", 10)}/></svg>{name}'
        for tone, name in names.items()
    )
    return f'<p class="legend">{"".join(cells)}</p>'


def _tone(finding: Finding) -> str:
    if finding.difference is None:
        return "good"
    return "bad" if finding.difference.kind == "bug" else finding.difference.kind


def _differences(report: Report) -> str:
    differences = report.differences()
    if not differences:
        return ""
    shown = "".join(_difference(run, f, d, report.prompts[f.prompt]) for run, f, d in differences[:_MOST])
    more = len(differences) - _MOST
    rest = f'<p class="soft">{more} more are in the JSON report.</p>' if more > 0 else ""
    return f"<h2>Differences</h2>{shown}{rest}"


def _difference(run: Run, finding: Finding, difference: Difference, prompt: str) -> str:
    facts = {
        "prompt": f'<span class="text">{escape(_short(prompt, 300))}</span>',
        "before": f'<span class="text">{escape(difference.before) or "(the beginning)"}</span>',
        "expected": _side(difference.expected_text, difference.expected, "want"),
        "got": _side(difference.got_text, difference.got, "got"),
        "tokens": f"{_name(difference.expected)} against {_name(difference.got)}",
    }
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    return (
        f'<article><header><span class="tag {difference.kind}">{_LABELS[difference.kind]}</span>'
        f"<h3>Prompt {finding.prompt + 1}, {difference.unit} {difference.position} of the output</h3>"
        f'<span class="soft">{escape(run.name)}</span></header>'
        f"<p>{escape(_sentence(difference.why))}</p><dl>{rows}</dl></article>"
    )


def _side(text: str, token: Token | None, name: str) -> str:
    """How one side goes on, its differing token marked."""
    if token is None:
        return f'<span class="text"><mark class="{name}">(ends here)</mark>{escape(text)}</span>'
    head = len(token.text) if token.text and text.startswith(token.text) else min(1, len(text))
    marked, rest = text[:head] or token.text or str(token.id), text[head:]
    return f'<span class="text"><mark class="{name}">{escape(marked)}</mark>{escape(rest)}</span>'


def _name(token: Token | None) -> str:
    return "the end of the text" if token is None else f'<span class="text">{escape(str(token))}</span>'


def _settings(report: Report) -> str:
    rows = "".join(f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in report.settings.items())
    return f'<h2>Settings</h2><div class="scroll"><table class="settings"><tbody>{rows}</tbody></table></div>'


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
