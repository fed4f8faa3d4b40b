"""Structured output: JSON schemas, regular expressions and grammars as constraints, through llguidance."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer

from faircopy.errors import RequestError
from faircopy.server.protocol import (
    GrammarFormat,
    RegexFormat,
    ResponseFormat,
    Sampling,
    SchemaFormat,
    StructuredOutputs,
)

_KEPT = 32  # masks kept per request: the paths of one step are asked for twice
_COMPACT = {"whitespace_flexible": False}  # free whitespace is what small models get lost in
_STRIDE = 32  # output tokens behind the last kept state of a matcher


class Grammars:
    """Makes constraints for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab: int, eos: Seq[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, sorted(eos)
        self._known: LLTokenizer | None = None

    def constraint(self, field: str, grammar: str) -> GrammarConstraint:
        """field: for the error, if the grammar cannot be used."""
        matcher = LLMatcher(self._words(field), grammar, log_level=0)
        if matcher.is_error():
            problem = f"cannot be used ({matcher.get_error().splitlines()[0][:200]})"
            raise RequestError(field, "a grammar", problem, "simplify it")
        return GrammarConstraint(matcher, self._vocab, self._eos)

    def _words(self, field: str) -> LLTokenizer:
        if self._known is None:
            try:
                from llguidance.hf import from_tokenizer

                self._known = from_tokenizer(self._tokenizer, self._vocab, self._eos or None)
            except Exception as error:  # tokenizers of other kinds than Hugging Face's fast ones
                problem = "the model's tokenizer is not one that constraints can read"
                raise RequestError(field, "a grammar", problem, "leave it out") from error
        return self._known


class GrammarConstraint:
    """Which tokens may follow an output. A function of the output: asked in any order it says the same."""

    def __init__(self, matcher: LLMatcher, vocab: int, eos: Seq[int]) -> None:
        self._start, self._vocab = matcher, vocab
        self._ends, self._nothing = _mask(vocab, eos), _mask(vocab, ())
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}
        self._base = matcher  # a state on the way, so that long outputs are not read again
        self._base_path: tuple[int, ...] = ()

    def allowed(self, output: Seq[int]) -> torch.Tensor:
        path = tuple(output)
        if path not in self._masks:
            if len(self._masks) >= _KEPT:
                self._masks.clear()
            self._masks[path] = self._compute(path)
        return self._masks[path]

    def complete(self, output: Seq[int]) -> bool:
        return self.allowed(output) is self._ends and not bool(self._ends.any())

    def _compute(self, path: tuple[int, ...]) -> torch.Tensor:
        """A path that the grammar forbids or that has ended may only end; a draft that went there is not accepted.

        Where llguidance gives up there is no mask: the request fails, for its text is not complete.
        """
        matcher, read = self._after(path)
        if read < len(path):
            return self._nothing if self._gave_up(path, read) else self._ends
        if matcher.is_stopped() and not matcher.is_error():
            return self._ends
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        if matcher.is_error():
            return self._nothing
        mask = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return mask.flatten()[: self._vocab].bool()

    def _gave_up(self, path: tuple[int, ...], read: int) -> bool:
        """Whether the last token was allowed and is not read: the matcher's limits were exceeded."""
        last = path[-1]
        return read == len(path) - 1 and not bool(self._ends[last]) and bool(self.allowed(path[:-1])[last])

    def _after(self, path: tuple[int, ...]) -> tuple[LLMatcher, int]:
        """The matcher's state behind a path, and how many of its tokens it has read: all, unless one is forbidden."""
        known = len(self._base_path)
        if path[:known] != self._base_path:
            self._base, self._base_path, known = self._start, (), 0
        if len(path) - known > _STRIDE:
            middle = len(path) - _STRIDE // 2
            moved, read = _consumed(self._base, path[known:middle])
            if known + read < middle:
                return moved, known + read
            self._base, self._base_path, known = moved, path[:middle], middle
        matcher, read = _consumed(self._base, path[known:])
        return matcher, known + read


def _consumed(matcher: LLMatcher, tokens: tuple[int, ...]) -> tuple[LLMatcher, int]:
    """A copy of the matcher that has read as many of these tokens as it can; one with an error counts all."""
    matcher = matcher.deep_copy()
    read = matcher.try_consume_tokens(list(tokens))
    return matcher, len(tokens) if matcher.is_error() else read


def _mask(vocab: int, tokens: Seq[int]) -> torch.Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[list(tokens)] = True
    return mask


def grammar_of(body: Sampling) -> tuple[str, str] | None:
    """The field that asks for structured output, and its grammar as llguidance takes it; None if there is none."""
    format, outputs = body.response_format, body.structured_outputs
    grammar = None if format is None else _of_format(format)
    other = None if outputs is None else _of_outputs(outputs)
    if grammar is not None and other is not None:
        raise RequestError("structured_outputs", "given", "beside response_format", "give one of the two")
    found = ("response_format", grammar) if grammar is not None else ("structured_outputs", other)
    if found[1] is None:
        return None
    refuse_contradictions(body, found[0])
    return found  # type: ignore[return-value]


def json_grammar(field: str, schema: dict[str, Any] | str) -> str:
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, defaults=_COMPACT))
    except ValueError as error:
        raise RequestError(field, schema, "not a JSON schema", "pass an object that is one") from error


def regex_grammar(regex: str) -> str:
    return str(LLMatcher.grammar_from_regex(regex))


def lark_grammar(grammar: str) -> str:
    return str(LLMatcher.grammar_from_lark(grammar))


def _of_format(format: ResponseFormat) -> str | None:
    if isinstance(format, SchemaFormat):
        return json_grammar("response_format", format.json_schema.json_schema or {})
    if isinstance(format, RegexFormat):
        return regex_grammar(format.regex)
    if isinstance(format, GrammarFormat):
        return lark_grammar(format.grammar)
    return json_grammar("response_format", {"type": "object"}) if format.type == "json_object" else None


def _of_outputs(outputs: StructuredOutputs) -> str | None:
    given = [name for name in ("json_", "regex", "choice", "grammar") if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise RequestError("structured_outputs", given, "not exactly one field", "give json, regex, choice or grammar")
    if outputs.json_ is not None:
        return json_grammar("structured_outputs", outputs.json_)
    if outputs.choice is not None:
        return regex_grammar("|".join(f"({re.escape(choice)})" for choice in outputs.choice))
    if outputs.regex is not None:
        return regex_grammar(outputs.regex)
    return None if outputs.grammar is None else lark_grammar(outputs.grammar)


def refuse_contradictions(body: Sampling, field: str) -> None:
    """Text of a complete grammar must be able to end."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(body, name):
            raise RequestError(name, getattr(body, name), f"cannot hold together with {field}", "leave one of them out")
