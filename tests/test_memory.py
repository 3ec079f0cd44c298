"""The process keeps memory that is given back, where it is asked to and may."""

import os
import subprocess
import sys

import pytest
import torch

from regard.memory import keep_memory

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of the C library of Linux")


def child(**environment: str) -> list[int]:
    """What keep_memory says in a process of its own, and the pages that the system then clears for 10 tensors, one
    after the other, after three of them."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ended = subprocess.run([sys.executable, __file__], env=plain | environment, capture_output=True, check=True)
    return [int(part) for part in ended.stdout.split()]


@LINUX
def test_large_tensors_come_from_memory_that_was_given_back():
    kept, pages = child()
    assert kept
    # 40,960 pages each, or 80 large ones; some small things may be new
    assert pages < 80


@LINUX
@pytest.mark.parametrize("environment", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}])
def test_the_environment_comes_first(environment):
    assert child(**environment)[0] == 0


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert not keep_memory()


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
    print(int(said), faults() - before)
