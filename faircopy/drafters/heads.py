"""What a draft head is: a network that reads the target's hidden states.

Row t of a head holds token t and the target's state of the row before it, so a head's keys and values lie at the
target's slots and depend on the tokens up to there alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faircopy.drafters.networks.blocks import (
    Attend,
    BlockShape,
    UnrolledAttention,
    causal,
    pack_linears,
    packed_linears,
)
from faircopy.drafters.trees import Tree
from faircopy.kernels.linear import Product, product
from faircopy.layout.base import LayerShape, Packed
from faircopy.model.base import TokenWeights

if TYPE_CHECKING:
    from faircopy.layout.paged import PagedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A draft head's configuration, as in its config.json."""

    method: str
    shape: BlockShape  # of its decoder layers
    vocab: int  # the target's
    depth: int  # the target's number of layers
    levels: int  # tokens it guesses ahead at most
    target: str = ""  # the name it was trained under, and what distinguishes that checkpoint from others
    fingerprint: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # the method's own


class Rows(NamedTuple):
    """Where rows stand: positions [T], and attention over the keys before them."""

    positions: Tensor
    attend: Attend
    packed: Packed | None = None  # the same rows over a cache of pages, for heads that run on kernels
    cache: PagedLayout | None = None


class Guess(NamedTuple):
    """A head's output at one level: logits [..., T, V], what it remembers, and the state its logits were made from.

    Of a head that serves they are the logits of its words alone, see Head.over_vocabulary.
    """

    logits: Tensor
    memory: Tensor
    out: Tensor


class Head(nn.Module, ABC):
    """Guesses tokens from the target's hidden states. [B, T, ...] are texts in training, else one row of packed ones.

    Each method is a subclass: what it reads, how it steps from a token to the next guesses, and its tree.
    Its loss is in train/losses.py.
    """

    deep: ClassVar[bool] = False  # whether guesses beyond the first level need keys and values of their own
    independent: ClassVar[bool] = False  # whether no level depends on the tokens guessed before it

    def __init__(self, config: HeadConfig, wants: tuple[int, ...], layers: int = 0) -> None:
        super().__init__()
        self.config, self.wants, self.levels = config, wants, config.levels
        self.layers: list[LayerShape] = [config.shape.cached] * layers
        self.name, self.vocab, self.context = config.method, config.vocab, config.shape.context
        self._token_weights: TokenWeights | None = None
        self._product: Product | None = None
        count = min(int(config.options.get("draft_vocab") or config.vocab), config.vocab)
        if count < config.vocab:
            self.register_buffer("words_kept", torch.arange(count))

    @property
    def token_weights(self) -> TokenWeights:
        assert self._token_weights is not None, "a head was used before it was bound to its target"
        return self._token_weights

    @property
    def dtype(self) -> torch.dtype:
        return self._like().dtype

    @property
    def device(self) -> torch.device:
        return self._like().device

    @property
    def input_size(self) -> int:
        """Numbers of hidden state that it reads per row."""
        return len(self.wants) * self.config.shape.hidden

    @property
    def size(self) -> int:
        """Trained parameters."""
        return sum(p.numel() for p in self.parameters()) + sum(part.numbers for part in packed_linears(self))

    @property
    def largest_weight(self) -> int:
        """Numbers of its largest weight."""
        return max([*(p.numel() for p in self.parameters()), *(part.numbers for part in packed_linears(self))])

    @property
    def weight_bytes(self) -> int:
        """Memory of its own parameters; what it shares with its target is the target's."""
        return sum(p.nbytes for p in self.parameters()) + sum(part.nbytes for part in packed_linears(self))

    @property
    def grows_trees(self) -> bool:
        """Whether its drafts are trees; else they are chains."""
        return type(self.tree(1)) is not Tree

    @property
    def words(self) -> Tensor | None:
        """The tokens it guesses, of a head with `draft_vocab`; None: all."""
        return self._buffers.get("words_kept")

    def keep_frequent(self, counts: Tensor) -> None:
        """Guess only the most frequent tokens, of a head with `draft_vocab`: counts [V] of the training text."""
        if self.words is not None:
            self.words.copy_(counts.argsort(descending=True, stable=True)[: len(self.words)].sort().values)

    def bind(self, weights: TokenWeights) -> Self:
        """Share the target's embedding and head; they are not part of its own weights."""
        self._token_weights = weights
        return self

    def serve(self) -> Self:
        """From now on it only guesses: the target's head, and on a CPU its own weights, are packed as the target's."""
        rows, bias, kept = self.token_weights.rows, self.token_weights.bias, self.words
        if kept is not None:
            rows, bias = rows[kept], None if bias is None else bias[kept]
        self._product = product(rows.to(self.dtype), bias, exact=False)
        if self.device.type == "cuda":
            self.run_on_kernels()
        else:
            pack_linears(self)
        return self.eval()

    def run_on_kernels(self, exact: bool = True) -> None:
        """Let the device's kernels run the layers of packed rows; for methods that know how. exact: products too."""

    @abstractmethod
    def read(self, states: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
        """What it remembers of each row: states [B, T, F] of the rows before, tokens [B, T]."""

    @abstractmethod
    def step(self, level: int, memory: Tensor, tokens: Tensor, rows: Rows | None = None) -> Guess:
        """What follows these tokens, given what was remembered above them; level 0 follows the text itself."""

    def all_levels(self, memory: Tensor, levels: int) -> list[Tensor]:
        """Logits [B, T, V] of every level, of a method whose levels are independent."""
        return [self.step(level, memory, memory.new_empty(0)).logits for level in range(levels)]

    def tree(self, max_nodes: int) -> Tree:
        """An empty tree of the method's own kind."""
        return Tree(max_nodes)

    def unroll(self, states: Tensor, tokens: Tensor, levels: int) -> Iterator[Guess]:
        """All levels over whole texts, each given the true tokens before: level j loses its last j + 1 rows.

        Level j of row t is at position t + j; a deep head is fed what it said at the level before.
        """
        text = text_rows(tokens, UnrolledAttention() if self.deep else causal)
        memory = self.read(states, tokens, text)
        for level in range(levels):
            count = tokens.shape[1] - 1 - level
            rows = Rows(text.positions[level : level + count], text.attend) if self.deep else None
            guess = self.step(level, memory[:, :count], tokens[:, level : level + count], rows)
            memory = guess.memory
            yield guess

    def start_from(self, last_layer: dict[str, Tensor], norm: Tensor) -> None:
        """Initial weights, from the target's last layer and final norm where the method says so."""

    def learned(self, ranks: list[list[float]]) -> dict[str, Any]:
        """Options to keep with the weights, from how often each rank of each level was right."""
        return {}

    def speak(self, out: Tensor) -> Tensor:
        """Logits of states, through the target's head; of one that serves, of the tokens it guesses."""
        weights = self.token_weights
        if self._product is not None:
            logits = self._product(out.flatten(0, -2)).view(*out.shape[:-1], -1)
        else:
            bias = None if weights.bias is None else weights.bias.to(out.dtype)
            logits = F.linear(out, weights.rows.to(out.dtype), bias)
        return logits if weights.divisor == 1.0 else logits / weights.divisor

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits of its words among those of all tokens, which are never guessed; of all tokens as they are."""
        if self.words is None or logits.shape[-1] == self.vocab:
            return logits
        return logits.new_full((*logits.shape[:-1], self.vocab), -torch.inf).index_copy(-1, self.words, logits)

    def _like(self) -> Tensor:
        return next(chain(self.parameters(), (part.like for part in packed_linears(self))))


def text_rows(tokens: Tensor, attend: Attend = causal) -> Rows:
    """Whole texts: every row sees those before it."""
    return Rows(torch.arange(tokens.shape[1], device=tokens.device), attend)
