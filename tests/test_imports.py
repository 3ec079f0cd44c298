"""What is imported, and when: PyTorch takes seconds, its compiler as long again."""

import functools
import importlib
import pkgutil
import subprocess
import sys
import types

import pytest
import torch

import regard
from regard.kernels.compiling import constant_when_compiled, run_eagerly

PROBE = """
import sys
import regard
from regard.cli import main

def loaded(*names):
    return [name for name in names if name in sys.modules]

def says(*words):
    try:
        assert main(list(words)) == 0
    except SystemExit as ended:
        assert ended.code == 0
"""
HELP = """
from regard.cli.program import _parser
verbs = next(action.choices for action in _parser()._actions if action.choices)
assert {"train", "translate", "show", "evaluate"} <= set(verbs)
for words in ([], *([verb] for verb in verbs)):
    says(*words, "--help")
says("list", "--recipes")
says("--version")
print(loaded("torch", "numpy", "matplotlib", "sklearn"), file=sys.stderr)
"""
LIST = """
says("list")
says("list", "--survey")
for spec in ("performer(features=8)", "synthesizer(longest=9)", "switch(experts=2)", "xl(clamp=3)"):
    says("explain", spec)
says("train", "translate", "--help")
import torch
layer = regard.attention("local(window=4)", width=8, heads=2, role="causal")
model = regard.Transformer(regard.ModelConfig(kind="decoder", vocabulary=9, width=8, heads=2, inner=8, layers=1))
with torch.no_grad():
    layer(torch.randn(1, 3, 8))
    model(torch.tensor([[1, 2, 3]]))
print(loaded("torch._dynamo", "torch._inductor", "sympy", "triton"), file=sys.stderr)
"""


@pytest.mark.parametrize("lines", [HELP, LIST], ids=["help without torch", "list without its compiler"])
def test_nothing_is_imported_before_it_is_used(lines):
    ended = subprocess.run([sys.executable, "-c", PROBE + lines], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "[]\n"), ended.stderr[-2000:]


def test_public_names():
    for name in regard.__all__:
        assert not isinstance(getattr(regard, name), types.ModuleType)
        assert name in dir(regard)
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = regard.atention


def test_every_module_is_imported_by_its_dotted_path():
    """No function of the package has the name of a module, which it would hide: `import regard.page.wire as wire`."""
    names = [module.name for module in pkgutil.walk_packages(regard.__path__, "regard.")]
    assert {"regard.layers.attention.softmax", "regard.page.wire", "regard.kernels.scan"} <= {*names}
    for name in names:
        if name.endswith(("__main__", "_triton")):  # the one runs the command line, the others need Triton
            continue
        module = importlib.import_module(name)
        assert functools.reduce(getattr, name.split(".")[1:], regard) is module, f"{name} is hidden by something else"


def test_marks_mean_what_those_of_pytorch_mean():
    """Graphs and answers as with `torch.compiler.disable` and `assume_constant_result`."""
    from torch._dynamo.testing import CompileCounter

    calls = []

    def plain(x):
        assert not torch.compiler.is_compiling()
        return x + 1

    def constant():
        calls.append(1)
        return 3

    graphs = []
    for disable, keep in (
        (torch.compiler.disable, torch.compiler.assume_constant_result),
        (run_eagerly, constant_when_compiled),
    ):
        torch._dynamo.reset()
        counter, calls[:] = CompileCounter(), []
        eager, fixed = disable(plain), keep(constant)
        compiled = torch.compile(lambda x, eager=eager, fixed=fixed: eager(x.sin()).cos() * fixed(), backend=counter)
        for length in (4, 4, 5, 6):
            x = torch.randn(length)
            torch.testing.assert_close(compiled(x), (x.sin() + 1).cos() * 3)
        graphs.append((counter.frame_count, counter.op_count, len(calls)))
    assert graphs[0] == graphs[1]
    x = torch.randn(3)
    torch.testing.assert_close(run_eagerly(plain)(x), x + 1)
