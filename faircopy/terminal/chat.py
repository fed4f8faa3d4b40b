"""`faircopy chat`: a conversation; what was said before is found in the cache, not computed again."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from faircopy.errors import FaircopyError
from faircopy.llm import LLM
from faircopy.types import SamplingParams

HELP = "/reset starts anew, /quit or Ctrl-D ends"


def chat(llm: LLM, params: SamplingParams, read: Callable[[str], str] = input, console: Console | None = None) -> None:
    """Read a line, stream the answer, remember both."""
    console = console or Console(highlight=False)
    llm.chat_prompt([{"role": "user", "content": ""}])  # a model without a chat template is refused here, not later
    console.print(HELP, style="dim")
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/quit":
            return
        if line == "/reset":
            messages = []
        elif line:
            messages = _turn(llm, params, [*messages, {"role": "user", "content": line}], console) or messages


def _turn(
    llm: LLM, params: SamplingParams, messages: list[dict[str, str]], console: Console
) -> list[dict[str, str]] | None:
    """The conversation with the answer, or None if there was none."""
    before, said = llm.metrics(), ""
    try:
        for piece in llm.stream(llm.chat_prompt(messages), params):
            console.print(piece, end="", markup=False, soft_wrap=True)
            said += piece
    except KeyboardInterrupt:
        console.print(" (stopped)", style="dim", end="")
    except FaircopyError as error:
        console.print(f"{error} (or /reset)", style="red", markup=False)
        return None
    now = llm.metrics()
    written, known = (now[name] - before[name] for name in ("emitted", "tokens_reused"))
    console.print(f"\n({written:.0f} tokens, {known:.0f} of the prompt from the cache)", style="dim")
    return [*messages, {"role": "assistant", "content": said}]
