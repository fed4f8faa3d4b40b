"""The loop: draft, run, judge, commit. Read this file first."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from faircopy.config import EngineConfig
from faircopy.drafters.base import Drafter, NoDrafter
from faircopy.drafters.heads import Head
from faircopy.drafters.model import ModelDrafter
from faircopy.drafters.reader import HeadDrafter
from faircopy.errors import ConfigError, OutOfPages, RequestError
from faircopy.layout.base import LayerShape, cache_dtype
from faircopy.layout.pool import PagePool
from faircopy.layout.tables import Tables
from faircopy.meter import Meter
from faircopy.model.base import Model
from faircopy.model.runner import Runner
from faircopy.plan.length import FixedLength
from faircopy.plan.room import pass_bytes
from faircopy.scheduler import Scheduler, Wish
from faircopy.strategy import STRATEGIES
from faircopy.types import Batch, Draft, Output, Request, Sequence, check_draft
from faircopy.verify.base import Verifier
from faircopy.verify.exact import ExactVerifier
from faircopy.verify.rejection import RejectionVerifier

if TYPE_CHECKING:
    from faircopy.kernels.gpu.suite import Suite
    from faircopy.replay import Flight, Replay


class Engine:
    """Knows every part; no part knows it."""

    def __init__(
        self,
        target: Runner,
        tables: Tables,
        drafter: Drafter,
        verifier: Verifier,
        scheduler: Scheduler,
        wish: Wish,
        eos: frozenset[int] = frozenset(),
        replay: Replay | None = None,
    ) -> None:
        self.target, self.tables, self.drafter, self.verifier = target, tables, drafter, verifier
        self.scheduler, self.wish, self.eos, self.replay = scheduler, wish, eos, replay
        self.layouts = [target.layout]  # and those of a draft model
        self.meter = Meter()
        self._flight: Flight | None = None  # a step launched and not landed
        self._next_id = 0

    @property
    def busy(self) -> bool:
        return self.scheduler.busy  # a step in the air that nobody waits for does not count

    def add(self, request: Request) -> Sequence:
        """Queue a request; one that can never be served is refused here."""
        check_request(request, self.target.model, self.tables)
        params = request.params
        self._next_id += 1
        seq = Sequence(
            id=self._next_id,
            request=request,
            tokens=list(request.prompt),
            stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos),
            limit=token_limit(request, self.target.model),
            prompt_logprobs=[] if params.prompt_logprobs is None else [None],
        )
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        """End a request between steps; what it has written stays in the sequence."""
        self.scheduler.abort(seq)
        self._forget_departed()

    def step(self) -> list[Output]:
        """Advance some sequences by at least one token each; return what is new."""
        if self._flight is not None and all(seq.finished for seq in self._flight.seqs):
            self._flight = None  # nobody waits for it; what comes next runs after it
        if self._flight is not None:
            return self._guarded(self._cruise, self._flight.seqs)
        batch = self.scheduler.pick(self.wish)  # admit, preempt, reserve room for the nodes
        self._forget_departed()
        if not batch.seqs:
            return []
        if self.replay is not None and self.replay.takes(batch):
            return self._guarded(lambda: self._take_off(batch), batch.seqs)
        return self._guarded(lambda: self._run(self._rooms(batch)), batch.seqs)

    def _guarded(self, run: Callable[[], list[Output]], seqs: list[Sequence]) -> list[Output]:
        try:
            return run()
        except BaseException:  # an interrupt too: what was cached but not appended must not count as cached
            self._flight = None
            self.scheduler.retreat(seqs)
            raise
        finally:
            self._forget_departed()

    def _rooms(self, batch: Batch) -> Batch:
        """The step as the host runs it: where captured steps follow, and each guess costs the host a pass, just one."""
        if self.replay is None or not getattr(self.drafter, "costly", False) or not self.replay.soon(batch):
            return batch
        return replace(batch, max_nodes=[min(max_nodes, 1) for max_nodes in batch.max_nodes])

    def _take_off(self, batch: Batch) -> list[Output]:
        assert self.replay is not None
        self._flight = self.replay.launch(batch.seqs, batch.max_nodes, max(map(self.wish, batch.seqs)))
        return self._cruise()

    def _cruise(self) -> list[Output]:
        """Launch the next step behind the one in the air, then land that one."""
        flight, replay = self._flight, self.replay
        assert flight is not None and replay is not None
        onward = self.scheduler.follow(flight.seqs, flight.space.k + 1)
        widths = [min(self.wish(seq), flight.space.k) for seq in onward]
        self._flight = replay.launch(onward, widths, flight.space.k, flight) if onward else None
        batch, draft, verdict = replay.land(flight)
        self.target.layout.publish(batch, verdict)
        outputs = self.scheduler.commit(batch, draft, verdict)
        self._record(draft, flight.rows, flight.rows - sum(len(nodes) + 1 for nodes in draft.tokens), outputs)
        return outputs

    def _run(self, batch: Batch) -> list[Output]:
        draft = self.drafter.propose(batch)  # may be empty, may be wrong
        check_draft(draft, batch, self.target.model.vocab)
        result = self.target.forward(batch, draft)  # one packed pass over uncached tokens and nodes
        verdict = self.verifier.judge(batch, draft, result)  # the step's only look at device results
        verdict = self.target.layout.commit(batch, verdict)  # may keep fewer, never more
        self.target.layout.publish(batch, verdict)  # full pages may now be shared
        self.drafter.observe(batch, draft, result, verdict)
        outputs = self.scheduler.commit(batch, draft, verdict)
        self._record(draft, result.packed.size, result.packed.padded, outputs)
        return outputs

    def _forget_departed(self) -> None:
        for seq in self.scheduler.departed():
            self.drafter.forget(seq)
            self.target.layout.forget(seq)

    def _record(self, draft: Draft, fed: int, padded: int, outputs: list[Output]) -> None:
        meter, held = self.meter, self.tables.held()
        meter.steps += 1
        meter.sequence_steps += sum(bool(output.tokens) for output in outputs)
        meter.tokens_fed += fed
        meter.tokens_padded += padded
        meter.rows_moved = sum(layout.moved for layout in self.layouts)
        meter.pages_held, meter.pages_peak = held, max(meter.pages_peak, held)
        meter.drafted += sum(map(len, draft.tokens))
        meter.accepted += sum(output.accepted for output in outputs)
        meter.emitted += sum(len(output.tokens) for output in outputs)
        meter.preemptions, meter.tokens_reused = self.scheduler.preemptions, self.scheduler.reused
        meter.grouped_steps = self.scheduler.grouped


def check_request(request: Request, model: Model, tables: Tables) -> None:
    """Refuse what can never be served, naming the field."""
    params, length = request.params, len(request.prompt)
    if not length:
        raise RequestError("prompt", "", "empty", "pass at least one token, for example the model's BOS token")
    if length >= model.context:
        raise RequestError(
            "prompt", f"{length} tokens", f"leaves no room in the model's context of {model.context}", "shorten it"
        )
    ids = {"prompt": request.prompt, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    for name, tokens in ids.items():
        for token in tokens:
            if not 0 <= token < model.vocab:
                raise RequestError(name, token, f"not a token id below {model.vocab}", "use the model's own tokenizer")
    if request.k is not None and (not isinstance(request.k, int) or isinstance(request.k, bool) or request.k < 0):
        raise RequestError("k", request.k, "not a whole number of at least 0", "use 0 to decode without drafting")
    limit = token_limit(request, model)
    if not tables.fits(limit):
        have = tables.pool.pages * tables.page
        raise OutOfPages(
            "prompt",
            f"{length} tokens",
            f"with max_tokens it may need {limit} of {have} tokens of memory",
            "raise memory=, or lower max_tokens",
        )


def token_limit(request: Request, model: Model) -> int:
    """How long prompt and output may become together."""
    most = request.params.max_tokens
    return model.context if most is None else min(model.context, len(request.prompt) + most)


def build_engine(
    target: Model,
    drafter: Drafter | None = None,
    *,
    draft: Model | Head | None = None,
    config: EngineConfig | None = None,
    eos: frozenset[int] = frozenset(),
    wish: Wish | None = None,
    suite: Suite | None = None,
) -> Engine:
    """Put the parts together: one pool and one set of tables under the target and its draft model or head, if any.

    suite: kernels to run with instead of the device's own.
    """
    config = config or EngineConfig()
    models: list[Model | Head] = [target] if draft is None else [target, draft]
    strategy, chunk = STRATEGIES[config.strategy], config.chunk_on(target.device)
    tables = strategy.tables(PagePool(page_count(models, config, strategy.tokens(target.context, config))), config)
    layouts = [strategy.layout(tables, target, config, False, suite)]
    runner = Runner(target, layouts[0])
    scheduler = Scheduler(tables, runner.layout.cached, strategy.policy(config), chunk)
    sampled = config.verifier == "rejection"
    if isinstance(draft, Head):
        pages = strategy.pages(tables, draft, config, suite)
        layouts.append(pages)
        drafter = HeadDrafter(draft, pages, chunk, sampled, config.max_batch)
    elif draft is not None:
        layouts.append(strategy.layout(tables, draft, config, True, suite))
        drafter = ModelDrafter(Runner(draft, layouts[1]), target.vocab, chunk, sampled)
    drafter = drafter or NoDrafter()
    runner.wants = getattr(drafter, "wants", ())
    verifier = RejectionVerifier() if sampled else ExactVerifier()
    replay = None if sampled or not config.graphs else build_replay(runner, drafter, tables, config)
    ends = frozenset(token for token in eos if token < target.vocab)  # some configurations name ids there are none of
    engine = Engine(runner, tables, drafter, verifier, scheduler, wish or FixedLength(config.k), ends, replay)
    engine.layouts = layouts
    return engine


def build_replay(target: Runner, drafter: Drafter, tables: Tables, config: EngineConfig) -> Replay | None:
    """The captured steady state, where all parts of a step are kernels; None: every step is packed by the host."""
    if getattr(target.layout, "suite", None) is None:
        return None
    from faircopy.model.fused import Fused
    from faircopy.replay import Fills, Replay

    models = [target.model] if not isinstance(drafter, ModelDrafter) else [target.model, drafter.model]
    if not all(isinstance(model, Fused) for model in models) or not isinstance(drafter, Fills):
        return None
    return Replay(target, drafter, tables, config.max_batch, config.k)


def page_count(models: Seq[Model | Head], config: EngineConfig, most: int) -> int:
    """How many pages of all models' keys and values the memory holds, up to the most tokens that could be used."""
    per_page = config.page * sum(_bytes(layer, model) for model in models for layer in model.layers)
    device = models[0].device
    measured = config.memory is None and device.type == "cuda"
    whole = [model for model in models if not isinstance(model, Head)] if measured else []
    choices = 12 * config.max_batch * (config.k + 1) * models[0].vocab  # a batch's logits in float32, three times
    passes = sum(pass_bytes(model, config.chunk_on(device)) for model in whole) + choices
    pages = min(config.cache_bytes(device, passes) // max(1, per_page), -(-most // config.page))
    if pages < 1:
        raise ConfigError("memory", config.memory, f"less than one page of {per_page} bytes", "raise it")
    return pages


def _bytes(layer: LayerShape, model: Model | Head) -> int:
    return 2 * layer.kv_heads * layer.head_dim * cache_dtype(model.dtype, model.device).itemsize
