"""What the C library does with memory that is given back."""

import ctypes
import os
import sys

# of mallopt in glibc's malloc.h
TRIM_THRESHOLD, MMAP_MAX = -1, -4
LARGEST = 2**31 - 1


def keep_memory() -> bool:
    """From now on, large tensors that are given back stay with this process, for the next ones; whether that is so.

    By default glibc hands them to the system and asks for them again, and the system clears every page: a tenth to a
    fifth of a training step on a CPU, where each step asks for what the one before gave back. Nothing changes on other
    systems, or where the environment says how to allocate.
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ):
        return False
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, LARGEST))
