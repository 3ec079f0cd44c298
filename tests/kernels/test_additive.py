"""Additive attention in Triton, compared with PyTorch's operators in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import SCRIPTS
from torch.testing import assert_close

from regard.kernels import additive, choose
from regard.kernels.visible import Visible


def check(device: str, dtype: torch.dtype, T: int, S: int, D: int, causal: bool) -> None:
    gen = torch.Generator().manual_seed(T)
    q, k, v = (
        (2 * torch.randn(2, n, 3, width, generator=gen)).to(device, dtype).transpose(1, 2).requires_grad_()
        for n, width in ((T, D), (S, D), (S, D + 3))
    )
    w = torch.randn(3, D, generator=gen).to(device, dtype).requires_grad_()
    # the first row sees all, the second half of the keys, and nothing before its third query
    first, limit = (torch.tensor(x, device=device) for x in ([S - T, -2], [S, (S + 1) // 2]))
    with choose.use("triton"):
        assert additive.takes(q, k, v)
        o = additive.attend(q, k, v, w, Visible(first, limit, causal))
    wide = [x.double() for x in (q, k, v, w)]
    hidden = (wide[0][:, :, :, None] + wide[1][:, :, None]).tanh()
    i, j = torch.arange(T, device=device)[:, None], torch.arange(S, device=device)
    seen = (j < limit[:, None, None]) & ((j <= first[:, None, None] + i) | (not causal))
    seen = seen[:, None]
    logits = torch.where(seen, (hidden * wide[3][:, None, None]).sum(-1), -1e30)
    true = torch.where(seen, logits.softmax(-1), 0) @ wide[2]
    close = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 0.05}
    assert_close(o.double(), true, **close)
    grad = torch.randn(true.shape, generator=gen, dtype=torch.float64).to(device)
    ours = torch.autograd.grad(o, (q, k, v, w), grad.to(o.dtype))
    for one, exact in zip(ours, torch.autograd.grad(true, (q, k, v, w), grad), strict=True):
        size = exact.abs().max()
        assert_close(one.double() / size, exact.double() / size, **close)


@pytest.mark.parametrize(("T", "S", "D", "causal"), [(19, 19, 16, True), (17, 37, 5, False), (2, 5, 16, True)])
def test_additive_attention(T: int, S: int, D: int, causal: bool) -> None:
    check("cpu", torch.float32, T, S, D, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "S", "D"), [(100, 129, 64), (30, 30, 32), (3, 5, 5), (20, 20, 125)])
def test_additive_attention_on_a_gpu(dtype: torch.dtype, T: int, S: int, D: int) -> None:
    check("cuda", dtype, T, S, D, True)
    check("cuda", dtype, T, S, D, False)


@pytest.mark.parametrize("which", ["one", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_kernels_compile_without_products_of_matrices(which: str, tmp_path: Path) -> None:
    """For a Hopper GPU that need not be there, in a process where they are not interpreted."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPTS / "gathers_compile.py", "additive", which]
    environment = {**clean, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
