"""`faircopy bench`: what is measured is what happened, and reports say it; the broken designs break."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import broken, fleet
from benchmarks.strategies import main as strategies
from faircopy import __version__, bundled
from faircopy.bench import record as provenance
from faircopy.bench.phases import PHASES, Stopwatch, profiled
from faircopy.bench.record import append, read
from faircopy.bench.report import gather, verdict, write_report
from faircopy.bench.run import Bench, Case, one_pass, rate, run, spread
from faircopy.bench.workloads import Workload, named, retold, synthetic, texts
from faircopy.build import build_engine
from faircopy.errors import CheckpointError, ConfigError
from faircopy.model.loader import load_tokenizer
from faircopy.testing import TableModel
from tests.helpers import load
from tests.test_cli import call

__all__ = ["call"]  # a fixture

MEASURING = ("faircopy.bench", "faircopy.testing", "benchmarks")
WORK = Workload("table", [[n % 9 + 1] * (n % 5 + 1) for n in range(8)], 12)


def half_right() -> TableModel:
    draft = TableModel()
    draft._table = draft._table + 0.6 * TableModel(seed=1)._table
    return draft


def measured(*cases: Case, **options: Any) -> list[dict[str, Any]]:
    bench = Bench(TableModel(), half_right(), **{"repeats": 2, **options})
    return list(run(bench, WORK, list(cases), 6, lambda name, done, total: None))


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    names = ("ragged", "padded", "realign", "pool")
    return measured(*(Case(name, "model", batch, 3) for batch in (2, 4) for name in names))


def test_a_record_says_what_happened(records: list[dict[str, Any]]) -> None:
    assert [(r["name"], r["batch"]) for r in records[:5]] == [
        ("plain", 2), ("ragged", 2), ("padded", 2), ("realign", 2), ("pool", 2),
    ]  # fmt: skip
    for record in records:
        prompts = 6 if record["batch"] == 2 else 8
        assert record["of"] == record["identical"] == record["settings"]["prompts"] == prompts
        assert record["counters"]["emitted"] == prompts * 12
        assert set(record["phases"]) == set(PHASES)
        assert record["tokens_per_second"]["median"] > 0
        assert len(record["tokens_per_second"]["values"]) == record["settings"]["repeats"] == 2
        assert {"commit", "versions", "device", "settings"} <= set(record)
    by_name = {r["name"]: r for r in records if r["batch"] == 4}
    assert by_name["padded"]["counters"]["tokens_padded"] > 0 == by_name["ragged"]["counters"]["tokens_padded"]
    assert by_name["realign"]["phases"]["realign"] > 0 == by_name["ragged"]["phases"]["realign"]
    assert by_name["realign"]["counters"]["rows_moved"] > by_name["pool"]["counters"]["rows_moved"] > 0
    assert by_name["plain"]["phases"]["draft"] < by_name["ragged"]["phases"]["draft"]


def test_names_say_what_is_not_as_published() -> None:
    refills = [Case("ragged", "ngram", 4, 3, refill).name for refill in (None, True, False)]
    assert refills == ["ragged", "ragged", "ragged, whole batches"]
    assert Case("realign", "ngram", 4, 3, True).name == "realign, refilled"
    assert Case("ragged", "none", 4, 0).name == "plain"


def test_profiling_leaves_no_trace() -> None:
    engine = build_engine(TableModel())
    with profiled(engine) as watch:
        one_pass(engine, WORK)
    assert watch.seconds["verify"] > 0
    for part in (engine, engine.target, engine.drafter, engine.verifier, engine.target.layout):
        assert not {"step", "forward", "propose", "judge", "commit"} & set(vars(part))


def test_time_inside_another_phase_counts_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("faircopy.bench.phases.time.perf_counter", lambda: now[0])
    watch = Stopwatch(torch.device("cpu"))
    inner = watch.timed("realign", lambda: spend(2.0))
    watch.timed("verify", lambda: (spend(1.0), inner(), spend(0.5)))()
    assert dict(watch.seconds) == {"realign": 2.0, "verify": 1.5}


def test_a_budget_ends_repeats_early_but_not_before_the_first() -> None:
    record = measured(Case("ragged", "ngram", 2, 3), repeats=50, budget=0.0)[1]
    assert record["settings"]["repeats"] == 1


def test_a_report_has_tables_plots_and_one_page(records: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    append(file, records[:5])
    append(file, records[5:])
    assert read(file) == records
    made = write_report([file], tmp_path / "report")
    assert [path.name for path in made[:2]] == ["tables.md", "index.html"]
    assert {path.stem.rpartition("-")[2] for path in made[2:]} == {"throughput", "speedup", "accepted", "phases"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made[2:])
    tables, page = made[0].read_text(), made[1].read_text()
    for name in (
        "plain",
        "ragged",
        "padded",
        "realign",
        "pool",
        "Times plain decoding",
        "texts equal to plain",
        "| 8/8 |",
    ):
        assert name in tables
    assert page.count("data:image/png;base64,") == 4
    texts = sum(record["of"] for record in records if record["name"] != "plain")
    assert f"All {texts} texts equal plain decoding" in page
    assert "://" not in page, "it needs no other file"  # the pictures' letters may spell http


def test_plain_decoding_stands_in_every_panel_of_its_workload(records: list[dict[str, Any]]) -> None:
    other = [{**record, "drafter": "ngram"} for record in records if record["name"] != "plain"]
    panels = gather([*records, *other])
    assert [panel.names[0] for panel in panels] == ["plain", "plain"]
    assert panels[0].speedup(panels[0].cells["plain", 2], "tokens_per_second") == 1.0


def test_unreadable_results_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("bad.jsonl", "empty.jsonl", "missing.jsonl"):
        with pytest.raises(CheckpointError, match=name):
            write_report([tmp_path / name], tmp_path / "out")


def test_results_outside_a_clone_name_the_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "site-packages" / "faircopy" / "bench" / "record.py"))
    provenance.origin.cache_clear()
    assert provenance.origin()["commit"] == f"faircopy {__version__}"
    provenance.origin.cache_clear()


def test_a_missing_plotting_library_is_named(
    records: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path / "results.jsonl", records)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib"):
        write_report([tmp_path / "results.jsonl"], tmp_path / "out")


def test_workloads() -> None:
    made = synthetic(64, 20, 512)
    assert {len(prompt) <= 246 for prompt in made.prompts} == {True}
    assert made == synthetic(64, 20, 512)
    assert [len(p) for p in texts("own", ["abc", "abcdef"], lambda text: [1] * len(text), 3, 8).prompts] == [3, 5]
    assert WORK.first(10).prompts[8:] == WORK.prompts[:2]
    with pytest.raises(ConfigError, match=r"workload = 'prose'.*prompts, synthetic, retold"):
        named("prose", lambda text: [], 64, 8, 512)
    with pytest.raises(ConfigError, match="max_tokens"):
        synthetic(64, 510, 512)


def test_retold_stories_begin_again() -> None:
    tokenizer: Any = load_tokenizer(bundled.target())
    workload = retold(tokenizer.encode, 32, 512, count=2, story=24)
    for prompt, text in zip(workload.prompts, bundled.prompts(), strict=False):
        ids = tokenizer.encode(text)
        assert prompt[: len(ids) - 1] == ids[:-1]
        assert prompt[-len(ids) :] == ids
        assert len(prompt) > 2 * len(ids) + 16


@pytest.mark.parametrize(
    ("case", "field"),
    [
        (Case("paged", "ngram", 2, 3), "strategy"),
        (Case("ragged", "eagle", 2, 3), "drafter"),
        (Case("ragged", "ngram", 0, 3), "max_batch"),
        (Case("ragged", "ngram", 2, -1), "k"),
    ],
)
def test_a_bad_case_is_refused_before_anything_runs(case: Case, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = "):
        measured(Case("ragged", "ngram", 2, 3), case)
    with pytest.raises(ConfigError, match=r"drafter = 'model'.*--draft"):
        next(run(Bench(TableModel()), WORK, [Case("ragged", "model", 2, 3)], 2, lambda *args: None))
    with pytest.raises(ConfigError, match="repeats"):
        Bench(TableModel(), repeats=0)


def test_the_command_measures_and_reports(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out, questions = tmp_path / "results.jsonl", tmp_path / "question.jsonl"
    questions.write_text('{"question_id": 81, "turns": ["Once upon a time", "And then?"]}\n{"turns": ["Tom had"]}\n')
    options = ["--batch", "2", "--max-tokens", "6", "--repeats", "1", "--prompts", "2", "--out", str(out)]
    code, said, _ = call("bench", "run", "--strategy", "ragged", "--strategy", "padded", *options)
    assert code == 0
    assert said.count("2/2 texts equal to plain") == 3
    assert call("bench", "run", "--workload", str(questions), "--drafter", "ngram", *options)[0] == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["workload"] for line in lines] == ["prompts"] * 3 + ["question"] * 5
    code, said, _ = call("bench", "report", str(out), "--out", str(tmp_path / "report"))
    assert code == 0
    assert str(tmp_path / "report" / "index.html") in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "paged"], "--strategy = 'paged': unknown; use one of ragged"),
        (["--workload", "prose"], "--workload = 'prose': unknown"),
        (["--workload", "nowhere.jsonl"], "--workload = 'nowhere.jsonl': cannot be read"),
        (["--batch", "0"], "--batch"),
        (["--prompts", "0"], "--prompts"),
        (["--threads", "0"], "--threads"),
        (["--drafter", "oracle"], "--drafter = 'oracle'"),
        (["--clock", "sun"], "--clock = 'sun'"),
        (["--out", "/nowhere/results.jsonl"], "--out = '/nowhere/results.jsonl': cannot be written"),
    ],
)
def test_wrong_usage_names_the_option(call, tmp_path: Path, options: list[str], words: str) -> None:  # type: ignore[no-untyped-def]
    code, _, said = call("bench", "run", "--out", str(tmp_path / "results.jsonl"), *options)
    assert (code, words in said) == (2, True), said


@pytest.mark.parametrize("content", ["", "prose", "[1, 2]", '{"a": 1}', "{"])
def test_a_report_of_something_else_is_refused_by_name(call, tmp_path: Path, content: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "other.jsonl"
    file.write_text(content)
    code, _, said = call("bench", "report", str(file), "--out", str(tmp_path / "report"))
    assert (code, "other.jsonl" in said, "Traceback" in said) == (2, True, False), said


def test_one_run_has_no_spread() -> None:
    assert spread(rate([3.0])) == "one run"
    assert spread(rate([3.0, 4.0, 5.0]), "spread ") == "spread 50%"


@pytest.fixture
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    capsys.readouterr()


def test_the_script_behind_the_figures_runs_widened(quiet: None, tmp_path: Path) -> None:
    """As on a GPU, at shapes that cost nothing."""
    out = tmp_path / "results.jsonl"
    strategies(
        ["--out", str(out), "--widen", "tiny", "--ems-batches", "2", "--exspec-batches", "2", "--tokens", "3",
         "--prompts", "2", "--repeats", "1", "--no-profile"]
    )  # fmt: skip
    strategies(
        ["--out", str(out), "--widen", "tiny", "--parts", "exspec", "--exspec-only", "pool", "--seconds", "0.1",
         "--exspec-batches", "1", "2", "--tokens", "3", "--prompts", "1", "--waves", "2", "--repeats", "1"]
    )  # fmt: skip
    records = read(out)
    assert [(record["name"], record["batch"]) for record in records[14:]] == [("plain", 1), ("pool", 1)]
    assert all(record["identical"] == record["of"] == 2 for record in records)
    assert {record["workload"] for record in records} == {"retold", "prompts"}


def test_the_broken_designs_break_and_the_sound_ones_do_not() -> None:
    target, draft = load(bundled.target()), load(bundled.draft())
    tokenizer: Any = load_tokenizer(bundled.target())
    prompts = [tokenizer.encode(prompt) for prompt in bundled.prompts()[4:8]]
    outcomes = {outcome.design: outcome for outcome in broken.compare(target, draft, prompts, 4, 24, k=4)}
    for name, outcome in outcomes.items():
        assert (outcome.identical == 4) == ("as it should be" in name), name
        assert (outcome.prefix == 1.0) == ("as it should be" in name), name


@pytest.mark.parametrize("module", ["faircopy", "faircopy.cli"])
def test_importing_the_library_imports_nothing_that_measures(module: str) -> None:
    """Measuring, kernel checks and tuning are imported by the commands that need them."""
    code = f"import sys, {module}; print(*[m for m in sys.modules if m.startswith({MEASURING})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_the_verdict_counts_texts_and_those_of_ragged() -> None:
    def record(identical: int, of: int) -> dict[str, Any]:
        return {"identical": identical, "of": of}

    assert verdict([record(1296, 1296)], [record(432, 432)]) == (
        "All 1,296 texts equal plain decoding (432 of them with ragged)"
    )
    assert verdict([record(8, 8), record(7, 8)], [record(8, 8)]) == (
        "15 of 16 texts equal plain decoding (8 of 8 with ragged)"
    )
    assert verdict([record(3, 4)], []) == "3 of 4 texts equal plain decoding"


def test_a_simulated_replica_is_as_fast_as_the_measured_one() -> None:
    for case in fleet.check():
        assert case["tokens_per_s"]["simulated"] == pytest.approx(case["tokens_per_s"]["measured"], rel=0.05)
        assert case["first_ms_p50"]["simulated"] < case["first_ms_p50"]["measured"]


@pytest.mark.parametrize(
    "wrong", ["--sizes 0", "--load 0", "--price nan", "--tick 0", "--requests 0.5", "--check --out x"]
)
def test_a_fleet_that_cannot_be_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fleet.main(wrong.split())
    assert wrong.split()[-2 if "check" not in wrong else 1] in capsys.readouterr().err
