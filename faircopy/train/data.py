"""Training text as one flat array of tokens, and shuffled windows over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from faircopy.errors import ConfigError


def pack(documents: Iterable[Sequence[int]], path: Path) -> int:
    """Write documents one after the other as 16-bit integers; returns the number of tokens."""
    total = 0
    with path.open("wb") as file:
        for document in documents:
            tokens = np.asarray(document, dtype=np.int64)
            if tokens.size and (tokens.min() < 0 or tokens.max() > np.iinfo(np.uint16).max):
                raise ConfigError("tokens", int(tokens.max()), "does not fit 16 bits", "use a vocabulary under 65536")
            file.write(tokens.astype(np.uint16).tobytes())
            total += tokens.size
    return total


def load_tokens(path: Path, device: torch.device | str = "cpu") -> Tensor:
    """The flat array, as int32 so that any device can index it."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(device)


class Windows:
    """Batches of `length + 1` tokens. Every epoch covers the text once, in a new order and cut at new places.

    Batch number n depends only on (tokens, seed, n): resuming needs no state but n.
    """

    def __init__(self, tokens: Tensor, length: int, rows: int, seed: int) -> None:
        self._tokens, self._length, self._rows, self._seed = tokens, length, rows, seed
        self.per_epoch = (len(tokens) - length - 1) // (length * rows)  # batches; the shift by epoch costs one window
        if self.per_epoch < 1:
            raise ConfigError("tokens", len(tokens), f"fewer than one batch of {rows} x {length}", "give more text")
        self._reach = torch.arange(length + 1, device=tokens.device)
        self._epoch, self._starts = -1, torch.empty(0)

    def batch(self, index: int) -> Tensor:
        """[rows, length + 1] int64: inputs are all but the last column, targets all but the first."""
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffle(epoch)
        starts = self._starts[place * self._rows : (place + 1) * self._rows]
        return self._tokens[starts[:, None] + self._reach].long()

    def _shuffle(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        shift = int(torch.randint(self._length, (1,), generator=generator))
        order = torch.randperm(self.per_epoch * self._rows, generator=generator)
        return (order * self._length + shift).to(self._tokens.device)


def overlap(texts: Sequence[Sequence[int]], corpus: Tensor, n: int = 13) -> float:
    """The share of the texts' n-grams that occur in the corpus."""
    grams = [_hashes(torch.tensor(text, device=corpus.device), n) for text in texts if len(text) >= n]
    return float(_found(torch.cat(grams), corpus, n).float().mean()) if grams else 0.0


def unseen(texts: Sequence[Sequence[int]], corpus: Tensor) -> list[list[int]]:
    """The texts that nowhere occur in the corpus as they are, in the order given."""
    seen = [False] * len(texts)
    for n in sorted({len(text) for text in texts}):
        places = [place for place, text in enumerate(texts) if len(text) == n]
        wanted = torch.cat([_hashes(torch.tensor(texts[place], device=corpus.device), n) for place in places])
        for place, found in zip(places, _found(wanted, corpus, n).tolist(), strict=True):
            seen[place] = found
    return [list(text) for text, found in zip(texts, seen, strict=True) if not found]


def _found(wanted: Tensor, corpus: Tensor, n: int, chunk: int = 1 << 24) -> Tensor:
    """Which of these n-gram hashes the corpus holds: may count a chance hit, misses none."""
    distinct, inverse = torch.unique(wanted, return_inverse=True)
    found = torch.zeros_like(distinct, dtype=torch.bool)
    for start in range(0, len(corpus) - n + 1, chunk):
        hashes = _hashes(corpus[start : start + chunk + n - 1], n)
        place = torch.searchsorted(distinct, hashes).clamp_(max=len(distinct) - 1)
        found[place[distinct[place] == hashes]] = True
    return found[inverse]


def _hashes(tokens: Tensor, n: int) -> Tensor:
    """A hash of every n consecutive tokens; int64 arithmetic wraps, which is what a hash wants."""
    tokens = tokens.long() + 1
    count = len(tokens) - n + 1
    total = torch.zeros(count, dtype=torch.int64, device=tokens.device)
    for offset in range(n):
        total = total * 6364136223846793005 + tokens[offset : offset + count]
        total = total ^ (total >> 29)
    return total
