"""Which pages each sequence holds, in order; the ledger that target and draft caches share."""

from __future__ import annotations

from collections.abc import Hashable

from faircopy.layout.pool import PagePool
from faircopy.types import Sequence


class BlockTables:
    """Block tables over one pool. Every model's cache of a sequence lies at the same slots."""

    def __init__(self, pool: PagePool, page: int, reuse: bool = True) -> None:
        self.pool, self.page, self.reuse = pool, page, reuse
        self._tables: dict[Sequence, list[int]] = {}
        self._published: dict[Sequence, list[Hashable]] = {}  # content of the leading full pages

    def table(self, seq: Sequence) -> list[int]:
        return self._tables[seq]

    def pages_for(self, length: int) -> int:
        return -(-length // self.page)

    def fits(self, length: int) -> bool:
        """Whether a sequence of this length could live here alone."""
        return self.pages_for(length) <= self.pool.pages

    def open(self, seq: Sequence) -> int:
        """Start a table with the pages of known prefixes; the number of tokens they hold."""
        table, contents = self._tables.setdefault(seq, []), self._published.setdefault(seq, [])
        if self.reuse and seq.params.prompt_logprobs is None:  # those need every prompt row computed
            for index in range((len(seq.tokens) - 1) // self.page):
                content = self._content(seq, index, contents)
                page = self.pool.find(content)
                if page is None:
                    break
                self.pool.share(page)
                table.append(page)
                contents.append(self.pool.content(page))  # the known object: the next page need not compare all before
        return len(table) * self.page

    def reserve(self, seq: Sequence, length: int) -> bool:
        """Hold pages for this many tokens; false, and nothing changed, if there are not enough."""
        table = self._tables[seq]
        missing = self.pages_for(length) - len(table)
        if missing > self.pool.available:
            return False
        for _ in range(missing):
            table.append(self.pool.take(table[-1] if table else None))
        return True

    def trim(self, seq: Sequence, length: int) -> None:
        """Give back the pages beyond this length."""
        table = self._tables[seq]
        while len(table) > self.pages_for(length):
            self.pool.release(table.pop())

    def publish(self, seq: Sequence, cached: int) -> None:
        """Let other sequences find the pages that are now full for good."""
        contents = self._published[seq]
        for index in range(len(contents), cached // self.page if self.reuse else 0):
            contents.append(self._content(seq, index, contents))
            self.pool.publish(self._tables[seq][index], contents[index])

    def close(self, seq: Sequence) -> None:
        """Give everything back."""
        for page in reversed(self._tables.pop(seq, [])):
            self.pool.release(page)
        self._published.pop(seq, None)

    def held(self) -> int:
        return sum(map(len, self._tables.values()))

    def check(self) -> None:
        self.pool.check(self._tables.values())

    def _content(self, seq: Sequence, index: int, contents: list[Hashable]) -> Hashable:
        """A page's tokens and, through its predecessor's content, all tokens before them."""
        tokens = tuple(seq.tokens[index * self.page : (index + 1) * self.page])
        before = contents[index - 1] if index else None
        return _Prefix(before, tokens)


class _Prefix:
    """A prefix of tokens, hashed once; equality compares the tokens themselves, so a collision cannot lie."""

    __slots__ = ("before", "code", "tokens")

    def __init__(self, before: Hashable, tokens: tuple[int, ...]) -> None:
        self.before, self.tokens = before, tokens
        self.code = hash((before, tokens))

    def __hash__(self) -> int:
        return self.code

    def __eq__(self, other: object) -> bool:
        """Walks towards the root without recursion: prefixes may be thousands of pages long."""
        mine: object = self
        while isinstance(mine, _Prefix) and isinstance(other, _Prefix):
            if mine is other:
                return True
            if mine.code != other.code or mine.tokens != other.tokens:
                return False
            mine, other = mine.before, other.before
        return mine is other
