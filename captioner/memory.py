"""Whether memory that was freed is kept for the next step or given back to the system."""

import ctypes
import sys

__all__ = ["give_freed_memory_back", "keep_freed_memory"]

# glibc's names and numbers, <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 32 * 2**20  # bytes, the most that glibc takes; larger blocks are mapped each time
GIVEN_BACK = 2**18  # bytes and more


def keep_freed_memory() -> None:
    """Undoes what TensorFlow does to glibc's `malloc` whenever `Dataset.from_generator` is used.

    On Python 3.11 it then sets M_MMAP_THRESHOLD to 128 kB ("Memory patch applied" in its log):
    every larger tensor is mapped from the system and unmapped again, and its pages are handed over
    one by one, zeroed. A training step on 7x7 regions took 200,000 page faults, and a quarter of
    all processor time went into them; afterwards it takes 10,000. Where there is no glibc this does
    nothing, and nothing has to be undone.
    """
    _mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    _mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def give_freed_memory_back() -> None:
    """Has large blocks mapped from the system and unmapped again, for a process that runs for long.

    By itself glibc learns to keep blocks of the size of photos, for each thread apart: a server
    that read twenty 8 megapixel photos, one after the other, but each in another thread, grew by
    580 MB, and with this by 45 MB. Where there is no glibc this does nothing.
    """
    _mallopt(M_MMAP_THRESHOLD, GIVEN_BACK)


def _mallopt(name: int, value: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(name, value)
