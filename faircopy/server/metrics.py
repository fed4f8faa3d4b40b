"""What /metrics shows: counters of this server, each under our name and, for the clients that look for it, vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from faircopy.engine import Engine
from faircopy.server.engine_thread import Update
from faircopy.server.shadow import ShadowAudit

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10)
_SLOW = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)


class Metrics:
    """The server's counters; the front end's thread alone writes them."""

    def __init__(self, engine: Engine, audit: ShadowAudit, model: str, twins: bool) -> None:
        self.registry = CollectorRegistry()
        self._model, self._prefixes = model, ("faircopy_", "vllm:") if twins else ("faircopy_",)
        self._drafts = self._counter("spec_decode_num_drafts", "Drafts verified")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._per_position: dict[int, Callable[[float], None]] = {}
        self._position = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the draft", "position"
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that began")
        self._generated = self._counter("generation_tokens", "Tokens written")
        self._success = self._labelled("request_success", "Requests that ended, by reason", "finished_reason")
        self._errors = self._labelled("http_errors", "Answers that were errors, by status", "status", own=True)
        self.rejected = self._counter("rejected_requests", "Requests refused with 429", own=True)
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token", _FAST)
        self.between = self._histogram("inter_token_latency_seconds", "Between two chunks of one sequence", _FAST)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token behind the first one, of a sequence", _FAST
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", _SLOW)
        self.registry.register(_EngineGauges(engine, audit, model, self._prefixes))
        self.totals = {"drafts": 0, "drafted": 0, "accepted": 0, "emitted": 0, "prompt": 0, "requests": 0}
        self.accepted_at: list[int] = []  # per position in the draft

    def took(self, update: Update) -> None:
        """A step's result for one sequence."""
        totals = self.totals
        if update.tokens:
            self._generated(len(update.tokens))
            totals["emitted"] += len(update.tokens)
        if update.drafted:
            self._drafts(1)
            self._draft_tokens(update.drafted)
            totals["drafts"] += 1
            totals["drafted"] += update.drafted
        if update.accepted:
            self._accepted(update.accepted)
            totals["accepted"] += update.accepted
            self._accept(update.accepted)

    def began(self, prompt_tokens: int) -> None:
        self._prompt(prompt_tokens)
        self.totals["prompt"] += prompt_tokens
        self.totals["requests"] += 1

    def ended(self, reason: str) -> None:
        for one in self._success:
            one.labels(self._model, reason).inc()

    def error(self, status: int) -> None:
        for one in self._errors:
            one.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _accept(self, count: int) -> None:
        self.accepted_at += [0] * (count - len(self.accepted_at))
        for position in range(count):
            self.accepted_at[position] += 1
            if position not in self._per_position:
                children = [one.labels(self._model, str(position)) for one in self._position]
                self._per_position[position] = _both([child.inc for child in children])
            self._per_position[position](1)

    def _counter(self, name: str, about: str, own: bool = False) -> Callable[[float], None]:
        return _both([one.labels(self._model).inc for one in self._labelled(name, about, own=own)])

    def _labelled(self, name: str, about: str, *labels: str, own: bool = False) -> list[Counter]:
        prefixes = self._prefixes[:1] if own else self._prefixes
        return [Counter(p + name, about, ["model_name", *labels], registry=self.registry) for p in prefixes]

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Callable[[float], None]:
        made = [
            Histogram(p + name, about, ["model_name"], registry=self.registry, buckets=buckets) for p in self._prefixes
        ]
        return _both([one.labels(self._model).observe for one in made])


def _both(functions: list[Callable[[float], None]]) -> Callable[[float], None]:
    def call(value: float) -> None:
        for function in functions:
            function(value)

    return call


class _EngineGauges:
    """What the engine counts itself, read when it is asked for."""

    def __init__(self, engine: Engine, audit: ShadowAudit, model: str, prefixes: tuple[str, ...]) -> None:
        self._engine, self._audit, self._model, self._prefixes = engine, audit, model, prefixes

    def collect(self) -> Iterator[Metric]:
        pool = self._engine.tables.pool
        held = pool.pages - pool.available
        for prefix in self._prefixes:
            yield from self._twins(prefix, held / max(1, pool.pages))
        yield self._gauge("faircopy_pages_held", "Pages that sequences hold", held)
        yield self._count("faircopy_steps", "Steps made", self._engine.meter.steps)
        yield self._count("faircopy_shadow_audits", "Answers run again plainly", self._audit.checked)
        yield self._count(
            "faircopy_shadow_audit_mismatches", "Of these, those that were different", self._audit.mismatches
        )

    def _twins(self, prefix: str, use: float) -> Iterator[Metric]:
        engine, meter = self._engine, self._engine.meter
        yield self._gauge(f"{prefix}num_requests_running", "Sequences in the batch", len(engine.scheduler.running))
        yield self._gauge(f"{prefix}num_requests_waiting", "Sequences in the queue", len(engine.scheduler.waiting))
        yield self._gauge(f"{prefix}kv_cache_usage_perc", "Share of the pages that are held", use)
        yield self._count(f"{prefix}num_preemptions", "Sequences preempted", meter.preemptions)
        yield self._count(f"{prefix}prefix_cache_hits", "Prompt tokens found in the cache", meter.tokens_reused)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, about, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric

    def _count(self, name: str, about: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, about, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric
