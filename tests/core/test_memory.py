"""The process keeps memory that is given back, where it is asked to and may."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import SCRIPTS
from training_runs import config, finish

from regard.cli import program
from regard.core import allocator
from regard.core.allocator import LARGEST, SERVER_IDLE, hand_back_memory, keep_memory
from regard.tasks.translate import translator as translation
from regard.training import loop

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only the C library of Linux is asked")


@functools.cache
def child(**environment: str) -> list[int]:
    """What memory_child.py prints."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    script = SCRIPTS / "memory_child.py"
    ended = subprocess.run([sys.executable, script], env=plain | environment, capture_output=True, check=True)
    return [int(part) for part in ended.stdout.split()]


@LINUX
def test_large_tensors_come_from_memory_that_was_given_back():
    (kept, pages, *_), (_, by_default, *_) = child(), child(MALLOC_ARENA_MAX="2")
    assert kept
    # how often a place that fits has to be found depends on where the system put the heap: 5 or 6 of 16 times here
    assert pages < by_default * 3 / 4


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


@pytest.mark.parametrize(("idle", "shares"), [(LARGEST, False), (SERVER_IDLE, True)])
def test_threads_of_a_server_share_one_heap(monkeypatch, idle, shares):
    asked = {}
    monkeypatch.setattr(allocator, "_kept", False)
    monkeypatch.setattr(allocator, "_function", lambda name: lambda what, value: asked.update({what: value}) or 1)
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    assert keep_memory(idle)
    assert asked == {allocator.MMAP_MAX: 0, allocator.TRIM_THRESHOLD: idle} | (
        {allocator.ARENA_MAX: 1} if shares else {}
    )


def test_large_blocks_are_returned_for_a_while(monkeypatch):
    asked = []
    monkeypatch.setattr(allocator, "_function", lambda name: lambda what, value: asked.append((what, value)))
    monkeypatch.setattr(allocator, "_kept", False)
    with allocator.return_large_blocks():
        assert asked.pop() == (allocator.MMAP_THRESHOLD, 2**17)
    assert asked.pop() == (allocator.MMAP_THRESHOLD, 2**25)
    monkeypatch.setattr(allocator, "_kept", True)
    with allocator.return_large_blocks():
        assert not asked


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["list"], [LARGEST]),
        (["train", "--help"], [LARGEST]),
        (["serve", "--help"], [SERVER_IDLE]),
        (["show", "-h"], []),
    ],
)
def test_commands_keep_memory_and_a_server_some_of_it(monkeypatch, capsys, words, kept):
    calls = []
    monkeypatch.setattr(program, "keep_memory", calls.append)
    monkeypatch.setattr(sys, "argv", ["regard", *words])
    with contextlib.suppress(SystemExit):
        program.main()
    assert capsys.readouterr().out
    assert calls == kept
    # a program that calls a verb has a process of its own
    with contextlib.suppress(SystemExit):
        program.main(words)
    assert calls == kept


def test_training_hands_back_at_each_line_of_the_log(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(loop, "hand_back_memory", lambda: calls.append(1))
    settings = config(tmp_path, log_every=2)
    finish(settings)
    lines = map(json.loads, (Path(settings.out) / "log.jsonl").read_text().splitlines())
    assert len(calls) == sum(line["event"] == "step" for line in lines) > 1


def test_translating_hands_back_after_so_many_lines(monkeypatch):
    calls = []
    monkeypatch.setattr(translation, "hand_back_memory", lambda: calls.append(1))
    translator = translation.Translator.load(device="cpu")
    assert len(list(translator.translate(["Hello."] * 7, at_once=3))) == 7
    assert len(calls) == 2
