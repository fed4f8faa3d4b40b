"""`faircopy chat`: a conversation; what was said before is found in the cache, not computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rich.console import Console

from faircopy.errors import FaircopyError
from faircopy.types import SamplingParams

HELP = "/reset starts anew, /quit or Ctrl-D ends"


class ChatModel(Protocol):
    """What a conversation needs: an LLM, or a server's model."""

    def chat_prompt(self, messages: list[dict[str, str]]) -> Any: ...
    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[str]: ...
    def metrics(self) -> dict[str, float]: ...


def conversation(system: str | None, text: str) -> list[dict[str, str]]:
    """The messages of a conversation that begins."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def chat(
    llm: ChatModel,
    params: SamplingParams,
    read: Callable[[str], str] = input,
    console: Console | None = None,
    system: str | None = None,
) -> None:
    """Read a line, stream the answer, remember both. Ctrl-C at the prompt asks once more before it leaves."""
    console = console or Console(highlight=False)
    start = conversation(system, "")[:-1]
    llm.chat_prompt(conversation(system, ""))  # a model without a chat template is refused here, not later
    console.print(HELP, style="dim")
    messages, leaving = start, False
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()
            if leaving:
                return
            leaving = True
            console.print("press Ctrl-C again to leave, or go on", style="dim")
            continue
        leaving = False
        if line == "/quit":
            return
        if line == "/reset":
            messages = start
        elif line:
            messages = _turn(llm, params, [*messages, {"role": "user", "content": line}], console) or messages


def _turn(
    llm: ChatModel, params: SamplingParams, messages: list[dict[str, str]], console: Console
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
