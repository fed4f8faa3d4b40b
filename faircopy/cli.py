"""The command line: thin; each command reads its options, calls the library, and says how it went.

Exit codes: 0 good, 1 the job failed, 2 wrong usage: an option, a file or a model that cannot be used.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from faircopy import __version__, bundled
from faircopy.errors import (
    CheckpointError,
    ConfigError,
    FaircopyError,
    NumericsError,
    OutOfPages,
    RequestError,
    UnsupportedModel,
)
from faircopy.terminal.bench import app as bench
from faircopy.terminal.guard import option_of, stoppable, writable

app = typer.Typer(
    name="faircopy",
    help="Batch speculative decoding whose output is exactly what the target model alone would have written.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target; the bundled one if left out.")]
Draft = Annotated[
    str | None,
    typer.Option(help="Folder or hub id of a draft model or head, 'ngram' or 'none'; the bundled target has its own."),
]
Width = Annotated[int, typer.Option("--k", help="Draft tokens per step.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens per answer at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus; 1 switches it off.")]
Seed = Annotated[int | None, typer.Option(help="A fresh one if left out.")]
BatchSize = Annotated[int, typer.Option("--batch", help="Sequences that run together at most.")]
Strategy = Annotated[str, typer.Option(help="How a ragged batch is held: docs/strategies.md.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
File = Annotated[Path | None, typer.Option("--file", help="Prompts: .txt, one a line, or .jsonl with prompt or turns.")]
Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts; standard input if there are none.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
@stoppable
def generate(
    prompts: Prompts = None,
    file: File = None,
    target: Target = None,
    draft: Draft = None,
    k: Width = 4,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    batch: BatchSize = 64,
    strategy: Strategy = "ragged",
    dtype: Dtype = "auto",
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Write answers to this JSONL file, which must be new.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Answer only what is missing in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    explain: Annotated[bool, typer.Option(help="Print the resolved configuration first.")] = False,
) -> None:
    """Answer prompts in a batch. Ctrl-C keeps what is finished."""
    from faircopy.terminal.generate import generate as run
    from faircopy.terminal.prompts import read_prompts
    from faircopy.types import SamplingParams

    asked = read_prompts(prompts or [], file)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    answers = _answer_file(out, asked, resume, overwrite)
    llm = _llm(target, draft, k, max_batch=batch, strategy=strategy, dtype=dtype, device=device)
    if explain:
        print(json.dumps(llm.explain(), indent=1), file=sys.stderr)
    if not run(llm, asked, params, answers, as_json):
        raise typer.Exit(1)


@app.command()
@stoppable
def chat(
    target: Target = None,
    draft: Draft = None,
    k: Width = 4,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Talk to a model; earlier turns stay in the cache."""
    from faircopy.terminal.chat import chat as run
    from faircopy.types import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    run(_llm(target, draft, k, dtype=dtype, device=device), params)


@app.command()
@stoppable
def demo(
    target: Target = None,
    draft: Draft = None,
    k: Width = 4,
    max_tokens: MaxTokens = 96,
) -> None:
    """Watch a batch of eight being written, then see what it cost and that it is exact."""
    from faircopy.terminal.demo import choose_prompts
    from faircopy.terminal.demo import demo as run

    console = Console()
    own = bundled.draft_for(target, draft if draft or target is None else "ngram")
    exact = run(target or bundled.target(), own, choose_prompts(), k, max_tokens, console)
    raise typer.Exit(0 if exact else 1)


@app.command()
@stoppable
def audit(
    prompts: Prompts = None,
    file: File = None,
    url: Annotated[
        list[str] | None, typer.Option(help="Audit OpenAI-compatible servers; the first is the reference.")
    ] = None,
    target: Target = None,
    draft: Annotated[list[str] | None, typer.Option(help="Drafts to try: folders, hub ids, 'ngram'.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", help="Draft lengths to try.")] = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", help="Batch sizes to try.")] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    exact: Annotated[bool, typer.Option(help="--no-exact shows what happens without the promise.")] = True,
    limit: Annotated[int | None, typer.Option(help="Prompts at most; 32 of the bundled ones if left out.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="About how long it may take; 0: no limit. 60 if it is given no prompts or options."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a one-file HTML report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    model: Annotated[str | None, typer.Option(help="With --url: the model's name there.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="With --url.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="With --url: requests at a time to try.")] = None,
    timeout: Annotated[float, typer.Option(help="With --url: seconds to wait for an answer.")] = 120.0,
    tie: Annotated[float, typer.Option(help="With --url: log probability below which a difference is a tie.")] = 0.5,
) -> None:
    """Check that speculation changes nothing, on your models and prompts. Exit code 0 only at 100 %.

    Ctrl-C keeps the report of what was compared.
    """
    from faircopy.audit.report import print_report
    from faircopy.files import replace_text
    from faircopy.terminal.audit import SECONDS, Shown

    asked = _audited_prompts(prompts, file, own=target is None and not url, limit=limit)
    writable("--html", html)
    if url and (target or draft or k or batch):
        raise ConfigError("--url", url, "given beside options for models", "audit servers or models, not both at once")
    if url and seconds is not None:
        raise ConfigError("--seconds", seconds, "given beside --url", "limit an audit of servers with --limit")
    if seconds is None and not (prompts or file or limit or target or draft or k or batch):
        seconds = SECONDS
    console = Console(stderr=as_json)
    with console.status("auditing") as status:
        if url:
            from faircopy.audit.servers import audit_servers

            report = audit_servers(
                url, asked, model=model, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed or 0,
                concurrency=tuple(concurrency or (1, 8)), timeout=timeout, tie=tie, api_key=api_key,
            )  # fmt: skip
        else:
            from faircopy.audit.models import audit_models
            from faircopy.types import SamplingParams

            shown = Shown(console, status)
            report = audit_models(
                target or bundled.target(),
                _audited_drafts(draft, own=target is None),
                asked,
                SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed),
                batches=tuple(batch or (1, 4, 8)),
                ks=tuple(k or (2, 4, 8)),
                seconds=seconds or None,
                watch=shown,
                progress=shown.on_progress,
                dtype=dtype,
                device=device,
                exact=exact,
            )
    if as_json:
        print(report.to_json())
    else:
        print_report(report, console)
    if html:
        replace_text("--html", html, report.to_html())
    raise typer.Exit(0 if report.passed else 1)


@app.command()
@stoppable
def train(
    what: Annotated[str, typer.Argument(help="'head' or 'draft'.")],
    data: Annotated[list[Path], typer.Option(help="Text (.txt) or .jsonl with text, or prompts to answer.")],
    out: Annotated[Path, typer.Option(help="Folder for the result; a run begun there goes on.")],
    more: Annotated[list[Path] | None, typer.Argument(help="More files of data.")] = None,
    target: Target = None,
    method: Annotated[str, typer.Option(help="Of a head: medusa, clover, clover2 or eagle3.")] = "clover",
    levels: Annotated[
        int | None, typer.Option(help="Of a head: tokens guessed ahead, if not the method's own.")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Of a draft model: its width.")] = 128,
    layers: Annotated[int, typer.Option(help="Of a draft model: its layers.")] = 2,
    heads: Annotated[int, typer.Option(help="Of a draft model: its attention heads.")] = 4,
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 1000,
    rows: Annotated[int, typer.Option(help="Texts per batch.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per text.")] = 256,
    accumulate: Annotated[int, typer.Option(help="Batches per step.")] = 1,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate: 0.001 for a head, 0.003 for a draft.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same weights.")] = 0,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16 (mixed).")] = "auto",
    device: Device = "auto",
    answer_tokens: Annotated[int, typer.Option(help="Tokens per answer, where the data are prompts.")] = 256,
    temperature: Temperature = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts go through the target's chat template.")] = False,
) -> None:
    """Train a draft head or a small draft model for a target of yours."""
    from faircopy.terminal.train import show
    from faircopy.train.corpus import Answering
    from faircopy.train.runs import Plan, train_draft, train_head

    if what not in ("head", "draft"):
        raise ConfigError("train", what, "unknown", "use 'head' or 'draft'")
    rate = lr or (1e-3 if what == "head" else 3e-3)
    answering = Answering(answer_tokens, temperature, seed, chat)
    plan = Plan(
        target or bundled.target(), [*data, *(more or [])], out, steps, rows=rows, length=length,
        accumulate=accumulate, lr=rate, seed=seed, precision=precision, device=device, answering=answering,
    )  # fmt: skip
    learned = train_head(plan, method, levels) if what == "head" else train_draft(plan, hidden, layers, heads)
    show(learned, plan.target, Console())


def _answer_file(out: Path | None, prompts: list[str], resume: bool, overwrite: bool) -> Any:
    from faircopy.terminal.answer_file import AnswerFile

    if out is None:
        if resume or overwrite:
            option = "--resume" if resume else "--overwrite"
            raise ConfigError(option, True, "given without --out", "name the file with --out")
        return None
    writable("--out", out)
    return AnswerFile(out, prompts, resume, overwrite)


def _audited_prompts(prompts: list[str] | None, file: Path | None, own: bool, limit: int | None) -> list[str]:
    """The user's prompts, all of them unless limited; the bundled ones where nothing is the user's own."""
    from faircopy.terminal.prompts import read_prompts

    if own and not prompts and file is None:
        return bundled.prompts()[: limit or 32]
    asked = read_prompts(prompts or [], file)
    if limit is not None and limit < len(asked):
        print(f"auditing {limit} of {len(asked)} prompts", file=sys.stderr)
    return asked[:limit]


def _audited_drafts(drafts: list[str] | None, own: bool) -> list[str]:
    if not own:
        return drafts or ["ngram"]
    return [bundled.named(draft) for draft in drafts] if drafts else [bundled.draft(), "ngram"]


def _llm(target: str | None, draft: str | None, k: int, **options: Any) -> Any:
    from faircopy.llm import LLM

    return LLM(target or bundled.target(), draft=bundled.draft_for(target, draft), k=k, **options)


def main() -> None:
    """Run the command line; errors of ours and an interruption are one line, not a traceback."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except FaircopyError as error:
        print(f"faircopy: {error.describe(option_of(error, sys.argv[1:]))}", file=sys.stderr)
        unusable = isinstance(error, ConfigError | RequestError | CheckpointError | UnsupportedModel)
        sys.exit(2 if unusable and not isinstance(error, NumericsError | OutOfPages) else 1)


if __name__ == "__main__":
    main()
