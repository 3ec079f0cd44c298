"""What the C library does with memory that is given back."""

import ctypes
import os
import sys

# of mallopt in glibc's malloc.h
TRIM_THRESHOLD, MMAP_MAX = -1, -4
LARGEST = 2**31 - 1
IDLE = 2**30  # bytes that may lie idle between steps

_kept = False


def keep_memory() -> bool:
    """From now on, large tensors that are given back stay with this process, for the next ones; whether that is so.

    By default glibc hands them to the system and asks for them again, and the system clears every page: a twentieth to
    a fifth of a training step on a CPU, where each step asks for what the one before gave back. Nothing changes on
    other systems, or where the environment says how to allocate.
    """
    global _kept
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ):
        return False
    mallopt = _function("mallopt")
    _kept = mallopt is not None and bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, LARGEST))
    return _kept


def hand_back_memory() -> bool:
    """Hands the system what has come to lie idle, if memory is kept and that is much; whether it was. Tensors of ever
    other sizes leave gaps that add up. For now and then: the system has to clear the pages that are needed again."""
    usage, trim = _function("mallinfo2"), _function("malloc_trim")
    if not _kept or usage is None or trim is None:
        return False
    usage.restype = Usage
    # gaps that were handed back still count as idle: only what has pages does lie there
    with open("/proc/self/statm") as file:
        pages, of_files = map(int, file.read().split()[1:3])
    held = (pages - of_files) * os.sysconf("SC_PAGE_SIZE")
    given = usage()
    return held - given.used - given.mapped_bytes > IDLE and bool(trim(0))


class Usage(ctypes.Structure):
    """struct mallinfo2: bytes of the heap by what they are for."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("heap", "chunks", "small", "mapped", "mapped_bytes", "_1", "small_bytes", "used", "idle", "top")
    )


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    """Of the C library of Linux, where it has one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
