"""Who decides between PyTorch and Triton, and what is said when Triton cannot run."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.kernels import choose, experts_triton
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
