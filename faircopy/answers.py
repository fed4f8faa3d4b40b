"""What users get back: answers, made from finished sequences."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from faircopy.errors import FaircopyError
from faircopy.requests import Prompt
from faircopy.text import IncrementalText
from faircopy.types import FinishReason, Logprobs, Sequence

MakeText = Callable[[Seq[int]], IncrementalText]


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
    """The n completions of one prompt; the first one's fields can be read directly."""

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


def make_answer(prompt: Prompt, seqs: list[Sequence], text: MakeText) -> Answer:
    """The answer to a prompt, from its finished sequences. text: begins the text behind a prompt."""
    first = seqs[0]
    logprobs = first.prompt_logprobs if first.params.prompt_logprobs is not None else None
    return Answer(prompt, list(first.prompt), [_completion(seq, text) for seq in seqs], logprobs)


def refused(prompt: Prompt, error: FaircopyError) -> Answer:
    """The answer to a prompt that was never run."""
    return Answer(prompt, [], [Completion("", [], "error", 0, 0, 0, 0, error=error)])


def _completion(seq: Sequence, text: MakeText) -> Completion:
    assert seq.finished is not None, "only a finished sequence is an answer"
    return Completion(
        text=_text(seq, text),
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


def _text(seq: Sequence, make: MakeText) -> str:
    """The text that was decoded as the tokens came, or the tokens decoded the same way now."""
    text = seq.request.text
    if not isinstance(text, IncrementalText):
        text = make(seq.prompt)
        for token in seq.output:
            text.push(token)
    return text.finish()
