"""Additive attention in Triton, compared with PyTorch's operators in float64."""

from pathlib import Path

import pytest
import torch
from compiled_kernels import check_compiles
from torch.testing import assert_close

from regard.kernels import additive, choose
from regard.kernels.visible import Visible


def check(device: str, dtype: torch.dtype, T: int, S: int, D: int, causal: bool) -> None:
    gen = torch.Generator().manual_seed(T)
    q, k, v = (
        (2 * torch.randn(2, n, 3, width, generator=gen)).to(device, dtype).transpose(1, 2).requires_grad_()
        for n, width in ((T, D), (S, D), (S, D + 3))
    )
    w, offset = (torch.randn(3, D, generator=gen).to(device, dtype).requires_grad_() for _ in range(2))
    # the first row sees all, the second half of the keys, and nothing before its third query
    first, limit = (torch.tensor(x, device=device) for x in ([S - T, -2], [S, (S + 1) // 2]))
    with choose.use("triton"):
        assert additive.takes(q, k, v)
        o = additive.attend(q, k, v, w, offset, Visible(first, limit, causal))
    leaves = (q, k, v, w, offset)
    wide = [x.double() for x in leaves]
    hidden = (wide[0][:, :, :, None] + wide[1][:, :, None] + wide[4][:, None, None]).tanh()
    i, j = torch.arange(T, device=device)[:, None], torch.arange(S, device=device)
    seen = (j < limit[:, None, None]) & ((j <= first[:, None, None] + i) | (not causal))
    seen = seen[:, None]
    logits = torch.where(seen, (hidden * wide[3][:, None, None]).sum(-1), -1e30)
    true = torch.where(seen, logits.softmax(-1), 0) @ wide[2]
    close = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 0.05}
    assert_close(o.double(), true, **close)
    grad = torch.randn(true.shape, generator=gen, dtype=torch.float64).to(device)
    ours = torch.autograd.grad(o, leaves, grad.to(o.dtype))
    for one, exact in zip(ours, torch.autograd.grad(true, leaves, grad), strict=True):
        size = exact.abs().max()
        assert_close(one.double() / size, exact.double() / size, **close)


@pytest.mark.parametrize(
    ("T", "S", "D", "causal"), [(19, 19, 16, True), (17, 37, 5, False), (2, 5, 16, True), (45, 40, 20, True)]
)
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
    check_compiles(tmp_path, "gathers_compile.py", "additive", which)
