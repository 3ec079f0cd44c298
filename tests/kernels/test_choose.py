"""Who decides between PyTorch and Triton, and what is said when Triton cannot run."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.kernels import (
    additive,
    choose,
    chunks,
    entmax,
    experts_triton,
    norm,
    pool,
    random_features,
    scan,
    summaries,
    take,
    votes,
)
from regard.kernels.choose import record, use, use_triton

SMALL = torch.zeros(2)


def test_auto_is_torch_on_a_cpu():
    with record() as answers:
        assert not use_triton("scan", SMALL)
    assert answers == [("scan", "torch")]


def test_triton_is_interpreted_on_a_cpu_when_asked_for():
    with use("triton"), record() as answers:
        assert use_triton("scan", SMALL, None)
        with use("torch"):
            assert not use_triton("scan", SMALL)
    assert answers == [("scan", "triton"), ("scan", "torch")]
    assert not use_triton("scan", SMALL)


def test_auto_takes_triton_on_cuda(monkeypatch):
    """And falls back where the kernel refuses or Triton does not run; an explicit choice raises with the reason."""
    monkeypatch.setattr(choose, "_problems", {"cuda": None})
    on_gpu = type("OnGpu", (), {"device": torch.device("cuda"), "dtype": torch.float32})()
    assert use_triton("scan", on_gpu)
    assert not use_triton("scan", on_gpu, refusal="heads are wider than 256")
    monkeypatch.setattr(choose, "UNPROVEN", ("scan",))
    assert not use_triton("scan", on_gpu)
    with use("triton"):
        assert use_triton("scan", on_gpu)
    monkeypatch.setattr(choose, "UNPROVEN", ())
    monkeypatch.setattr(choose, "_problems", {"cuda": "RuntimeError: no C compiler"})
    assert not use_triton("scan", on_gpu)
    with use("triton"), pytest.raises(ValueError, match="'scan' cannot run in Triton: RuntimeError: no C compiler"):
        use_triton("scan", on_gpu)


@pytest.mark.parametrize(
    ("tensors", "refusal", "words"),
    [
        ([SMALL.double()], None, "it takes float32, bfloat16 and float16, got float64"),
        ([SMALL, SMALL.to("meta")], None, "its tensors lie on cpu and meta"),
        ([SMALL.to("meta")], None, "its tensors lie on meta"),
        ([SMALL], "heads are wider than 256", "heads are wider than 256"),
    ],
)
def test_an_explicit_choice_says_why_it_cannot_run(tensors, refusal, words):
    with use("triton"), pytest.raises(ValueError, match=words):
        use_triton("scan", *tensors, refusal=refusal)
    assert not use_triton("scan", *tensors, refusal=refusal)


ROWS = torch.empty(1, 1, 4, 16).expand(32768, 2, 4, 16)
MANY_ROWS = {
    "additive": lambda: additive.takes(ROWS, ROWS, ROWS),
    "chunks": lambda: chunks.takes(ROWS[:, :1], ROWS[:, :1], 4, rounds=2),
    "entmax": lambda: entmax.takes(ROWS, ROWS, ROWS),
    "features": lambda: random_features.exp_features(ROWS.flatten(0, 1)[:, None], torch.empty(8, 16), scale=1.0),
    "norm": lambda: norm.norm(ROWS, 1e-6),
    "pool": lambda: pool.takes(ROWS, None, 2),
    "scan": lambda: scan.absorb(*2 * [ROWS.flatten(0, 1)[:, None]]),
    "summaries": lambda: summaries.takes(ROWS, ROWS, ROWS, 2),
    "take": lambda: take.take_per_head(ROWS, torch.zeros(1, 1, 1, dtype=torch.long).expand(32768, 2, 1)),
    "votes": lambda: votes.group_codes(ROWS, ROWS, None, 1),
}


@pytest.mark.parametrize("kernel", MANY_ROWS)
def test_more_rows_and_heads_than_a_grid_has_room_for_are_left_to_pytorch(kernel):
    with use("triton"), pytest.raises(ValueError, match=f"'{kernel}' .* 65,536, and a grid has room for 65,535"):
        MANY_ROWS[kernel]()


def test_a_gpu_without_a_compiler_is_said_once(monkeypatch):
    monkeypatch.setattr(choose, "_problems", {})
    monkeypatch.setattr(choose, "_tried", lambda device: "RuntimeError: no C compiler")
    with pytest.warns(UserWarning, match="Triton does not run here"):
        assert choose._problem("cuda")
    assert choose._problem("cuda") == "RuntimeError: no C compiler"


def test_why_triton_does_not_run(monkeypatch):
    monkeypatch.setattr(experts_triton, "copied", lambda *_: 1 / 0)
    assert choose._tried("cpu") == "ZeroDivisionError: division by zero"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in choose._tried("cpu")


def test_triton_is_tried_outside_of_what_a_compiler_traces(monkeypatch):
    monkeypatch.setattr(choose, "_problems", {})
    with FakeTensorMode():
        assert choose._problem("cpu") is None


def test_compiled_code_asks_too():
    @torch.compile(backend="eager", fullgraph=True)
    def ask(x):
        return x + 1 if use_triton("scan", x) else x

    assert not ask(SMALL).any()
    with use("triton"):
        assert ask(SMALL).all()


def test_the_environment_sets_the_choice():
    """It is read once in a process: here when the module is read anew."""
    code = (
        "import importlib, os, sys, torch; from regard.kernels import choose\n"
        "for choice in sys.argv[1:]:\n"
        "    os.environ['REGARD_KERNELS'] = choice\n"
        "    try:\n"
        "        print(importlib.reload(choose).use_triton('scan', torch.zeros(1)))\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    command = [sys.executable, "-c", code, "triton", "torch", "fast"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[:2] == ["True", "False"]
    assert "must be 'auto', 'torch' or 'triton'" in lines[2]
