"""Text from tokens as they come, cut at stop strings; what may still become one is held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_CONTEXT = 6  # tokens of the prompt that decide how the first new ones read
_INCOMPLETE = "\ufffd"  # what an unfinished multi-byte character decodes to


class IncrementalText:
    """One sequence's text. Decoding starts a little before each new token, because tokens read differently alone."""

    def __init__(self, decode: Decode, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)
        self._text, self._released = "", 0
        self._ended = False

    @property
    def text(self) -> str:
        """All text so far; complete once `finish` was called."""
        return self._text

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Take one token; true if a stop string is now complete (text then ends before it)."""
        self._ids.append(token)
        known = len(self._text)
        self._absorb(final=False)
        if may_stop:
            self._ended = self._cut(known)
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
            self._text += now[len(before) :]
            self._start, self._read = self._read, len(self._ids)

    def _cut(self, known: int) -> bool:
        """End the text before the first stop string that reaches into its new part."""
        places = [self._text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stop]
        first = min((place for place in places if place >= 0), default=None)
        if first is None:
            return False
        self._text = self._text[:first]
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
