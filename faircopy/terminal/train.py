"""`faircopy train`: what was learned, and how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from faircopy import bundled
from faircopy.terminal.guard import stoppable
from faircopy.terminal.options import Command, Group, with_made

if TYPE_CHECKING:
    from faircopy.train.runs import Learned

app = typer.Typer(
    help="Train a draft head or a small draft model for a target of yours.",
    no_args_is_help=True,
    cls=Group,
    pretty_exceptions_enable=False,
)

Data = Annotated[list[Path], typer.Option(help="Text (.txt) or .jsonl with text, or prompts to answer.")]
Out = Annotated[Path, typer.Option(help="Folder for the result; a run begun there goes on.")]
More = Annotated[list[Path] | None, typer.Argument(help="More files of data.")]
Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target; the bundled one if left out.")]
Steps = Annotated[int, typer.Option(help="Updates of the weights.")]
Rows = Annotated[int, typer.Option(help="Texts per batch.")]
Length = Annotated[int, typer.Option(help="Tokens per text.")]
Accumulate = Annotated[int, typer.Option(help="Batches per step.")]
Rate = Annotated[float, typer.Option(help="Highest learning rate.")]
Seed = Annotated[int, typer.Option(help="The same seed, the same weights.")]
Precision = Annotated[str, typer.Option(help="auto, float32 or bfloat16 (mixed).")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
AnswerTokens = Annotated[int, typer.Option(help="Tokens per answer, where the data are prompts.")]
Temperature = Annotated[float, typer.Option(help="Of the answers, where the data are prompts; 0 is greedy.")]
Chat = Annotated[bool, typer.Option("--chat", help="Prompts go through the target's chat template.")]


def _plan(
    data: Data,
    out: Out,
    more: More = None,
    target: Target = None,
    steps: Steps = 1000,
    rows: Rows = 8,
    length: Length = 256,
    accumulate: Accumulate = 1,
    lr: Rate = 1e-3,
    seed: Seed = 0,
    precision: Precision = "auto",
    device: Device = "auto",
    answer_tokens: AnswerTokens = 256,
    temperature: Temperature = 0.0,
    chat: Chat = False,
) -> Any:
    """What to train on and how, from the options that both commands have."""
    from faircopy.train.corpus import Answering
    from faircopy.train.runs import Plan

    return Plan(
        target or bundled.target(), [*data, *(more or [])], out, steps, rows=rows, length=length, accumulate=accumulate,
        lr=lr, seed=seed, precision=precision, device=device,
        answering=Answering(answer_tokens, temperature, seed, chat),
    )  # fmt: skip


@app.command(cls=Command)
@stoppable
@with_made("plan", _plan)
def head(
    plan: Any,
    method: Annotated[str, typer.Option(help="medusa, clover, clover2, eagle3 or scylla.")] = "clover",
    levels: Annotated[int | None, typer.Option(help="Tokens guessed ahead, if not the method's own number.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers of clover2 and scylla.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="Tokens it guesses: the most frequent ones of the training text.")
    ] = None,
    pretrain: Annotated[
        list[Path] | None, typer.Option(help="Raw text for a first stage of training; may be given several times.")
    ] = None,
    pretrain_steps: Annotated[int, typer.Option(help="Updates of the first stage.", show_default="as --steps")] = 0,
) -> None:
    """Train a draft head, which reads the target's hidden states."""
    from dataclasses import replace

    from faircopy.train.runs import train_head

    plan = replace(plan, pretrain=pretrain or [], pretrain_steps=pretrain_steps)
    given = {"layers": layers, "draft_vocab": draft_vocab}
    options = {name: value for name, value in given.items() if value is not None}
    show(train_head(plan, method, levels, **options), plan.target, Console())


@app.command(cls=Command)
@stoppable
@with_made("plan", _plan, lr=3e-3)
def draft(
    plan: Any,
    hidden: Annotated[int, typer.Option(help="Width.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers.")] = 2,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
) -> None:
    """Train a small draft model with the target's vocabulary."""
    from faircopy.train.runs import train_draft

    show(train_draft(plan, hidden, layers, heads), plan.target, Console())


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
