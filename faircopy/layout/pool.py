"""Pages as integers: how many sequences hold each, which may be shared, which are free. No tensors here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush


class PagePool:
    """Hands out pages; a page is free, held by one or more sequences, or kept for its content until needed.

    `birth` counts how often a page was handed out anew: what was known about its content is true while it is the same.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.birth = [0] * pages
        self._free = set(range(pages))
        self._holders: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # held by no sequence, least recently used first
        self._content: dict[int, Hashable] = {}  # page -> what it holds, for pages that may be shared
        self._index: dict[Hashable, int] = {}  # the same, backwards
        self._lowest = list(range(pages))  # a heap: all free pages, among others and repetitions

    @property
    def available(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def in_use(self) -> int:
        """Pages that sequences hold, or that are kept for their content."""
        return self.pages - len(self._free)

    def take(self, after: int | None = None) -> int:
        """A page for one holder, if possible the neighbour of `after`, so that a sequence lies in one run."""
        if not self._free:
            self._forget(next(iter(self._kept)))
        page = after + 1 if after is not None and after + 1 in self._free else self._place()
        self._free.remove(page)
        self.birth[page] += 1
        self._holders[page] = 1
        return page

    def find(self, content: Hashable) -> int | None:
        """The page known to hold this content, if any."""
        return self._index.get(content)

    def content(self, page: int) -> Hashable:
        """What a page was published to hold, as the one object that others compare with."""
        return self._content[page]

    def share(self, page: int) -> None:
        """One more holder of a page with known content."""
        self._kept.pop(page, None)
        self._holders[page] = self._holders.get(page, 0) + 1

    def publish(self, page: int, content: Hashable) -> None:
        """Let others find this full page; the first page with a content stays the one to find."""
        if content not in self._index and page not in self._content:
            self._index[content], self._content[page] = page, content

    def release(self, page: int) -> None:
        """One holder fewer; the last one gives the page back, or leaves it to be found again."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        del self._holders[page]
        if page in self._content:
            self._kept[page] = None
        else:
            self._give_back(page)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Check that every page is in exactly one state, and held as often as it is in the tables."""
        held: dict[int, int] = {}
        for table in tables:
            for page in table:
                held[page] = held.get(page, 0) + 1
        assert held == self._holders, "a table and the pool disagree about the holders of a page"
        states = sorted([*self._free, *self._holders, *self._kept])
        assert states == list(range(self.pages)), "a page is lost or in two states"
        assert set(self._kept) <= set(self._content), "a page is kept for no content"
        assert {page: content for content, page in self._index.items()} == self._content, "the index is out of step"

    def _forget(self, page: int) -> None:
        del self._kept[page], self._index[self._content.pop(page)]
        self._give_back(page)

    def _give_back(self, page: int) -> None:
        self._free.add(page)
        heappush(self._lowest, page)
        if len(self._lowest) > 2 * self.pages:
            self._lowest = sorted(self._free)

    def _place(self) -> int:
        """The lowest free page: memory is taken where it was used before."""
        while self._lowest[0] not in self._free:
            heappop(self._lowest)
        return self._lowest[0]
