"""`faircopy laws`: train a grid of draft heads, fit how they scale, and predict which one to train."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from faircopy import bundled
from faircopy.terminal.guard import drawable, stoppable
from faircopy.terminal.options import Command, Group

if TYPE_CHECKING:
    from faircopy.laws.fit import Fit
    from faircopy.laws.points import Result
    from faircopy.laws.predict import Candidate, Prediction
    from faircopy.laws.report import MeasureReport

app = typer.Typer(
    help="Train a grid of draft heads, fit how accepted tokens grow with text and depth, predict which head to train.",
    no_args_is_help=True,
    cls=Group,
    pretty_exceptions_enable=False,
)

LOG_2 = math.log(2.0)
MAIN = "tree 60, T=0"  # what a prediction is made from
Results = Annotated[list[Path], typer.Argument(help="Files that `laws run` wrote.")]
Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target; the bundled one if left out.")]
TargetName = Annotated[str | None, typer.Option(help="The target in the results, if they are of several.")]


@app.command(cls=Command)
@stoppable
def run(
    data: Annotated[list[Path], typer.Option(help="Text of the target's own, or prompts that it answers.")],
    prompts: Annotated[list[Path], typer.Option(help="Held-out prompts (.jsonl) that heads are measured behind.")],
    out: Annotated[Path, typer.Option(help="Folder for results; a run begun there goes on.")],
    target: Target = None,
    pretrain: Annotated[
        list[Path] | None, typer.Option(help="Raw text, whose tokens T counts; --data is read behind it.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for everything: 45m, 10h.")] = "30m",
    smallest: Annotated[int, typer.Option(help="Tokens of the smallest head; T doubles from there.")] = 1 << 18,
    layers: Annotated[
        list[int] | None, typer.Option(help="Depths, in the order to train them.", show_default="1, 2, 4, 3, 6")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Heads at each of two budgets.")] = 3,
    rows: Annotated[int, typer.Option(help="Texts per batch.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens per text.")] = 256,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    new: Annotated[int, typer.Option(help="Tokens that the target writes behind each held-out prompt.")] = 64,
    answer_tokens: Annotated[int, typer.Option(help="Tokens per answer, where --data has prompts.")] = 256,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts go through the target's chat template.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Train heads over tokens, layers and seeds within a time budget, the most telling ones first."""
    from faircopy.laws.plan import GridPlan, run_plan
    from faircopy.laws.predict import parse_time
    from faircopy.train.corpus import Answering

    plan = GridPlan(
        target=target or bundled.target(), data=data, prompts=prompts, out=out, seconds=parse_time(budget),
        pretrain=pretrain or [], smallest=smallest, depths=tuple(layers or (1, 2, 4, 3, 6)), seeds=seeds, rows=rows,
        length=length, lr=lr, new=new, device=device, answering=Answering(answer_tokens, chat=chat),
    )  # fmt: skip
    found = run_plan(plan)
    print(f"{len(found)} heads in {out / 'results.jsonl'}; fit them with: faircopy laws fit {out / 'results.jsonl'}")


@app.command(cls=Command)
@stoppable
def fit(
    results: Results,
    target_name: TargetName = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of laws and residuals.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit accepted tokens over text and depth: log law against saturating power law, with intervals."""
    from faircopy.laws import report
    from faircopy.laws.points import read_results

    drawable("--plot", plot)
    mine = report.one_target(read_results(results), target_name)
    found = [report.report(mine, measure) for measure in report.measures_of(mine)]
    if plot is not None:
        from faircopy.laws.plots import plot_laws

        plot_laws(plot, f"{mine[0].target}: {len(mine)} heads", mine, found)
    if as_json:
        print(json.dumps([report.as_json(one) for one in found], indent=1))
    else:
        show_fits(mine, found, Console())


@app.command(cls=Command)
@stoppable
def predict(
    results: Results,
    target: Target = None,
    target_name: TargetName = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch sizes.", show_default="1, 2, 4, 8, 16, 32, 64")
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for training the head: 45m, 10h.")] = "1h",
    layers: Annotated[list[int] | None, typer.Option(min=1, help="Depths.", show_default="1, 2, 3, 4, 6")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 512,
    gpu: Annotated[
        str | None, typer.Option(help="A device to predict for, by its roofline; this machine, measured, if left out.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="JSON of measured passes of the target (a cost table) to use instead.")
    ] = None,
    times: Annotated[
        Path | None, typer.Option(help="JSON of measured draft levels (times.json of benchmarks.laws) to use instead.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of tokens per second over batch sizes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the head and the draft nodes with the most tokens per second, at every batch size."""
    from faircopy.laws import report
    from faircopy.laws.costs import Serving, costs_for
    from faircopy.laws.points import read_results
    from faircopy.laws.predict import parse_time
    from faircopy.laws.predict import predict as predicted
    from faircopy.laws.trees import small_trees

    drawable("--plot", plot)
    mine = report.one_target(read_results(results), target_name)
    serving = Serving(target or bundled.target(), context, tuple(layers or (1, 2, 3, 4, 6)), gpu, costs, times)
    known, same = costs_for(serving, mine)
    fits, trees = report.report(mine, MAIN).plausible, small_trees(mine)
    found = [
        predicted(fits, trees, known, size, parse_time(budget), same) for size in batch or (1, 2, 4, 8, 16, 32, 64)
    ]
    if plot is not None:
        from faircopy.laws.plots import plot_rates

        plot_rates(plot, f"{Path(serving.target).name}, {budget} of training, predicted", found)
    if as_json:
        print(json.dumps([_prediction(one) for one in found], indent=1))
    else:
        show_predictions(found, fits[0].law.formula, known.sources, Console())


def show_fits(results: list[Result], found: list[MeasureReport], console: Console) -> None:
    """Tables of heads, of laws, and of heads that were left out."""
    console.print(_heads(results, [report.measure for report in found]))
    console.print(_laws(found))
    console.print(_left_out(found))


def _heads(results: list[Result], measures: list[str]) -> Table:
    table = _table("Accepted draft tokens per cycle", ("T", "D", "seed", *measures, "training"), "right")
    for result in sorted(results, key=lambda one: (one.layers, one.tokens, one.seed)):
        means = [f"{result.accepted(measure):.3f}" for measure in measures]
        place = (_tokens(result.tokens), str(result.layers), str(result.seed))
        table.add_row(*place, *means, f"{result.train_seconds:.0f} s")
    return table


def _laws(found: list[MeasureReport]) -> Table:
    table = _table(
        "A, accepted draft tokens per cycle; T in millions of tokens",
        ("measure", "heads", "law", "per doubling of T, or limit", "AIC"),
    )
    for report in found:
        for heads, fits in (("D = 1", report.text), ("all D", report.joint)):
            for one in fits.values():
                table.add_row(report.measure, heads, one.law.formula, _growth(one), f"{one.law.aic:.1f}")
    return table


def _growth(found: Fit) -> str:
    """What a doubling of T brings by the log law; what endless text brings by the power law."""
    if found.law.form == "power":
        return f"limit {found.law.limit:.2f} ({found.coefficient('constant')})"
    value, ends = found.law.text * LOG_2, found.coefficient("text")
    return f"{value:+.3f} ({ends.low * LOG_2:+.3f} to {ends.high * LOG_2:+.3f})"


def _left_out(found: list[MeasureReport]) -> Table:
    table = _table(
        "Heads that a law was fitted without, and its 95 % interval",
        ("measure", "law", "T", "D", "measured", "predicted", "inside"),
    )
    for report in found:
        for check in report.checks:
            place = (_tokens(check.point.tokens), str(check.point.layers))
            seen = (f"{check.measured:.3f}", str(check.interval), "yes" if check.inside else "no")
            table.add_row(report.measure, check.form, *place, *seen)
    return table


def _table(title: str, columns: tuple[str, ...], justify: Literal["left", "right"] = "left") -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify=justify)
    return table


def show_predictions(found: list[Prediction], formula: str, sources: list[str], console: Console) -> None:
    """The best head of every batch size, what it rests on, and where it goes beyond what was measured."""
    columns = ("batch", "layers", "T", "k", "accepted per cycle", "tokens/s", "x plain", "drafting")
    table = _table(f"Most tokens per second; {formula}", columns, "right")
    for prediction in found:
        one = prediction.best
        spread = f"{one.rate:.0f} ({one.rate_interval.low:.0f} to {one.rate_interval.high:.0f})"
        accepted = f"{one.accepted:.2f} ({one.accepted_interval.low:.2f} to {one.accepted_interval.high:.2f})"
        table.add_row(
            str(prediction.batch), str(one.point.layers), _tokens(one.point.tokens), str(one.nodes), accepted,
            spread, f"{one.rate / prediction.plain:.2f}", f"{one.draft_share:.0%}",
        )  # fmt: skip
    console.print(table)
    for warning in dict.fromkeys(text for prediction in found for text in prediction.best.warnings):
        console.print(f"Extrapolation: {warning}.", highlight=False)
    for source in sources:
        console.print(source, style="dim", highlight=False, soft_wrap=True)


def _tokens(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _prediction(found: Prediction) -> dict[str, Any]:
    return {
        "batch": found.batch,
        "plain": found.plain,
        "best": _candidate(found.best),
        "by_layers": [_candidate(one) for one in found.candidates],
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "layers": one.point.layers,
        "tokens": one.point.tokens,
        "k": one.nodes,
        "accepted": one.accepted,
        "accepted_interval": [one.accepted_interval.low, one.accepted_interval.high],
        "tokens_per_second": one.rate,
        "interval": [one.rate_interval.low, one.rate_interval.high],
        "draft_share": one.draft_share,
        "extrapolates": list(one.warnings),
    }
