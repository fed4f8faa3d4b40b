"""`faircopy demo`: a batch streams, coloured by who wrote each token; then what it cost, and the proof."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from faircopy import bundled
from faircopy.audit.models import audit_models
from faircopy.audit.report import Report
from faircopy.llm import LLM
from faircopy.types import SamplingParams, Sequence

LINES = 2  # of a terminal, per text
DRAFTED, OWN = "green", "bold yellow"


@dataclass(frozen=True, slots=True)
class Measure:
    """One way of decoding, timed."""

    name: str
    batch: int
    rate: float  # tokens per second
    per_step: float  # tokens per sequence and verify pass
    acceptance: float


def demo(target: str, draft: str | None, prompts: list[str], k: int, max_tokens: int, console: Console) -> bool:
    """True if every text was identical to plain decoding alone; draft None shows plain decoding."""
    torch.set_num_threads(1)  # small models gain nothing from a second one, and lose much on a busy machine
    params = SamplingParams(max_tokens=max_tokens)
    with console.status("loading models"):
        ways = {"plain": LLM(target, cache_memory="512MiB")}
        if draft is not None:
            ways[f"speculative, k = {k}"] = LLM(target, draft=draft, k=k, cache_memory="512MiB")
    watch([*ways.values()][-1], prompts, params, console)
    with console.status("measuring"):
        rows = [measure(llm, name, part, params) for part in (prompts[:1], prompts) for name, llm in ways.items()]
    with console.status("auditing: the same texts alone, in batches, with other drafts, under preemption"):
        report = audit_models(target, [draft or "none", "ngram"], prompts, params, batches=(1, len(prompts)), ks=(2, k))
    console.print(table(rows, report))
    console.print(Text(explanation(rows, report)))
    return report.passed


def watch(llm: LLM, prompts: list[str], params: SamplingParams, console: Console) -> None:
    """Run the batch and show it growing."""
    seqs = [llm.engine.add(llm.request(prompt, params)) for prompt in prompts]
    texts = [_Coloured(llm, seq) for seq in seqs]
    with Live(console=console, refresh_per_second=12, transient=True) as live:
        while any(seq.finished is None for seq in seqs):
            llm.engine.step()
            live.update(Group(*(text.last_line(console.width) for text in texts), _legend()))
    console.print(Group(*(text.lines(console.width, LINES) for text in texts), _legend()))


def measure(llm: LLM, name: str, prompts: list[str], params: SamplingParams, repeats: int = 3) -> Measure:
    """The best of a few runs; the first one also warms up."""
    best, figures = 0.0, llm.metrics()
    for _ in range(repeats):
        before = llm.metrics()
        start = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        seconds, figures = time.perf_counter() - start, llm.metrics()
        best = max(best, (figures["emitted"] - before["emitted"]) / seconds)
    drafted, accepted, emitted, passes = (
        figures[key] - before[key] for key in ("drafted", "accepted", "emitted", "sequence_steps")
    )
    return Measure(name, len(prompts), best, emitted / passes, accepted / drafted if drafted else 0.0)


def table(rows: list[Measure], report: Report) -> Table:
    """Plain against speculative, and the audit's verdict below."""
    result = Table(title="plain decoding against speculative", caption=_verdict(report))
    for heading in ("batch", "", "tokens/s", "against plain", "tokens per step", "drafts accepted"):
        result.add_column(heading, justify="left" if heading == "" else "right")
    for row in rows:
        base = next(r.rate for r in rows if r.batch == row.batch)
        share = f"{row.acceptance:.0%}" if row.acceptance else ""
        result.add_row(
            str(row.batch), row.name, f"{row.rate:.0f}", f"{row.rate / base:.2f} x", f"{row.per_step:.2f}", share
        )
    return result


def explanation(rows: list[Measure], report: Report) -> str:
    """One sentence: what the table says, and what to try next."""
    best = max(rows, key=lambda row: row.per_step)
    same = "every text is" if report.passed else "NOT every text is"
    return (
        f"Each pass of the target wrote up to {best.per_step:.2f} tokens per sequence "
        f"({best.name}, batch {best.batch}), and {same} the one that plain decoding writes; try next: "
        'faircopy generate "Once upon a time", faircopy audit, or faircopy demo --target DIR with a model of yours.'
    )


def _verdict(report: Report) -> str:
    return f"audit: {report.percentage:.2f} % identical ({report.identical} of {report.total} texts)"


def _legend() -> Text:
    return Text.assemble(("accepted draft", DRAFTED), "   ", ("the target's own", OWN), "   ", ("prompt", "dim"))


class _Coloured:
    """A sequence's text, each token in the colour of its origin."""

    def __init__(self, llm: LLM, seq: Sequence) -> None:
        self._seq, self._shown = seq, 0
        self._reader = llm.text(seq.prompt)
        self._text = Text(llm.decode(list(seq.prompt)), style="dim")

    def last_line(self, width: int) -> Text:
        """As much of the end as one line holds, so that all sequences are seen growing."""
        line = self.text()[-(width - 2) :]
        line.plain = line.plain.replace("\n", " ")
        return line

    def lines(self, width: int, most: int) -> Text:
        """The end of the text, as much as a few lines hold, so that a batch and its table fit a terminal."""
        text = self.text().copy()
        text.plain = text.plain.replace("\n", " ")
        room = width * most - width // 8  # words that do not fit a line's end leave it empty
        if len(text) > room:
            text = Text("…", style="dim").append_text(text[1 - room :])
        return text

    def text(self) -> Text:
        for token, drafted in zip(self._seq.output[self._shown :], self._seq.origins[self._shown :], strict=True):
            self._reader.push(token)
            self._text.append(self._reader.release(), style=DRAFTED if drafted else OWN)
            self._shown += 1
        if self._seq.finished is not None:
            self._reader.finish()
            self._text.append(self._reader.release(), style=OWN)
        return self._text


def choose_prompts(count: int = 8) -> list[str]:
    """Bundled prompts of different lengths: evenly from the shortest to the longest."""
    by_length = sorted(bundled.prompts(), key=len)
    return [by_length[n * (len(by_length) - 1) // (count - 1)] for n in range(count)]
