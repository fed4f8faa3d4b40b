"""Top-k, top-p and min-p as one threshold per row, found by adding integers alone.

A token's probability mass is a 64-bit integer made from its score by a fixed formula, so a sum has the same bits in any
order: rows, blocks and devices cannot change which tokens are kept. The kept tokens of a row are those above its
threshold, and of those equal to it the ones with the lowest ids up to a last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SCALE = 40  # the best token's mass is about 2^40
STEPS = 20  # a score difference is counted in 2^-20 octaves
SHARE = 24  # top-p is a multiple of 2^-24
POLYNOMIAL = (1073741765, -744256846, 257890763, -59377501, 9890102, -1017428)  # 2^-x on [0, 1), times 2^30
AT_ONCE = 1 << 16  # scores whose thresholds are found together: sorting takes many times their memory
FARTHEST = (SCALE + 2) << STEPS  # at this distance and beyond a token has no mass


class Filter(NamedTuple):
    """What one row keeps; every field as the device reads it."""

    top_k: int = 0  # 0: off
    share: int = 1 << SHARE  # top-p times 2^24; 2^24: off
    below: float = -math.inf  # how far under the best score min-p reaches, a float32; minus infinity: off
    steps: float = 1.0  # float32: 2^-20 octaves of probability per unit of score

    @classmethod
    def of(cls, temperature: float, top_k: int, top_p: float, min_p: float) -> Filter:
        """For scores that have not been divided by the temperature yet."""
        below = temperature * math.log(min_p) if min_p > 0.0 else -math.inf
        share = 1 << SHARE if top_p >= 1.0 else max(1, min((1 << SHARE) - 1, round(top_p * 2**SHARE)))
        return cls(top_k, share, _float32(below), _float32(min(1e30, 2.0**STEPS / math.log(2.0) / temperature)))

    @property
    def active(self) -> bool:
        return self != Filter(steps=self.steps)


class Kept(NamedTuple):
    """A row's threshold: kept are the scores above it, and of those equal to it the ids up to `last`."""

    score: float
    last: int


def kept(scores: Tensor, what: Filter) -> Kept:
    """The threshold of one row [V] of float32 scores."""
    found, last = thresholds(scores[None], [what])
    return Kept(float(found), int(last))


def thresholds(scores: Tensor, filters: list[Filter]) -> tuple[Tensor, Tensor]:
    """Score and last id [R] of the thresholds of float32 scores [R, V].

    The best token is always kept, and ties go to the lowest id.
    """
    scores = scores + 0.0  # one zero
    best, vocab = scores.amax(-1), scores.shape[1]
    found = _top_k(scores, [what.top_k for what in filters])
    last = torch.full_like(found, vocab, dtype=torch.int64)
    rows = [i for i, what in enumerate(filters) if what.share < 1 << SHARE]
    if rows:
        some = scores[rows]
        some.masked_fill_(some < found[rows, None], -torch.inf)
        found[rows], last[rows] = _share(some, best[rows], [filters[i] for i in rows])
    lowest = best + best.new_tensor([what.below for what in filters])
    return torch.where(found >= lowest, found, lowest), torch.where(found >= lowest, last, vocab)


def _top_k(scores: Tensor, ks: list[int]) -> Tensor:
    """Each row's k-th best score; minus infinity where all are kept."""
    found = torch.full_like(scores[:, 0], -torch.inf)
    rows = [i for i, k in enumerate(ks) if 0 < k < scores.shape[1]]
    if rows:
        some = scores if len(rows) == len(ks) else scores[rows]
        best = some.topk(max(ks[i] for i in rows)).values
        found[rows] = best[range(len(rows)), [ks[i] - 1 for i in rows]]
    return found


def _share(scores: Tensor, best: Tensor, filters: list[Filter]) -> tuple[Tensor, Tensor]:
    """The last token of each row, best first, before which less than the wanted mass lies: its score and its id."""
    ordered, ids = scores.sort(descending=True, stable=True)
    weights = mass(ordered, best[:, None], best.new_tensor([what.steps for what in filters])[:, None])
    before, totals = weights.cumsum(-1) - weights, weights.sum(-1).tolist()
    wanted = [wanted_mass(total, what.share) for total, what in zip(totals, filters, strict=True)]
    last = (before < weights.new_tensor(wanted)[:, None]).sum(-1, keepdim=True) - 1
    return ordered.gather(1, last)[:, 0], ids.gather(1, last)[:, 0]


def mass(scores: Tensor, best: Tensor, steps: Tensor) -> Tensor:
    """Probability masses, int64: 2^40 * exp((score - best) / temperature), by integer arithmetic."""
    distance = ((best - scores) * steps).clamp(0.0, float(FARTHEST)).to(torch.int64)
    fraction = distance & ((1 << STEPS) - 1)
    value = torch.full_like(fraction, POLYNOMIAL[-1])
    for coefficient in reversed(POLYNOMIAL[:-1]):
        value = ((value * fraction) >> STEPS) + coefficient
    return (value << (SCALE - 30)) >> (distance >> STEPS)


def wanted_mass(total: int, share: int) -> int:
    """How much mass comes before the first token that is not kept: the share of the total, at least 1."""
    high, low = total >> SHARE, total & ((1 << SHARE) - 1)
    return max(1, high * share + ((low * share) >> SHARE))


def exclude(scores: Tensor, filters: list[Filter]) -> None:
    """Set what each row [R, V] does not keep to minus infinity, in place."""
    rows = [i for i, what in enumerate(filters) if what.active]
    if rows and scores.is_cuda and (on_device := _kernel()) is not None:
        _mask(scores, *on_device(scores, filters))
    elif rows:
        count = max(1, AT_ONCE // scores.shape[1])
        for at in range(0, len(filters), count):
            part = scores[at : at + count]
            _mask(part, *thresholds(part, filters[at : at + count]))


def _mask(scores: Tensor, found: Tensor, last: Tensor) -> None:
    ids = torch.arange(scores.shape[1], device=scores.device)
    found, last = found[:, None], last[:, None]
    scores.masked_fill_((scores < found) | ((scores == found) & (ids > last)), -torch.inf)


def _kernel() -> Callable[[Tensor, list[Filter]], tuple[Tensor, Tensor]] | None:
    """The GPU's own search; captured steps use it too."""
    try:
        from faircopy.kernels.gpu.sampler import thresholds
    except ImportError:
        return None
    return thresholds


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
