"""One writer to a run: a lock that the system lets go of when its process ends, however it ends.

The lock is on an open file, not the file itself, so that what a killed process left is nobody's. What stands in the
file is for people: who holds it. Readers need no lock: all they read is replaced as a whole.
"""

import errno
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Windows keeps others from reading bytes that are locked: one far behind the text.
FAR = 1 << 30
# What file systems without locks answer.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def hold(path: Path, doing: str) -> Iterator[None]:
    """Holds the lock of a folder while the block runs. `path` is the file for it, `doing` what others are told."""
    handle = _acquire(path)
    try:
        os.ftruncate(handle, 0)
        who = {
            "doing": doing,
            "process": os.getpid(),
            "host": platform.node(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.write(handle, json.dumps(who).encode() + b"\n")
        yield
    finally:
        # before it is closed, so that nobody else holds it yet; Windows removes no open file, and it does no harm
        with suppress(OSError):
            os.unlink(path)
        os.close(handle)


def _acquire(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if not _try(handle, path):
                raise ValueError(_held(path))
            if _is_file(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        # whoever held it removed the file before we got the lock of it
        os.close(handle)


def _try(handle: int, path: Path) -> bool:
    """Locks an open file, unless another process, or another part of this one, has done so."""
    try:
        try:
            import fcntl
        except ImportError:
            import msvcrt

            os.lseek(handle, FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return False
        print(f"regard: {path.parent} is on a file system without locks: only one process may write", file=sys.stderr)
    return True


def _is_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _held(path: Path) -> str:
    who = ""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_bytes()[:1000])
        who = f" by process {found['process']} on {found['host']} ({found['doing']}, since {found['since']})"
    return f"{path.parent} is being written{who}: wait until that ends, or stop it; meanwhile the run can be read"
