"""A rectangle of rows, counted in pages of the shared pool."""

from __future__ import annotations

from typing import Protocol

from faircopy.layout.block_tables import BlockTables
from faircopy.layout.pool import PagePool
from faircopy.types import Sequence


class RowLayout(Protocol):
    """What the tables ask of a layout whose rows are all equally wide."""

    def width_for(self, seq: Sequence, length: int) -> int:
        """How wide the rectangle must be for this sequence to become this long."""


class RowTables(BlockTables):
    """Counts a rectangle in pages: a row per sequence, all as wide as the widest; no page is shared.

    A draft head has pages of its own beside it (`paged`), as many as the rectangle: no row is shorter than its text, so
    they suffice.
    """

    def __init__(self, pool: PagePool, page: int) -> None:
        super().__init__(pool, page, reuse=False)
        self.layouts: list[RowLayout] = []
        self._beside: BlockTables | None = None
        self._needs: dict[Sequence, int] = {}
        self._held = 0  # pages every row has

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.pool.pages * self.page

    def paged(self) -> BlockTables:
        """Pages for the same sequences, held and given back with their rows."""
        self._beside = BlockTables(PagePool(self.pool.pages), self.page, reuse=False)
        return self._beside

    def open(self, seq: Sequence) -> int:
        if self._beside is not None:
            self._beside.open(seq)
        return super().open(seq)

    def reserve(self, seq: Sequence, length: int) -> bool:
        """Widen all rows to what this one needs; false, and nothing changed, if that is too much."""
        return self._reserve_row(seq, length) and (self._beside is None or self._beside.reserve(seq, length))

    def _reserve_row(self, seq: Sequence, length: int) -> bool:
        before = self._needs.get(seq, 0)
        self._needs[seq] = max(layout.width_for(seq, length) for layout in self.layouts)
        need = self.pages_for(self._needs[seq])
        if need <= self._held == len(self.table(seq)):
            return True
        if self._widen() or self._widen():  # the second time without what trimmed rows have left over
            return True
        self._needs[seq] = before
        return False

    def trim(self, seq: Sequence, length: int) -> None:
        self._needs[seq] = max(layout.width_for(seq, length) for layout in self.layouts)
        if self._beside is not None:
            self._beside.trim(seq, length)

    def close(self, seq: Sequence) -> None:
        super().close(seq)
        self._needs.pop(seq, None)
        if self._beside is not None:
            self._beside.close(seq)

    def check(self) -> None:
        super().check()
        if self._beside is not None:
            self._beside.check()

    def _widen(self) -> bool:
        self._held = self.pages_for(max(self._needs.values(), default=0))
        width = self._held * self.page
        for seq in self._tables:
            super().trim(seq, width)
        missing = sum(self._held - len(table) for table in self._tables.values())
        if missing > self.pool.available:
            self._held = 0
            return False
        return all(super(RowTables, self).reserve(seq, width) for seq in self._tables)
