"""`faircopy bench`: measure strategies on this machine, and make a report of result files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from faircopy import bundled
from faircopy.errors import ConfigError
from faircopy.terminal.guard import stoppable, writable
from faircopy.terminal.options import Command, Group

app = typer.Typer(
    help="Measure strategies, drafters, batch sizes and draft lengths side by side; make a report of the results.",
    no_args_is_help=True,
    cls=Group,
    pretty_exceptions_enable=False,
)


@app.command(cls=Command)
@stoppable
def run(
    out: Annotated[Path, typer.Option(help="Append one JSON line per case to this file.")] = Path("bench.jsonl"),
    target: Annotated[str | None, typer.Option(help="Folder or hub id; the bundled pair if left out.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="Folder or hub id of a draft model or head, for --drafter model.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="prompts, retold, synthetic, or a file: .txt, or .jsonl as Spec-Bench's.")
    ] = "prompts",
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Strategies to measure: docs/strategies.md.", show_default="ragged, padded, realign, pool"),
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="none, ngram or model.", show_default="model if there is one, else ngram")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes.", show_default="1, 4, 8")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", min=0, help="Draft tokens per step.", show_default="4")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per run; rounded up to whole batches.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer, no more and no fewer.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each case, in turns.")] = 3,
    warmup: Annotated[int, typer.Option(help="Short runs before.")] = 1,
    profile: Annotated[bool, typer.Option(help="One more run that times the phases of a step.")] = True,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    exact: Annotated[bool, typer.Option(help="--no-exact drops the promise of `ragged`.")] = True,
    refill: Annotated[
        bool | None, typer.Option(help="Whether new requests join a running batch; as published if left out.")
    ] = None,
    clock: Annotated[str, typer.Option(help="wall, or cpu: this process's own time, for a busy machine.")] = "wall",
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch; one for the bundled pair.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share each layer: 1, 2, 4 or 8.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="Devices that share the layers among them.")] = 1,
) -> None:
    """Run every combination; each text is compared with plain decoding's. Exit code 1 if `ragged` differs anywhere."""
    import torch

    from faircopy.bench.pair import load_pair
    from faircopy.bench.run import Bench, Case

    writable("--out", out)
    if threads or target is None:
        torch.set_num_threads(threads or 1)
    own = bundled.draft_for(target, draft)
    drafters = drafter or ["model" if own else draft or "ngram"]
    ranks = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    pair = load_pair(target or bundled.target(), own, dtype=dtype, device=device, exact=exact, **ranks)
    several = ["ragged"] if max(ranks.values()) > 1 else ["ragged", "padded", "realign", "pool"]
    ways = product(strategy or several, drafters, batch or [1, 4, 8], k or [4])
    cases = [Case(*way, refill=refill) for way in ways]
    bench = Bench(pair.target, pair.draft, repeats, warmup, profile, options={"exact": exact, **ranks}, clock=clock)
    same = _measure(bench, _workload(workload, pair, max_tokens), cases, prompts, out)
    print(f"written to {out}; make a report with: faircopy bench report {out}")
    raise typer.Exit(0 if same or not exact else 1)


def _measure(bench: Any, workload: Any, cases: list[Any], prompts: int, out: Path) -> bool:
    """Append each case's record to the file; true if all texts of `ragged` equal plain decoding's."""
    from faircopy.bench.run import run as measure

    same = True
    with _Bar() as bar:
        for record in measure(bench, workload, cases, prompts, bar.show):
            _append(out, record)
            bar.say(_line(record))
            same &= record["strategy"] != "ragged" or record["identical"] == record["of"]
    return same


@app.command(cls=Command)
@stoppable
def report(
    files: Annotated[list[Path], typer.Argument(help="Files that `faircopy bench run` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for tables, plots and the page.")] = Path("bench-report"),
) -> None:
    """Markdown tables, PNG plots and one self-contained HTML page of result files."""
    from faircopy.bench.report import write_report

    for file in write_report(files, out):
        print(file)


SHAPES = "A shape to measure (llama-3.1-8b, ...; an unknown one lists them); qwen3-8b and qwen3-0.6b by default."


@app.command(cls=Command)
@stoppable
def kernels(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("benchmarks/results/gpu-kernels.json"),
    shape: Annotated[list[str] | None, typer.Option(help=SHAPES)] = None,
) -> None:
    """On a GPU: every kernel against its twin; products and attention against reading their bytes once."""
    needs_gpu()
    from faircopy.bench.kernels import rows

    names = _shapes(shape)
    _collect(out, {"shapes": names}, rows(names))


@app.command(cls=Command)
@stoppable
def steps(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("benchmarks/results/gpu-steps.json"),
    shape: Annotated[list[str] | None, typer.Option(help=SHAPES)] = None,
    context: Annotated[int, typer.Option(help="Tokens each sequence has.", min=1)] = 512,
    long: Annotated[bool, typer.Option("--long", help="Contexts of 8k and 32k, and a prompt of 32k, instead.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Passes of 16, 32, ... 512 rows instead.")] = False,
) -> None:
    """On a GPU: one pass by batch and rows per sequence, exact and on cuBLAS, against the floor; reading prompts."""
    needs_gpu()
    from faircopy.bench.steps import rows

    names = _shapes(shape)
    settings = {"shapes": names, "context": context, "long": long, "sweep": sweep}
    _collect(out, settings, rows(context, names, long=long, sweep=sweep))


def needs_gpu() -> None:
    import torch

    from faircopy.errors import ConfigError

    if not torch.cuda.is_available():
        raise ConfigError("device", "cpu", "no GPU is visible", "run it where there is one")


def _shapes(names: list[str] | None) -> tuple[str, ...]:
    from faircopy.bench.shapes import PAIR, SHAPES
    from faircopy.errors import ConfigError

    for name in names or ():
        if name not in SHAPES:
            raise ConfigError("--shape", name, "unknown", f"use one of {', '.join(SHAPES)}")
    return tuple(names or PAIR)


def _collect(out: Path, settings: dict[str, Any], rows: Iterator[dict[str, Any]]) -> None:
    from faircopy.bench.record import collect

    out.parent.mkdir(parents=True, exist_ok=True)
    writable("--out", out)
    for row in collect(str(out), settings, rows):
        _show(row)
    print(f"written to {out}")


def _show(row: dict[str, Any]) -> None:
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def _workload(name: str, pair: Any, tokens: int) -> Any:
    from faircopy.bench.workloads import named, texts
    from faircopy.terminal.prompts import read_prompts

    context = min(model.context for model in (pair.target, pair.draft) if model is not None)
    if Path(name).suffix in (".jsonl", ".txt"):
        if not Path(name).is_file():
            raise ConfigError("--workload", name, "cannot be read (no such file)", "pass a .txt or .jsonl file")
        return texts(Path(name).stem, read_prompts([], Path(name)), pair.encode, tokens, context)
    return named(name, pair.encode, pair.target.vocab, tokens, context)


def _append(out: Path, record: dict[str, Any]) -> None:
    from faircopy.bench.record import append

    append(out, [record])


def _line(record: dict[str, Any]) -> str:
    from faircopy.bench.run import spread

    rate = record["tokens_per_second"]
    return (
        f"batch {record['batch']:3d}  {record['drafter']:6s} k {record['k']}  {record['name']:24s} "
        f"{rate['median']:8.1f} tokens/s ({spread(rate, 'spread ')})  {record['accepted_per_step']:.2f} tokens/step  "
        f"{record['identical']}/{record['of']} texts equal to plain"
    )


class _Bar:
    """Progress on a terminal; elsewhere only the results."""

    def __enter__(self) -> _Bar:
        from rich.progress import Progress

        self._progress = Progress(transient=True)
        self._progress.start()
        self._task = self._progress.add_task("loading")
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=name, completed=done, total=total)

    def say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=True)
