"""Which replica has a prompt's beginning in its cache, as far as requests that were sent there tell."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

BLOCK = 256  # characters; a beginning is known in multiples of it
BLOCKS = 32  # of one prompt at most
KNOWN = 100_000  # blocks remembered at most, the latest used ones


def prefix_keys(body: Mapping[str, Any]) -> list[str]:
    """One key for each beginning of a request's prompt, shortest first; the first part counts even if it is short."""
    text = json.dumps(body.get("messages") or body.get("prompt") or "", ensure_ascii=False)
    ends = range(BLOCK, min(len(text), BLOCK * BLOCKS) + 1, BLOCK) or [len(text)]
    return [hashlib.blake2b(text[:end].encode("utf-8", "replace"), digest_size=12).hexdigest() for end in ends]


class PrefixHomes:
    """Remembers where beginnings of prompts were sent."""

    def __init__(self, threshold: int) -> None:
        """threshold: a replica with the prefix is passed over if it has that many requests more than the least busy."""
        self._threshold = threshold
        self._homes: OrderedDict[str, Hashable] = OrderedDict()

    def order(self, keys: list[str], load: Mapping[Hashable, int]) -> list[Hashable]:
        """The replicas, best first: the one with the longest known beginning unless it is too busy, then by load."""
        by_load = sorted(load, key=lambda replica: load[replica])
        home = next((self._homes[key] for key in reversed(keys) if self._homes.get(key) in load), None)
        if home is None or load[home] - load[by_load[0]] > self._threshold:
            return by_load
        return [home, *(replica for replica in by_load if replica != home)]

    def sent(self, keys: list[str], replica: Hashable) -> None:
        for key in keys:
            self._homes[key] = replica
            self._homes.move_to_end(key)
        while len(self._homes) > KNOWN:
            self._homes.popitem(last=False)

    def gone(self, replica: Hashable) -> None:
        for key in [key for key, home in self._homes.items() if home == replica]:
            del self._homes[key]
