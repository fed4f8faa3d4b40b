"""From updates of the engine to the choices of an answer: text, log probabilities, origins, counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from faircopy.llm import LLM
from faircopy.server.engine_thread import Update
from faircopy.types import FinishReason, Logprobs, Request

Scores = Mapping[int, float]


@dataclass(slots=True)
class Piece:
    """What one or more updates add to a choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Scores | None] = field(default_factory=list)
    origins: list[tuple[str, bool]] = field(default_factory=list)
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    finished: FinishReason | None = None


class Choice:
    """One text as it is written; decodes outside the engine's thread, the same way and with the same cut."""

    def __init__(self, llm: LLM, request: Request, index: int, origins: bool = False) -> None:
        self.request, self.index = request, index
        self._text = llm.text(request.prompt, request.params.stop)
        self._origins = origins
        self.whole = Piece()
        self.counts = DraftCounts()

    def resume(self) -> None:
        """Count the tokens that the client has already; their text is not sent again."""
        if self.request.written:
            self.take([Update(tokens=self.request.written)])

    def take(self, updates: list[Update]) -> Piece:
        """What is new; `whole` has everything."""
        piece = Piece()
        for update in updates:
            self._take(update, piece)
        if piece.finished is not None:
            self._text.finish()
        self._release(piece, drafted=False)
        whole = self.whole
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.logprobs += piece.logprobs
        whole.origins += piece.origins
        whole.finished = piece.finished
        whole.prompt_logprobs = whole.prompt_logprobs or piece.prompt_logprobs
        return piece

    def _take(self, update: Update, piece: Piece) -> None:
        self.counts.add(update)
        written = len(self.whole.tokens) + len(piece.tokens)
        for place, token in enumerate(update.tokens):
            self._text.push(token, written + place + 1 >= self.request.params.min_tokens)
            if self._origins:
                self._release(piece, place < update.accepted)
        piece.tokens += update.tokens
        piece.logprobs += update.logprobs
        piece.finished = update.finished
        piece.prompt_logprobs = piece.prompt_logprobs or update.prompt_logprobs

    def _release(self, piece: Piece, drafted: bool) -> None:
        text = self._text.release()
        piece.text += text
        if self._origins and text:
            piece.origins.append((text, drafted))


@dataclass(slots=True)
class DraftCounts:
    """What speculation did for one sequence."""

    steps: int = 0  # with a draft
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    accepted_per_step: list[int] = field(default_factory=list)

    def add(self, update: Update) -> None:
        self.tokens += len(update.tokens)
        if update.drafted:
            self.steps += 1
            self.drafted += update.drafted
            self.accepted += update.accepted
            self.accepted_per_step.append(update.accepted)


def speculative_metrics(counts: list[DraftCounts], k: int, detail: str) -> dict[str, Any] | None:
    """metrics.speculative_decoding in vLLM's shape; None if it is switched off."""
    if detail == "none":
        return None
    steps, drafted = sum(c.steps for c in counts), sum(c.drafted for c in counts)
    accepted = sum(c.accepted for c in counts)
    each = [count for c in counts for count in c.accepted_per_step]
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [each.count(n) for n in range(max(each, default=0) + 1)] if each else [],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": k,
    }
    if detail == "detailed":
        found["accepted_per_step"] = [c.accepted_per_step for c in counts]
    return found


def usage(prompts: list[tuple[int, ...]], choices: list[Choice], count_output: bool = True) -> dict[str, Any]:
    prompt = sum(map(len, prompts))
    written = sum(len(choice.whole.tokens) for choice in choices) if count_output else 0
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }
    if any(choice.request.prediction for choice in choices):
        accepted = sum(choice.counts.accepted for choice in choices)
        drafted = sum(choice.counts.drafted for choice in choices)
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return found


class TokenNames:
    """The text of single tokens, as log probabilities name them."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer, self._known = llm.tokenizer, dict[int, str]()

    def __call__(self, token: int) -> str:
        if token not in self._known:
            name = "" if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)
            self._known[token] = str(name)
        return self._known[token]


def completion_logprobs(
    names: TokenNames, tokens: list[int], scores: list[Scores | None], best: int, offset: int
) -> dict[str, Any]:
    """OpenAI's parallel lists; the scores of a prompt's first token are null."""
    texts = [names(token) for token in tokens]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    top = [None if score is None else _best(names, score, best) for score in scores]
    return {
        "tokens": texts,
        "token_logprobs": [
            None if score is None else score[token] for token, score in zip(tokens, scores, strict=True)
        ],
        "top_logprobs": top if best else None,
        "text_offset": offsets[: len(texts)],
    }


def chat_logprobs(names: TokenNames, tokens: list[int], scores: list[Scores | None], best: int) -> dict[str, Any]:
    content = []
    for token, score in zip(tokens, scores, strict=True):
        assert score is not None, "output tokens have log probabilities"
        ordered = sorted(score.items(), key=lambda pair: -pair[1])[:best]
        top = [_chat_token(names(other), value) for other, value in ordered]
        content.append({**_chat_token(names(token), score[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", errors="replace"))}


def _best(names: TokenNames, score: Scores, best: int) -> dict[str, float]:
    """The best tokens, and the chosen one if it is not among them; of two with one text the better stays."""
    found: dict[str, float] = {}
    for token, value in sorted(score.items(), key=lambda pair: -pair[1]):
        found.setdefault(names(token), value)
    return found
