"""The audit: passes what is identical, and names place, tokens and cause of what is not."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from rich.console import Console

from faircopy import LLM, ConfigError, SamplingParams, bundled
from faircopy.audit.margin import judge, rounding
from faircopy.audit.models import audit_models
from faircopy.audit.pace import Pace
from faircopy.audit.report import Difference, Estimate, Finding, Report, Run, Token, print_report
from faircopy.audit.servers import ServerError, audit_servers
from faircopy.layout.base import Cache, Packed
from faircopy.testing import ByteTokenizer, TableModel, cacheless, plain
from faircopy.verify import base
from tests.helpers import random_prompts

PROMPTS = ["one", "a second prompt", "x", "<script>alert(1)</script>"]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5)


def a_target(seed: int = 3) -> TableModel:
    return TableModel(vocab=256, seed=seed, eos=(0,))


def a_draft() -> TableModel:
    draft = a_target()
    draft._table = draft._table + 0.4 * a_target(seed=4)._table
    return draft


def audit(target: Any = None, drafts: Any = None, params: SamplingParams | None = None, **options: Any) -> Report:
    options = {"batches": (1, 4), "ks": (2, 4), "cache_memory": "1MiB", "tokenizer": ByteTokenizer(), **options}
    drafts = [a_draft(), "ngram"] if drafts is None else drafts
    return audit_models(target or a_target(), drafts, PROMPTS, params or SamplingParams(max_tokens=24), **options)


def accept_anything(tokens: Any, parents: Any, choices: list[int], broken: Any) -> tuple[list[int], list[int]]:
    """A verifier that believes every draft's first node."""
    return ([0], [tokens[0], choices[1]]) if tokens else ([], [choices[0]])


class Wobbly(TableModel):
    """After byte 97 two tokens are this far apart, and which one wins depends on how many rows run."""

    def __init__(self, apart: float) -> None:
        super().__init__(vocab=256, seed=3)
        self.wobble = 2 * apart
        self._table[:, 97] = 0.0
        self._table[:, 97, 98], self._table[:, 97, 99] = 9.0, 9.0 - apart

    def forward(self, packed: Packed, cache: Cache) -> torch.Tensor:
        logits = super().forward(packed, cache)
        if packed.wanted.numel() > 1:
            logits[:, 99] += self.wobble
        return logits


class TestModels:
    @pytest.mark.parametrize("params", [SamplingParams(max_tokens=24), SAMPLED], ids=["greedy", "sampled"])
    def test_what_is_exact_passes(self, params: SamplingParams) -> None:
        report = audit(params=params)
        assert report.passed
        assert (report.identical, report.total, report.percentage) == (36, 36, 100.0)
        assert len(report.runs) == 2 * 2 * 2 + 1
        assert {finding.verdict for run in report.runs for finding in run.findings} == {"IDENTICAL"}
        assert all(run.acceptance is not None and run.tokens_per_step for run in report.runs if run.drafter == "table")

    def test_the_last_run_really_preempts(self) -> None:
        last = audit(ks=(4,)).runs[-1]
        assert last.preemptions
        assert last.note.startswith("preempted")
        assert not any(run.preemptions for run in audit(ks=(4,), preemption=False).runs)

    def test_one_prompt_is_enough_for_a_batch_and_for_preemption(self) -> None:
        report = audit_models(
            a_target(), ["none"], ["alone"], SamplingParams(max_tokens=40, ignore_eos=True), batches=(4,),
            cache_memory="1MiB", tokenizer=ByteTokenizer(),
        )  # fmt: skip
        assert report.passed
        assert report.total == 2
        assert report.runs[-1].preemptions

    def test_checkpoints_are_loaded_from_folders(self, checkpoint: Callable[..., str]) -> None:
        seen: list[tuple[int, int, str]] = []
        report = audit_models(
            checkpoint("llama"), [checkpoint("llama", 1), "ngram"], random_prompts(3, 128),
            SamplingParams(max_tokens=12), batches=(3,), ks=(3,), cache_memory="16MiB",
            progress=lambda *step: seen.append(step),
        )  # fmt: skip
        assert report.passed
        assert [run.k for run in report.runs] == [3, 3, 3]
        assert seen[0] == (0, 4, "alone")
        assert seen[-1] == (4, 4, "done")
        assert report.settings["dtype"] == "float32"

    def test_inexact_mode_can_be_audited_too(self, checkpoint: Callable[..., str]) -> None:
        report = audit_models(
            checkpoint("llama"), ["ngram"], random_prompts(4, 128), SamplingParams(max_tokens=24),
            batches=(4,), ks=(4,), exact=False, cache_memory="16MiB",
        )  # fmt: skip
        assert report.total == 8
        assert all(difference.kind == "tie" for _, _, difference in report.differences())

    @pytest.mark.parametrize("params", [SamplingParams(max_tokens=24), SAMPLED], ids=["greedy", "sampled"])
    def test_a_broken_verifier_is_caught(self, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(base, "accept_path", accept_anything)
        report = audit(drafts=[a_target(seed=9)], params=params, batches=(2,), ks=(2,), preemption=False)
        assert not report.passed
        assert report.identical == 0
        finding = report.runs[0].findings[1]
        prompt, tokenizer = PROMPTS[1].encode(), ByteTokenizer()
        want, wrong = (
            plain(cacheless(a_target(seed)), list(prompt), params, context=512, seed=params.seed or 0).tokens[0]
            for seed in (3, 9)
        )
        difference = finding.difference
        assert difference is not None
        assert finding.verdict in ("BUG", "DIFFERENT")  # sampled: top-p may exclude the wrong token altogether
        assert difference.kind == "bug" or not params.greedy
        assert difference.position == 0
        assert difference.expected == Token(tokenizer.decode([want], skip_special_tokens=False), want)
        assert difference.got == Token(tokenizer.decode([wrong], skip_special_tokens=False), wrong)
        if params.greedy:
            best = cacheless(a_target())(list(prompt))[-1].topk(2).values
            assert difference.margin == pytest.approx(float(best[0] - best[1]))

    def test_a_text_that_does_not_stop_is_a_bug(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from faircopy.scheduler import Scheduler

        target = TableModel(vocab=256, seed=3)
        target._table[:, :, 0] = 100.0  # ends at once
        target.eos = (0,)
        stop = Scheduler._stop_reason

        def forget(self: Scheduler, seq: Any, token: int) -> Any:
            seq.stops = frozenset() if seq.steps or seq.drafted or self.policy._batch > 1 else seq.stops
            return stop(self, seq, token)

        monkeypatch.setattr(Scheduler, "_stop_reason", forget)
        report = audit(target, ["ngram"], batches=(2,), ks=(2,), preemption=False)
        difference = report.runs[0].findings[0].difference
        assert difference is not None
        assert (difference.kind, difference.position, difference.expected) == ("bug", 1, None)
        assert "'stop'" in difference.why
        assert "'length'" in difference.why

    def test_a_rounding_tie_is_told_from_a_bug(self) -> None:
        for apart, kind in ((1e-6, "tie"), (0.25, "bug")):
            report = audit_models(
                Wobbly(apart), ["none"], ["a", "za"], SamplingParams(max_tokens=4), batches=(2,), preemption=False,
                cache_memory="1MiB", tokenizer=ByteTokenizer(),
            )  # fmt: skip
            difference = report.runs[0].findings[0].difference
            assert difference is not None
            assert (difference.kind, difference.position) == (kind, 0)
            assert (difference.expected, difference.got) == (Token("b", 98), Token("c", 99))
            assert difference.threshold == pytest.approx(64 * 2**-23 * 9, rel=0.1)
            assert not report.passed  # a tie is an explanation, not an excuse

    def test_a_near_tie_between_other_tokens_explains_nothing(self) -> None:
        scores = torch.tensor([9.0, 9.0 - 1e-6, 3.0])
        assert judge(scores, 0, 1, rounding(scores, torch.float32)).kind == "tie"
        assert judge(scores, 0, 2, rounding(scores, torch.float32)).kind == "bug"
        assert judge(scores.masked_fill(scores < 5, -torch.inf), 0, 2, 1e-3).kind == "unknown"

    def test_a_draft_is_loaded_and_refused_as_llm_does_it(self, checkpoint: Callable[..., str]) -> None:
        options: dict[str, Any] = {"dtype": "float32", "cache_memory": "32MiB"}
        with pytest.raises(ConfigError) as llms:
            LLM(bundled.draft(), draft=checkpoint("llama"), **options)
        with pytest.raises(ConfigError) as audits:
            audit_models(bundled.draft(), [checkpoint("llama")], ["Tom"], SamplingParams(max_tokens=2), **options)
        assert str(audits.value) == str(llms.value)

    def test_wrong_use_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="prompts"):
            audit_models(a_target(), ["ngram"], [])
        with pytest.raises(ConfigError, match="ks = \\(\\): empty"):
            audit(ks=())
        with pytest.raises(ConfigError, match=r"max_batch.*unknown option"):
            audit(max_batch=3)
        with pytest.raises(ConfigError, match="one text per prompt"):
            audit(params=SamplingParams(n=2))
        with pytest.raises(ConfigError, match="distribution"):
            audit(params=SAMPLED, verifier="rejection")


def a_report() -> Report:
    """One tie, one bug, one end, with markup in every place a text can come from."""
    evil = "<script>alert(1)</script>"
    tie = Difference(3, Token(evil, 7), Token(" b", 8), "tie", evil, margin=1e-6, threshold=1e-4, before=evil)
    bug = Difference(0, Token("x"), None, "bug", "bug: [bold]x[/bold]", "character", expected_text=evil)
    runs = [
        Run(evil, 4, 2, [Finding(0, tie), Finding(1)], 1.5, 0.25, 3, 0.1, evil),
        Run("b", 1, None, [Finding(0, bug)]),
    ]
    return Report(f"Audit of {evil}", [evil, "fine"], {"target": evil}, runs)


class TestReport:
    def test_totals(self) -> None:
        report = a_report()
        assert (report.identical, report.total, report.percentage, report.passed) == (1, 3, 33.33, False)
        assert not Report("nothing", [], {}).passed
        many = Run("d", 1, 1, [Finding(n) for n in range(99_999)] + [a_report().runs[1].findings[0]])
        assert Report("nearly", [], {}, [many]).percentage == 99.99  # never rounded up to a pass

    def test_json_round_trip(self) -> None:
        report = a_report()
        assert Report.from_json(report.to_json()) == report
        assert json.loads(report.to_json())["percentage"] == 33.33

    def test_html_is_one_escaped_page(self) -> None:
        html = a_report().to_html()
        assert "<script" not in html
        assert html.count("&lt;script&gt;") > 5
        assert "33.33 % identical" in html
        assert "rounding tie" in html
        for outside in ("http", "src=", "@import", "url("):
            assert outside not in html
        assert "100.00 % identical" in audit(ks=(2,), batches=(2,)).to_html()

    def test_the_terminal_ends_with_the_percentage(self) -> None:
        console = Console(file=io.StringIO(), width=120)
        print_report(a_report(), console)
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert printed.splitlines()[-1] == "33.33 % identical: 1 of 3 texts in 2 runs"
        assert "BUG  prompt 1" in printed
        assert "[bold]x[/bold]" in printed


@dataclass
class Fake:
    """How a pretended server behaves."""

    text: Callable[[str], str] = lambda prompt: f"{prompt} goes on and on"
    second: float = -3.0  # log probability of the second best token
    logprobs: bool = True
    status: int = 200
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, path: str, headers: Any, body: dict[str, Any]) -> tuple[int, Any]:
        if self.status != 200:
            return self.status, {"error": "no"}
        if self.key and headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {"error": "who are you"}
        if path == "/v1/models":
            return 200, {"data": [{"id": "fake"}]}
        self.bodies.append(body)
        if "logprobs" in body and not self.logprobs:
            return 400, {"error": "logprobs are not supported"}
        return 200, {"choices": [self.choice(self.text(body["prompt"]), "logprobs" in body)]}

    def choice(self, text: str, detailed: bool) -> dict[str, Any]:
        words = [word + " " for word in text.split()]
        top = [{word: -0.1, "other ": self.second} for word in words]
        logprobs = {"tokens": words, "top_logprobs": top} if detailed else None
        return {"text": "".join(words), "finish_reason": "length", "logprobs": logprobs}


@contextmanager
def serving(*fakes: Fake) -> Iterator[list[str]]:
    """Pretended servers on loopback, closed at the end."""
    servers = [_serve(fake) for fake in fakes]
    try:
        yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _serve(fake: Fake) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*fake.answer(self.path, self.headers, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*fake.answer(self.path, self.headers, body))

        def reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


def ask(urls: list[str], **options: Any) -> Report:
    with httpx.Client(trust_env=False) as client:  # loopback needs no proxy
        return audit_servers(urls, ["one", "two"], client=client, timeout=5, concurrency=(1, 3), **options)


def other(prompt: str) -> str:
    return "two goes other ways" if prompt == "two" else Fake().text(prompt)


class TestServers:
    def test_an_estimate_comes_first_and_each_run_is_told(self) -> None:
        told: list[Any] = []
        watch = SimpleNamespace(on_estimate=told.append, on_run=told.append)
        with serving(Fake(), Fake()) as urls:
            report = ask(urls, watch=watch)
        assert [type(what) for what in told] == [Estimate, Run, Run]
        assert (told[0].prompts, told[0].runs) == (2, 2) and told[0].seconds_all > 0
        assert told[1:] == report.runs

    def test_equal_servers_pass(self) -> None:
        with serving(Fake(), Fake()) as urls:
            report = ask([urls[0] + "/v1/", urls[1]], max_tokens=7, seed=3)
        assert report.passed
        assert report.total == 4
        assert [run.batch for run in report.runs] == [1, 3]
        assert report.settings["server 2"] == f"{urls[1]}, model fake"

    @pytest.mark.parametrize(
        ("second", "options", "kind"), [(-3.0, {}, "bug"), (-0.2, {}, "tie"), (-3.0, {"temperature": 1.0}, "unknown")]
    )
    def test_different_servers_do_not(self, second: float, options: dict[str, Any], kind: str) -> None:
        with serving(Fake(second=second), Fake(text=other)) as urls:
            report = ask(urls, **options)
        assert (report.identical, report.total) == (2, 4)
        difference = report.runs[1].findings[1].difference
        assert difference is not None
        assert (difference.kind, difference.unit, difference.position) == (kind, "token", 2)
        assert (difference.expected, difference.got) == (Token("on "), Token("other "))
        assert difference.margin == pytest.approx(-0.1 - second)
        assert (difference.before, difference.got_text) == ("two goes ", "other ways ")

    @pytest.mark.parametrize(("second", "kind"), [(-3.0, "bug"), (-0.2, "tie")])
    def test_without_the_others_tokens_characters_are_compared(self, second: float, kind: str) -> None:
        quiet = Fake(text=other, logprobs=False)
        with serving(Fake(second=second), quiet) as urls:
            difference = ask(urls).runs[0].findings[1].difference
        assert difference is not None
        assert (difference.kind, difference.unit, difference.position) == (kind, "character", len("two goes o"))
        assert (difference.expected, difference.got) == (Token("n"), Token("t"))
        assert sum("logprobs" in body for body in quiet.bodies) == 1  # refused once, not asked again

    def test_without_any_tokens_the_cause_is_unknown(self) -> None:
        with serving(Fake(logprobs=False), Fake(text=other, logprobs=False)) as urls:
            difference = ask(urls).runs[0].findings[1].difference
        assert difference is not None
        assert (difference.kind, difference.margin) == ("unknown", None)

    def test_failures_name_url_status_and_remedy(self) -> None:
        with serving(Fake(), Fake(status=503), Fake(key="secret")) as (good, down, locked):
            with pytest.raises(ServerError, match=f"{down}.*503 Service Unavailable.*log") as caught:
                ask([good, down])
            assert caught.value.status == 503
            with pytest.raises(ServerError, match=r"401.*pass api_key="):
                ask([good, locked])
            assert ask([good, locked], api_key="secret").passed
        with pytest.raises(ServerError, match=f"{good}.*cannot be reached.*check the address"):
            ask([good, down])

    def test_wrong_use_is_refused(self) -> None:
        for urls, match in ((["http://a"], "fewer than two"), (["http://a", "b"], "not an http address")):
            with pytest.raises(ConfigError, match=match):
                ask(urls)

    def test_passwords_stay_out_of_reports(self) -> None:
        with serving(Fake(), Fake()) as urls:
            report = ask([urls[0], urls[1].replace("//", "//me:secret@")])
        assert "secret" not in report.to_json() + report.to_html()


@dataclass
class Watcher:
    """Remembers what an audit tells, and presses Ctrl-C after a number of runs."""

    interrupt_after: int | None = None
    estimates: list[Estimate] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def on_estimate(self, estimate: Estimate) -> None:
        self.estimates.append(estimate)

    def on_run(self, run: Run) -> None:
        self.runs.append(run)

    def answers(self, llm: LLM, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """LLM.answers, with a Ctrl-C after the first answer of the run that follows."""
        for answer in ANSWERS(llm, *args, **kwargs):
            yield answer
            if self.interrupt_after is not None and len(self.runs) >= self.interrupt_after:
                raise KeyboardInterrupt


ANSWERS = LLM.answers


def test_an_interruption_keeps_what_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(interrupt_after=2)
    monkeypatch.setattr(LLM, "answers", lambda llm, *a, **k: watcher.answers(llm, *a, **k))
    monkeypatch.setattr("faircopy.audit.models._Audit.decode_alone", undisturbed(watcher))
    report = audit(watch=watcher)
    assert [run.total for run in report.runs] == [4, 4, 1]
    assert report.runs == watcher.runs
    assert report.runs[2].note == "stopped after 1 of 4 texts"
    assert (report.stopped, report.planned, report.passed, report.percentage) == ("interrupted", 9, False, 100.0)
    assert report.summary == "100.00 % identical: 9 of 9 texts in 3 runs; PARTIAL, 3 of 9 runs: interrupted"
    assert Report.from_json(report.to_json()) == report
    assert "PARTIAL" in report.to_html() and "Not passed: interrupted" in report.to_html()
    console = Console(record=True, width=100, file=io.StringIO())
    print_report(report, console)
    assert "PARTIAL, 3 of 9 runs: interrupted" in console.export_text()


def undisturbed(watcher: Watcher) -> Callable[..., None]:
    """decode_alone without Ctrl-C: nothing is compared there."""
    from faircopy.audit.models import _Audit

    original = _Audit.decode_alone

    def decode_alone(self: Any, prompts: Any) -> None:
        after, watcher.interrupt_after = watcher.interrupt_after, None
        original(self, prompts)
        watcher.interrupt_after = after

    return decode_alone


def test_an_interruption_before_anything_is_compared_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(interrupt_after=0)
    monkeypatch.setattr(LLM, "answers", lambda llm, *a, **k: watcher.answers(llm, *a, **k))
    with pytest.raises(KeyboardInterrupt):
        audit(watch=watcher)


def test_a_time_limit_takes_fewer_prompts_and_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher()
    report = audit(seconds=1000.0, watch=watcher)
    assert (report.stopped, report.passed, len(report.runs), len(report.prompts)) == ("", True, 9, 4)
    assert [run.drafter for run in report.runs[:2]] == ["table", "ngram"], "each drafter once before the rest"
    assert "preempt" in report.runs[2].note
    [estimate] = watcher.estimates
    assert (estimate.prompts, estimate.taken, estimate.runs) == (4, 4, 9)
    assert 0 < estimate.seconds_taken == estimate.seconds_all < 1000

    report = audit(seconds=1e-6)
    assert report.stopped == "the time of 1e-06 seconds is over"
    assert len(report.runs) == 1 and report.total >= 1 and report.planned == 9
    assert report.passed, "what was compared is identical"
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="seconds"):
            audit(seconds=seconds)


def test_the_estimate_counts_steps_and_copies() -> None:
    pace = Pace(alone=1.0, together=3.0, batch=5)
    assert pace.seconds(4, 10, []) == 40.0, "the reference, one prompt at a time"
    assert pace.seconds(10, 10, [5]) == 100.0 + 2 * 10 * 3.0
    assert pace.seconds(1, 10, [5]) == 10.0 + 10 * 3.0, "copies fill the batch"
    assert pace.seconds(6, 10, [3]) == 60.0 + 2 * 10 * 2.0
    assert pace.prompts_within(160.0, 32, 10, [5]) == 10
    assert pace.prompts_within(0.1, 32, 10, [5]) == 4, "a few in any case"
    assert pace.prompts_within(0.1, 2, 10, [5]) == 2
