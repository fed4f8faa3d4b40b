"""`faircopy batch`: OpenAI's batch format in and out, nothing twice and nothing lost after a kill."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="faircopy[serve] is not installed")

from click.testing import Result
from typer.testing import CliRunner

from faircopy import LLM, SamplingParams, bundled, cli
from faircopy.errors import ConfigError, OutputError, RankError
from faircopy.files import exclusive
from faircopy.server.endpoints import _fingerprint as fingerprint
from faircopy.server.offline import Offline
from faircopy.terminal.batch import Answers
from faircopy.terminal.batch import run as batch_run
from faircopy.terminal.batch_file import BatchFile
from faircopy.testing import ByteTokenizer, TableModel

COMMAND = ["batch", "--threads", "1", "--dtype", "float32"]
KILLED_AFTER_8 = """
import os, signal
from faircopy import cli
from faircopy.terminal.batch_file import BatchFile

add, left = BatchFile.add, iter(range(7, -1, -1))

def add_and_die(file, answer):
    add(file, answer)
    if not next(left):
        os.kill(os.getpid(), signal.SIGKILL)

BatchFile.add = add_and_die
cli.main()
"""
CHAT = [{"role": "user", "content": "Tell me of a dog."}]


def request(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def stories(count: int, tokens: int) -> list[dict[str, Any]]:
    prompts = bundled.prompts()
    return [
        request(f"r{n}", prompt=prompts[n % len(prompts)][: 40 + n % 30], max_tokens=tokens, temperature=n % 2, seed=n)
        for n in range(count)
    ]


def run(requests: Path, answers: Path, *more: str) -> Result:
    return CliRunner().invoke(cli.app, [*COMMAND, "--in", str(requests), "--out", str(answers), *more])


def test_requests_are_answered_and_bad_ones_say_why(tmp_path: Path) -> None:
    lines = [
        *stories(3, 12),
        request("chat", "/v1/chat/completions", messages=CHAT, max_tokens=8, temperature=0, n=2),
        request("wrong", prompt="x", temprature=1),
        request("streamed", prompt="x", stream=True),
        request("model", prompt="x", model="gpt-9"),
        request("named", prompt="x", model="gpt-5", max_tokens=1),
        request("whole id", prompt="x", model=bundled.target(), max_tokens=1),
    ]
    asked = write(tmp_path / "in.jsonl", lines)
    asked.write_text("\ufeff" + asked.read_text())  # as some programs begin a file
    done = run(asked, tmp_path / "out.jsonl", "--name", "gpt-5")
    assert done.exit_code == 1 and "3 requests were refused" in done.stderr
    again = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert again.exit_code == 1 and "3 requests were refused" in again.stderr  # the same, with nothing left to do
    found = {line["custom_id"]: line["response"] for line in read(tmp_path / "out.jsonl")}
    assert len(found) == len(lines)
    assert {name: found[name]["status_code"] for name in ("wrong", "streamed", "model")} == {
        "wrong": 400, "streamed": 400, "model": 404,
    }  # fmt: skip
    assert found["named"]["status_code"] == found["whole id"]["status_code"] == 200
    assert "temperature" in found["wrong"]["body"]["error"]["message"]
    assert len(found["chat"]["body"]["choices"]) == 2
    llm = LLM(bundled.target(), dtype="float32", threads=1, cache_memory="16MiB")
    for line in lines[:3]:
        body = line["body"]
        params = SamplingParams(max_tokens=12, temperature=body["temperature"], seed=body["seed"])
        assert found[line["custom_id"]]["body"]["choices"][0]["text"] == llm.generate(body["prompt"], params)[0].text


def test_a_killed_batch_goes_on_with_nothing_twice_and_nothing_lost(tmp_path: Path) -> None:
    lines, out = stories(64, 24), tmp_path / "out.jsonl"
    requests = write(tmp_path / "in.jsonl", lines)
    arguments = [*COMMAND, "--in", requests, "--out", out, "--batch", "4"]
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER_8, *arguments], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = len(read(out))
    assert kept == 8
    with out.open("a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "r1')  # a line that a kill cut
    again = run(requests, out, "--batch", "16")
    assert again.exit_code == 0 and f"{kept} of 64 requests are already answered" in again.stderr
    answers = read(out)
    assert sorted(line["custom_id"] for line in answers) == sorted(line["custom_id"] for line in lines)
    llm = LLM(bundled.target(), dtype="float32", threads=1, cache_memory="16MiB")
    bodies = [line["body"] for line in lines]
    params = [SamplingParams(max_tokens=24, temperature=body["temperature"], seed=body["seed"]) for body in bodies]
    alone = llm.generate([body["prompt"] for body in bodies], params, progress=False)
    assert texts(answers) == {line["custom_id"]: answer.text for line, answer in zip(lines, alone, strict=True)}
    assert run(requests, out).exit_code == 0 and len(read(out)) == 64  # nothing is left to do


def test_requests_that_come_while_a_run_works_are_left_to_the_next_one(tmp_path: Path) -> None:
    lines = stories(3, 4)
    requests = write(tmp_path / "in.jsonl", lines[:2])
    file = BatchFile(requests, tmp_path / "out.jsonl")
    write(requests, lines)
    assert [line["custom_id"] for line in file.missing()] == ["r0", "r1"] and file.total == 2


def texts(answers: list[dict[str, Any]]) -> dict[str, str]:
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in answers}


def test_what_the_engine_failed_at_is_answered_by_the_next_run(tmp_path: Path) -> None:
    """A step that fails, and an engine that ends: neither is an answer."""
    requests, out = (
        write(tmp_path / "in.jsonl", [request(f"r{n}", prompt=[n], max_tokens=4) for n in range(9)]),
        tmp_path / "out",
    )

    def answers(error: type[Exception] | None) -> Answers:
        llm = LLM(TableModel(), tokenizer=ByteTokenizer(), cache_memory="1MiB", drafter_per_request=True)
        step, left = llm.engine.step, iter(range(6, 0, -1))

        def fail_later() -> Any:
            if error is not None and not next(left, 0):
                raise error("rank", 1, "died", "start again")
            return step()

        llm.engine.step = fail_later  # type: ignore[method-assign]
        return lambda lines: Offline(llm).answers(lines, 2)

    for error, missing in ((RankError, True), (OutputError, True), (None, False)):
        file = BatchFile(requests, out)
        before = file.answered
        assert batch_run(file, answers(error)) is not missing
        assert file.answered > before and (file.answered < 9) is missing and not file.refused
    assert sorted(line["custom_id"] for line in read(out)) == [f"r{n}" for n in range(9)]
    assert {line["response"]["status_code"] for line in read(out)} == {200}


def test_answers_to_a_request_that_has_changed_or_of_another_model_are_not_mixed_in(tmp_path: Path) -> None:
    lines, out = [request("a", prompt=[1], max_tokens=2), request("b", prompt=[2], max_tokens=2)], tmp_path / "out"

    def answered(requests: list[dict[str, Any]], config: dict[str, Any] | None = None, **options: Any) -> bool:
        config = {"cache_memory": "1MiB", "drafter_per_request": True, **(config or {})}
        llm = LLM(TableModel(**options), tokenizer=ByteTokenizer(), **config)
        llm.model.name = f"table {options}"
        return batch_run(
            BatchFile(write(tmp_path / "in.jsonl", requests), out), lambda lines: Offline(llm).answers(lines, 2)
        )

    assert answered(lines[:1])
    with pytest.raises(ConfigError, match=r"out:1.*'a', which has changed"):
        answered([request("a", prompt=[1], max_tokens=3), lines[1]])
    with pytest.raises(ConfigError, match="another target"):
        answered(lines, context=99)
    with pytest.raises(ConfigError, match="order of sums"):
        answered(lines, {"k_groups": True})
    assert answered(lines) and len(read(out)) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "custom_id"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "not served"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2, "twice"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=problem) as refused:
        BatchFile(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert "in.jsonl:" in str(refused.value)


def test_two_runs_at_once_do_not_answer_everything_twice(tmp_path: Path) -> None:
    requests, out = write(tmp_path / "in.jsonl", stories(1, 4)), tmp_path / "out.jsonl"
    with exclusive("--out", out):
        second = run(requests, out)
    assert isinstance(second.exception, ConfigError) and "another process writes it" in str(second.exception)
    assert not out.exists()


def test_answers_to_other_requests_are_not_mixed_in(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", stories(1, 4))
    for line in ('{"custom_id": "other"}', "nonsense"):
        (tmp_path / "out.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigError, match=r"out\.jsonl:1"):
            BatchFile(requests, tmp_path / "out.jsonl")


@pytest.mark.parametrize("ending", ["", "\n"])
@pytest.mark.parametrize(
    "content", [json.dumps(request("r0", prompt="x")), '{"custom_id": ["r0"]}', "notes of mine", "{"]
)
def test_a_file_that_holds_no_answers_is_refused_and_kept(tmp_path: Path, content: str, ending: str) -> None:
    """Also the file of requests itself: they are not taken for answers, and a last line without an end is not cut."""
    requests, other = write(tmp_path / "in.jsonl", [request("r0", prompt="x")]), tmp_path / "other"
    other.write_text(content + ending)
    if (content, ending) == ("{", ""):
        assert BatchFile(requests, other).answered == 0 and other.read_text() == ""  # the beginning of an answer
        return
    with pytest.raises(ConfigError, match="not an answer of a batch"):
        BatchFile(requests, other)
    assert other.read_text() == content + ending


def test_weights_decide_the_tokens_wherever_they_lie(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    folder, others = checkpoint("llama"), checkpoint("llama", 1)
    shutil.copytree(folder, tmp_path / "copy")
    shutil.copytree(others, tmp_path / "one" / "model")
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "cache_memory": "1MiB"}
    found = [fingerprint(LLM(name, **options)) for name in (folder, str(tmp_path / "copy"), others)]
    assert found[0] == found[1] != found[2], "a copy is the same model"
    place = str(tmp_path / "one" / "model")
    before = fingerprint(LLM(place, **options))
    shutil.rmtree(place)
    shutil.copytree(folder, place)
    assert (before, fingerprint(LLM(place, **options))) == (found[2], found[0]), "other weights at the same path"


def test_ranks_are_no_part_of_what_decides_the_tokens() -> None:
    """A file that was begun on two ranks may be finished on four, or by one process with the same order of sums."""
    found = {}
    for name, backend, options in (
        ("one", "eager decoder", {}),
        ("stages", "eager decoder, pipeline of 2", {}),
        ("one, grouped", "eager decoder, sums in K groups, 1 rank", {"k_groups": True}),
        ("two, grouped", "eager decoder, sums in K groups, 2 ranks", {"k_groups": True}),
        ("inexact", "eager decoder", {"exact": False}),
        ("rejection", "eager decoder", {"verifier": "rejection"}),
    ):
        llm = LLM(TableModel(), tokenizer=ByteTokenizer(), cache_memory="1MiB", **options)  # type: ignore[arg-type]
        llm.model.backend = backend
        found[name] = fingerprint(llm)
    assert found["one"] == found["stages"] and found["one, grouped"] == found["two, grouped"]
    assert len(set(found.values())) == 4
