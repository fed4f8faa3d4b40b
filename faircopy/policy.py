"""Which sequences run together."""

from __future__ import annotations

from faircopy.types import Sequence


def first_come(seqs: list[Sequence]) -> list[Sequence]:
    """Everybody, in order of arrival."""
    return sorted(seqs, key=lambda seq: seq.id)
