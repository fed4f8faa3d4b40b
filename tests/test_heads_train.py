"""Training heads and drafts: from files to a folder, killed and resumed, and what each refuses."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import heads as bench
from benchmarks import laws as bench_laws
from benchmarks import laws_speed as bench_speed
from faircopy import LLM, ConfigError, SamplingParams, bundled, cli
from faircopy.audit.models import audit_models
from faircopy.drafters.folder import METHODS, load_head, new_head, save_head
from faircopy.drafters.networks.eagle3 import Eagle3
from faircopy.errors import CheckpointError
from faircopy.laws.points import Point, read_results
from faircopy.model.hidden import stock_token_weights
from faircopy.model.loader import load_stock
from faircopy.train.corpus import Answering, corpus, read_documents
from faircopy.train.heads import HeadTask, Teacher, measure_heads
from faircopy.train.llama import Shape, fresh, save_llama
from faircopy.train.loop import Progress, Settings, read_log, train
from faircopy.train.losses import Lesson, known_rows, teaching_of
from faircopy.train.runs import Plan, train_draft, train_head
from faircopy.train.tokenizer import save_tokenizer, train_bpe
from tests.helpers import CPU, load

SHAPE = Shape(vocab=300, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48, context=96)
TEXT = "Once upon a time there was a cat. The cat sat on a mat. The mat was red. The dog saw the cat. " * 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small target with a tokenizer that knows a simple text by heart, so that there is something to guess."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = train_bpe([TEXT], SHAPE.vocab)
    network = fresh(replace(SHAPE, vocab=tokenizer.get_vocab_size()), 1)
    tokens = torch.tensor(tokenizer.encode(TEXT).ids)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for step in range(1000):
        batch = torch.stack([tokens[start : start + 65] for start in range(step % 40, 1400, 350)])
        loss = torch.nn.functional.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if loss.item() < 0.03:
            break
    else:
        pytest.fail(f"after 1,000 steps the target does not know its text: loss {loss.item():.3f}")
    save_llama(network, folder, bos_token_id=0, eos_token_id=0, pad_token_id=1)
    save_tokenizer(tokenizer, folder, SHAPE.context)
    return str(folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def plan_for(target: str, data: Path, out: Path, **changes: object) -> Plan:
    settings = {"steps": 60, "rows": 4, "length": 48, "lr": 5e-3, "log_every": 5, "device": "cpu", **changes}
    return Plan(target, [data], out, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_head_guesses_better_and_serves(target: str, data: Path, tmp_path: Path, method: str) -> None:
    learned = train_head(plan_for(target, data, tmp_path / "head"), method)
    lines = read_log(tmp_path / "head" / "log.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert learned.accuracy is not None and learned.accuracy.top1[0] > 0.5
    assert (tmp_path / "head" / "curves.png").stat().st_size > 1000
    llm = LLM(target, draft=tmp_path / "head", k=4, device="cpu", cache_memory="16MiB")
    (answer,) = llm.generate(["Once upon a time there"], SamplingParams(max_tokens=40))
    (plain,) = LLM(target, device="cpu", cache_memory="16MiB").generate(
        ["Once upon a time there"], SamplingParams(max_tokens=40)
    )
    assert answer.text == plain.text
    assert llm.metrics()["tokens_per_step"] > 1.3


def test_a_distilled_draft_agrees_and_serves(target: str, data: Path, tmp_path: Path) -> None:
    train_draft(plan_for(target, data, tmp_path / "draft", steps=40, lr=1e-2), hidden=32, layers=1)
    lines = read_log(tmp_path / "draft" / "log.jsonl")
    assert lines[-1]["agree"] > lines[0]["agree"] + 0.2
    llm = LLM(target, draft=tmp_path / "draft", k=3, device="cpu", cache_memory="16MiB")
    llm.generate(["Once upon a time there"], SamplingParams(max_tokens=30))
    assert llm.metrics()["tokens_per_step"] > 1.3


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_training_goes_on_with_the_same_losses(
    target: str, data: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"style": "eagle1"} if method == "eagle3" else {}  # that one draws noise
    whole, broken = (
        plan_for(target, data, tmp_path / name, steps=8, log_every=2, checkpoint_every=3, accumulate=2)
        for name in ("whole", "broken")
    )
    train_head(whole, method, **options)
    calls, loss = 0, HeadTask.loss

    def dying(self: HeadTask, batch: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        if calls == 11:  # in the sixth step, two after the last checkpoint
            raise Killed
        return loss(self, batch)

    monkeypatch.setattr(HeadTask, "loss", dying)
    with pytest.raises(Killed):
        train_head(broken, method, **options)
    monkeypatch.setattr(HeadTask, "loss", loss)
    train_head(broken, method, **options)
    logs = [
        [
            {name: value for name, value in line.items() if name != "seconds"}
            for line in read_log(plan.out / "log.jsonl")
        ]
        for plan in (whole, broken)
    ]
    assert logs[0] == logs[1] and len(logs[0]) > 4
    weights = [(plan.out / "model.safetensors").read_bytes() for plan in (whole, broken)]
    assert weights[0] == weights[1]


def test_a_first_stage_is_trained_and_resumed(
    target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "raw.jsonl.gz"
    raw.write_bytes(gzip.compress(json.dumps({"text": TEXT[::-1]}).encode()))
    stages = {"pretrain": [raw], "pretrain_steps": 6, "steps": 4, "checkpoint_every": 2, "log_every": 1}
    whole, broken = (plan_for(target, data, tmp_path / name, **stages) for name in ("whole", "broken"))
    train_head(whole, "scylla", layers=2)
    loss = HeadTask.loss
    for deaths in (4, 5):  # in the first stage's fourth step, then in the second stage's third one
        calls = iter(range(1, 100))

        def dying(self: HeadTask, batch: torch.Tensor, calls: Any = calls, deaths: int = deaths) -> object:
            if next(calls) > deaths:
                raise Killed
            return loss(self, batch)

        monkeypatch.setattr(HeadTask, "loss", dying)
        with pytest.raises(Killed):
            train_head(broken, "scylla", layers=2)
    monkeypatch.setattr(HeadTask, "loss", loss)
    train_head(broken, "scylla", layers=2)
    files = [[(plan.out / name).read_bytes() for name in ("model.safetensors",)] for plan in (whole, broken)]
    assert files[0] == files[1]
    for name, count in (("pretrain.jsonl", 6), ("log.jsonl", 4)):
        assert [line["step"] for line in read_log(broken.out / name)] == [*range(1, count + 1)]
    options = json.loads((broken.out / "config.json").read_text())["options"]
    assert options["layers"] == 2
    assert options["stages"] == {
        "pretrain_tokens": 6 * 4 * 49,
        "tokens": 4 * 4 * 49,
        "parameters": load_head(str(broken.out), load(target)).size,
    }


def test_a_folder_of_another_run_is_not_gone_on_with(target: str, data: Path, tmp_path: Path) -> None:
    plan = plan_for(target, data, tmp_path / "head", steps=2)
    train_head(plan, "medusa")
    with pytest.raises(ConfigError, match="a run with method = 'medusa' was begun there"):
        train_head(plan, "clover")


def test_prompts_are_answered_by_the_target_once(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "The cat"}\n{"turns": ["The dog", "and then?"]}\n{"text": "A mat was red."}\n')
    documents = read_documents([file])
    assert (documents.texts, documents.prompts) == (["A mat was red."], ["The cat", "The dog"])
    how = Answering(max_tokens=12, device="cpu")
    tokens = corpus(target, [file], how, tmp_path / "tokens.npy").tolist()
    llm = LLM(target, device="cpu", cache_memory="16MiB")
    for answer in llm.generate(["The cat", "The dog"], SamplingParams(max_tokens=12)):
        row = answer.prompt_token_ids + answer.token_ids
        assert any(tokens[n : n + len(row)] == row for n in range(len(tokens)))
    other = tmp_path / "other.txt"
    other.write_text("The dog was red.")
    with monkeypatch.context() as killed:
        killed.setattr("numpy.save", lambda *args: sys.exit("killed"))
        with pytest.raises(SystemExit):
            corpus(target, [other], how, tmp_path / "tokens.npy")
    assert not (tmp_path / "tokens.json").exists()  # what the file of tokens holds then is not known
    assert corpus(target, [file], how, tmp_path / "tokens.npy").tolist() == tokens
    monkeypatch.setattr(LLM, "generate", lambda *args: pytest.fail("answered twice"))
    assert corpus(target, [file], how, tmp_path / "tokens.npy").tolist() == tokens
    (tmp_path / "tokens.json").write_text('{"ke')  # a kill cut it
    assert corpus(target, [other], how, tmp_path / "tokens.npy").tolist() != tokens


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps": 0}, "--steps = 0: below 1"),
        ({"lr": float("nan")}, "--lr = nan: not a learning rate"),
        ({"length": 3}, "below 16"),
        ({"precision": "int4"}, "use one of auto"),
        ({"rows": 4000}, "less than one batch"),
        ({"data": []}, "no files given"),
        ({"data": [Path("nowhere.txt")]}, "cannot be read"),
        ({"data": [Path("pyproject.toml")]}, "neither .txt nor .jsonl"),
        ({"out": Path("pyproject.toml/no")}, "cannot be written"),
        ({"target": "./nowhere"}, "no such folder"),
        ({"pretrain_steps": 3}, "given without --pretrain"),
        ({"pretrain": [Path("tests/nowhere.txt.gz")]}, "cannot be read"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(
    target: str, data: Path, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    plan = replace(plan_for(target, data, tmp_path / "out"), **changes)
    with pytest.raises((ConfigError, CheckpointError), match=problem):
        train_head(plan, "clover")


def test_wrong_methods_levels_and_lines_are_named(target: str, data: Path, tmp_path: Path) -> None:
    plan = plan_for(target, data, tmp_path / "out")
    with pytest.raises(ConfigError, match="use one of medusa"):
        train_head(plan, "magic")
    with pytest.raises(ConfigError, match="1 to 16"):
        train_head(plan, "clover", levels=40)
    with pytest.raises(ConfigError, match="clover has a fixed number of layers"):
        train_head(plan, "clover", layers=2)
    with pytest.raises(ConfigError, match="another size"):
        train_draft(plan, hidden=30)
    bad = tmp_path / "bad.jsonl"
    for line, problem in (("{no", "bad.jsonl:1"), ('{"words": 1}', "neither 'text'"), ("", "no text in it")):
        bad.write_text(line)
        with pytest.raises(ConfigError, match=problem):
            read_documents([bad])


def teacher_of(target: str) -> Teacher:
    return Teacher(load_stock(target, torch.float32, CPU))


def test_levels_are_taught_the_tokens_they_are_about(target: str) -> None:
    """Row t of level j against the token at t + 1 + j; a head that is the target itself would be right."""
    teacher, tokens = teacher_of(target), torch.arange(20)[None] % 7
    lesson = teacher.lesson(tokens, (3,))
    assert torch.equal(lesson.states[:, 0], torch.zeros_like(lesson.states[:, 0]))
    assert lesson.states.shape == (1, 20, 32)
    for level in (0, 2):
        teaching = teaching_of(lesson, level)
        assert torch.equal(teaching.labels, tokens[:, 2 + level :])
        assert torch.equal(teaching.logits, lesson.logits[:, 1 + level : -1])
        head = new_head("clover", target, stock_token_weights(teacher.stock))
        guess = [*head.unroll(lesson.states, tokens, level + 1)][-1]
        assert known_rows(guess).logits.shape == teaching.logits.shape


def test_a_level_never_sees_the_future(target: str) -> None:
    """Changing a token changes no guess that stands before it."""
    teacher = teacher_of(target)
    tokens = torch.randint(5, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 15:] = (changed[0, 15:] + 7) % 50
    for method in METHODS:
        head = new_head(method, target, stock_token_weights(teacher.stock)).eval()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            pairs = zip(
                *(head.unroll(teacher.lesson(t, head.wants).states, t, 3) for t in (tokens, changed)), strict=True
            )
            for level, (a, b) in enumerate(pairs):
                torch.testing.assert_close(a.logits[:, : 15 - level], b.logits[:, : 15 - level])


def test_a_head_over_fewer_tokens_is_made_saved_and_loaded(target: str, tmp_path: Path) -> None:
    """EAGLE-3's own vocabulary; folders written before the option had this name say `words`."""
    teacher = teacher_of(target)
    head = new_head("eagle3", target, stock_token_weights(teacher.stock), levels=2, draft_vocab=16)
    assert isinstance(head, Eagle3)
    head.keep_frequent(torch.arange(head.vocab))
    save_head(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["options"].pop("draft_vocab") == 16
    model = load(target)
    for options in ({"draft_vocab": 16}, {"words": 16}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "options": {**config["options"], **options}}))
        loaded = load_head(str(tmp_path), model)
        assert isinstance(loaded, Eagle3)
        assert loaded.output.out_features == 16
        assert loaded.words_kept.tolist() == list(range(head.vocab - 16, head.vocab))


def test_accuracy_counts_ranks(target: str) -> None:
    teacher = teacher_of(target)
    head = new_head("medusa", target, stock_token_weights(teacher.stock), levels=2)
    tokens = torch.randint(5, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    accuracy = measure_heads(head, teacher, [tokens])
    lesson: Lesson = teacher.lesson(tokens, head.wants)
    own = lesson.logits[:, :-2].argmax(-1)  # untrained, level 0 says what the target said of the token before
    wanted = lesson.logits[:, 1:-1].argmax(-1)
    assert accuracy.top1[0] == pytest.approx(float((own == wanted).float().mean()))
    assert accuracy.top5[0] == pytest.approx(sum(accuracy.ranks[0][:5]))


def test_mixed_precision_trains(target: str, data: Path, tmp_path: Path) -> None:
    learned = train_head(plan_for(target, data, tmp_path / "head", precision="bfloat16", steps=12), "eagle3", levels=3)
    assert learned.progress.loss < 20


def test_the_comparison_of_heads_runs_and_resumes(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--target", target, "--out", str(tmp_path), "--work", str(tmp_path / "work"), "--device", "cpu", "--steps", "2",
        "--rows", "2", "--length", "999", "--own-rows", "16", "--own-length", "90", "--own-seconds", "0", "--new", "8",
        "--measured", "2", "--accept-batch", "2", "--batches", "2", "--memory", "16MiB", "--draft-hidden", "16",
        "--keep", "clover",
    ]  # fmt: skip
    bench.main(arguments)
    rows = json.loads((tmp_path / "heads.json").read_text())["rows"]
    kinds = Counter(row["kind"] for row in rows)
    trees = 2 * len(bench.VARIANTS) + len(bench.OWN) + len(bench.COMPARED)
    assert kinds == {"accuracy": len(bench.VARIANTS), "acceptance": trees, "speed": 10, "exact": 18}
    assert all(row["identical"] == row["of"] for row in rows if row["kind"] == "exact")
    bench.main(arguments)
    assert len(json.loads((tmp_path / "heads.json").read_text())["rows"]) == len(rows), "nothing is done twice"
    capsys.readouterr()
    bench.main(["--show", str(tmp_path / "heads.json")])
    assert "clover - decoder - regression" in capsys.readouterr().out


def test_the_grid_of_laws_runs_resumes_and_serves(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("REPEATS", "CONTEXT"):  # what a level costs is not what is tested
        monkeypatch.setattr(f"faircopy.laws.timing.{name}", 1)
    text, questions, given = tmp_path / "raw.jsonl", tmp_path / "questions.jsonl", tmp_path / "given.npz"
    text.write_text(json.dumps({"text": TEXT}) + "\n")
    asked = [("qa", "the cat"), ("writing", "the dog"), ("qa", "a mat")]
    lines = [json.dumps({"category": task, "turns": [f"Once upon a time {words} sat"]}) for task, words in asked]
    questions.write_text("\n".join(lines))
    sizes = ["--target", target, "--device", "cpu", "--length", "48", "--rows", "2", "--longest", "40", "--new", "20"]
    files = ["--prepare", str(given), "--text", str(text), "--shares", "1", "--prompts", str(questions)]
    bench_laws.main([*sizes, *files, "--text-tokens", "1200"])
    assert "3 prompts" in capsys.readouterr().out
    sizes += ["--own-rows", "24", "--own-length", "60", "--own-seconds", "0", "--prompts-wanted", "6", "--lr", "5e-3"]
    sizes += ["--smallest", "192", "--doublings", "2", "--budgets", "0", "--depths", "1", "2", "--seeds", "2"]
    sizes += ["--answer-tokens", "300", "--answer-length", "24", "--continued", "4"]
    for name, more in (("own", []), ("given", ["--given", str(given), "--own-rows", "150"])):
        out = str(tmp_path / name)
        bench_laws.main([*sizes, *more, "--out", out, "--minutes", "0.26"])
        bench_laws.main([*sizes, *more, "--out", out, "--minutes", "5"])
        results = read_results([tmp_path / name / "results.jsonl"])
        assert [result.point for result in results].count(Point(192, 2)) == 1 and len(results) == 5
        assert {result.answers > 0 for result in results} == {name == "given"}
        assert len(json.loads((tmp_path / name / "times.json").read_text())["rows"]) == 20
    grid = str(tmp_path / "given")
    arguments = ["--target", target, "--given", str(given), "--grid", grid, "--work", grid, "--device", "cpu"]
    arguments += ["--train-seconds", "1", "--rows", "2", "--length", "40", "--batches", "1", "--new", "8"]
    bench_speed.main([*arguments, "--prompts", "2", "--memory", "8MiB", "--out", str(tmp_path / "speed.json")])
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert {row["drafter"] for row in rows} == {"plain", "scylla", "eagle3", "n-gram"}
    assert {row["task"] for row in rows} == {"qa", "mt_bench"}
    assert all(row["identical"] == row["of"] for row in rows)


def test_progress_is_watched(target: str) -> None:
    seen: list[Progress] = []
    teacher = teacher_of(target)
    task = HeadTask(new_head("clover", target, stock_token_weights(teacher.stock)), teacher)

    class Same:
        def batch(self, index: int) -> torch.Tensor:
            return torch.arange(40)[None] % 9

    train(task, Same(), Settings(steps=2), Path(target) / "log.jsonl", watch=seen.append)
    assert len(seen) == 2


def test_methods_are_the_documented_ones() -> None:
    text = (Path(__file__).parents[1] / "docs" / "drafters.md").read_text()
    for method in METHODS:
        assert f"`{method}`" in text


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["faircopy", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_the_command_line_trains_and_uses_a_head(
    target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (
        "--target",
        target,
        "--data",
        str(data),
        "--steps",
        "3",
        "--rows",
        "2",
        "--length",
        "32",
        "--device",
        "cpu",
    )
    head, draft = str(tmp_path / "head"), str(tmp_path / "draft")
    assert call(monkeypatch, "train", "head", "--method", "eagle3", "--out", head, *common, str(data)) == 0
    assert json.loads((tmp_path / "head" / "tokens.json").read_text())["texts"] == 2
    assert "tokens ahead" in capsys.readouterr().out
    assert call(monkeypatch, "train", "draft", "--hidden", "32", "--layers", "1", "--out", draft, *common) == 0
    for folder in (head, draft):
        arguments = (
            "generate",
            "The cat",
            "--target",
            target,
            "--draft",
            folder,
            "--max-tokens",
            "4",
            "--device",
            "cpu",
        )
        assert call(monkeypatch, *arguments) == 0
    assert call(monkeypatch, "train", "head", "--method", "magic", "--out", head, *common) == 2
    assert "use one of medusa" in capsys.readouterr().err
    assert call(monkeypatch, "generate", "The cat", "--draft", head, "--max-tokens", "4") == 2
    assert f"a head for {target}, not for" in capsys.readouterr().err


def test_the_bundled_head_keeps_its_word() -> None:
    params, prompts = SamplingParams(max_tokens=24), bundled.prompts()[:4]
    llm = LLM(bundled.target(), draft=bundled.named("clover"), k=4, cache_memory="64MiB", device="cpu")
    plain = LLM(bundled.target(), cache_memory="64MiB", device="cpu").generate(prompts, params, progress=False)
    assert [a.token_ids for a in llm.generate(prompts, params, progress=False)] == [a.token_ids for a in plain]
    assert llm.metrics()["tokens_per_step"] > 1.5
    assert bundled.named("ngram") == "ngram" and bundled.named(None) == bundled.draft()
    report = audit_models(
        bundled.target(), [bundled.named("clover")], prompts[:2], params, batches=(2,), ks=(3,), device="cpu"
    )
    assert report.passed and report.runs[-1].preemptions > 0
