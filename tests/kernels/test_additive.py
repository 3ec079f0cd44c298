"""Logits of additive attention in Triton, compared with PyTorch's operators in float64."""

import pytest
import torch
from torch.testing import assert_close

from regard.kernels import additive, choose


def check(device: str, dtype: torch.dtype, T: int, S: int, D: int) -> None:
    gen = torch.Generator().manual_seed(T)
    q, k = (
        (3 * torch.randn(2, n, 2, D, generator=gen)).to(device, dtype).transpose(1, 2).requires_grad_() for n in (T, S)
    )
    w = torch.randn(2, D, generator=gen).to(device, dtype).requires_grad_()
    with choose.use("triton"):
        assert additive.takes(q, k)
        logits = additive.scores(q, k, w)
    wide = [x.double() for x in (q, k, w)]
    hidden = (wide[0][:, :, :, None] + wide[1][:, :, None]).tanh()
    expected = (hidden * wide[2][:, None, None]).sum(-1)
    grad = torch.randn(expected.shape, generator=gen, dtype=torch.float64).to(device)
    assert_close(logits, expected.float(), rtol=1e-4, atol=1e-4)
    ours = torch.autograd.grad(logits, (q, k, w), grad.float())
    for one, true in zip(ours, torch.autograd.grad(expected, (q, k, w), grad), strict=True):
        close = 1e-4 if dtype == torch.float32 else 0.02 * true.abs().max().item()
        assert_close(one.double(), true.double(), rtol=0, atol=close)


@pytest.mark.parametrize(("T", "S", "D"), [(17, 40, 16), (3, 1, 5)])
def test_logits(T: int, S: int, D: int) -> None:
    check("cpu", torch.float32, T, S, D)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "S", "D"), [(100, 129, 64), (30, 28, 32), (3, 1, 5), (20, 20, 128)])
def test_logits_on_a_gpu(dtype: torch.dtype, T: int, S: int, D: int) -> None:
    check("cuda", dtype, T, S, D)
