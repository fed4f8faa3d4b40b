"""`faircopy generate`: answers as text on the screen, as JSON lines, or in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from faircopy.llm import LLM, Answer, Prompt
from faircopy.terminal.answer_file import AnswerFile
from faircopy.types import SamplingParams


def generate(
    llm: LLM,
    texts: list[str],
    params: SamplingParams,
    out: AnswerFile | None,
    as_json: bool,
    encode: Callable[[str], Prompt] = str,
) -> bool:
    """Answer all texts; each answer is written as soon as it is finished. True if all were answered.

    encode: makes a prompt of a text; records have the text.
    """
    todo = out.missing if out is not None else list(range(len(texts)))
    console, good, finished = Console(highlight=False), True, 0
    if out is not None:
        if out.answered:
            print(f"{out.answered} of {len(texts)} prompts are already answered", file=sys.stderr)
        out.begin()
    try:
        for place, answer in llm.answers([encode(texts[index]) for index in todo], params) if todo else ():
            written = record(todo[place], texts[todo[place]], answer, params)
            good, finished = good and answer.error is None, finished + 1
            if out is not None:
                out.add(written)
            if as_json:
                print(json.dumps(written), flush=True)
            elif out is None:
                _show(console, texts[todo[place]], answer)
    except KeyboardInterrupt:
        print(f"interrupted: {len(texts) - len(todo) + finished} of {len(texts)} answers are kept", file=sys.stderr)
        good = False
    finally:
        if out is not None:
            out.sort()
    return good


def record(index: int, prompt: str, answer: Answer, params: SamplingParams) -> dict[str, Any]:
    """One line of JSONL. Several samples and log probabilities are there if they were asked for."""
    fields: dict[str, Any] = {
        "index": index,
        "prompt": prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "drafted": answer.drafted,
        "accepted": answer.accepted,
        "seed": answer.seed,
        "params": params.given(),
    }
    if params.logprobs is not None:
        fields["logprobs"] = answer.logprobs
    if params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = answer.prompt_logprobs
    if len(answer.outputs) > 1:
        names = ("text", "token_ids", "finish_reason", "seed", *(("logprobs",) if params.logprobs is not None else ()))
        fields["outputs"] = [{name: getattr(output, name) for name in names} for output in answer.outputs]
    return fields if answer.error is None else {**fields, "error": str(answer.error)}


def _show(console: Console, prompt: str, answer: Answer) -> None:
    if answer.error is not None:
        Console(stderr=True).print(str(answer.error), style="red", markup=False, soft_wrap=True)
        return
    for output in answer.outputs:
        console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
        console.print(output.text, markup=False, soft_wrap=True)
    if answer.drafted:
        share = answer.accepted / answer.drafted
        console.print(
            f"[{answer.accepted} of {answer.drafted} drafts accepted, {share:.0%}]", style="dim", markup=False
        )
    console.print()
