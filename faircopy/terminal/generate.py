"""`faircopy generate`: answers as text on the screen, as JSON lines, or in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from faircopy.llm import LLM, Answer
from faircopy.types import SamplingParams


def generate(llm: LLM, prompts: list[str], params: SamplingParams, out: Path | None, as_json: bool) -> bool:
    """Answer all prompts; each is written as soon as it is finished. True if all were answered."""
    records: dict[int, dict[str, Any]] = {}
    console, good = Console(highlight=False), True
    if out is not None:
        out.write_text("")
    try:
        for index, answer in llm.answers(prompts, params):
            records[index] = record(index, answer)
            good = good and answer.error is None
            if as_json:
                print(json.dumps(records[index]), flush=True)
            elif out is None:
                _show(console, answer)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(records[index]) + "\n")
    except KeyboardInterrupt:
        print(f"interrupted: {len(records)} of {len(prompts)} answers are kept", file=sys.stderr)
        good = False
    finally:
        if out is not None and records:
            out.write_text("".join(json.dumps(records[index]) + "\n" for index in sorted(records)), encoding="utf-8")
    return good


def record(index: int, answer: Answer) -> dict[str, Any]:
    """One line of JSONL."""
    fields: dict[str, Any] = {
        "index": index,
        "prompt": answer.prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "drafted": answer.drafted,
        "accepted": answer.accepted,
        "seed": answer.seed,
    }
    return fields if answer.error is None else {**fields, "error": str(answer.error)}


def _show(console: Console, answer: Answer) -> None:
    if answer.error is not None:
        Console(stderr=True).print(str(answer.error), style="red", markup=False, soft_wrap=True)
        return
    console.print(str(answer.prompt), style="dim", end="", markup=False, soft_wrap=True)
    console.print(answer.text, markup=False, soft_wrap=True)
    if answer.drafted:
        share = answer.accepted / answer.drafted
        console.print(
            f"[{answer.accepted} of {answer.drafted} drafts accepted, {share:.0%}]", style="dim", markup=False
        )
    console.print()
