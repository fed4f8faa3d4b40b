"""What a benchmark asks for: prompts as token ids, and how many tokens each answer has."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from faircopy import bundled
from faircopy.errors import ConfigError
from faircopy.llm import LLM
from faircopy.types import SamplingParams

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts; every answer has exactly `tokens` tokens, so that all strategies do the same work."""

    name: str
    prompts: list[list[int]]
    tokens: int

    def first(self, count: int) -> Workload:
        """This many prompts, from the beginning again where there are too few."""
        return Workload(self.name, [self.prompts[n % len(self.prompts)] for n in range(count)], self.tokens)


def texts(name: str, prompts: list[str], encode: Encode, tokens: int, context: int) -> Workload:
    """Given prompts, for example Spec-Bench's first turns, cut where the context would be too short for answers."""
    room = context - tokens
    if room < 1:
        raise ConfigError("max_tokens", tokens, f"leaves no room in a context of {context}", "lower it")
    return Workload(name, [encode(prompt)[:room] for prompt in prompts], tokens)


def held_out(encode: Encode, tokens: int, context: int) -> Workload:
    """Beginnings of stories that the bundled models were not trained on: 24 to 64 tokens."""
    return texts("prompts", bundled.prompts(), encode, tokens, context)


def synthetic(vocab: int, tokens: int, context: int, count: int = 128, seed: int = 0) -> Workload:
    """Random tokens of random lengths, for any model: 8 to 256, or half the context."""
    source, longest = random.Random(seed), min(256, (context - tokens) // 2)
    if longest < 8:
        raise ConfigError("max_tokens", tokens, f"leaves no room in a context of {context}", "lower it")
    lengths = [source.randint(8, longest) for _ in range(count)]
    return Workload("synthetic", [[source.randrange(2, vocab) for _ in range(length)] for length in lengths], tokens)


def retold(encode: Encode, tokens: int, context: int, count: int = 48, story: int = 128) -> Workload:
    """Summarisation-like: a story, then its beginning once more; the answer repeats much of the story, not all.

    The story is a held-out prompt and what the bundled target itself goes on to write (float32, greedy), so a model
    that writes the bundled target's text copies runs of it and leaves them again, as a summary does.
    """
    llm = LLM(bundled.target(), dtype="float32", device="cpu", cache_memory="512MiB")
    prompts = bundled.prompts()[:count]
    answers = llm.generate(prompts, SamplingParams(max_tokens=story), progress=False)
    asked = [
        [*encode(f"{prompt}{answer.text}\n\n"), *encode(prompt)]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return Workload("retold", [ids[-(context - tokens) :] for ids in asked], tokens)


def named(name: str, encode: Encode, vocab: int, tokens: int, context: int) -> Workload:
    """A workload that comes with faircopy."""
    makers: dict[str, Callable[[], Workload]] = {
        "prompts": lambda: held_out(encode, tokens, context),
        "synthetic": lambda: synthetic(vocab, tokens, context),
        "retold": lambda: retold(encode, tokens, context),
    }
    if name not in makers:
        known = ", ".join(makers)
        raise ConfigError("workload", name, "unknown", f"use one of {known}, or a .jsonl or .txt file of prompts")
    return makers[name]()
