"""The state of a batch of captured steps on the device, and what one step's passes read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchSlots:
    """The state of a batch of captured steps, one row per batch slot."""

    control: Tensor  # [B, Control.PAGES + pages] int32, written by the host
    lengths: Tensor  # [B] int32
    history: Tensor  # [B, context + spare] int32

    def part(self, size: int) -> BatchSlots:
        return BatchSlots(self.control[:size], self.lengths[:size], self.history[:size])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step's passes read: W = k + 1 rows per batch slot, the last token and its nodes."""

    ids: Tensor  # [B, W] int32; the drafter fills the nodes
    positions: Tensor  # [B, W] int32
    slots: Tensor  # [B, W] int64: KV slots
    keys: Tensor  # [B, W] int64: the random key of the token after each row
    temperatures: Tensor  # [B, W] float32
    before: Tensor  # [3, B, 2] int64: ids, positions, KV slots of the last two tokens, for a draft model to catch up
    columns: Tensor  # [2, W, B] int64: positions and KV slots once more, column by column

    @classmethod
    def empty(cls, size: int, width: int, device: torch.device) -> StepInputs:
        def table(kind: torch.dtype) -> Tensor:
            return torch.zeros(size, width, dtype=kind, device=device)

        ints, longs = torch.int32, torch.int64
        before = torch.zeros(3, size, 2, dtype=longs, device=device)
        columns = torch.zeros(2, width, size, dtype=longs, device=device)
        return cls(table(ints), table(ints), table(longs), table(longs), table(torch.float32), before, columns)
