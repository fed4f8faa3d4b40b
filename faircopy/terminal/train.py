"""`faircopy train`: what was learned, and how to use it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from faircopy.train.runs import Learned


def show(learned: Learned, target: str, console: Console) -> None:
    """A line of facts, a head's accuracy by level, and the command that uses the result."""
    progress = learned.progress
    facts = f"{learned.parameters / 1e6:.2f} M parameters, {progress.step} steps, {progress.tokens / 1e6:.2f} M tokens"
    console.print(f"{facts}, {progress.seconds:.0f} s, loss {progress.loss:.3f}")
    if learned.accuracy is not None:
        console.print(_table(learned))
    console.print(f"log.jsonl and curves.png are in {learned.out}", highlight=False)
    console.print(f"faircopy generate --target {target} --draft {learned.out}", highlight=False, soft_wrap=True)


def _table(learned: Learned) -> Table:
    assert learned.accuracy is not None
    table = Table(title="held-out text: how often the target's token was guessed")
    for heading in ("tokens ahead", "first guess", "first five"):
        table.add_column(heading, justify="right")
    for level, (one, five) in enumerate(zip(learned.accuracy.top1, learned.accuracy.top5, strict=True), 1):
        table.add_row(str(level), f"{one:.1%}", f"{five:.1%}")
    return table
