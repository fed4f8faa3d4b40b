"""How much of a drafter's drafts was accepted, kept in the user's cache folder for plans and for later runs."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from faircopy.acceptance_rates import tree_gain
from faircopy.cache import KeptTable, cache_folder
from faircopy.errors import CheckpointError
from faircopy.model.anatomy import identity

KEPT_FROM = 20  # drafts of an engine from which on they are kept,
ENOUGH = 100  # and of all engines from which on plans believe them
_KEPT = KeptTable("acceptance", changes=True)


@dataclass(frozen=True, slots=True)
class History:
    """What drafts of one drafter for one target gave."""

    drafts: int
    rates: tuple[float, ...] = ()  # of chains: how often each place was right where all before it were
    trees: tuple[tuple[int, float], ...] = ()  # (nodes, accepted tokens)
    chains: int = 0  # nodes up to which drafts are chains, of a drafter that grows trees beside them
    found: float = 1.0  # how often there was a draft at all

    def accepted(self, nodes: int) -> float | None:
        """Tokens that a step with drafts of this many nodes is likely to accept; None: nothing is known of the kind."""
        gain = self._gain(nodes)
        return None if gain is None else self.found * gain

    def _gain(self, nodes: int) -> float | None:
        """The same of a draft that was found."""
        if nodes > self.chains and self.trees:
            return tree_gain(dict(self.trees), nodes)
        if not self.rates:
            return None
        chain = min(nodes, self.chains or nodes)
        rates = [*self.rates, *[self.rates[-1]] * chain][:chain]
        gain = math.fsum(math.prod(rates[: place + 1]) for place in range(chain))
        return gain if chain == nodes else tree_gain({chain: gain}, nodes)


class HistoryKeeper:
    """Keeps what an engine learns of its drafter, each time there is twice as much of it.

    Only if target and drafter were read from files, or the drafter needs none.
    """

    def __init__(self, target: str, drafter: str) -> None:
        self._key = _key(target, drafter)
        self.known = None if self._key is None else _history(_KEPT.get(self._key))  # of earlier engines
        self._least = KEPT_FROM  # drafts of this one

    def see(self, history: History | None) -> None:
        """history: of earlier engines and this one."""
        if self._key is None or history is None:
            return
        own = history.drafts - (0 if self.known is None else self.known.drafts)
        if own >= self._least:
            self._least = 2 * own
            _KEPT.put(self._key, asdict(history))


def known_history(target: str, drafter: str) -> History | None:
    """What drafts of this drafter gave before, if enough of them were kept."""
    known = HistoryKeeper(target, drafter).known
    return known if known is not None and known.drafts >= ENOUGH else None


def _history(kept: Any) -> History | None:
    """As it was kept; None: there is none, or the file was damaged."""
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        rates = tuple(min(1.0, max(0.0, float(rate))) for rate in kept["rates"])
        sizes = [(max(1, int(nodes)), float(gain)) for nodes, gain in kept["trees"]]
        trees = tuple((nodes, min(float(nodes), max(0.0, gain))) for nodes, gain in sizes)
        found = min(1.0, max(0.0, float(kept.get("found", 1.0))))
        return History(max(1, int(kept["drafts"])), rates, trees, max(0, int(kept.get("chains", 0))), found)
    return None


def _key(target: str, drafter: str) -> str | None:
    if cache_folder() is None:
        return None
    with suppress(CheckpointError):
        found = identity(target), drafter if drafter == "ngram" else identity(drafter)
        return f"{found[0]} {found[1]}" if all(found) else None
    return None
