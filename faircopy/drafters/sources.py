"""What the tokens of a draft are drawn from, collected level by level for rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from faircopy.kernels.transfer import rows_of
from faircopy.sampling import SamplingRow, probabilities
from faircopy.types import PICKED


class SourceTable:
    """Keeps the logits from which tokens are drawn; their distributions are computed at once, when asked for."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._rows: list[SamplingRow] = []

    def add(self, logits: Tensor, rows: Seq[SamplingRow]) -> list[int]:
        """Each row's place in the table, PICKED of a greedy one. The next pass may write over logits [R, V]."""
        drawn = [n for n, row in enumerate(rows) if not row.seq.params.greedy]
        first, places = len(self._rows), [PICKED] * len(rows)
        for n, at in enumerate(drawn):
            places[at] = first + n
        if drawn:
            some = rows_of(logits, drawn)
            self._logits.append(some.clone() if some is logits else some)
            self._rows += [SamplingRow(rows[n].seq, list(rows[n].path)) for n in drawn]
        return places

    def __call__(self) -> Tensor:
        """Distributions [N, V]; there are none without a drawn row."""
        return probabilities(torch.cat(self._logits), self._rows)
