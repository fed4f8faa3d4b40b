"""Text from tokens as they come, cut at stop strings; what may still become one is held back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
Clean = Callable[[str], str]

_CONTEXT = 6  # tokens of the prompt that decide how the first new ones read
_INCOMPLETE = "\ufffd"  # what an unfinished multi-byte character decodes to
# Cleaning takes spaces out of " .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're" and changes nothing
# else: none of these reaches across a character that is in none of them, or across three characters without a space.
_SETTLED = re.compile(r".*(?:[^ .?!,'ntmsver]|[^ ]{3})", re.DOTALL)


class IncrementalText:
    """One sequence's text. Decoding starts a little before each new token, because tokens read differently alone."""

    def __init__(
        self, decode: Decode, prompt: Sequence[int], stop: Sequence[str] = (), clean: Clean | None = None
    ) -> None:
        """clean: takes spaces out of a whole text, as transformers' clean_up_tokenization does."""
        self._decode, self._stop, self._clean = decode, stop, clean
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)
        self._text, self._released = "", 0
        self._open = ""  # behind the text: decoded, and cleaned when it is known what follows
        self._ended = False

    @property
    def text(self) -> str:
        """All text that is settled; complete once `finish` was called."""
        return self._text

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Take one token; true if a stop string is now complete (text then ends before it)."""
        self._ids.append(token)
        known, unsettled = len(self._text), self._unsettled()
        self._absorb(final=False)
        if may_stop and self._stop:
            so_far = self._text + self._unsettled()
            self._ended = self._cut(so_far, known + _alike(unsettled, so_far[known:]))
        return self._ended

    def finish(self) -> str:
        """No more tokens: what was held back is released as it is."""
        if not self._ended:
            self._absorb(final=True)
            self._ended = True
        return self._text

    def release(self) -> str:
        """The text that is new since the last call and that no stop string can take back."""
        safe = len(self._text) if self._ended else len(self._text) - self._suspect()
        piece, self._released = self._text[self._released : safe], max(self._released, safe)
        return piece

    def _absorb(self, final: bool) -> None:
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if len(now) > len(before) and (final or not now.endswith(_INCOMPLETE)):
            self._open += now[len(before) :]
            self._start, self._read = self._read, len(self._ids)
        self._settle(final)

    def _settle(self, final: bool) -> None:
        """Move to the text what no later token changes."""
        if self._clean is None or final:
            self._text += self._unsettled()
            self._open = ""
        elif (settled := _SETTLED.match(self._open)) is not None:
            self._text += self._clean(settled[0])
            self._open = self._open[settled.end() :]

    def _unsettled(self) -> str:
        """What would follow the text if it ended here."""
        return self._open if self._clean is None or not self._open else self._clean(self._open)

    def _cut(self, so_far: str, known: int) -> bool:
        """End the text before the first stop string that reaches behind what was known before."""
        places = [so_far.find(stop, max(0, known - len(stop) + 1)) for stop in self._stop]
        first = min((place for place in places if place >= 0), default=None)
        if first is None:
            return False
        self._text, self._open = so_far[:first], ""
        return True

    def _suspect(self) -> int:
        """The length of the longest ending that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    shorter = min(len(one), len(other))
    return next((n for n in range(shorter) if one[n] != other[n]), shorter)
