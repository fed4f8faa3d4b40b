"""LLM for people: a tokenizer and an engine; generate, stream, chat."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from tqdm import tqdm

from faircopy.answers import Answer, Completion, make_answer, refused
from faircopy.build import build_engine, load_draft, load_target
from faircopy.config import EngineConfig, from_speculative, refuse_unknown
from faircopy.draft_length import AUTO_MAX, auto_tree_nodes
from faircopy.drafters.base import Drafter
from faircopy.drafters.heads import Head
from faircopy.engine import Engine
from faircopy.errors import BatchError, ConfigError, FaircopyError, RequestError
from faircopy.fair_lock import FairLock
from faircopy.kernels.memory import collect_garbage_once
from faircopy.layout.base import kv_bytes_per_token
from faircopy.measured_costs import keep_costs
from faircopy.model.base import Model
from faircopy.model.loader import load_eos, load_tokenizer
from faircopy.planning.limit import check_limited, fit_into_memory
from faircopy.planning.plan import Plan
from faircopy.progress import amount, tell
from faircopy.requests import Message, Prompt, RequestReader, as_conversations, as_prompts, check_request, per_prompt
from faircopy.text import IncrementalText
from faircopy.threads import use_threads
from faircopy.types import Output, Request, SamplingParams, Sequence

LAW_MAX = 60  # of k="law": EAGLE-2's tree

__all__ = ["LLM", "Answer", "Completion", "Prompt"]


class LLM:
    """A target model, an optional drafter, and the engine that runs them.

    Several threads may call it: their requests share the batch, and each step is made by one thread at a time.

    target: a checkpoint folder, a hub id, or a Model. draft: the same, the folder of a draft head trained for this
    target, "ngram", a Drafter of your own, or None. k: draft tokens per step and sequence, or "auto": as many as pay;
    "law": as many as cost no time at the batch size, by the roofline.
    options: the other fields of EngineConfig. speculative_config takes vLLM's keys instead of draft and k.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Model,
        draft: str | os.PathLike[str] | Model | Head | Drafter | None = None,
        k: int | str = "auto",
        *,
        speculative_config: dict[str, Any] | None = None,
        tokenizer: Any | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown("LLM", options, set(EngineConfig.__dataclass_fields__) - {"k"}, signature(LLM).parameters)
        if speculative_config is not None:
            if draft is not None:
                raise ConfigError(
                    "speculative_config", speculative_config, "given beside draft=", "give one of the two"
                )
            draft, more = from_speculative(speculative_config)
            k = more.pop("k", k)
            options = more | options
        chosen = k == "auto"
        if chosen:
            k, options = AUTO_MAX, {"auto": True, **options}
        elif k == "law":
            k, options = LAW_MAX, {"law": True, **options}
        self.config = EngineConfig(k=k, **options)  # type: ignore[arg-type]  # it refuses other words
        use_threads(self.config.threads)
        self._warm_up = "not done"  # or the time and the memory that it took
        self._lock = FairLock()  # around everything that reads or changes the engine
        target = os.fspath(target) if isinstance(target, os.PathLike) else target
        self._plan: Plan | None = None  # what was chosen so that a limit on memory holds
        if self.config.memory is not None:
            path = os.fspath(draft) if isinstance(draft, os.PathLike) else draft
            draft, self.config, self._plan = fit_into_memory(target, path, self.config)
        self.model = load_target(target, self.config)
        known = load_tokenizer(target) if tokenizer is None and isinstance(target, str) else tokenizer
        self._reader = RequestReader(known)
        eos = load_eos(target) if isinstance(target, str) else frozenset(getattr(target, "eos", ()))
        drafter, self._draft = load_draft(draft, self.model, self.tokenizer, self.config)
        if chosen and self._plan is None and self._grows_cheap_trees:
            self.config = replace(self.config, k=auto_tree_nodes(self.config.max_batch))
        self.engine: Engine = build_engine(
            self.model, drafter, draft=self._draft, config=self.config, eos=eos, limited=self._plan is not None
        )
        if isinstance(target, str):
            tell(memory_line(self.model, self._memory()))
        if self._plan is not None:
            tell(self._plan.reason)
        collect_garbage_once()

    @property
    def tokenizer(self) -> Any | None:
        return self._reader.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any | None) -> None:
        self._reader.tokenizer = tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        k: int | Seq[int] | None = None,
        progress: bool | None = None,
        errors: str = "raise",
    ) -> list[Answer]:
        """Answers in the order of the prompts (texts or lists of token ids).

        If some requests fail the others are finished first; then BatchError is raised, with all answers in it
        (errors="return": they come back with `error` set). A single prompt raises its own error.
        """
        if errors not in ("raise", "return"):
            raise ConfigError("errors", errors, "unknown", "use 'raise' or 'return'")
        found = dict(self.answers(prompts, params, k=k, progress=progress))
        answers = [found[index] for index in sorted(found)]
        failures = [(i, answer.error) for i, answer in enumerate(answers) if answer.error is not None]
        if failures and errors == "raise":
            raise failures[0][1] if len(answers) == 1 else BatchError(answers, failures)
        return answers

    def answers(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        k: int | Seq[int] | None = None,
        progress: bool | None = None,
    ) -> Iterator[tuple[int, Answer]]:
        """(index, answer) as each prompt is finished, failed ones with their `error`; leaving early aborts the rest."""
        asked = as_prompts(prompts)
        each = per_prompt("params", params if params is not None else SamplingParams(), len(asked))
        ks = per_prompt("k", k, len(asked))
        pending = [PendingAnswer(*about) for about in zip(asked, each, ks, strict=True)]
        return self._answers(pending, progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, k: int | None = None) -> Iterator[str]:
        """Text as it is decided; what may yet become a stop string waits. Leaving the loop early aborts the request."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError("n", params.n, "a stream has one text", "use n=1, or generate()")
        if self.tokenizer is None:
            raise RequestError("prompt", prompt, "there is no tokenizer to make text", "pass tokenizer= to LLM")
        request = self.request(prompt, params, k, streamed=True)
        check_request(request, self.model, self.engine.tables)  # now, not when the first piece is asked for
        return self._stream(request)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Answers to one conversation or several, through the model's chat template."""
        return self.generate([self.chat_prompt(m) for m in as_conversations(messages)], params, **options)

    def chat_prompt(self, messages: list[Message], **template: Any) -> list[int]:
        """Token ids of a conversation, ready for the next answer. template: what else the chat template is given."""
        return self._reader.chat_prompt(messages, **template)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids pass through."""
        return self._reader.encode(prompt)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones left out; empty without a tokenizer."""
        return self._reader.decode(tokens)

    def text(self, prompt: Seq[int], stop: Seq[str] = ()) -> IncrementalText:
        """The text behind a prompt, for callers that step the engine themselves: it takes tokens as they come."""
        return self._reader.text(prompt, stop)

    def request(self, prompt: Prompt, params: SamplingParams, k: int | None = None, streamed: bool = False) -> Request:
        """A prompt as the engine takes it, for callers that step the engine themselves."""
        if self._plan is not None:
            check_limited(params)
            k = None if k is None else min(k, self.config.k)
        return self._reader.request(prompt, params, k, streamed)

    def samples(self, first: Request) -> list[Request]:
        """A request and its n - 1 further samples, each with a seed of its own."""
        return self._reader.samples(first)

    def explain(self) -> dict[str, Any]:
        """The configuration as it was resolved: what runs where, how, and in how much memory."""
        tables, model = self.engine.tables, self.model
        return {
            "target": model.name,
            "backend": model.backend,
            "drafter": type(self.engine.drafter).__name__,
            "draft_length": self.engine.draft_lengths.reason,
            "warm_up": self._warm_up,
            "captured_steps": "yes" if self.engine.captured is not None else f"no: {self.engine.eager_because}",
            **asdict(self.config),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "threads": torch.get_num_threads(),
            "context": model.context,
            "vocabulary": model.vocab,
            "pages": tables.pool.pages,
            "tokens_of_memory": tables.pool.pages * tables.page,
            "end_tokens": sorted(self.engine.eos),
            "memory_bytes": self._memory(),
            **({} if self._plan is None else {"memory": self._plan.budget, "memory_plan": self._plan.reason}),
        }

    @property
    def _grows_cheap_trees(self) -> bool:
        """Whether drafts are trees, on a device where more rows of a pass cost little time."""
        head = self._draft
        return isinstance(head, Head) and head.grows_trees and self.model.device.type == "cuda"

    def _memory(self) -> dict[str, int]:
        """Bytes of weights, and of keys and values: all that may be used, and what sequences hold or reuse now."""
        draft, pool = self._draft, self.engine.tables.pool
        models: list[Model | Head] = [self.model] if draft is None else [self.model, draft]
        page = self.engine.tables.page * sum(map(kv_bytes_per_token, models))
        return {
            "weights": self.model.weight_bytes,
            "draft_weights": 0 if draft is None else draft.weight_bytes,
            "cache_limit": pool.pages * page,
            "cache_in_use": pool.in_use * page,
        }

    def warm_up(self) -> None:
        """On a GPU, capture steps and passes of every size now: later nothing is captured on a request's time."""
        with self._lock:
            begin, before = time.perf_counter(), _reserved_bytes(self.model.device)
            self.engine.warm_up()
            if self.model.device.type == "cuda":
                gc.collect()  # compilers leave much; Python would look for it in the middle of a text
            if self.engine.costs.target.points:
                keep_costs(self.model, self._draft, self.engine.costs)
            taken = time.perf_counter() - begin
            self._warm_up = f"{taken:.1f} s, {(_reserved_bytes(self.model.device) - before) / 2**20:.0f} MiB"

    def metrics(self) -> dict[str, float]:
        """Totals since this LLM was made."""
        return self.engine.meter.snapshot()

    def _answers(self, pending: list[PendingAnswer], progress: bool | None) -> Iterator[tuple[int, Answer]]:
        show = sys.stderr.isatty() if progress is None else progress
        open_ones = dict(enumerate(pending))
        live: list[Sequence] = []
        try:
            for one in pending:
                with self._lock:
                    one.start(self, live)
            with tqdm(total=len(live), disable=not show, unit="req", dynamic_ncols=True) as bar:
                while open_ones:
                    with self._lock:
                        done = [(index, one.answer(self)) for index, one in open_ones.items() if one.done]
                        outputs = self.engine.step() if not done else []
                    for index, answer in done:
                        del open_ones[index]
                        yield index, answer
                    _report(bar, outputs, live, self.engine.draft_lengths.brief)
        finally:
            with self._lock:
                for seq in live:
                    self.engine.abort(seq)

    def _stream(self, request: Request) -> Iterator[str]:
        text = request.text
        assert isinstance(text, IncrementalText)
        with self._lock:
            seq = self.engine.add(request)
        try:
            ended = False
            while not ended:
                with self._lock:
                    if seq.finished is None:  # another caller's step may have finished it
                        self.engine.step()
                    ended = seq.finished is not None
                    if ended:
                        text.finish()
                    piece = text.release()
                if piece:
                    yield piece
            if seq.error is not None:
                raise seq.error
        finally:
            with self._lock:
                self.engine.abort(seq)


def _reserved_bytes(device: torch.device) -> int:
    """What torch holds of a GPU's memory, that of graphs included."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


@dataclass(slots=True)
class PendingAnswer:
    """One prompt in work: its sequences, or the reason there are none."""

    prompt: Prompt
    params: SamplingParams
    k: int | None
    seqs: list[Sequence] = field(default_factory=list)
    error: FaircopyError | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or all(seq.finished is not None for seq in self.seqs)

    def start(self, llm: LLM, live: list[Sequence]) -> None:
        """Queue its samples, all or none, and add them to the live ones."""
        try:
            for request in llm.samples(llm.request(self.prompt, self.params, self.k)):
                self.seqs.append(llm.engine.add(request))
                live.append(self.seqs[-1])
        except RequestError as error:
            self.error = error
            for seq in self.seqs:
                llm.engine.abort(seq)

    def answer(self, llm: LLM) -> Answer:
        return make_answer(self.prompt, self.seqs, llm.text) if self.error is None else refused(self.prompt, self.error)


def memory_line(model: Model, memory: dict[str, int]) -> str:
    """What takes memory, in one line."""
    weights, limit = memory["weights"] + memory["draft_weights"], memory["cache_limit"]
    kind = str(model.dtype).removeprefix("torch.")
    taken = "taken as sequences grow" if model.device.type == "cpu" else "reserved"
    return f"{model.name}: {amount(weights)} of weights ({kind}); up to {amount(limit)} of keys and values, {taken}"


def _report(bar: Any, outputs: list[Output], live: list[Sequence], chosen: str) -> None:
    if bar.disable:
        return
    bar.update(sum(output.finished is not None for output in outputs))
    written, drafted = sum(len(seq.output) for seq in live), sum(seq.drafted for seq in live)
    accepted = sum(seq.accepted for seq in live)
    rate = written / max(1e-9, bar.format_dict["elapsed"])
    parts = [
        f"{rate:.0f} tok/s",
        *([f"accepted {accepted / drafted:.0%}"] if drafted else []),
        *([chosen] if chosen else []),
    ]
    bar.set_postfix_str(", ".join(parts))
