"""The command line, as a stranger uses it, on the bundled models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from faircopy import LLM, RequestError, SamplingParams, bundled, cli
from faircopy.terminal.chat import chat
from faircopy.terminal.demo import choose_prompts, demo
from faircopy.terminal.prompts import read_prompts


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    """Exit code, output and error output of one call."""
    monkeypatch.setattr(sys, "argv", ["faircopy", *args])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return lambda *args: run(capsys, monkeypatch, *args)


def test_generate_answers_its_arguments(call) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = call("generate", "Once upon a time", "The dog", "--max-tokens", "8")
    assert code == 0
    assert out.count("drafts accepted") == 2
    assert "Once upon a time, there was" in out


def test_json_lines_have_the_promised_fields_and_do_not_depend_on_the_draft(call) -> None:  # type: ignore[no-untyped-def]
    texts = []
    for draft in ("none", "ngram", bundled.draft()):
        code, out, _ = call(
            "generate", "Tom had", "A frog", "--max-tokens", "12", "--json", "--draft", draft, "--temperature", "0.9",
            "--top-p", "0.95", "--seed", "5",
        )  # fmt: skip
        records = sorted((json.loads(line) for line in out.splitlines()), key=lambda r: r["index"])
        assert code == 0
        for record in records:
            assert set(record) == {
                "index", "prompt", "text", "token_ids", "finish_reason", "drafted", "accepted", "seed",
            }  # fmt: skip
        texts.append([(r["text"], r["token_ids"]) for r in records])
    assert texts[0] == texts[1] == texts[2]


def test_files_and_out(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"prompt": "Tom had"}\n\n{"question_id": 1, "turns": ["The dog", "And then?"]}\n')
    out = tmp_path / "a.jsonl"
    code, printed, explained = call(
        "generate", "A frog", "--file", str(questions), "--out", str(out), "--max-tokens", "4", "--explain"
    )
    assert (code, printed) == (0, "")
    assert json.loads(explained)["drafter"] == "ModelDrafter"
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["A frog", "Tom had", "The dog"]


def test_an_interruption_keeps_what_is_finished(
    call,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    answers = LLM.answers

    def interrupted(self: LLM, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
        yield next(answers(self, *args, **kwargs))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "answers", interrupted)
    out = tmp_path / "kept.jsonl"
    code, _, err = call("generate", "Tom", "The dog", "--max-tokens", "4", "--out", str(out))
    assert code == 1
    assert "1 of 2 answers are kept" in err
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("generate", "a", "--k", "-1"), 2, "k = -1"),
        (("generate", "a", "--temperature", "-1"), 2, "temperature"),
        (("generate", "a", "--strategy", "magic"), 2, "use one of ragged"),
        (("generate", "a", "--dtype", "int3"), 2, "dtype"),
        (("generate", "a", "--bogus"), 2, "bogus"),
        (("generate", "a", "--k", "x"), 2, "--k"),
        (("generate", "--file", "/nowhere.txt"), 2, "/nowhere.txt"),
        (("generate", "a", "--target", "./nowhere"), 1, "no such folder"),
        (("generate", "x " * 600), 1, "leaves no room"),
        (("nonsense",), 2, "nonsense"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_wrong_usage_is_two_and_a_failed_job_is_one(call, args: tuple[str, ...], code: int, words: str) -> None:  # type: ignore[no-untyped-def]
    got, out, err = call(*args)
    assert got == code
    assert words in (out + err).replace("\n", "")
    assert "Traceback" not in err


def test_version_and_help(call) -> None:  # type: ignore[no-untyped-def]
    assert call("--version")[:2] == (0, "0.1.0\n")
    code, out, _ = call("--help")
    assert code == 0
    for command in ("generate", "chat", "demo", "audit"):
        assert command in out


def test_standard_input_is_read_when_there_is_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "faircopy.cli", "generate", "--json", "--max-tokens", "3"],
        input="Tom\n\nThe dog\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line)["prompt"] for line in done.stdout.splitlines()) == ["The dog", "Tom"]


@pytest.mark.parametrize("content", ["{broken", '{"text": "a"}', '{"turns": []}', '{"prompt": 3}', "[1]"])
def test_a_bad_line_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + content + "\n")
    with pytest.raises(RequestError, match=r"p\.jsonl:2"):
        read_prompts([], file)


def test_a_conversation_remembers_and_computes_only_what_is_new() -> None:
    llm = LLM(bundled.target(), draft=bundled.draft(), memory="64MiB")
    first = "Tell me a story about a dog and a very long walk in the green park by the sea."
    lines = iter([first, "And then?", "/reset", "Hi", "", "/quit"])
    console = Console(record=True, width=100)
    chat(llm, SamplingParams(max_tokens=40), read=lambda prompt: next(lines), console=console)
    counts = [
        tuple(int(word) for word in line.replace("(", " ").split() if word.isdigit())
        for line in console.export_text().splitlines()
        if line.endswith("computed)")
    ]
    assert len(counts) == 3
    prompt = len(llm.chat_prompt([{"role": "user", "content": "And then?"}]))
    assert counts[1][1] < prompt + 60 + 4 * 40, "the first turn was not fed again"


def test_the_end_of_input_ends_a_conversation() -> None:
    def end(prompt: str) -> str:
        raise EOFError

    chat(LLM(bundled.target(), memory="64MiB"), SamplingParams(), read=end, console=Console(quiet=True))


def test_the_demo_shows_costs_and_the_verdict() -> None:
    console = Console(record=True, width=120)
    prompts = choose_prompts()
    assert len({len(p) for p in prompts}) == 8
    assert demo(bundled.target(), bundled.draft(), prompts[:2], 2, 12, console)
    text = console.export_text()
    assert "100.00 % identical" in text
    assert "speculative, k = 2" in text


def test_the_bundled_pair_keeps_its_word() -> None:
    """At least 2.5 tokens per verify at k = 4, greedy, on prompts neither model was trained on."""
    llm = LLM(bundled.target(), draft=bundled.draft(), k=4, memory="256MiB")
    llm.generate(bundled.prompts()[:24], SamplingParams(max_tokens=64))
    assert llm.metrics()["tokens_per_step"] >= 2.5
    size = sum(file.stat().st_size for file in bundled.folder().rglob("*") if file.is_file())
    assert size <= 32_000_000
