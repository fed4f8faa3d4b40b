"""Records what `faircopy demo` shows as an animated SVG: a batch of eight being written, then the audit's verdict.

python -m runs.demo_recording docs/demo.svg

One column is one character; a token appears in the step that accepted it. The recording loops; a viewer without
animations shows its end.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from faircopy import LLM, SamplingParams, bundled
from faircopy.audit.models import audit_models
from faircopy.terminal.demo import choose_prompts
from faircopy.text import IncrementalText
from faircopy.types import Sequence

COLUMNS, PROMPT = 104, 26  # characters in a line, and how many of them show the end of the prompt
WIDTH, HEIGHT, LINE, CHAR = 888, 352, 24, 8.0  # pixels
LOOP, FIRST, LAST = 12.0, 1.0, 7.0  # seconds: the whole, the first step, the last step
BACK, DIM, DRAFTED, OWN, TEXT = "#14181f", "#7d8794", "#6fd08c", "#f5c542", "#dfe5ec"


@dataclass(frozen=True, slots=True)
class Piece:
    """A token's text, where and when it appears, and whether a draft had it right."""

    row: int
    column: int
    text: str
    step: int
    drafted: bool


def record(llm: LLM, prompts: list[str], tokens: int) -> tuple[list[str], list[Piece], int]:
    """The ends of the prompts, the pieces that fit their lines, and how many steps it took to fill them."""
    params = SamplingParams(max_tokens=tokens)
    seqs = [llm.engine.add(llm.request(prompt, params)) for prompt in prompts]
    readers = [IncrementalText(llm.decode, seq.prompt) for seq in seqs]
    columns, shown, pieces = [PROMPT] * len(seqs), [0] * len(seqs), list[Piece]()
    steps = 0
    while any(seq.finished is None for seq in seqs) and min(columns) < COLUMNS:
        llm.engine.step()
        steps += 1
        for row, seq in enumerate(seqs):
            for piece in _new(seq, readers[row], shown[row]):
                text = piece.text[: max(0, COLUMNS - columns[row])]
                if text:
                    pieces.append(Piece(row, columns[row], text, steps, piece.drafted))
                columns[row] += len(text)
            shown[row] = len(seq.output)
    for seq in seqs:
        llm.engine.abort(seq)
    return [_ending(prompt) for prompt in prompts], pieces, max(piece.step for piece in pieces)


def _new(seq: Sequence, reader: IncrementalText, shown: int) -> list[Piece]:
    found = []
    for token, drafted in zip(seq.output[shown:], seq.origins[shown:], strict=True):
        reader.push(token)
        found.append(Piece(0, 0, reader.release().replace("\n", " "), 0, drafted))
    return found


def _ending(prompt: str) -> str:
    flat = prompt.replace("\n", " ")
    return flat if len(flat) <= PROMPT else "…" + flat[-(PROMPT - 1) :]


def picture(prompts: list[str], pieces: list[Piece], steps: int, verdict: str) -> str:
    top = 84
    body = [_text(20, 34, "$ faircopy demo", TEXT)]
    body += [_text(20, top + LINE * row, prompt, DIM) for row, prompt in enumerate(prompts)]
    for piece in pieces:
        x, colour = 20 + CHAR * piece.column, DRAFTED if piece.drafted else OWN
        body.append(_text(x, top + LINE * piece.row, piece.text, colour, f"s{piece.step}"))
    below = top + LINE * len(prompts) + 16
    legend = ((20, "accepted draft", DRAFTED), (170, "the target's own", OWN), (335, "prompt", DIM))
    body += [_text(x, below, text, colour) for x, text, colour in legend]
    body.append(_text(20, below + LINE + 4, verdict, TEXT, f"s{steps + 1}"))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    font = 'font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="13"'
    frame = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{BACK}"/>'
    style = f"<style>{_style(steps)}</style>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', style, frame, *body, "</svg>", ""])


def _text(x: float, y: float, text: str, colour: str, when: str = "") -> str:
    """Stretched to whole columns, whatever the viewer's font."""
    kept = text.rstrip()
    lead = len(kept) - len(kept.lstrip())
    kept, x = kept.lstrip(), x + CHAR * lead
    if not kept:
        return ""
    at = f'x="{x:g}" y="{y:g}" textLength="{CHAR * len(kept):g}" lengthAdjust="spacingAndGlyphs" fill="{colour}"'
    return f"<text {at}{f' class={when!r}' if when else ''}>{escape(kept)}</text>"


def _style(steps: int) -> str:
    """One animation per step: hidden until its moment in the loop, then shown until the loop begins again."""
    rules = []
    for step in range(1, steps + 2):
        seconds = FIRST + (LAST - FIRST) * (step - 1) / steps
        percent = 100 * seconds / LOOP
        rules.append(f"@keyframes k{step}{{0%,{percent:.2f}%{{opacity:0}}{percent + 0.01:.2f}%,100%{{opacity:1}}}}")
        rules.append(f".s{step}{{animation:k{step} {LOOP:g}s infinite}}")
    return "".join(rules)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    prompts = choose_prompts()
    llm = LLM(bundled.target(), draft=bundled.draft(), k=4, cache_memory="256MiB")
    drawn = record(llm, prompts, 48)
    report = audit_models(
        bundled.target(), [bundled.draft(), "ngram"], prompts, SamplingParams(max_tokens=96), batches=(1, 8), ks=(2, 4)
    )
    verdict = f"audit: {report.percentage:.2f} % identical ({report.identical} of {report.total} texts)"
    out.write_text(picture(*drawn, verdict))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
