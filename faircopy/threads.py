"""CPU threads: how many there are. How they wait is set in faircopy/__init__.py, before torch is loaded."""

from __future__ import annotations

import os

import torch

from faircopy.errors import ConfigError

_chosen: int | None = None  # what an LLM of this process asked for


def use_threads(count: int | None) -> None:
    """Let torch use this many CPU threads; None: as many as it uses.

    The last bits of a sum may depend on the number of threads, so one process keeps to one number.
    """
    global _chosen
    if count is None:
        return
    most = max(64, 4 * (os.cpu_count() or 1))
    if count > most:
        raise ConfigError("threads", count, f"more than {most} on a machine of {os.cpu_count()} cores", "lower it")
    if _chosen not in (None, count):
        problem = f"another LLM of this process uses {_chosen}"
        raise ConfigError("threads", count, problem, "use the same number, or another process")
    _chosen = count
    torch.set_num_threads(count)
