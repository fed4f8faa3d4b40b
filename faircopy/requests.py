"""What users pass in, read and checked: prompts, conversations, values per prompt, requests."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Seq
from dataclasses import replace
from numbers import Integral
from typing import Any

from faircopy import rng
from faircopy.errors import ConfigError, OutOfPages, RequestError
from faircopy.layout.block_tables import BlockTables
from faircopy.model.base import Model
from faircopy.model.loader import space_cleaner, text_decoder
from faircopy.text import IncrementalText
from faircopy.types import Request, SamplingParams

Prompt = str | Seq[int]
Message = dict[str, Any]


class RequestReader:
    """Makes requests from texts and token ids with the model's tokenizer, if there is one."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any | None:
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any | None) -> None:
        self._tokenizer, self._decode, self._clean = tokenizer, text_decoder(tokenizer), space_cleaner(tokenizer)
        self._single: dict[int, str] = {}  # texts of single tokens, which streams ask for again and again

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids pass through."""
        if not isinstance(prompt, str):
            return as_ids(prompt)
        if self.tokenizer is None:
            raise RequestError("prompt", prompt, "there is no tokenizer for text", "pass token ids, or tokenizer=")
        try:
            return list(self.tokenizer.encode(prompt))
        except (TypeError, UnicodeError) as error:  # half a surrogate pair, for example
            raise RequestError("prompt", prompt, "not valid text", "remove what is not Unicode") from error

    def decode(self, tokens: list[int]) -> str:
        text = self._decode_raw(tokens)
        return text if self._clean is None else self._clean(text)

    def text(self, prompt: Seq[int], stop: Seq[str] = ()) -> IncrementalText:
        """The text behind a prompt, from tokens that are yet to come."""
        return IncrementalText(self._decode_raw, prompt, stop, self._clean)

    def _decode_raw(self, tokens: list[int]) -> str:
        if len(tokens) != 1:
            return self._decode(tokens)
        text = self._single.get(tokens[0])
        if text is None:
            text = self._single[tokens[0]] = self._decode(tokens)
        return text

    def request(self, prompt: Prompt, params: SamplingParams, k: int | None = None, streamed: bool = False) -> Request:
        """A prompt as token ids, with a seed, and with a text to watch if there are stop strings or it is streamed."""
        if not isinstance(params, SamplingParams):
            raise RequestError("params", params, "not SamplingParams", "pass SamplingParams(...)")
        ids = self.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop", params.stop, "there is no tokenizer for text", "use stop_token_ids")
        text = self.text(ids, params.stop) if params.stop or streamed else None
        seed = rng.fresh_seed() if params.seed is None else params.seed
        return Request(tuple(ids), params, seed, k, text, self._bad_words(params))

    def samples(self, first: Request) -> list[Request]:
        """The request and its n - 1 further samples, each with a seed and a text of its own."""
        return [first, *(self._sample(first, index) for index in range(1, first.params.n))]

    def chat_prompt(self, messages: list[Message], **template: Any) -> list[int]:
        """Token ids of a conversation, ready for the next answer. template: what else the chat template is given."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("messages", "", "the model has no chat template", "use generate() with a prompt")
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    messages, **{"add_generation_prompt": True, **template, "tokenize": True, "return_dict": False}
                )
            )
        except Exception as error:  # templates are programs and raise what they like
            raise RequestError("messages", messages, f"the chat template fails ({error})", "check roles") from error

    def _sample(self, first: Request, index: int) -> Request:
        text = None if first.text is None else self.text(first.prompt, first.params.stop)
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


def as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts; a single text or list of ids becomes a list of one. Arrays and tensors are lists."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise RequestError("prompts", prompts, "neither text nor token ids", "pass a string, or a list of either")
    return [prompts] if len(prompts) and isinstance(prompts[0], Integral) else list(prompts)


def as_ids(prompt: Any) -> list[int]:
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(
            "prompt", prompt, "neither text nor token ids", "pass a string or a list of whole numbers"
        ) from None


def as_conversations(messages: Any) -> list[list[Message]]:
    """A list of conversations; a single one becomes a list of one."""
    if not isinstance(messages, Seq) or isinstance(messages, str) or not len(messages):
        raise RequestError("messages", messages, "not a conversation", "pass [{'role': ..., 'content': ...}, ...]")
    several = [messages] if isinstance(messages[0], dict) else messages
    for conversation in several:
        for message in conversation:
            if not isinstance(message, dict) or not {"role", "content"} <= set(message):
                raise RequestError("messages", message, "not a message", "give each a 'role' and a 'content'")
    return [list(conversation) for conversation in several]


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt; a single value is repeated."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ConfigError(name, f"{len(value)} values", f"for {count} prompts", "pass one, or one per prompt")
    return list(value)


def check_request(request: Request, model: Model, tables: BlockTables) -> None:
    """Refuse what can never be served, naming the field."""
    params, length = request.params, len(request.prompt)
    if not length:
        raise RequestError("prompt", "", "empty", "pass at least one token, for example the model's BOS token")
    if length >= model.context:
        raise RequestError(
            "prompt", f"{length} tokens", f"leaves no room in the model's context of {model.context}", "shorten it"
        )
    ids = {
        "prompt": request.prompt,
        "written": request.written,
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, tokens in ids.items():
        for token in tokens:
            if not 0 <= token < model.vocab:
                raise RequestError(name, token, f"not a token id below {model.vocab}", "use the model's own tokenizer")
    if request.k is not None and (not isinstance(request.k, int) or isinstance(request.k, bool) or request.k < 0):
        raise RequestError("k", request.k, "not a whole number of at least 0", "use 0 to decode without drafting")
    limit = token_limit(request, model)
    if request.written and length + len(request.written) >= limit:
        raise RequestError("written", f"{len(request.written)} tokens", "leaves nothing to write", "pass fewer")
    if not tables.fits(limit):
        have = tables.pool.pages * tables.page
        raise OutOfPages(
            "prompt",
            f"{length} tokens",
            f"with max_tokens it may need {limit} of {have} tokens of memory",
            "raise cache_memory= or memory=, or lower max_tokens",
        )


def replay_text(request: Request) -> None:
    """Tell the watch for stop strings the tokens that were written elsewhere."""
    if request.text is not None:
        for count, token in enumerate(request.written, 1):
            request.text.push(token, count >= request.params.min_tokens)


def token_limit(request: Request, model: Model) -> int:
    """How long prompt and output may become together."""
    most = request.params.max_tokens
    return model.context if most is None else min(model.context, len(request.prompt) + most)
