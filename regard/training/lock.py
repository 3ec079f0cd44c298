"""One writer to a run: a lock that the operating system releases when its process ends, however it ends.

The lock belongs to an open file, not to a file's existence, so a killed process leaves no lock behind. The content of
the file is for people: who holds the lock. Readers need none: all they read is replaced as a whole.
"""

import errno
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Windows keeps others from reading locked bytes, so the locked byte is far behind the text.
FAR = 1 << 30
PAUSE = 0.05  # seconds between attempts
# The errors of file systems without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def hold(path: Path, doing: str, *, waits: bool = False) -> Iterator[None]:
    """Holds the lock of a folder while the block runs. `path` is the lock file; `doing` is what others are told.
    `waits`: if another process holds the lock, until it does not."""
    handle = _acquire(path, waits)
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
        # before it is closed, so that nobody else holds it yet; Windows cannot remove an open file, and it may stay
        with suppress(OSError):
            os.unlink(path)
        os.close(handle)


def _acquire(path: Path, waits: bool) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            is_ours = _try(handle, path)
            if not is_ours and not waits:
                raise ValueError(_held(path))
            if is_ours and _is_file(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        # another process holds it, or removed the file before we got the lock
        os.close(handle)
        if not is_ours:
            time.sleep(PAUSE)


def _try(handle: int, path: Path) -> bool:
    """Locks an open file. False: another process, or another thread of this one, holds the lock."""
    try:
        try:
            import fcntl
        except ImportError:
            # not `sys.platform == "win32"`, which the type checker understands: the tests replace both modules
            msvcrt: Any = importlib.import_module("msvcrt")
            os.lseek(handle, FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return False
        print(f"regard: {path.parent} is on a file system without locks: let only one process write", file=sys.stderr)
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
