"""How much of a drafter's drafts was accepted, kept in the user's cache folder: the planner's history."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from faircopy.acceptance_rates import tree_gain
from faircopy.cache import KeptTable
from faircopy.errors import CheckpointError
from faircopy.model.anatomy import identity

ENOUGH = 100  # drafts from which on a history is kept
_KEPT = KeptTable("acceptance")


@dataclass(frozen=True, slots=True)
class History:
    """What drafts of one drafter for one target gave."""

    drafts: int
    rates: tuple[float, ...] = ()  # of chains: how often each place was right where all before it were
    trees: tuple[tuple[int, float], ...] = ()  # (nodes, accepted tokens)
    chains: int = 0  # nodes up to which drafts are chains, of a drafter that grows trees beside them

    def accepted(self, nodes: int) -> float | None:
        """Tokens of a draft of this many nodes that are likely to be accepted; None: nothing is known of its kind."""
        if nodes > self.chains and self.trees:
            return tree_gain(dict(self.trees), nodes)
        if not self.rates:
            return None
        chain = min(nodes, self.chains or nodes)
        rates = [*self.rates, *[self.rates[-1]] * chain][:chain]
        gain = math.fsum(math.prod(rates[: place + 1]) for place in range(chain))
        return gain if chain == nodes else tree_gain({chain: gain}, nodes)


def keep_history(target: str, drafter: str, history: History) -> None:
    """Keep what was learned, if both were read from files, or the drafter needs none."""
    key = _key(target, drafter)
    if key is not None and history.drafts >= ENOUGH:
        _KEPT.put(key, asdict(history))


def known_history(target: str, drafter: str) -> History | None:
    """What drafts of this drafter gave before, if that was kept."""
    key = _key(target, drafter)
    return None if key is None else _history(_KEPT.get(key))


def _history(kept: Any) -> History | None:
    """As it was kept; None: there is none, or the file was damaged."""
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        rates = tuple(min(1.0, max(0.0, float(rate))) for rate in kept["rates"])
        trees = tuple((max(1, int(nodes)), max(0.0, float(gain))) for nodes, gain in kept["trees"])
        return History(int(kept["drafts"]), rates, trees, max(0, int(kept.get("chains", 0))))
    return None


def _key(target: str, drafter: str) -> str | None:
    with suppress(CheckpointError):
        found = identity(target), drafter if drafter == "ngram" else identity(drafter)
        return f"{found[0]} {found[1]}" if all(found) else None
    return None
