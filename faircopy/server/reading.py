"""From bodies of HTTP requests to requests of the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from faircopy.drafters.per_request import drafter_names
from faircopy.errors import RequestError
from faircopy.llm import LLM
from faircopy.requests import check_request
from faircopy.server.errors import ApiError
from faircopy.server.grammar import Grammars, grammar_of, json_grammar, refuse_contradictions
from faircopy.server.protocol import (
    IGNORED_IN_MESSAGES,
    ChatRequest,
    CompletionRequest,
    Message,
    NamedTool,
    Sampling,
    Speculative,
    TextPart,
    Tool,
)
from faircopy.server.settings import ServerConfig
from faircopy.types import Constraint, Request, SamplingParams

PREDICTION_K = 16  # draft tokens per step from a prediction, unless the request says otherwise


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request as the engine takes it: n requests for each prompt, in the order of the choices."""

    requests: list[Request]
    prompts: list[tuple[int, ...]]
    n: int
    finished: frozenset[int] = frozenset()  # choices that the client has in full

    @property
    def open(self) -> list[int]:
        """The choices that are to be written."""
        return [index for index in range(len(self.requests)) if index not in self.finished]


class Reader:
    """Reads bodies for one model; called from worker threads."""

    def __init__(self, llm: LLM, config: ServerConfig, name: str) -> None:
        self._llm, self._config, self._name = llm, config, name
        self._grammars = Grammars(llm.tokenizer, llm.model.vocab, sorted(llm.engine.eos))

    def completion(self, body: CompletionRequest) -> Asked:
        self._check(body)
        prompts = _prompts(body.prompt)
        if len(prompts) > self._config.max_prompts:
            problem = f"more than {self._config.max_prompts} prompts"
            raise RequestError("prompt", f"{len(prompts)} prompts", problem, "send several requests")
        prompt_logprobs = body.logprobs if body.echo else None
        most = None if body.max_tokens is None else max(1, body.max_tokens)  # a 0 is cut afterwards
        params = sampling_params(body, max_tokens=most, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
        ids = [self._llm.encode(prompt) for prompt in prompts]
        return self._asked(body, ids, params, self._constraint(body))

    def chat(self, body: ChatRequest) -> Asked:
        self._check(body)
        most = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if wants_logprobs(body) else None
        params = sampling_params(body, max_tokens=most, logprobs=logprobs)
        ids = self.chat_ids(body.messages, _tools(body), _template(body))
        constraint = self._tool_constraint(body) or self._constraint(body)
        return self._asked(body, [ids], params, constraint, self._prediction(body))

    def chat_ids(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, template: dict[str, Any]
    ) -> list[int]:
        more = {**template, **({"tools": tools} if tools else {})}
        return self._llm.chat_prompt([plain_message(message) for message in messages], **more)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self._name, self._llm.model.name):  # the last one: a hub's whole id
            raise ApiError(404, f"model = {name!r}: not served here; use {self._name!r}", "model", "model_not_found")

    def _check(self, body: Sampling) -> None:
        self.check_model(body.model)
        if (body.n or 1) > self._config.max_n:
            raise RequestError("n", body.n, f"above {self._config.max_n}", "send several requests")

    def _asked(
        self,
        body: Sampling,
        prompts: Seq[list[int]],
        params: SamplingParams,
        constraint: Constraint | None,
        prediction: tuple[int, ...] = (),
    ) -> Asked:
        k, drafter = self._drafting(body, bool(prediction))
        requests: list[Request] = []
        for ids in prompts:
            if self._config.max_prompt is not None and len(ids) > self._config.max_prompt:
                problem = f"more than {self._config.max_prompt}"
                raise RequestError("prompt", f"{len(ids)} tokens", problem, "shorten it")
            first = replace(
                self._llm.request(ids, params, k), constraint=constraint, drafter=drafter, prediction=prediction
            )
            check_request(first, self._llm.model, self._llm.engine.tables)
            requests += self._llm.samples(first)
        known = body.continued
        finished = frozenset(index for index, written in enumerate(known or ()) if written.finished)
        return Asked(self._continued(body, requests), [tuple(ids) for ids in prompts], params.n, finished)

    def _continued(self, body: Sampling, requests: list[Request]) -> list[Request]:
        """Requests that go on behind the tokens that the client has."""
        if body.continued is None:
            return requests
        if not body.stream or body.seed is None:
            raise RequestError("continued", "given", "without a stream and its seed", "set stream to true, and seed")
        if len(body.continued) != len(requests):
            problem = f"for {len(requests)} choices"
            raise RequestError("continued", f"{len(body.continued)} entries", problem, "give one for each choice")
        found = []
        for request, known in zip(requests, body.continued, strict=True):
            found.append(replace(request, written=tuple(known.token_ids)))
            if not known.finished:
                check_request(found[-1], self._llm.model, self._llm.engine.tables)
        return found

    def _drafting(self, body: Sampling, predicted: bool) -> tuple[int | None, str | None]:
        """The request's k and drafter."""
        wanted = body.speculative
        if wanted is False or (isinstance(wanted, Speculative) and not wanted.enabled):
            return 0, None
        own = wanted if isinstance(wanted, Speculative) else Speculative(k=None, drafter=None)
        names = drafter_names(self._llm.engine.drafter)
        if own.drafter is not None and own.drafter not in names:
            raise RequestError("speculative.drafter", own.drafter, "not known here", f"use one of {', '.join(names)}")
        return (PREDICTION_K if predicted and own.k is None else own.k), own.drafter

    def _constraint(self, body: Sampling) -> Constraint | None:
        found = grammar_of(body)
        return None if found is None else self._grammars.constraint(*found)

    def _tool_constraint(self, body: ChatRequest) -> Constraint | None:
        """A call that must be made is forced as JSON, whatever the model's own format for calls is."""
        forced = forced_tools(body)
        if forced is None:
            return None
        refuse_contradictions(body, "tool_choice")
        schemas = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": _arguments_schema(tool, place),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for place, tool in enumerate(forced)
        ]
        return self._grammars.constraint("tools", json_grammar("tools", {"anyOf": schemas}))

    def _prediction(self, body: ChatRequest) -> tuple[int, ...]:
        if body.prediction is None:
            return ()
        tokenizer = self._llm.tokenizer
        text = flat_text(body.prediction.content)
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if tokenizer is not None else ()


def forced_tools(body: ChatRequest) -> list[Any] | None:
    """The tools of which one must be called; None if the model may choose."""
    if body.tool_choice == "required":
        if not body.tools:
            raise RequestError("tool_choice", "required", "there are no tools", "give tools")
        return body.tools
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        named = [tool for tool in body.tools or () if tool.function.name == name]
        if not named:
            raise RequestError("tool_choice", name, "not one of tools", "name one of them")
        return named
    return None


def _arguments_schema(tool: Tool, place: int) -> dict[str, Any]:
    """A tool's schema as a part of another one: with an identifier of its own its references stay in it."""
    usual = {"$id": f"urn:faircopy:tool:{place}", "type": "object", "additionalProperties": False}
    return usual | (tool.function.parameters or {})


def sampling_params(body: Sampling, **more: Any) -> SamplingParams:
    """The engine's parameters; null means the default."""
    top_k = body.top_k if body.top_k is not None and body.top_k > 0 else 0
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=top_k,
        min_p=body.min_p or 0.0,
        seed=None if body.seed is None else body.seed % (1 << 63),
        min_tokens=body.min_tokens or 0,
        stop=body.stop or (),  # type: ignore[arg-type]
        stop_token_ids=body.stop_token_ids or (),  # type: ignore[arg-type]
        ignore_eos=bool(body.ignore_eos),
        n=body.n or 1,
        logit_bias=body.logit_bias or {},  # type: ignore[arg-type]
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        bad_words=body.bad_words or (),  # type: ignore[arg-type]
        **more,
    )


def plain_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: text instead of parts, arguments of calls as objects."""
    plain = message.model_dump(exclude_none=True, exclude=IGNORED_IN_MESSAGES)
    plain["content"] = flat_text(message.content)
    for call in plain.get("tool_calls", ()):
        call.pop("index", None)
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return plain


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise RequestError("messages", text, "not JSON", "send the call's arguments as JSON") from None


def flat_text(content: str | list[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    if not body.tools or body.tool_choice == "none":
        return None
    return [plain_tool(tool) for tool in body.tools]


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates and parsers expect it."""
    return tool.model_dump(exclude_none=True, exclude={"cache_control"})


def wants_logprobs(body: ChatRequest) -> bool:
    return bool(body.logprobs) or body.top_logprobs is not None


def _template(body: ChatRequest) -> dict[str, Any]:
    """What the chat template is given beside messages and tools."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return effort | (body.chat_template_kwargs or {})


def _prompts(prompt: Any) -> list[Any]:
    """One prompt or several, as texts or lists of token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
