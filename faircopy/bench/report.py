"""Result files as tables, plots and one page: what each strategy gains, and what it costs."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from faircopy.bench.phases import PHASES
from faircopy.bench.plots import plot_lines, plot_stacks
from faircopy.bench.record import read
from faircopy.bench.run import spread
from faircopy.errors import CheckpointError, ConfigError
from faircopy.html import document

Record = dict[str, Any]
ORDER = ("plain", "ragged", "ems", "unpad_inputs", "unpad_cache", "padded", "realign", "pool")


@dataclass(frozen=True, slots=True)
class Table:
    """A heading, names of columns, rows of text."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def html(self) -> str:
        head = "".join(f'<th class="{"n" if n else ""}">{escape(name)}</th>' for n, name in enumerate(self.head))
        rows = "".join(
            "<tr>"
            + "".join(f'<td class="{"n" if n else ""}">{escape(cell)}</td>' for n, cell in enumerate(row))
            + "</tr>"
            for row in self.rows
        )
        return (
            f'<h3>{escape(self.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )


@dataclass(slots=True)
class Panel:
    """Everything measured with one drafter on one workload and device."""

    title: str
    slug: str
    cells: dict[tuple[str, int], Record] = field(default_factory=dict)  # by (name, batch)

    @property
    def names(self) -> list[str]:
        return sorted({name for name, _ in self.cells}, key=_rank)

    @property
    def batches(self) -> list[int]:
        return sorted({batch for _, batch in self.cells})

    def settings(self) -> Record:
        return next(iter(self.cells.values()))

    def lines(self, value: Callable[[Record], float]) -> dict[str, list[tuple[int, float]]]:
        """Per name, (batch, value) where it was measured."""
        return {
            name: [(batch, value(self.cells[name, batch])) for batch in self.batches if (name, batch) in self.cells]
            for name in self.names
        }

    def speedup(self, record: Record, kind: str) -> float:
        """Over plain decoding at the same batch, in the same run."""
        plain = self.cells.get(("plain", record["batch"]))
        return float(record[kind]["median"] / plain[kind]["median"]) if plain and plain[kind]["median"] else 0.0


def write_report(files: list[Path], out: Path) -> list[Path]:
    """Tables, plots and page into a folder; the files written."""
    panels = gather([record for file in files for record in read(file)])
    if not panels:
        raise CheckpointError(
            "results", ", ".join(map(str, files)), "no results in it", "run `faircopy bench run` first"
        )
    _folder(out)
    tables, page = out / "tables.md", out / "index.html"
    plots = {panel.slug: plot(panel, out) for panel in panels}
    tables.write_text("\n".join(_markdown(panel) for panel in panels), encoding="utf-8")
    page.write_text(document("faircopy: strategies side by side", _page(panels, plots)), encoding="utf-8")
    return [tables, page, *(file for made in plots.values() for file in made)]


def _folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(out), f"not a folder ({error.strerror})", "pass a folder, new or not") from error


def gather(records: list[Record]) -> list[Panel]:
    """One panel per device, target, workload, drafter and k; plain decoding stands in each that it belongs to."""
    panels: dict[tuple[Any, ...], Panel] = {}
    for record in records:
        if record["name"] != "plain":
            key = (*_place(record), record["drafter"], record["k"])
            panel = panels.setdefault(key, Panel(_title(record), _slug(record)))
            panel.cells[record["name"], record["batch"]] = record
    for record in records:
        for key, panel in panels.items():
            if record["name"] == "plain" and key[:-2] == _place(record):
                panel.cells["plain", record["batch"]] = record
    return list(panels.values())


def tables(panel: Panel) -> list[Table]:
    """Throughput, speed-up, what it cost, where the time went."""
    per = _per(panel)
    return [
        _by_batch(panel, f"Tokens {per}, prompts included (spread of the repeats)", _rate("tokens_per_second")),
        _by_batch(panel, f"Tokens {per} while decoding (spread of the repeats)", _rate("decode_tokens_per_second")),
        _by_batch(panel, "Times plain decoding, while decoding", _times(panel, "decode_tokens_per_second")),
        _by_batch(panel, "Times plain decoding, prompts included", _times(panel, "tokens_per_second")),
        _costs(panel),
        _phases(panel),
    ]


def plot(panel: Panel, out: Path) -> list[Path]:
    """Throughput, speed-up, tokens per pass and phases over batch sizes."""
    kind = "decode_tokens_per_second"
    speculative = {
        name: line for name, line in panel.lines(lambda r: panel.speedup(r, kind)).items() if name != "plain"
    }
    lines = {
        "throughput": (
            f"tokens {_per(panel)}, decoding only (prompts left out)",
            panel.lines(lambda r: float(r[kind]["median"])),
        ),
        "speedup": ("speed-up over plain decoding, decoding only (prompts left out)", speculative),
        "accepted": ("tokens per pass of the target, whole batch", panel.lines(_per_pass)),
    }
    made = []
    for name, (label, values) in lines.items():
        made.append(out / f"{panel.slug}-{name}.png")
        plot_lines(made[-1], panel.title, label, values, one=name == "speedup")
    stacks = {(record["name"], record["batch"]): share for record in _ordered(panel) if (share := _shares(record))}
    if stacks:
        made.append(out / f"{panel.slug}-phases.png")
        plot_stacks(made[-1], panel.title, stacks)
    return made


def _markdown(panel: Panel) -> str:
    record = panel.settings()
    commit = str(record["commit"])
    made_by = commit if commit.startswith("faircopy ") else f"Commit {commit}"
    source = f"{made_by}, torch {record['versions']['torch']}, {record['device']}."
    return f"## {panel.title}\n\n{source} {_said(panel)}\n\n" + "\n".join(table.markdown() for table in tables(panel))


def _page(panels: list[Panel], plots: dict[str, list[Path]]) -> str:
    records = [record for panel in panels for record in panel.cells.values() if record["name"] != "plain"]
    ragged = [record for record in records if record["strategy"] == "ragged"]
    tone = "good" if all(record["identical"] == record["of"] for record in ragged or records) else "bad"
    body = [f'<h1>faircopy: strategies side by side</h1><p class="verdict {tone}">{verdict(records, ragged)}</p>']
    for panel in panels:
        body.append(f"<h2>{escape(panel.title)}</h2><p class='soft'>{escape(_said(panel))}</p>")
        body += [_image(file) for file in plots[panel.slug]]
        body += [table.html() for table in tables(panel)]
    return "\n".join([*body, *(_settings(panel) for panel in panels)])


def verdict(records: list[Record], ragged: list[Record]) -> str:
    """How many texts equal plain decoding, and how many of `ragged`, which promises it."""
    (same, total), (own, owns) = _counts(records), _counts(ragged)
    if same == total:
        return f"All {total:,} texts equal plain decoding" + (f" ({owns:,} of them with ragged)" if owns else "")
    return f"{same:,} of {total:,} texts equal plain decoding" + (f" ({own:,} of {owns:,} with ragged)" if owns else "")


def _counts(records: list[Record]) -> tuple[int, int]:
    return sum(r["identical"] for r in records), sum(r["of"] for r in records)


def _image(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{data}">'


def _settings(panel: Panel) -> str:
    record = panel.settings()
    facts = {"commit": record["commit"], "device": record["device"], **record["versions"], **record["settings"]}
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return (
        f'<h2>Settings: {escape(panel.title)}</h2><div class="scroll"><table class="settings"><tbody>{rows}</tbody>'
        "</table></div>"
    )


def _by_batch(panel: Panel, title: str, cell: Callable[[Record], str]) -> Table:
    rows = [
        [name, *(cell(panel.cells[name, b]) if (name, b) in panel.cells else "" for b in panel.batches)]
        for name in panel.names
    ]
    return Table(title, ["", *(f"batch {batch}" for batch in panel.batches)], rows)


def _rate(kind: str) -> Callable[[Record], str]:
    return lambda record: f"{record[kind]['median']:.0f} ({spread(record[kind])})"


def _times(panel: Panel, kind: str) -> Callable[[Record], str]:
    return lambda record: f"{panel.speedup(record, kind):.2f}"


def _costs(panel: Panel) -> Table:
    head = ["", "batch", "tokens per sequence and step", "tokens per pass", "padded rows", "KV rows moved per token",
            "grouped steps", "peak KV, MiB", "texts equal to plain"]  # fmt: skip
    return Table("Gains and costs", head, [[r["name"], str(r["batch"]), *_cost(r)] for r in _ordered(panel)])


def _cost(record: Record) -> list[str]:
    counters = record["counters"]
    return [
        f"{record['accepted_per_step']:.2f}",
        f"{_per_pass(record):.1f}",
        f"{counters['tokens_padded'] / max(1, counters['tokens_fed']):.0%}",
        f"{counters['rows_moved'] / max(1, counters['emitted']):.1f}",
        f"{record['grouping_rate']:.0%}",
        f"{record['peak_bytes'] / 2**20:.1f}",
        f"{record['identical']}/{record['of']}",
    ]


def _phases(panel: Panel) -> Table:
    rows = [
        [record["name"], str(record["batch"]), *_pass(record), *(f"{share[phase]:.0%}" for phase in PHASES)]
        for record in _ordered(panel)
        if (share := _shares(record))
    ]
    return Table("Where the time goes (a pass of its own)", ["", "batch", "seconds", "tokens/s", *PHASES], rows)


def _pass(record: Record) -> list[str]:
    """Seconds and tokens per second of the pass that timed phases, prompts included."""
    seconds = sum(record["phases"].values())
    return [f"{seconds:.3f}", f"{record['counters']['emitted'] / seconds:.0f}"]


def _shares(record: Record) -> dict[str, float]:
    """Each phase's share of the time; empty if phases were not timed."""
    total = sum(record["phases"].values())
    return {phase: record["phases"].get(phase, 0.0) / total for phase in PHASES} if total else {}


def _per(panel: Panel) -> str:
    return "per CPU second" if panel.settings()["settings"]["clock"] == "cpu" else "per second"


def _per_pass(record: Record) -> float:
    return float(record["counters"]["emitted"] / max(1, record["counters"]["steps"]))


def _ordered(panel: Panel) -> list[Record]:
    return [panel.cells[name, b] for b in panel.batches for name in panel.names if (name, b) in panel.cells]


def _rank(name: str) -> tuple[int, str]:
    first = name.partition(",")[0]
    return (ORDER.index(first) if first in ORDER else len(ORDER), name)


def _place(record: Record) -> tuple[Any, ...]:
    settings = record["settings"]
    return (record["device"], settings["target"], settings["dtype"], record["workload"])


def _title(record: Record) -> str:
    how = "n-gram drafts" if record["drafter"] == "ngram" else f"{record['drafter']} drafts"
    return f"{record['workload']}, {how}, k = {record['k']}, {record['settings']['dtype']}, {record['device']}"


def _slug(record: Record) -> str:
    kind = "gpu" if "CPU" not in record["device"] else "cpu"
    return f"{kind}-{record['settings']['dtype']}-{record['workload']}-{record['drafter']}-k{record['k']}"


def _said(panel: Panel) -> str:
    s = panel.settings()["settings"]
    return (
        f"Target {s['target']}, draft {s['draft'] or 'none'}; {_span(panel, 'prompts')} prompts (whole batches), "
        f"{s['max_tokens']} tokens each, medians of {_span(panel, 'repeats')} run(s) in turns, "
        f"{s['threads']} CPU thread(s)."
    )


def _span(panel: Panel, name: str) -> str:
    """A setting that may differ by batch: from the least to the most."""
    values = sorted({record["settings"][name] for record in panel.cells.values()})
    return " to ".join(map(str, dict.fromkeys([values[0], values[-1]])))
