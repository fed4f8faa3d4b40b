"""LLM for people: a tokenizer and an engine; generate, stream, chat."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from tqdm import tqdm

from faircopy import rng
from faircopy.config import EngineConfig, from_speculative, refuse_unknown
from faircopy.drafters.base import Drafter
from faircopy.drafters.folder import load_head
from faircopy.drafters.heads import Head
from faircopy.drafters.ngram import NgramDrafter
from faircopy.engine import Engine, build_engine, check_request
from faircopy.errors import BatchError, ConfigError, FaircopyError, RequestError
from faircopy.model.anatomy import is_head
from faircopy.model.base import Model
from faircopy.model.loader import load_eos, load_model, load_tokenizer, vocabulary_difference
from faircopy.model.selftest import self_test
from faircopy.text import IncrementalText
from faircopy.types import FinishReason, Logprobs, Request, SamplingParams, Sequence

Prompt = str | Seq[int]
Message = dict[str, Any]
BACKENDS = {"Decoder": "eager decoder", "Fused": "fused decoder", "Universal": "transformers"}


@dataclass(slots=True)
class Completion:
    """One text the target wrote."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    drafted: int
    accepted: int
    steps: int
    seed: int
    logprobs: list[Logprobs] | None = None
    origins: list[bool] = field(default_factory=list)  # per token: true if a draft had it right
    error: FaircopyError | None = None


@dataclass(slots=True)
class Answer:
    """What came of one prompt: n completions, the first of them also read directly."""

    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[Logprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def drafted(self) -> int:
        return sum(output.drafted for output in self.outputs)

    @property
    def accepted(self) -> int:
        return sum(output.accepted for output in self.outputs)

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.outputs[0].logprobs

    @property
    def seed(self) -> int:
        return self.outputs[0].seed

    @property
    def error(self) -> FaircopyError | None:
        return next((output.error for output in self.outputs if output.error is not None), None)


class LLM:
    """A target model, an optional drafter, and the engine that runs them. One thread at a time.

    target: a checkpoint folder, a hub id, or a Model. draft: the same, the folder of a head trained for
    this target, "ngram", a Drafter of your own, or None.
    Options are the fields of EngineConfig: dtype, device, strategy, verifier, exact, max_batch, chunk, memory, page,
    prefix_reuse, graphs, lookup_min, lookup_max, refill, pool_window, pool_sort. speculative_config takes vLLM's keys
    instead of draft and k.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Model,
        draft: str | os.PathLike[str] | Model | Head | Drafter | None = None,
        k: int = 4,
        *,
        speculative_config: dict[str, Any] | None = None,
        tokenizer: Any | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown("LLM", options, set(EngineConfig.__dataclass_fields__) - {"k"})
        if speculative_config is not None:
            if draft is not None:
                raise ConfigError(
                    "speculative_config", speculative_config, "given beside draft=", "give one of the two"
                )
            draft, more = from_speculative(speculative_config)
            k = more.pop("k", k)
            options = more | options
        self.config = EngineConfig(k=k, **options)
        target = os.fspath(target) if isinstance(target, os.PathLike) else target
        self.model = self._load("target", target)
        self.tokenizer = load_tokenizer(target) if tokenizer is None and isinstance(target, str) else tokenizer
        eos = load_eos(target) if isinstance(target, str) else frozenset(getattr(target, "eos", ()))
        drafter, model = self.load_draft(draft)
        self.engine: Engine = build_engine(self.model, drafter, draft=model, config=self.config, eos=eos)

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
        asked = _as_prompts(prompts)
        each = _per_prompt("params", params if params is not None else SamplingParams(), len(asked))
        ks = _per_prompt("k", k, len(asked))
        return self._answers([_Job(p, own, width) for p, own, width in zip(asked, each, ks, strict=True)], progress)

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
        return self.generate([self.chat_prompt(m) for m in _as_conversations(messages)], params, **options)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids pass through."""
        if not isinstance(prompt, str):
            return _as_ids(prompt)
        if self.tokenizer is None:
            raise RequestError("prompt", prompt, "there is no tokenizer for text", "pass token ids, or tokenizer=")
        try:
            return list(self.tokenizer.encode(prompt))
        except (TypeError, UnicodeError) as error:  # half a surrogate pair, for example
            raise RequestError("prompt", prompt, "not valid text", "remove what is not Unicode") from error

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)) if self.tokenizer is not None else ""

    def explain(self) -> dict[str, Any]:
        """The configuration as it was resolved: what runs where, how, and in how much memory."""
        tables, model = self.engine.tables, self.model
        return {
            "target": model.name,
            "backend": BACKENDS.get(type(model).__name__, type(model).__name__),
            "drafter": type(self.engine.drafter).__name__,
            **asdict(self.config),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "threads": torch.get_num_threads(),
            "context": model.context,
            "vocabulary": model.vocab,
            "pages": tables.pool.pages,
            "tokens_of_memory": tables.pool.pages * tables.page,
            "end_tokens": sorted(self.engine.eos),
        }

    def warm_up(self) -> None:
        """On devices that capture the steady state, do so for every size of batch now: the first answers wait less."""
        if self.engine.replay is not None:
            self.engine.replay.warm(self.config.k)

    def metrics(self) -> dict[str, float]:
        """Totals since this LLM was made."""
        return self.engine.meter.snapshot()

    def _load(self, name: str, model: Any) -> Model:
        config = self.config
        if isinstance(model, str):
            model = load_model(model, config.torch_dtype(), config.torch_device(), config.exact)
            self_test(model, config.exact)
        if not hasattr(model, "forward") or not hasattr(model, "layers"):
            raise ConfigError(name, model, "neither a folder, a hub id nor a model", "pass the path of a checkpoint")
        return model  # type: ignore[no-any-return]

    def load_draft(self, draft: Any) -> tuple[Drafter | None, Model | Head | None]:
        """The drafter, or the model or head to draft with, checked against the target."""
        draft = os.fspath(draft) if isinstance(draft, os.PathLike) else draft
        if draft is None or isinstance(draft, Drafter):
            return draft, None
        if draft == "ngram":
            return NgramDrafter(self.config.lookup_min, self.config.lookup_max), None
        if isinstance(draft, str) and is_head(draft):
            return None, load_head(draft, self.model)
        model = self._load("draft", draft)
        theirs = load_tokenizer(draft) if isinstance(draft, str) else self.tokenizer
        difference = vocabulary_difference(self.tokenizer, theirs, (self.model.vocab, model.vocab))
        if difference:
            problem = f"draft and target have different vocabularies: {difference}"
            raise ConfigError("draft", model.name, problem, "use a draft with the target's tokenizer")
        return None, model

    def request(self, prompt: Prompt, params: SamplingParams, k: int | None = None, streamed: bool = False) -> Request:
        """A prompt as the engine takes it, for callers that step the engine themselves."""
        if not isinstance(params, SamplingParams):
            raise RequestError("params", params, "not SamplingParams", "pass SamplingParams(...)")
        ids = self.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop", params.stop, "there is no tokenizer for text", "use stop_token_ids")
        text = IncrementalText(self.decode, ids, params.stop) if params.stop or streamed else None
        seed = rng.fresh_seed() if params.seed is None else params.seed
        return Request(tuple(ids), params, seed, k, text, self._bad_words(params))

    def _sample(self, first: Request, index: int) -> Request:
        """The same request once more, with the seed of its index-th sample and a text of its own."""
        text = None if first.text is None else IncrementalText(self.decode, first.prompt, first.params.stop)
        return replace(first, seed=rng.sample_seed(first.seed, index), text=text)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as tokens, at the start of a text and after a space."""
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise RequestError("bad_words", params.bad_words, "there is no tokenizer for text", "use logit_bias")
        forms = {
            tuple(self.tokenizer.encode(prefix + word, add_special_tokens=False))
            for word in params.bad_words
            for prefix in ("", " ")
        }
        return tuple(sorted(form for form in forms if form))

    def _answers(self, jobs: list[_Job], progress: bool | None) -> Iterator[tuple[int, Answer]]:
        show = sys.stderr.isatty() if progress is None else progress
        open_jobs = dict(enumerate(jobs))
        live: list[Sequence] = []
        try:
            for job in jobs:
                job.start(self, live)
            with tqdm(total=len(live), disable=not show, unit="req", dynamic_ncols=True) as bar:
                while open_jobs:
                    for index in [index for index, job in open_jobs.items() if job.done]:
                        yield index, open_jobs.pop(index).answer(self)
                    if open_jobs:
                        _report(bar, self.engine.step(), live)
        finally:
            for seq in live:
                self.engine.abort(seq)

    def _stream(self, request: Request) -> Iterator[str]:
        text, seq = request.text, self.engine.add(request)
        assert isinstance(text, IncrementalText)
        try:
            ended = False
            while not ended:
                if seq.finished is None:  # somebody else's step may have finished it
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
            self.engine.abort(seq)

    def chat_prompt(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation, ready for the next answer."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("messages", "", "the model has no chat template", "use generate() with a prompt")
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
        except Exception as error:  # templates are programs and raise what they like
            raise RequestError("messages", messages, f"the chat template fails ({error})", "check roles") from error


@dataclass(slots=True)
class _Job:
    """One prompt on its way: its sequences, or the reason there are none."""

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
            first = llm.request(self.prompt, self.params, self.k)
            samples = [first, *(llm._sample(first, n) for n in range(1, self.params.n))]
            for request in samples:
                self.seqs.append(llm.engine.add(request))
                live.append(self.seqs[-1])
        except RequestError as error:
            self.error = error
            for seq in self.seqs:
                llm.engine.abort(seq)

    def answer(self, llm: LLM) -> Answer:
        if self.error is not None:
            return Answer(self.prompt, [], [Completion("", [], "error", 0, 0, 0, 0, error=self.error)])
        first = self.seqs[0]
        logprobs = first.prompt_logprobs if self.params.prompt_logprobs is not None else None
        return Answer(self.prompt, list(first.prompt), [_completion(llm, seq) for seq in self.seqs], logprobs)


def _completion(llm: LLM, seq: Sequence) -> Completion:
    assert seq.finished is not None
    return Completion(
        text=_text(llm, seq),
        token_ids=seq.output,
        finish_reason=seq.finished,
        drafted=seq.drafted,
        accepted=seq.accepted,
        steps=seq.steps,
        seed=seq.seed,
        logprobs=None if seq.params.logprobs is None else seq.logprobs,
        origins=seq.origins,
        error=seq.error,
    )


def _text(llm: LLM, seq: Sequence) -> str:
    """The sequence's own text, or its tokens read the same way now."""
    text = seq.request.text
    if not isinstance(text, IncrementalText):
        text = IncrementalText(llm.decode, seq.prompt)
        for token in seq.output:
            text.push(token)
    return text.finish()


def _as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts; one text or one list of ids stands for itself. Arrays and tensors are lists."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise RequestError("prompts", prompts, "neither text nor token ids", "pass a string, or a list of either")
    return [prompts] if len(prompts) and isinstance(prompts[0], Integral) else list(prompts)


def _as_ids(prompt: Any) -> list[int]:
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(
            "prompt", prompt, "neither text nor token ids", "pass a string or a list of whole numbers"
        ) from None


def _as_conversations(messages: Any) -> list[list[Message]]:
    """Several conversations; one stands for itself."""
    if not isinstance(messages, Seq) or isinstance(messages, str) or not len(messages):
        raise RequestError("messages", messages, "not a conversation", "pass [{'role': ..., 'content': ...}, ...]")
    several = [messages] if isinstance(messages[0], dict) else messages
    for conversation in several:
        for message in conversation:
            if not isinstance(message, dict) or not {"role", "content"} <= set(message):
                raise RequestError("messages", message, "not a message", "give each a 'role' and a 'content'")
    return [list(conversation) for conversation in several]


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ConfigError(name, f"{len(value)} values", f"for {count} prompts", "pass one, or one per prompt")
    return list(value)


def _report(bar: Any, outputs: Any, live: list[Sequence]) -> None:
    if bar.disable:
        return
    bar.update(sum(output.finished is not None for output in outputs))
    written, drafted = sum(len(seq.output) for seq in live), sum(seq.drafted for seq in live)
    accepted = sum(seq.accepted for seq in live)
    rate = written / max(1e-9, bar.format_dict["elapsed"])
    bar.set_postfix_str(f"{rate:.0f} tok/s, accepted {accepted / drafted:.0%}" if drafted else f"{rate:.0f} tok/s")
