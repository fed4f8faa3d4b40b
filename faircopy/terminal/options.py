"""Options that several commands share: one table makes the sampling options of `generate` and `chat`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from faircopy.errors import RequestError
from faircopy.types import SamplingParams

DEFAULTS = SamplingParams()


class SamplingOption(NamedTuple):
    """A field of SamplingParams as an option: its type on the command line, and its help."""

    field: str
    kind: Any
    help: str


# A new field of SamplingParams is one line here.
SAMPLING = (
    SamplingOption("max_tokens", int, "Tokens per answer at most."),
    SamplingOption("min_tokens", int, "Tokens per answer at least."),
    SamplingOption("temperature", float, "0 is greedy."),
    SamplingOption("top_p", float, "Nucleus; 1 switches it off."),
    SamplingOption("top_k", int, "Sample from the n best tokens; 0: all."),
    SamplingOption("min_p", float, "Leave out tokens below this share of the best one's probability."),
    SamplingOption("seed", int | None, "A fresh one if left out."),
    SamplingOption("n", int, "Samples per prompt."),
    SamplingOption("stop", list[str] | None, "End before this text; may be given several times."),
    SamplingOption("stop_token_ids", list[int] | None, "End at this token; may be given several times."),
    SamplingOption("logprobs", int | None, "Of each token written, and of the n best; in --json and --out."),
    SamplingOption("prompt_logprobs", int | None, "The same of the prompt's tokens."),
    SamplingOption("ignore_eos", bool, "Go on after the model's end token."),
    SamplingOption("repetition_penalty", float, "Above 1: tokens already seen become less likely."),
    SamplingOption("presence_penalty", float, "Taken from the logits of tokens already written."),
    SamplingOption("frequency_penalty", float, "The same, once for each time a token was written."),
    SamplingOption("logit_bias", list[str] | None, "TOKEN_ID=NUMBER is added to a logit; may be given several times."),
    SamplingOption("bad_words", list[str] | None, "Never write this text; may be given several times."),
)


def with_sampling(left_out: tuple[str, ...] = (), **defaults: Any) -> Callable[..., Callable[..., None]]:
    """Give a command one option per line of SAMPLING; it gets them as one SamplingParams, `params`."""
    added = [_parameter(option, defaults) for option in SAMPLING if option.field not in left_out]
    return _with("params", added, _params)


def with_made(name: str, make: Callable[..., Any], **defaults: Any) -> Callable[..., Callable[..., None]]:
    """Give a command the options of `make`, some with other defaults; it gets what `make` makes of them, as `name`."""
    options = inspect.signature(make, eval_str=True).parameters.values()
    return _with(name, [p.replace(default=defaults.get(p.name, p.default)) for p in options], make)


def _with(
    name: str, added: list[inspect.Parameter], make: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            chosen = {p.name: given.pop(p.name) for p in added}
            command(**given, **{name: make(**chosen)})

        own = inspect.signature(command, eval_str=True).parameters.values()
        every = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *added) if p.name != name]
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in every}
        return run

    return decorate


def _parameter(option: SamplingOption, defaults: dict[str, Any]) -> inspect.Parameter:
    name = "--" + option.field.replace("_", "-")
    default = defaults.get(option.field, getattr(DEFAULTS, option.field))
    shown = typer.Option(name, help=option.help)
    return inspect.Parameter(
        option.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=default or None if isinstance(default, tuple | dict) else default,
        annotation=Annotated[option.kind, shown],
    )


def _params(**chosen: Any) -> SamplingParams:
    return SamplingParams(**{**chosen, "logit_bias": _bias(chosen.get("logit_bias"))})


def _bias(given: list[str] | None) -> dict[int, float]:
    found = {}
    for text in given or ():
        token, _, number = text.partition("=")
        try:
            found[int(token)] = float(number)
        except ValueError:
            raise RequestError("logit_bias", text, "not TOKEN_ID=NUMBER", "write for example 42=-5") from None
    return found


class Command(TyperCommand):
    """A command whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))


def _plain_flags(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        if getattr(param, "envvar", None) is None:
            param.show_envvar = False  # a name that is made by rule is told once, in the command's help
    return params
