"""Small translation runs: made, finished, killed on the way, and compared to the last bit."""

import os
import signal
from pathlib import Path

import torch
from forked import fork
from torch.testing import assert_close

from regard.tasks.train import train
from regard.tasks.translate import DataConfig, Task, TranslateConfig, TranslatorOptions
from regard.training import checkpoint, loop
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.run import Run

WORDS = ("one", "two", "three", "four", "five"), ("eins", "zwei", "drei", "vier", "fünf")
TIMES = ("seconds", "tokens_per_second", "images_per_second", "memory")


def write_pairs(path: Path, count: int = 90) -> Path:
    draw = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(count):
        digits = torch.randint(5, (int(torch.randint(1, 6, (1,), generator=draw)),), generator=draw).tolist()
        lines.append("\t".join(" ".join(side[digit] for digit in digits) for side in WORDS))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def config(folder: Path, name: str = "run", **training) -> TranslateConfig:
    data = folder / "pairs.tsv"
    if not data.exists():
        write_pairs(data)
    small = {"steps": 12, "tokens": 100, "evaluate_every": 5, "save_every": 3, "log_every": 1, "warmup": 4}
    model = TranslatorOptions(width=16, heads=2, inner=32, layers=1, dropout=0.2)
    return TranslateConfig(
        out=str(folder / name),
        data=DataConfig(source=str(data), vocabulary=300, held_out=8),
        model=model,
        training=TrainingConfig(**small | {"tensorboard": False, "keep": 3} | training),
    )


def finish(settings: TranslateConfig) -> loop.State:
    return train(Task, settings, Display(quiet=True))


def outcome(folder: str | Path) -> tuple[dict, dict, list]:
    """All that a finished run must agree in with another: tensors, state, log; times of the clock apart."""
    run = Run.open(folder)
    last = checkpoint.newest(run.checkpoints).checkpoint
    state = {name: value for name, value in last.state.items() if name not in TIMES}
    log = [{name: value for name, value in record.items() if name not in TIMES} for record in run.records()]
    return last.tensors, state, log


def assert_same(one: str | Path, other: str | Path) -> None:
    ours, theirs = outcome(one), outcome(other)
    assert ours[0].keys() == theirs[0].keys()
    for stem in ours[0]:
        assert_close(ours[0][stem], theirs[0][stem], rtol=0, atol=0)
    assert ours[1] == theirs[1]
    assert ours[2] == theirs[2]
    assert checkpoint.names(Run(one).checkpoints) == checkpoint.names(Run(other).checkpoints)


def in_child(work) -> int:
    """Runs in a forked child: its exit status, or minus the signal that ended it."""
    return exit_status(os.waitpid(begin_child(work), 0)[1])


def begin_child(work) -> int:
    """Begins work in a forked child, whose process id is returned."""
    child = fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(99)
    return child


def exit_status(found: int) -> int:
    """That of a process, or minus the signal that ended it, from what os.wait says."""
    return -os.WTERMSIG(found) if os.WIFSIGNALED(found) else os.WEXITSTATUS(found)


def dying(owner, name: str, call: int):
    """Kills the process, as kill -9 does, at the given call of a function."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*arguments, **options):
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(owner, name, wrapped)
