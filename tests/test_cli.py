"""The command line, as a stranger uses it, on the bundled models."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from faircopy import LLM, ConfigError, RequestError, SamplingParams, bundled, cli
from faircopy.audit.models import audit_models
from faircopy.audit.report import Report
from faircopy.errors import OutputError
from faircopy.files import cut_unfinished_line, replace_text
from faircopy.terminal.chat import chat
from faircopy.terminal.demo import choose_prompts, demo
from faircopy.terminal.options import SAMPLING
from faircopy.terminal.prompts import read_prompts
from runs import demo_recording


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
    code, out, _ = call("generate", "Once upon a time", "The dog", "--max-tokens", "8", "--k", "4")
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
                "index", "prompt", "text", "token_ids", "finish_reason", "drafted", "accepted", "seed", "params",
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
    assert json.loads(explained)["backend"] == "eager decoder"
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


def written(file: Path) -> list[dict[str, object]]:
    """The records of a file; each of its lines must be whole."""
    text = file.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def test_an_existing_file_is_refused_resumed_or_replaced(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "a.jsonl"
    ask = ("generate", "Tom", "The dog", "A frog", "--k", "4", "--max-tokens", "3", "--seed", "1", "--out", str(out))
    assert call(*ask)[0] == 0
    complete, lines = written(out), out.read_text().splitlines(keepends=True)
    code, _, err = call(*ask)
    assert code == 2 and "--resume" in err and "--overwrite" in err
    assert re.search(r"--out = '.*/a\.jsonl': exists", err), "the beginning of a long path may be left out"
    assert written(out) == complete, "a refusal changes nothing"

    out.write_text(lines[2] + lines[0][:20])  # out of order, the last line cut as a full disk cuts it
    code, _, err = call(*ask, "--resume")
    assert code == 0 and "1 of 3 prompts are already answered" in err
    assert written(out) == complete
    assert call(*ask, "--resume")[0] == 0, "nothing is missing"
    assert written(out) == complete

    assert call("generate", "A cat", "--max-tokens", "3", "--out", str(out), "--overwrite")[0] == 0
    assert [record["prompt"] for record in written(out)] == ["A cat"]
    assert list(tmp_path.iterdir()) == [out], "no temporary file is left"


def test_a_file_is_not_resumed_with_other_sampling_parameters(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "answers.jsonl"
    ask = ["generate", "Tom had", "Lily saw", "--max-tokens", "4", "--stop", "xyz", "--out", str(out)]
    assert call(*ask)[0] == 0
    assert json.loads(out.read_text().splitlines()[0])["params"] == {"max_tokens": 4, "stop": ["xyz"]}
    assert call(*ask, "--resume")[0] == 0
    code, _, err = call(*ask, "--resume", "--top-k", "3")
    assert code == 2 and "answers.jsonl:1" in err and "made with top_k left out, not 3" in err and "--overwrite" in err
    code, _, err = call("generate", "Tom had", "Lily saw", "--max-tokens", "4", "--out", str(out), "--resume")
    assert code == 2 and "made with stop ['xyz'], not 'left out'" in err


def test_log_probabilities_are_written_as_json(call) -> None:  # type: ignore[no-untyped-def]
    ask = ["generate", "Tom had", "--max-tokens", "3", "--logprobs", "2", "--prompt-logprobs", "0"]
    code, out, _ = call(*ask, "--json")
    record = json.loads(out)
    assert code == 0 and len(record["logprobs"]) == 3 and all(len(one) in (2, 3) for one in record["logprobs"])
    assert record["prompt_logprobs"][0] is None and len(record["prompt_logprobs"][1]) == 1
    code, _, err = call(*ask)
    assert code == 2 and "--logprobs" in err and "--json" in err


def test_a_failed_answer_is_made_again_by_resume(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "a.jsonl"
    ask = ("generate", "Tom", "x " * 600, "--max-tokens", "3", "--out", str(out))
    assert call(*ask)[0] == 1
    assert ["error" in record for record in written(out)] == [False, True]
    code, _, err = call(*ask, "--resume")
    assert code == 1 and "1 of 2 prompts are already answered" in err
    assert ["error" in record for record in written(out)] == [False, True]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ('{"index": 0, "prompt": "another"}\n', ("--resume",), "a.jsonl:1': answers prompt 0, 'another'"),
        ('{"index": 7, "prompt": "Tom"}\n', ("--resume",), "answers prompt 7"),
        ('\n{"broken\n', ("--resume",), "a.jsonl:2': not an answer"),
        ("[1]\n", ("--resume",), "not an answer"),
        ("", ("--resume", "--overwrite"), "give one of the two"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    call, tmp_path: Path, content: str, options: tuple[str, ...], words: str
) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "a.jsonl"
    out.write_text(content)
    code, _, err = call("generate", "Tom", "--out", str(out), *options)
    assert (code, out.read_text()) == (2, content)
    assert words in err
    assert call("generate", "Tom", "--resume")[0] == 2, "--resume without --out"


def test_a_full_disk_is_an_error_by_name_and_leaves_whole_lines(
    call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    room, write = [700], os.write

    def full(file: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(file, content[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr("faircopy.files.os.write", full)
    out = tmp_path / "a.jsonl"
    ask = ("generate", *bundled.prompts()[:6], "--max-tokens", "3", "--out", str(out))
    code, _, err = call(*ask)
    assert code == 1 and "Traceback" not in err
    assert re.search(r"--out = '.*/a\.jsonl': cannot be written \(No space left on device\)", err)
    assert "free some space" in err
    kept = len(written(out))
    assert 0 < kept < 6
    room[0] = 1 << 20
    code, _, err = call(*ask, "--resume")
    assert code == 0 and f"{kept} of 6 prompts are already answered" in err
    assert [record["index"] for record in written(out)] == [0, 1, 2, 3, 4, 5]


def test_a_device_is_written_and_never_replaced(call) -> None:  # type: ignore[no-untyped-def]
    assert call("generate", "Tom", "The dog", "--max-tokens", "2", "--out", "/dev/null", "--overwrite")[0] == 0
    assert Path("/dev/null").is_char_device()
    code, _, err = call("generate", "Tom", "--max-tokens", "2", "--out", "/dev/full")
    assert code == 1 and "--out = '/dev/full': cannot be written (No space left on device)" in err


def test_without_space_a_file_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("faircopy.files.os.fsync", full)
    file = tmp_path / "r.json"
    file.write_text("old")
    with pytest.raises(OutputError, match="as it was before"):
        replace_text("--out", file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("rest", [0, 1, (1 << 16) - 1, 1 << 16, 200_000])
@pytest.mark.parametrize("whole", ["", "one\n", "one\n\ntwo\n"])
def test_a_line_without_its_end_is_cut_off(tmp_path: Path, whole: str, rest: int) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(whole + "x" * rest)
    cut_unfinished_line(file)
    assert file.read_text() == whole


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("generate", "a", "--k", "-1"), 2, "--k = -1"),
        (("generate", "a", "--k=-1"), 2, "--k = -1"),
        (("generate", "a", "--batch", "0"), 2, "--batch = 0"),
        (("generate", "a", "--max-tokens", "0"), 2, "--max-tokens = 0"),
        (("generate", "a", "--temperature", "-1"), 2, "--temperature = -1.0"),
        (("generate", "a", "--logit-bias", "x"), 2, "--logit-bias = 'x': not TOKEN_ID=NUMBER"),
        (("generate", "a", "--top-k", "-2"), 2, "--top-k = -2"),
        (("generate", "a", "--memory", "lots"), 2, "--memory = 'lots'"),
        (("generate", "a", "--min-tokens", "200"), 2, "--min-tokens = 200: above max_tokens = 128"),
        (("train", "tail"), 2, "tail"),
        (("generate", "a", "--strategy", "magic"), 2, "use one of ragged"),
        (("generate", "a", "--dtype", "int3"), 2, "dtype"),
        (("generate", "a", "--bogus"), 2, "bogus"),
        (("generate", "a", "--k", "x"), 2, "--k"),
        (("generate", "--file", "/nowhere.txt"), 2, "/nowhere.txt"),
        (("generate", "a", "--target", "./nowhere"), 2, "--target = './nowhere': no such folder"),
        (("generate", "a", "--draft", "./nowhere"), 2, "--draft = './nowhere': no such folder"),
        (("audit", "a", "--draft", "./nowhere"), 2, "--draft = './nowhere': no such folder"),
        (("audit", "a", "--batch", "0"), 2, "--batch = 0"),
        (("audit", "a", "--url", "localhost:1", "--url", "localhost:2"), 2, "--url = 'localhost:1': not an http"),
        (("audit", "a", "--url", "http://127.0.0.1:9", "--url", "http://127.0.0.1:9"), 1, "cannot be reached"),
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
    for command in ("generate", "chat", "demo", "audit", "train"):
        assert command in out


def test_every_sampling_parameter_is_an_option(call, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    assert {option.field for option in SAMPLING} == set(SamplingParams.names())
    seen: list[SamplingParams] = []

    def stop(llm: LLM, asked: object, params: SamplingParams) -> None:
        seen.append(params)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "answers", stop)
    call("generate", "Tom")
    call(
        "generate", "Tom", "--top-k", "5", "--min-p", "0.1", "--stop", "a b", "--stop", "c", "--stop-token-ids", "7",
        "--ignore-eos", "--repetition-penalty", "1.2", "--presence-penalty", "0.5", "--frequency-penalty", "0.25",
        "--min-tokens", "2", "--bad-words", "dog", "--logit-bias", "42=-5", "--logit-bias", "7=1.5", "--n", "2",
        "--seed", "3", "--temperature", "0.7", "--top-p", "0.9", "--max-tokens", "9",
    )  # fmt: skip
    assert seen[0] == SamplingParams()
    assert seen[1] == SamplingParams(
        top_k=5, min_p=0.1, stop=("a b", "c"), stop_token_ids=(7,), ignore_eos=True, repetition_penalty=1.2,
        presence_penalty=0.5, frequency_penalty=0.25, min_tokens=2, bad_words=("dog",), logit_bias={42: -5.0, 7: 1.5},
        n=2, seed=3, temperature=0.7, top_p=0.9, max_tokens=9,
    )  # fmt: skip


def test_chat_template_and_system_message(call) -> None:  # type: ignore[no-untyped-def]
    ask = ("generate", "Tom had", "--max-tokens", "4", "--json")
    llm = LLM(bundled.target(), cache_memory="64MiB")
    code, out, _ = call(*ask, "--chat", "--memory", "64MiB", "--no-exact")
    answer = llm.chat([{"role": "user", "content": "Tom had"}], SamplingParams(max_tokens=4))[0]
    assert code == 0
    assert (json.loads(out)["prompt"], json.loads(out)["token_ids"]) == ("Tom had", answer.token_ids)
    assert call(*ask, "--chat", "--system", "Be brief.")[0] == 0
    code, _, err = call(*ask, "--system", "Be brief.")
    assert code == 2 and "--system = 'Be brief.': given without --chat" in err


def test_several_samples_are_all_written(call) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = call(
        "generate", "Tom", "--n", "2", "--temperature", "1", "--seed", "1", "--max-tokens", "6", "--json"
    )
    record = json.loads(out)
    assert code == 0 and len(record["outputs"]) == 2
    assert record["outputs"][0]["token_ids"] == record["token_ids"] != record["outputs"][1]["token_ids"]


def test_help_shows_defaults_of_lists_and_no_type_of_flags(call) -> None:  # type: ignore[no-untyped-def]
    for command in (("generate",), ("chat",), ("demo",), ("audit",), ("bench", "run"), ("train", "head"), ()):
        code, out, _ = call(*command, "--help")
        assert code == 0 and "<bool>" not in out, command
    audit = call("audit", "--help")[1]
    assert "2, 4, 8" in audit and "1, 4, 8" in audit
    head, draft = (" ".join(call("train", what, "--help")[1].split()) for what in ("head", "draft"))
    assert "--method" in head and "--hidden" not in head and "0.001" in head
    assert "--hidden" in draft and "--method" not in draft and "0.003" in draft


def test_the_package_runs_as_a_module_and_completes() -> None:
    shown = subprocess.run([sys.executable, "-m", "faircopy", "--version"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (0, "0.1.0\n")
    program = "import sys; sys.argv[1:] = ['--help']; from faircopy.cli import main\ntry: main()\n"
    program += "except SystemExit: print('torch' in sys.modules, 'transformers' in sys.modules)"
    helped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "generate" in helped.stdout and helped.stdout.endswith("False False\n"), "loading torch takes seconds"
    asked = {**os.environ, "_FAIRCOPY_COMPLETE": "complete_bash", "COMP_WORDS": "faircopy ge", "COMP_CWORD": "1"}
    program = "import sys; sys.argv[0] = 'faircopy'; from faircopy.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], env=asked, capture_output=True, text=True, check=False)
    assert "generate" in done.stdout and "audit" not in done.stdout


def test_standard_input_is_read_when_there_is_nothing_else(call, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Tom\n\nThe dog\n")))
    code, out, err = call("generate", "--json", "--max-tokens", "3")
    assert code == 0, err
    assert sorted(json.loads(line)["prompt"] for line in out.splitlines()) == ["The dog", "Tom"]


@pytest.mark.parametrize("content", ["{broken", '{"text": "a"}', '{"turns": []}', '{"prompt": 3}', "[1]"])
def test_a_bad_line_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + content + "\n")
    with pytest.raises(RequestError, match=r"p\.jsonl:2"):
        read_prompts([], file)
    file.write_text('{"prompt": "fine"}\n\n \n' + content + "\n")
    with pytest.raises(RequestError, match=r"p\.jsonl:4"):
        read_prompts([], file)


def test_a_conversation_finds_its_earlier_turns_in_the_cache() -> None:
    known = []
    for reuse in (True, False):
        llm = LLM(bundled.target(), draft=bundled.draft(), cache_memory="64MiB", prefix_reuse=reuse)
        first = "Tell me a story about a dog and a very long walk in the green park by the sea."
        lines = iter([first, "And then?", "/reset", "Hi", "", "/quit"])
        console = Console(record=True, width=100)
        chat(llm, SamplingParams(max_tokens=40), read=lambda prompt, lines=lines: next(lines), console=console)
        shown = [line for line in console.export_text().splitlines() if line.endswith("from the cache)")]
        known.append([int(line.split(", ")[1].split()[0]) for line in shown])
    assert known[1] == [0, 0, 0]
    assert known[0][0] == known[0][2] == 0
    assert known[0][1] >= 32, "the first turn is known in the second"


def test_chat_without_a_template_is_refused_at_once(checkpoint: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        chat(LLM(checkpoint("llama"), cache_memory="32MiB"), SamplingParams(), read=lambda prompt: "hi")


@pytest.mark.parametrize("option", [("generate", "a", "--out"), ("audit", "a", "--html")])
@pytest.mark.parametrize("path", ["/nowhere/x", "/tmp"])
def test_a_file_that_cannot_be_written_is_refused_first(call, option: tuple[str, ...], path: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = call(*option, path)
    assert (code, out) == (2, "")
    assert "cannot be written" in err


def test_the_audit_looks_at_every_prompt_of_the_users_own(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "p.txt"
    file.write_text("".join(f"Tom had {n} boats\n" for n in range(40)))
    small = ("--file", str(file), "--max-tokens", "2", "--batch", "8", "--k", "2", "--draft", "ngram", "--json")
    code, out, _ = call("audit", *small)
    assert (code, len(json.loads(out)["prompts"])) == (0, 40)
    code, out, err = call("audit", *small, "--limit", "3")
    assert (code, len(json.loads(out)["prompts"])) == (0, 3)
    assert "3 of 40 prompts" in err
    assert {f["verdict"] for run in json.loads(out)["runs"] for f in run["findings"]} == {"IDENTICAL"}


def test_an_interrupted_audit_keeps_its_report(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from faircopy.terminal.audit import Shown

    def interrupted(self: Shown, done: int, total: int, name: str) -> None:
        if done == 3:
            monkeypatch.setattr(LLM, "answers", stop)

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Shown, "on_progress", interrupted)
    page = tmp_path / "audit.html"
    small = ("Tom had", "The dog", "--max-tokens", "3", "--batch", "2", "--html", str(page))
    code, out, _ = call("audit", *small)
    assert code == 1
    assert out.count("2 of 2 texts identical") == 2, "verdicts come one by one"
    assert "PARTIAL, 2 of 7 runs: interrupted" in out.replace("\n", " ")
    assert "PARTIAL" in page.read_text()


def test_an_audit_without_options_is_limited_in_time(call, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    limits: list[float | None] = []

    def stop(*args: object, seconds: float | None, **kwargs: object) -> None:
        limits.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("faircopy.audit.models.audit_models", stop)
    for options in ((), ("--seconds", "0"), ("--seconds", "5"), ("--limit", "3"), ("Tom",)):
        assert call("audit", *options)[0] == 1
    assert limits == [60.0, None, 5.0, None, None]


def test_servers_and_models_are_audited_apart(call) -> None:  # type: ignore[no-untyped-def]
    code, _, err = call("audit", "a", "--url", "http://127.0.0.1:9", "--target", "x")
    assert code == 2
    assert "not both" in err


def test_an_interruption_anywhere_is_one_line(call, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("faircopy.build.load_model", interrupted)
    monkeypatch.setattr("faircopy.build._IN_USE", {})  # another test may hold the bundled models
    for command in (("chat",), ("generate", "a"), ("audit",), ("demo",)):
        code, _, err = call(*command)
        assert (code, err.strip().splitlines()[-1]) == (1, "interrupted")


@pytest.mark.parametrize("content", [b"\xff\xfe broken", b"", b"\n \n"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    file = tmp_path / f"p.{suffix}"
    file.write_bytes(content)
    with pytest.raises(RequestError, match=r"p\."):
        read_prompts([], file)


def test_lines_end_where_lines_end(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n'.encode())
    assert read_prompts([], file) == ["a\u2028b", "c"]


def test_half_a_character_harms_no_other_prompt() -> None:
    llm = LLM(bundled.target(), cache_memory="64MiB")
    outs = llm.generate(["Tom", "bad \ud800 x"], SamplingParams(max_tokens=3), errors="return")
    assert [o.error is None for o in outs] == [True, False]


def test_an_interruption_at_the_prompt_is_asked_again() -> None:
    keys = iter(["^C", "", "^C", "^C", "never read"])

    def read(prompt: str) -> str:
        key = next(keys)
        if key == "^C":
            raise KeyboardInterrupt
        return key

    console = Console(record=True, width=100)
    chat(LLM(bundled.target(), cache_memory="64MiB"), SamplingParams(), read=read, console=console)
    assert console.export_text().count("press Ctrl-C again to leave") == 2
    assert list(keys) == ["never read"]


def test_the_end_of_input_ends_a_conversation() -> None:
    def end(prompt: str) -> str:
        raise EOFError

    chat(LLM(bundled.target(), cache_memory="64MiB"), SamplingParams(), read=end, console=Console(quiet=True))


def test_the_demo_shows_costs_and_the_verdict() -> None:
    console = Console(record=True, width=120)
    prompts = choose_prompts()
    assert len({len(p) for p in prompts}) == 8
    assert demo(bundled.target(), bundled.draft(), prompts[:2], 2, 12, console)
    text = console.export_text()
    assert "100.00 % identical" in text
    assert "speculative, k = 2" in text
    assert "try next: faircopy generate" in " ".join(text.split())


def test_the_demo_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_audit(target: str, drafts: list[str], prompts: list[str], *rest: object, **options: object) -> Report:
        return audit_models(target, drafts[:1], prompts[:2], SamplingParams(max_tokens=4), batches=(2,), ks=(2,))

    monkeypatch.setattr("faircopy.terminal.demo.audit_models", short_audit)  # its verdict takes one line
    console = Console(record=True, width=100)
    assert demo(bundled.target(), bundled.draft(), choose_prompts(), 2, 48, console)
    shown = console.export_text().splitlines()
    assert len(shown) <= 38 and max(map(len, shown)) <= 100


def test_the_recording_of_the_demo_shows_every_piece() -> None:
    llm = LLM(bundled.target(), draft=bundled.draft(), k=4, cache_memory="64MiB")
    prompts, pieces, steps = demo_recording.record(llm, choose_prompts()[:2], 48)
    drawn = demo_recording.picture(prompts, pieces, steps, "audit: fine")
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert [text for text in texts if text in ("$ faircopy demo", "audit: fine")] == ["$ faircopy demo", "audit: fine"]
    assert {piece.text.strip() for piece in pieces if piece.text.strip()} <= set(texts)
    assert {piece.drafted for piece in pieces} == {True, False}
    assert llm.engine.tables.held() == 0


def test_the_demo_without_a_draft_shows_plain_decoding(call, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("faircopy.terminal.demo.choose_prompts", lambda: ["Tom had", "The dog saw"])
    code, out, _ = call("demo", "--draft", "none", "--max-tokens", "8")
    assert code == 0
    assert "100.00 % identical" in out and "speculative, k" not in out


def test_the_bundled_pair_keeps_its_word() -> None:
    """At least 2.5 tokens per verify at k = 4, greedy, on prompts neither model was trained on."""
    llm = LLM(bundled.target(), draft=bundled.draft(), k=4, cache_memory="256MiB")
    llm.generate(bundled.prompts()[:24], SamplingParams(max_tokens=64))
    assert llm.metrics()["tokens_per_step"] >= 2.5
    size = sum(file.stat().st_size for file in bundled.folder().rglob("*") if file.is_file())
    assert size <= 32_000_000
