"""What the system is told about memory. Only speed and resident bytes depend on it."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

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


def give_back_free_memory() -> None:
    """Return what the C library keeps of freed memory to the system, as after loading a checkpoint."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
