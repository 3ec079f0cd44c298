"""The process keeps memory that is given back, where it is asked to and may."""

import functools
import os
import subprocess
import sys

import pytest
import torch

from regard.memory import hand_back_memory, keep_memory

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of the C library of Linux")


@functools.cache
def child(**environment: str) -> list[int]:
    """In a process of its own: what keep_memory says; the pages that the system then clears for 10 tensors, one after
    the other, after three of them; whether gaps of 1,600 MiB are handed back, how much that is, and whether again."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ended = subprocess.run([sys.executable, __file__], env=plain | environment, capture_output=True, check=True)
    return [int(part) for part in ended.stdout.split()]


@LINUX
def test_large_tensors_come_from_memory_that_was_given_back():
    kept, pages, *_ = child()
    assert kept
    # 40,960 pages each, or 80 large ones; some small things may be new
    assert pages < 80


@LINUX
def test_gaps_are_handed_back():
    *_, handed, mebibytes, again = child()
    assert handed
    assert mebibytes > 1500
    assert not again


@LINUX
@pytest.mark.parametrize("environment", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}])
def test_the_environment_comes_first(environment):
    kept, _, handed, *_ = child(**environment)
    assert not kept
    assert not handed


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert not keep_memory()
    assert not hand_back_memory()


if __name__ == "__main__":
    import resource

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    said = keep_memory()
    for _ in range(3):
        torch.ones(40 << 20)
    before = faults()
    for _ in range(10):
        torch.ones(40 << 20)
    pages = faults() - before

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    # large ones among small ones that stay: what they leave are gaps
    gaps, stay = [], []
    for size in range(40):
        gaps.append(torch.ones(10 << 20))
        stay.append(torch.ones(1000 + size))
    gaps.clear()
    full, handed = resident(), hand_back_memory()
    print(int(said), pages, int(handed), (full - resident()) >> 20, int(hand_back_memory()))
