"""The rows that host and device exchange for each batch slot: a control row to the device, a report row back.

This is the only definition of their columns. The host and the torch twins index with the enums; kernels read the same
numbers as constexpr globals.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import lru_cache

import numpy as np
import triton.language as tl


class Control(IntEnum):
    """Columns of a control row, int32."""

    FRESH = 0  # 1: the length is the one in this row; 0: the one on the device
    LENGTH = 1  # tokens of the sequence
    LIMIT = 2  # tokens it may have at most
    MAX_NODES = 3  # draft nodes it may have in this step
    TEMPERATURE = 4  # the bits of a float32
    SEED_LOW = 5  # the seed, scrambled by rng.mix, in two halves
    SEED_HIGH = 6
    PAGES = 7  # the page table begins here


class Report(IntEnum):
    """Columns of a report row, int32, that do not depend on the number of nodes; see ReportColumns for the others."""

    NUM_TOKENS = 0  # tokens the sequence gained
    MAX_NODES = 1  # draft nodes it could have
    FINITE = 2  # 1: all rows on the accepted path had finite logits; 0: the last one had not
    TOKENS = 3  # the gained tokens begin here


class Setting(IntEnum):
    """Columns of a settings row, int32: the sampling parameters of the sequence in a batch slot."""

    ASKS = 0  # which parameters act, see Asks
    TOP_K = 1  # 0: off
    SHARE = 2  # top-p, see filters.Filter; so are the next two, as the bits of float32 numbers
    BELOW = 3
    STEPS = 4
    WINDOW = 5  # bits of a float32: no token further than this below the best is needed for top-p
    REPETITION = 6  # bits of float32 numbers
    PRESENCE = 7
    FREQUENCY = 8
    PROMPT = 9  # tokens of the prompt
    MIN_TOKENS = 10
    LOGPROBS = 11  # how many of the best tokens' log probabilities are wanted, and 1 more; 0: none at all
    STOPS = 12  # MAX_STOPS tokens that may not come before that, -1 where there are fewer
    WORDS = 28  # MAX_WORDS bad words of MAX_WORD tokens, -1 behind each
    TOTAL = 156


class Asks(IntFlag):
    """What a row's parameters do to its scores."""

    PENALTIES = 1
    BIAS = 2
    BANS = 4
    FILTERS = 8


MAX_STOPS, MAX_WORDS, MAX_WORD = 16, 16, 8
MAX_BANS = MAX_STOPS + MAX_WORDS  # tokens of a row that may not be chosen
IN_PROMPT = 1 << 30  # added to a token's count if the prompt has it

FRESH, LENGTH, LIMIT, MAX_NODES, TEMPERATURE, SEED_LOW, SEED_HIGH, PAGES = (tl.constexpr(int(c)) for c in Control)
NUM_TOKENS, REPORT_MAX_NODES, FINITE, TOKENS = (tl.constexpr(int(c)) for c in Report)


@dataclass(frozen=True, slots=True)
class ReportColumns:
    """Where the parts of a report row begin: tokens, draft nodes, and of trees the nodes' parents and the path."""

    rows: int  # per batch slot: its last token and its draft nodes
    tree: bool

    @property
    def guesses(self) -> int:
        """The draft nodes' tokens, one per node."""
        return Report.TOKENS + self.rows

    @property
    def parents(self) -> int:
        """The draft nodes' parents, -1 for the last token."""
        return self.guesses + self.rows - 1

    @property
    def path(self) -> int:
        """The rows of the accepted path: row 0 is the last token, row j node j - 1."""
        return self.parents + self.rows - 1

    @property
    def total(self) -> int:
        return self.path + self.rows if self.tree else self.parents


def float_bits(number: float) -> int:
    """The bits of a float32, as an int32."""
    return int(np.float32(number).view(np.int32))


def control_columns(fresh: bool, length: int, limit: int, max_nodes: int, temperature: float, seed: int) -> list[int]:
    """The columns before the page table, in the order of Control; seed is scrambled already."""
    return [int(fresh), length, limit, max_nodes, *_drawing_columns(temperature, seed)]


@lru_cache(4096)
def _drawing_columns(temperature: float, seed: int) -> tuple[int, int, int]:
    """What does not change while a sequence runs."""
    low, high = (int(np.uint32(half).astype(np.int32)) for half in (seed & 0xFFFFFFFF, seed >> 32))
    return float_bits(temperature), low, high


# A batch slot without a sequence: it feeds one token into the scratch page in every step.
EMPTY_SLOT = control_columns(fresh=True, length=1, limit=1, max_nodes=0, temperature=0.0, seed=0)


def seed_of(row: list[int]) -> int:
    """The scrambled seed in a control row."""
    return (row[Control.SEED_HIGH] & 0xFFFFFFFF) << 32 | (row[Control.SEED_LOW] & 0xFFFFFFFF)
