"""What the system and Python's garbage collector are told about memory. Only speed and resident bytes depend on it."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from functools import cache

HUGE = 2 << 20  # bytes of a huge page
_HUGEPAGE, _COLLAPSE = 14, 25  # madvise: huge pages from now on; make them of what is there (Linux 6.1)


def use_huge_pages(address: int, size: int) -> bool:
    """Ask for huge pages under this memory; False where the system has none.

    A product that reads megabytes of weights otherwise waits for the address translation.
    """
    first = -(-address // HUGE) * HUGE
    length = (address + size - first) // HUGE * HUGE
    if sys.platform != "linux" or length <= 0:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return all(madvise(first, length, advice) == 0 for advice in (_HUGEPAGE, _COLLAPSE))


@cache
def collect_garbage_once() -> None:
    """Look for garbage among all objects now: what was imported and loaded is a quarter more than at the last look, and
    Python would look in the middle of a text (0.2 s)."""
    gc.collect()


def keep_all_objects() -> None:
    """What is there stays until the process ends, and is not looked through again; for processes that only serve."""
    gc.collect()
    gc.freeze()


def give_back_free_memory() -> None:
    """Return what the C library keeps of freed memory to the system, as after loading a checkpoint."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
