"""What the C library does with memory that is freed."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# parameters of mallopt, from glibc's malloc.h
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -3, -4, -8
LARGEST = 2**31 - 1
IDLE = 2**30  # bytes that may lie idle between steps
SERVER_IDLE = 2**28  # bytes that may lie idle at the end of the heap of a server

_kept = False


def keep_memory(idle: int = LARGEST) -> bool:
    """Keeps the memory of large tensors that are freed in this process, for later ones. Returns whether it could. What
    lies idle at the end of the heap beyond `idle` bytes is returned; by default nothing is.

    By default glibc returns it to the system and asks for it again, and the system clears every page: a twentieth to a
    fifth of a training step on a CPU, where each step asks for what the one before freed. Nothing changes on other
    systems, or where the environment says how to allocate.

    Servers compute in threads, whose own heaps hold at most 64 MiB each and are returned whole: they share one heap.
    """
    global _kept
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ):
        return False
    mallopt = _function("mallopt")
    _kept = mallopt is not None and bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, idle))
    if mallopt is not None and idle < LARGEST:
        mallopt(ARENA_MAX, 1)
    return _kept


def hand_back_memory() -> bool:
    """Returns free memory to the system, where memory is kept and more than IDLE bytes of it lie idle. Returns whether
    it did. Tensors of ever new sizes leave gaps that add up. Call it rarely: the system has to clear the pages that are
    needed again."""
    usage, trim = _function("mallinfo2"), _function("malloc_trim")
    if not _kept or usage is None or trim is None:
        return False
    usage.restype = Usage
    # gaps that were returned still count as idle: only what has pages takes memory
    with open("/proc/self/statm") as file:
        pages, of_files = map(int, file.read().split()[1:3])
    held = (pages - of_files) * os.sysconf("SC_PAGE_SIZE")
    heap = usage()
    return held - heap.used - heap.mapped_bytes > IDLE and bool(trim(0))


@contextmanager
def return_large_blocks() -> Iterator[None]:
    """Inside, every block of 128 KiB or more that is freed goes back to the system, where memory is not kept. Otherwise
    glibc cuts them from a heap as soon as the first was freed: gradients of a recurrence, one for each of thousands of
    tokens, leave gaps there that small tensors keep apart, of gigabytes."""
    mallopt = None if _kept else _function("mallopt")
    if mallopt is None:
        yield
        return
    mallopt(MMAP_THRESHOLD, 2**17)
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, 2**25)  # what glibc's own rule arrives at


class Usage(ctypes.Structure):
    """struct mallinfo2: bytes of the heap by what they are for."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("heap", "chunks", "small", "mapped", "mapped_bytes", "_1", "small_bytes", "used", "idle", "top")
    )


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    """A function of the C library of Linux, where it has one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
