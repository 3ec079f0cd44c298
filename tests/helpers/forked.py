"""A child of this process for what kills, at the price of a small process."""

import ctypes
import gc
import os


def fork() -> int:
    """As os.fork. A child's table of pages is a copy of its parent's, and its garbage collector writes to every object
    there is, so that all of them are copied too. So what earlier tests gave back goes to the system first, and the
    collector of the child leaves alone what it did not make."""
    hand_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if hand_back is not None:
        hand_back(0)
    child = os.fork()
    if child == 0:
        gc.freeze()
    return child
