"""Audits models: whatever the drafter, k, batch or memory, is every text the one the target writes alone?"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from faircopy.audit.margin import first_difference, margin_at
from faircopy.audit.pace import measure_pace
from faircopy.audit.report import Difference, Estimate, Finding, Report, Run, Token, Watch, ending, versions
from faircopy.build import load_draft
from faircopy.config import EngineConfig, refuse_unknown
from faircopy.drafters.base import Drafter
from faircopy.drafters.heads import Head
from faircopy.errors import ConfigError
from faircopy.layout.base import kv_bytes_per_token
from faircopy.llm import LLM, Answer, Completion, Prompt
from faircopy.model.base import Model
from faircopy.types import SamplingParams

Draft = str | os.PathLike[str] | Model | Head | Drafter  # a path, "ngram", "none", or the thing itself
Progress = Callable[[int, int, str], None]  # runs done, runs in all, the run that begins


_PAGE = 4  # tokens per page of the starved run: small pages run out often
_SLACK = 8  # a text that fails to stop must have room to show it
_AFTER = 24  # tokens shown from a difference on


def audit_models(
    target: str | os.PathLike[str] | Model,
    drafts: Seq[Draft],
    prompts: Seq[Prompt],
    params: SamplingParams | None = None,
    *,
    batches: Seq[int] = (1, 4, 8),
    ks: Seq[int] = (2, 4, 8),
    preemption: bool = True,
    seconds: float | None = None,
    watch: Watch | None = None,
    progress: Progress | None = None,
    **llm_options: Any,
) -> Report:
    """Decode every prompt alone without a draft, then in every other way, and compare.

    seconds: about how long it may take. As many prompts are taken as an estimate allows, runs that differ most come
    first, and what does not fit is left out; the report says so. watch: told the estimate and each run; with it, Ctrl-C
    returns what was compared so far, marked as interrupted, once there is something.
    Further options are LLM's (dtype, device, exact, tokenizer, ...). The target is loaded once.
    """
    _check(prompts, batches, ks, params, seconds, llm_options)
    tell = progress or (lambda done, total, name: None)
    # a page shared between prompts would already be company
    alone = LLM(target, **{**llm_options, "max_batch": 1, "prefix_reuse": False})
    plans = _plans([_load_draft(alone, draft) for draft in drafts], batches, ks, preemption)
    audit = _Audit(alone, _seeded(params or SamplingParams()), llm_options)
    taken = list(prompts)
    if seconds is not None:
        plans = _most_different_first(plans)
        tell(0, len(plans) + 1, "estimating")
        taken = taken[: audit.estimate(taken, plans, seconds, watch)]
    stop = math.inf if seconds is None else time.perf_counter() + seconds
    tell(0, len(plans) + 1, "alone")
    audit.decode_alone(taken)
    report = Report(f"Audit of {alone.model.name}", audit.shown, audit.settings(), planned=len(plans))
    for done, plan in enumerate(plans, 1):
        tell(done, len(plans) + 1, plan.name)
        _add_run(report, audit, plan, stop, watch)
        if time.perf_counter() >= stop and done < len(plans) and not report.stopped:
            report.stopped = f"the time of {seconds:g} seconds is over"
        if report.stopped:
            break
    tell(len(report.runs) + 1, len(plans) + 1, "done")
    return report


def _add_run(report: Report, audit: _Audit, plan: _Plan, stop: float, watch: Watch | None) -> None:
    """Compare once more. With a watch, Ctrl-C keeps what was compared and marks the report."""
    try:
        run = audit.run(plan, stop)
    except _Interrupted as interruption:
        if watch is None or (not report.runs and interruption.run is None):
            raise KeyboardInterrupt from None
        run, report.stopped = interruption.run, "interrupted"
    if run is not None:
        report.runs.append(run)
        if watch is not None:
            watch.on_run(run)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The circumstances of one run."""

    drafter: str
    draft: Model | Head | Drafter | str | None
    batch: int
    k: int
    starved: bool = False  # so little memory that sequences must be preempted

    @property
    def name(self) -> str:
        return f"{self.drafter}, batch {self.batch}, k {self.k}" + (", preemption" if self.starved else "")


def _plans(
    drafts: list[tuple[str, Model | Head | Drafter | str | None]], batches: Seq[int], ks: Seq[int], preemption: bool
) -> list[_Plan]:
    """Every drafter at every batch size and k; preemption once, where most is at stake."""
    plans = [
        _Plan(name, draft, batch, k)
        for name, draft in drafts or [("none", None)]
        for batch in batches
        for k in (ks if draft is not None else (0,))
    ]
    if preemption:
        last = max(plans, key=lambda plan: (plan.batch, plan.k))
        plans.append(replace(last, batch=max(2, last.batch), starved=True))
    return plans


def _most_different_first(plans: list[_Plan]) -> list[_Plan]:
    """Each drafter once in its largest batch, then preemption, then the rest: time may be over before all have run."""
    first: dict[str, _Plan] = {}
    for plan in plans:
        if not plan.starved and (plan.drafter not in first or plan.batch > first[plan.drafter].batch):
            first[plan.drafter] = plan
    front = [*first.values(), *(plan for plan in plans if plan.starved)]
    return [*front, *(plan for plan in plans if plan not in front)]


class _Interrupted(Exception):
    """Ctrl-C in a run; run: what it had compared, if anything."""

    def __init__(self, run: Run | None) -> None:
        self.run = run


class _Audit:
    """The reference texts, and what is needed to produce them again in other ways."""

    def __init__(self, alone: LLM, params: SamplingParams, options: dict[str, Any]) -> None:
        self._alone, self._model, self._params, self._options = alone, alone.model, params, options
        self._expected: list[Answer] = []
        self._prompts: list[list[int]] = []
        self.shown: list[str] = []

    def estimate(self, prompts: list[Prompt], plans: list[_Plan], seconds: float, watch: Watch | None) -> int:
        """How many prompts fit into the time; the watcher is told what all of them would take."""
        batches = [plan.batch for plan in plans]
        pace = measure_pace(self._alone, self._llm(max_batch=max(batches)), prompts)
        tokens = self._params.max_tokens or self._model.context
        count = pace.prompts_within(seconds, len(prompts), tokens, batches)
        if watch is not None:
            expected = [pace.seconds(n, tokens, batches) for n in (len(prompts), count)]
            watch.on_estimate(Estimate(len(prompts), count, len(plans), expected[0], expected[1]))
        return count

    def decode_alone(self, prompts: list[Prompt]) -> None:
        """Make the reference texts."""
        alone = self._alone
        self._expected = [alone.generate([p], self._params, progress=False)[0] for p in prompts]
        self._prompts = [answer.prompt_token_ids for answer in self._expected]
        self.shown = [p if isinstance(p, str) else alone.decode(list(p)) or str(list(p)) for p in prompts]

    def settings(self) -> dict[str, str]:
        model, params, default = self._model, self._params, SamplingParams()
        changed = {n: getattr(params, n) for n in params.names() if getattr(params, n) != getattr(default, n)}
        options = {name: str(value) for name, value in self._options.items() if name != "tokenizer"}
        kinds = {"target": model.name, "dtype": str(model.dtype).removeprefix("torch."), "device": _device(model)}
        sampling = ", ".join(f"{name} {value}" for name, value in changed.items()) or "greedy"
        threads = {"threads": str(torch.get_num_threads())} if model.device.type == "cpu" else {}
        return {**kinds, **threads, "prompts": str(len(self._prompts)), "parameters": sampling, **options, **versions()}

    def run(self, plan: _Plan, stop: float = math.inf) -> Run | None:
        """All prompts under one plan, or those finished before the time `stop`; None if there are none.

        A batch larger than the prompts is filled with copies of them.
        """
        crowd = [n % len(self._prompts) for n in range(max(len(self._prompts), plan.batch))]
        options: dict[str, Any] = {"max_batch": plan.batch}
        each = [self._params] * len(crowd)
        if plan.starved:
            crowd.sort(key=self._length, reverse=True)  # the two longest meet first
            each = [self._tight(n) for n in crowd]
            little = {"cache_memory": self._little(plan, crowd, each), "memory": None, "planned_tokens": None}
            options |= {"page": _PAGE, "prefix_reuse": False, **little}
        answers: dict[int, Answer] = {}
        try:
            llm = self._llm(plan.draft, plan.k, **options)
            start = time.perf_counter()
            for place, answer in llm.answers([self._prompts[n] for n in crowd], each, progress=False):
                answers[place] = answer
                if time.perf_counter() >= stop:
                    break
            return self._compare(plan, crowd, answers, llm, time.perf_counter() - start)
        except KeyboardInterrupt:
            took = time.perf_counter() - start if answers else 0.0
            raise _Interrupted(self._compare(plan, crowd, answers, llm, took) if answers else None) from None

    def _llm(self, draft: Any = None, k: int = 0, **options: Any) -> LLM:
        gc.collect()  # the last run's cache goes before the next one's comes
        given = {name: value for name, value in self._options.items() if name != "tokenizer"}
        llm = LLM(self._model, draft, k, tokenizer=self._alone.tokenizer, **{**given, **options})
        llm.engine.eos = self._alone.engine.eos  # a model that is passed in does not always know its end tokens
        return llm

    def _length(self, n: int) -> int:
        return len(self._prompts[n]) + len(self._expected[n].token_ids)

    def _tight(self, n: int) -> SamplingParams:
        """The same request, asking for little more than it needs: memory can then be scarce."""
        written = len(self._expected[n].token_ids) + _SLACK
        asked = self._params.max_tokens
        most = max(written, self._params.min_tokens)
        return replace(self._params, max_tokens=most if asked is None else min(asked, most))

    def _little(self, plan: _Plan, crowd: list[int], each: list[SamplingParams]) -> int:
        """Bytes for any text alone and for the two longest to begin, but not for both to end."""
        prompts = [len(self._prompts[n]) for n in crowd]
        pages = [-(-(a + (p.max_tokens or 0)) // _PAGE) for a, p in zip(prompts, each, strict=True)]
        begin = sum(-(-(length + plan.k) // _PAGE) for length in prompts[:2])
        models: list[Any] = [self._model, *([plan.draft] if _is_model(plan.draft) else [])]
        return max(*pages, begin) * _PAGE * sum(map(kv_bytes_per_token, models))

    def _compare(self, plan: _Plan, crowd: list[int], answers: dict[int, Answer], llm: LLM, seconds: float) -> Run:
        """The finished answers, by their place in the crowd, against the reference."""
        found: dict[int, Difference | None] = {}
        for place, answer in answers.items():
            found[crowd[place]] = found.get(crowd[place]) or self._difference(crowd[place], answer.outputs[0])
        meter = llm.engine.meter
        notes = [_preempted(meter.preemptions)] if plan.starved else []
        notes += [f"stopped after {len(answers)} of {len(crowd)} texts"] if len(answers) < len(crowd) else []
        return Run(
            drafter=plan.drafter,
            batch=plan.batch,
            k=plan.k,
            findings=[Finding(n, found[n]) for n in sorted(found)],
            tokens_per_step=meter.tokens_per_step,
            acceptance=meter.acceptance if meter.drafted else None,
            preemptions=meter.preemptions,
            seconds=seconds,
            note=", ".join(notes),
        )

    def _difference(self, n: int, got: Completion) -> Difference | None:
        want = self._expected[n].outputs[0]
        place = first_difference(want.token_ids, got.token_ids)
        if place is None and (want.finish_reason, want.text) == (got.finish_reason, got.text):
            return None
        place = len(want.token_ids) if place is None else place
        reading = self._reading(want, got, place)
        if place >= min(len(want.token_ids), len(got.token_ids)):
            return Difference(place, kind="bug", why=_ending(want, got), **reading)
        margin = margin_at(self._alone, self._prompts[n], self._params, want.token_ids, got.token_ids[place], place)
        return Difference(
            place, kind=margin.kind, why=margin.why, margin=margin.top_two, threshold=margin.threshold, **reading
        )

    def _reading(self, want: Completion, got: Completion, place: int) -> dict[str, Any]:
        """Both tokens, and the text around them."""
        decode = self._alone.decode
        return {
            "expected": self._token(want.token_ids, place),
            "got": self._token(got.token_ids, place),
            "before": ending(decode(want.token_ids[:place])),
            "expected_text": decode(want.token_ids[place : place + _AFTER]),
            "got_text": decode(got.token_ids[place : place + _AFTER]),
        }

    def _token(self, tokens: list[int], place: int) -> Token | None:
        if place >= len(tokens):
            return None
        tokenizer, token = self._alone.tokenizer, tokens[place]
        text = "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        return Token(str(text), token)


def _ending(want: Completion, got: Completion) -> str:
    if got.error is not None:
        return f"the request failed: {got.error}"
    if len(want.token_ids) != len(got.token_ids):
        return (
            f"the same tokens, but {len(want.token_ids)} of them (finish reason {want.finish_reason!r}) "
            f"against {len(got.token_ids)} ({got.finish_reason!r})"
        )
    if want.finish_reason != got.finish_reason:
        return f"the same tokens, but finish reason {want.finish_reason!r} against {got.finish_reason!r}"
    return "the same tokens, but another text"


def _preempted(count: int) -> str:
    if count:
        return f"preempted {count} times" if count > 1 else "preempted once"
    return "preemption not reached: the texts are too short"


def _load_draft(llm: LLM, draft: Draft) -> tuple[str, Model | Head | Drafter | str | None]:
    """The draft's name, and what LLM takes for it; a path is loaded once for all runs."""
    path = os.fspath(draft) if isinstance(draft, os.PathLike) else draft
    if not isinstance(path, str):
        return str(getattr(path, "name", type(path).__name__)), path
    if path in ("ngram", "none"):
        return path, path if path == "ngram" else None
    return path, load_draft(path, llm.model, llm.tokenizer, llm.config)[1]


def _check(
    prompts: Seq[Prompt],
    batches: Seq[int],
    ks: Seq[int],
    params: SamplingParams | None,
    seconds: float | None,
    options: dict[str, Any],
) -> None:
    refuse_unknown("audit", options, (set(EngineConfig.__dataclass_fields__) | {"tokenizer"}) - {"k", "max_batch"})
    if isinstance(prompts, str) or not len(prompts):
        raise ConfigError("prompts", prompts, "not a list with at least one prompt", "pass a list of prompts")
    if seconds is not None and not seconds > 0:
        raise ConfigError("seconds", seconds, "not above 0", "pass how long the audit may take, or None for no limit")
    for name, values in (("batches", batches), ("ks", ks)):
        if not values:
            raise ConfigError(name, values, "empty", "name at least one value")
    if params is not None and params.n != 1:
        raise ConfigError("n", params.n, "an audit compares one text per prompt", "use n=1, or repeat the prompt")
    if options.get("verifier") == "rejection" and params is not None and not params.greedy:
        raise ConfigError(
            "verifier", "rejection", "keeps the distribution, not the text", "use temperature=0, or verifier='exact'"
        )


def _seeded(params: SamplingParams) -> SamplingParams:
    """Without a seed every run would draw its own."""
    return params if params.greedy or params.seed is not None else replace(params, seed=0)


def _is_model(draft: Any) -> bool:
    return draft is not None and not isinstance(draft, str | Drafter)


def _device(model: Model) -> str:
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)
