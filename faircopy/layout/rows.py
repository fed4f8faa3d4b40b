"""Rules about single rows that every layout shares: which have logits, where nodes stand, what may be stored."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from faircopy.kernels.attention import Ints
from faircopy.types import Sequence


def node_depths(parents: list[int]) -> Ints:
    """How deep each node is in its tree; a child of the last token is at depth 1."""
    depths = np.empty(len(parents), np.int64)
    for node, parent in enumerate(parents):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
    return depths


def wanted_rows(seq: Sequence, start: int, upto: int, complete: bool, nodes: int) -> list[int]:
    """Rows of the sequence whose logits are needed: asked-for prompt rows, the last token, nodes."""
    fed = upto - start
    prompt = max(0, min(upto, len(seq.prompt) - 1) - start) if seq.params.prompt_logprobs is not None else 0
    last = fed - 1 if complete and fed else fed
    return [*range(prompt), *range(max(last, prompt), fed + nodes)]


def page_grid(tables: list[list[int]], empty: int) -> NDArray[np.int32]:
    """Page tables of several sequences side by side, `empty` behind the shorter ones."""
    counts = np.array([len(table) for table in tables], np.int64)
    grid = np.full((len(tables), max(map(len, tables), default=0)), empty, np.int32)
    grid[np.arange(grid.shape[1]) < counts[:, None]] = np.fromiter(chain(*tables), np.int32)
    return grid


def pad_last(x: Tensor, width: int) -> Tensor:
    """Zeros behind the last dimension, where a layer's values are narrower than its keys."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def finite_or_zero(x: Tensor) -> Tensor:
    """A masked NaN still spreads (NaN - inf, 0 * NaN), to other queries and to a page's next holder: store zeros."""
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)
