"""Laws of draft heads: counts are the engine's, grids resume, fits find what is there, predictions name their range."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import laws as laws_benchmark
from faircopy import LLM, CheckpointError, ConfigError, bundled, cli
from faircopy.answers import Answer, Completion
from faircopy.config import EngineConfig
from faircopy.costs import Curve
from faircopy.draft_length import BatchLength
from faircopy.drafters.folder import load_head
from faircopy.drafters.trees import Tree
from faircopy.files import exclusive
from faircopy.laws import report as laws_report
from faircopy.laws.acceptance import HeldOutTexts, held_out_texts, measure, noise_keys
from faircopy.laws.costs import Serving, costs_for
from faircopy.laws.fit import Law
from faircopy.laws.plan import GridPlan, name_of, run_plan
from faircopy.laws.plan import _texts as texts_of
from faircopy.laws.plan import _written as written_texts
from faircopy.laws.points import Point, Result, append_result, grid, read_results, refuse_other_settings
from faircopy.laws.predict import Costs, parse_time, predict, training_seconds
from faircopy.laws.run import GridRun
from faircopy.laws.timing import level_times
from faircopy.laws.trees import SmallTree, small_trees
from faircopy.model.loader import load_model, load_stock
from faircopy.train.heads import Teacher
from faircopy.types import Request, SamplingParams, Sequence
from tests.helpers import CPU, engine_of, head_for, load, random_prompts

MAIN = "tree 60, T=0"
NEW = 40


@cache
def written(folder: str, temperature: float) -> tuple[list[list[int]], list[list[int]], HeldOutTexts]:
    """Prompts, what the target writes behind them in the engine, and the same as held-out texts."""
    model = load(folder)
    prompts = random_prompts(5, model.vocab, seed=4)
    engine = engine_of(model, max_batch=8)
    params = SamplingParams(max_tokens=NEW, temperature=temperature, ignore_eos=True)
    seqs = [engine.add(Request(tuple(prompt), params, seed=n)) for n, prompt in enumerate(prompts)]
    while engine.busy:
        engine.step()
    texts = [seq.tokens for seq in seqs]
    teacher = Teacher(load_stock(folder, torch.float32, CPU))
    return prompts, texts, held_out_texts(prompts, texts, teacher, CPU, temperature)


@pytest.mark.parametrize("method", ["scylla", "eagle1"])
@pytest.mark.parametrize(("chain", "temperature"), [(True, 0.0), (False, 0.0), (True, 0.9), (False, 0.9)])
def test_counts_are_the_engines(checkpoint: Callable[..., str], method: str, chain: bool, temperature: float) -> None:
    folder = checkpoint("llama")
    options = {"style": "eagle1"} if method == "eagle1" else {"layers": 2}
    head = head_for(folder, load(folder), "eagle3" if method == "eagle1" else method, **options)
    prompts, texts, held_out = written(folder, temperature)
    nodes = head.levels if chain else 14
    found = measure(head, held_out, nodes, chain)
    assert sum(found.tokens) > 0
    if chain:
        head.tree = Tree  # type: ignore[method-assign, assignment]
    engine = engine_of(load(folder), draft=head, lengths=lambda seq: nodes, max_batch=1)
    for n, prompt in enumerate(prompts):
        longer = SamplingParams(max_tokens=NEW + nodes, temperature=temperature, ignore_eos=True)
        seq = engine.add(Request(tuple(prompt), longer, seed=n))  # near its limit a sequence gets fewer nodes
        engine.step()
        accepted = []
        for _ in range(found.cycles[n]):
            before = len(seq.tokens)
            engine.step()
            accepted.append(len(seq.tokens) - before - 1)
        while engine.busy:
            engine.step()
        assert seq.tokens[: len(texts[n])] == texts[n]
        assert sum(accepted) == found.tokens[n]
        assert len(texts[n]) - head.levels <= len(prompt) + found.tokens[n] + found.cycles[n] < len(texts[n])


def test_noise_is_the_engines() -> None:
    keys = noise_keys([3, 4], 6)
    assert keys.shape == (2, 6) and len(keys.unique()) == 12


def test_the_batch_law_sets_draft_lengths_and_changes_nothing(checkpoint: Callable[..., str]) -> None:
    lengths = BatchLength(lambda batch: 40 / batch - 1, 24, 64)
    seqs = [Sequence(n, Request((1,)), [1]) for n in range(64)]
    assert [lengths.choose(seqs[:b])[0] for b in (1, 2, 8, 16, 32, 64)] == [24, 16, 3, 1, 0, 0]
    assert lengths.lengths == (0, 1, 2, 3, 5, 8, 12, 16, 24) and "24 at batch 1" in lengths.reason
    folder = checkpoint("llama")
    prompts = random_prompts(3, load(folder).vocab, seed=5)
    params, head = SamplingParams(max_tokens=20), head_for(folder, load(folder), "scylla")
    drafted = LLM(load(folder), draft=head, k="law", max_batch=1, cache_memory="8MiB")
    plain = LLM(load(folder), cache_memory="8MiB").generate(prompts, params, progress=False)
    assert [a.token_ids for a in drafted.generate(prompts, params, progress=False)] == [a.token_ids for a in plain]
    assert "by the roofline" in drafted.explain()["draft_length"] and drafted.engine.meter.drafted > 0
    with pytest.raises(ConfigError, match="beside auto"):
        EngineConfig(auto=True, law=True)


def results_of(law: Law, points: list[Point], noise: float = 0.02, target: str = "bundled") -> list[Result]:
    """Heads that follow a law, with cycles of 200 prompts and some training noise."""
    rng = np.random.default_rng(3)
    found = []
    for point in points:
        mean = law(point) + rng.normal(0.0, noise)
        cycles = rng.integers(10, 30, 200)
        kinds = {MAIN: 1.0, "chain 7, T=0": 0.6}
        kinds |= {"tree 4, T=0": 0.5, "tree 16, T=0": 0.8} if point == Point(1 << 20) else {}
        measures = {
            name: {"tokens": rng.poisson(share * mean * cycles).tolist(), "cycles": cycles.tolist()}
            for name, share in kinds.items()
        }
        facts = {"distinct": point.tokens, "answers": 0, "parameters": 1, "loss": 1.0, "measure_seconds": 1.0}
        seconds = 1e-6 * point.tokens * (1 + 0.5 * point.layers)
        place = {"tokens": point.tokens, "layers": point.layers, "seed": point.seed}
        found.append(Result(target=target, **place, **facts, train_seconds=seconds, measures=measures))
    return found


POINTS = grid(1 << 18, 7, (1, 2, 4, 3, 6), (1 << 20, 1 << 23), range(3))
LOG = Law("log", 1.5, 0.3, 0.5)
POWER = Law("power", 4.0, 2.0, 0.3, exponent=0.4)


@cache
def report_of(law: Law, noise: float = 0.02) -> laws_report.MeasureReport:
    """Of the whole grid: fits draw it again some hundred times."""
    return laws_report.report(results_of(law, POINTS, noise), MAIN)


def test_a_target_in_the_present_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert name_of(".") == tmp_path.name == name_of(str(tmp_path)) and name_of("Qwen/Qwen3-8B") == "Qwen3-8B"


def test_a_grid_begins_with_the_text_then_depths_then_seeds() -> None:
    assert POINTS[:8] == [Point(1 << n) for n in range(18, 26)]
    assert {point.layers for point in POINTS[8:16]} == {2, 3, 4, 6} and len(POINTS) == 20
    assert POINTS[16:] == [Point(tokens, 1, seed) for seed in (1, 2) for tokens in (1 << 20, 1 << 23)]


@pytest.mark.parametrize("law", [LOG, POWER], ids=["log", "power"])
def test_the_law_that_was_put_in_is_found(law: Law) -> None:
    report = report_of(law)
    assert report.best.law.form == law.form
    for name in ("constant", "text", "depth", "exponent"):
        found = report.best.coefficient(name)
        width = found.high - found.low
        assert found.low - width / 2 <= getattr(law, name) <= found.high + width / 2
    checks = [check for check in report.checks if check.form == law.form]
    assert {check.point.layers for check in checks} == {1, 4} and sum(check.inside for check in checks) >= 2


def test_intervals_shrink_with_less_noise_and_grow_outside() -> None:
    wide, narrow = (report_of(LOG, noise).joint["log"] for noise in (0.2, 0.01))
    size = [interval.high - interval.low for interval in (f.interval(Point(1 << 21)) for f in (wide, narrow))]
    assert size[0] > 2 * size[1]
    far = narrow.interval(Point(1 << 36))
    assert far.high - far.low > size[1] and not narrow.covers(Point(1 << 36)) and narrow.covers(Point(1 << 21, 5))


def costs(draft: float) -> Costs:
    level = {layers: Curve(((1, draft * layers), (512, draft * layers))) for layers in (1, 2, 6)}
    return Costs(target=lambda seqs, rows: 1e-3 * max(1.0, rows / 64), level=level, train=lambda layers: 1e-6 * layers)


def test_predictions_weigh_what_a_head_costs() -> None:
    results = results_of(LOG, POINTS)
    fits, trees = report_of(LOG).plausible, small_trees(results)
    assert set(trees) == {0, 4, 16, 60} and 0 < trees[4](3.0) < trees[16](3.0) < trees[60](3.0) == pytest.approx(3.0)
    free, dear, useless = (predict(fits, trees, costs(s), 1, 8.0, True).best for s in (1e-9, 2e-4, 1.0))
    assert free.point.layers == 6 and free.nodes == 60
    assert dear.point.layers == 1 and dear.draft_share > 0.3
    assert useless.nodes == 0 and useless.rate == pytest.approx(1000)
    assert free.rate_interval.low < free.rate < free.rate_interval.high
    crowded = predict(fits, trees, costs(1e-9), 64, 8.0, True)
    assert crowded.best.nodes < 60 and crowded.plain == pytest.approx(64e3)


def test_the_second_stage_is_part_of_the_budget(tmp_path: Path) -> None:
    """Training takes 1e-6 seconds a token and layer here, and T counts the first stage's tokens alone."""
    results = [replace(result, answers=1 << 20) for result in results_of(LOG, POINTS)]
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"rows": [{"layers": 1, "rows": rows, "ms": 1e-6 * rows} for rows in (8, 1)]}))
    known, _ = costs_for(Serving(bundled.target(), 64, (1,), "h200", times=times), results)
    assert known.answers == 1 << 20 and known.level[1](4) == pytest.approx(4e-9)
    fits, trees = laws_report.report(results, MAIN).plausible, small_trees(results)
    given = replace(costs(1e-9), answers=1 << 20)
    assert predict(fits, trees, given, 1, 8.0, True).candidates[0].point.tokens == 8_000_000 - (1 << 20)
    instant = [replace(result, train_seconds=0.0) for result in results]
    assert training_seconds(instant)(1) > 0


def test_no_more_tokens_are_accepted_than_drafted() -> None:
    fits = report_of(LOG).plausible
    best = predict(fits, {2: SmallTree(2, 1.0, 0.1)}, costs(1e-9), 1, 1e6, True).best
    assert fits[0].law(best.point) > 3 and 1.9 < best.accepted <= best.accepted_interval.high < 2


def test_small_trees_pass_through_what_was_measured() -> None:
    """The power is fitted to two heads. Better ones fill small trees, worse ones keep the share of the worse one."""
    results = results_of(LOG, POINTS[:2])
    for result, (large, small) in zip(results, ((3.876, 1.27), (4.925, 1.449)), strict=True):
        result.measures.update({MAIN: counted(large), "tree 2, T=0": counted(small)})
    two = small_trees(results)[2]
    assert [two(3.876), two(4.925)] == pytest.approx([1.27, 1.449], abs=1e-6)
    assert 1.7 < two(6.4) < 1.8 and two(7.0) > 1.95 and two(0.0) == 0.0
    assert two(1.938) == pytest.approx(1.27 / 2) and small_trees(results)[60](4.2) == pytest.approx(4.2)


def counted(accepted: float) -> dict[str, list[int]]:
    return {"tokens": [round(1000 * accepted)], "cycles": [1000]}


def test_predictions_say_when_they_extrapolate() -> None:
    results = results_of(LOG, POINTS)
    fits, trees = report_of(LOG).plausible, small_trees(results)
    assert predict(fits, trees, costs(1e-9), 1, 8.0, True).best.warnings == ()
    warnings = predict(fits, trees, costs(1e-9), 1, 1e6, False).best.warnings
    assert "another target" in warnings[0] and "times the largest measured" in warnings[1]


def test_times_are_read_and_refused() -> None:
    assert (parse_time("10h"), parse_time("1.5m"), parse_time("2d")) == (36000.0, 90.0, 172800.0)
    for text in ("", "10", "h", "-1h", "0s", "nanh", "infh"):
        with pytest.raises(ConfigError, match="45m or 10h"):
            parse_time(text)


def test_a_cut_line_is_left_out_and_a_foreign_file_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for result in results_of(LOG, POINTS[:3]):
        append_result(file, result)
    file.write_text(file.read_text() + '{"target": "bund')
    assert [result.point for result in read_results([file])] == POINTS[:3]
    file.write_text(file.read_text() + "garbage}\n")
    with pytest.raises(CheckpointError, match=r"results\.jsonl:4.*laws run"):
        read_results([file])
    file.write_text('{"name": 3}\n')
    with pytest.raises(CheckpointError, match="laws run"):
        read_results([file])


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"tokens": math.inf},
        {"tokens": "many"},
        {"layers": 0},
        {"measures": []},
        {"measures": {MAIN: {"tokens": [1]}}},
        {"measures": {MAIN: {"tokens": [1], "cycles": [1, 1]}}},
        {"measures": {MAIN: {"tokens": [0], "cycles": [0]}}},
    ],
    ids=str,
)
def test_a_result_that_no_law_can_be_fitted_to_is_refused_by_its_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file = tmp_path / "results.jsonl"
    for result in results_of(LOG, POINTS[:2]):
        append_result(file, result)
    append_result(file, replace(result, **wrong))
    with pytest.raises(CheckpointError, match=r"results\.jsonl:3.*laws run"):
        read_results([file])


def test_texts_that_end_before_a_draft_does_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., str]
) -> None:
    """A would be 0 however good a head is."""
    monkeypatch.setattr(LLM, "generate", lambda llm, prompts, params: [Answer(p, p, [short]) for p in prompts])
    monkeypatch.setattr(LLM, "encode", lambda llm, text: [1, 2, 3])
    short = Completion("", [5] * 7, "stop", 0, 0, 1, 0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    plan = GridPlan(target=checkpoint("llama"), data=[], prompts=[prompts], out=tmp_path, seconds=1.0, device="cpu")
    with pytest.raises(ConfigError, match=r"--prompts.*7 tokens or fewer"):
        written_texts(plan)


def test_two_runs_at_once_do_not_train_everything_twice(tmp_path: Path) -> None:
    plan = GridPlan(target=bundled.target(), data=[], prompts=[], out=tmp_path, seconds=1.0, device="cpu")
    with exclusive("--out", tmp_path / "results.jsonl"), pytest.raises(ConfigError, match="another process writes it"):
        run_plan(plan)


def test_text_that_is_too_short_is_refused_by_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"data.npy": 40, "pretrain.npy": 4096}
    monkeypatch.setattr("faircopy.laws.plan.corpus", lambda *given: torch.arange(sizes[given[3].name]))
    plan = GridPlan(target="t", data=[Path("d")], prompts=[], out=tmp_path, seconds=1.0, smallest=4096, length=64)
    for pretrain, problem in (([], "40 tokens are less than the 4096 of --smallest"), ([Path("p")], "64 of --length")):
        with pytest.raises(ConfigError, match=f"--data.*{problem}"):
            texts_of(replace(plan, pretrain=pretrain))
    with pytest.raises(ConfigError, match=r"--prompts = 'none\.jsonl'"):
        written_texts(replace(plan, prompts=[Path("none.jsonl")]))
    sizes |= {"data.npy": 64, "pretrain.npy": 4095}
    with pytest.raises(ConfigError, match=r"--pretrain.*4095 tokens"):
        texts_of(replace(plan, pretrain=[Path("p")]))


def test_heads_that_were_trained_or_measured_otherwise_are_not_mixed_in() -> None:
    known = [replace(result, settings={"lr": 1e-3}) for result in results_of(LOG, POINTS[:3])]
    refuse_other_settings(Path("grid"), known, {"lr": 1e-3, "rows": 4})
    with pytest.raises(ConfigError, match=r"--lr = 0.5: grid has heads with 0.001"):
        refuse_other_settings(Path("grid"), known, {"lr": 0.5})
    fewer = {MAIN: {"tokens": [1, 2], "cycles": [2, 2]}}
    with pytest.raises(ConfigError, match="different prompts"):
        laws_report.report([*known, replace(known[0], measures=fewer)], MAIN)


def test_files_of_two_grids_are_not_one_law() -> None:
    known = [replace(result, settings={"lr": 1e-3}) for result in results_of(LOG, POINTS)]
    assert laws_report.one_target(known) == known
    for results, problem in (
        ([], "no results"),
        ([*known, known[3]], "more than once"),
        ([*known, replace(known[3], seed=9, settings={"lr": 2e-3})], "lr = 0.001 and 0.002"),
    ):
        with pytest.raises(ConfigError, match=problem):
            laws_report.one_target(results)
    with pytest.raises(ConfigError, match="no measure that every head has"):
        laws_report.measures_of([*known, replace(known[3], seed=9, measures={})])
    with pytest.raises(ConfigError, match="no heads of one layer"):
        laws_report.report([result for result in known if result.layers > 1], MAIN)


def test_a_depth_is_not_predicted_from_one_layer() -> None:
    results = results_of(LOG, [*POINTS[:8], Point(1 << 20, 4)])
    assert {check.point.layers for check in laws_report.report(results, MAIN).checks} == {1}


def test_a_fit_of_few_points_is_json() -> None:
    entry = laws_report.as_json(laws_report.report(results_of(LOG, POINTS[:4]), MAIN))
    assert json.loads(json.dumps(entry, allow_nan=False))["one layer"]["power"]["aic"] is None


def test_a_head_without_an_accepted_token_says_nothing_of_smaller_trees() -> None:
    results = results_of(LOG, POINTS[:3])
    nothing = {name: {"tokens": [0], "cycles": [9]} for name in (MAIN, "tree 4, T=0")}
    assert small_trees([*results, replace(results[0], measures=nothing)]) == small_trees(results)


NO_PASSES = '{"rows": [{"target": [], "draft": [], "stepped": false, "steps": [], "layers": 1, "rows": 1, "ms": -1}]}'
NO_ROWS = '{"rows": [{"layers": 1, "rows": 0, "ms": 1.0}]}'


@pytest.mark.parametrize("content", ["[1]", '{"rows": []}', '{"rows": [{"x": 1}]}', "nothing", NO_PASSES, NO_ROWS])
def test_files_of_costs_and_times_that_cannot_be_used_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    for files in ({"costs": file}, {"times": file}):
        with pytest.raises(CheckpointError, match=r"file\.json"):
            costs_for(Serving(bundled.target(), 64, (1,), "h200", **files), results_of(LOG, POINTS[:3]))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["faircopy", "laws", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_the_command_line_runs_resumes_fits_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, prompts, out = tmp_path / "text.txt", tmp_path / "prompts.jsonl", tmp_path / "grid"
    text.write_text(" ".join(bundled.prompts()[:48]))
    prompts.write_text("".join(json.dumps({"prompt": prompt[:40]}) + "\n" for prompt in bundled.prompts()[:3]))
    run = ("run", "--data", str(text), "--prompts", str(prompts), "--out", str(out), "--smallest", "256", "--rows", "2")
    run += ("--length", "64", "--new", "10", "--seeds", "1", "--device", "cpu")

    def append_behind_head(path: Path, result: Result) -> None:
        """A kill between the two must not lose the best head: its result would keep it from being trained again."""
        assert load_head(str(out / "best"), load_model(bundled.target(), None, CPU))
        append_result(path, result)

    with monkeypatch.context() as patched:
        patched.setattr(GridRun, "_expected", lambda run, point: math.inf if run._seconds else 0.0)
        patched.setattr("faircopy.laws.run.append_result", append_behind_head)
        assert call(patched, *run, "--layers", "1", "--budget", "20m") == 0
    begun = read_results([out / "results.jsonl"])
    assert len(begun) == 1 and "left out, no time" in capsys.readouterr().out
    with (out / "results.jsonl").open("a") as lines:
        lines.write('{"target": "bundled", "tok')  # a line that a kill cut
    assert call(monkeypatch, *run, "--layers", "1", "--layers", "2", "--budget", "20m") == 0
    results = read_results([out / "results.jsonl"])
    assert results[: len(begun)] == begun and {result.layers for result in results} == {1, 2}
    assert len({result.point for result in results}) == len(results)
    head = load_head(str(out / "best"), load_model(bundled.target(), None, CPU))
    assert head.config.options["stages"]["tokens"] in {result.tokens for result in results}
    file, picture = str(out / "results.jsonl"), tmp_path / "laws.png"
    for name in ("REPEATS", "CONTEXT"):  # what a level costs is not what is tested
        monkeypatch.setattr(f"faircopy.laws.timing.{name}", 1)
    monkeypatch.setattr("faircopy.laws.costs.level_times", partial(level_times, rows=(1, 2, 8)))
    assert call(monkeypatch, "fit", file, "--plot", str(picture)) == 0
    assert picture.stat().st_size > 1000 and "inside" in capsys.readouterr().out
    assert call(monkeypatch, "fit", file, "--json") == 0
    assert {entry["measure"] for entry in json.loads(capsys.readouterr().out)} >= {MAIN, "chain 7, T=0.8"}
    for where in (("--gpu", "h200"), ()):
        wanted = ("predict", file, "--batch", "1", "--layers", "1", "--layers", "9", "--budget", "1h", "--json", *where)
        assert call(monkeypatch, *wanted, "--plot", str(picture)) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert "D = 9 was not measured" in found["by_layers"][1]["extrapolates"]
    assert call(monkeypatch, "predict", file, "--target-name", "other") == 2
    assert "results are of bundled" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr("faircopy.laws.plan.run_plan", lambda plan: [])
        assert call(patched, *run) == 2
    assert "--budget = '30m': no head was trained" in capsys.readouterr().err
    for wrong in ("--length 8", "--length 512", "--new 7", "--new 600", "--lr nan", "--smallest 200"):
        assert call(monkeypatch, *run, *wrong.split()) == 2
        assert wrong.split()[0] in capsys.readouterr().err


def test_parts_of_a_grid_hold_each_point_once_and_cost_about_the_same() -> None:
    points = grid(1 << 18, 7, [1, 2, 4, 3, 6], [1 << 21, 1 << 23], range(3))
    parts = [laws_benchmark.part_of(points, part, 3) for part in (1, 2, 3)]
    assert sorted(map(str, chain(*parts))) == sorted(map(str, points))
    costs = [sum(map(laws_benchmark._cost, part)) for part in parts]
    assert max(costs) < 1.05 * min(costs)
    assert max(points, key=laws_benchmark._cost) in parts[0]
