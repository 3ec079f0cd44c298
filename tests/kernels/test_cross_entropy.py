"""Rows of logits that become their gradient: Triton against PyTorch."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from regard.kernels import choose, cross_entropy_triton
from regard.kernels.cross_entropy import IGNORED, cross_entropy


def both(
    logits: Tensor, target: Tensor, smoothing: float, choice: choose.Choice, trains: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.clone()
    with choose.use(choice), choose.record() as ran:
        total, plain = cross_entropy(logits, target, smoothing, ignores=True, trains=trains)
    assert ran == [("cross_entropy", choice)]
    return total, plain, logits


def check(device: str, dtype: torch.dtype, V: int, smoothing: float) -> None:
    gen = torch.Generator().manual_seed(V)
    logits = (30 * torch.randn(5, V, generator=gen)).to(device, dtype)
    logits[1, ::2] = -torch.inf if smoothing == 0 else -100
    target = torch.tensor([0, 1, IGNORED, V - 1, V // 2], device=device)
    total, plain, slopes = both(logits, target, smoothing, "triton")
    exact_total, exact_plain, exact = both(logits.float(), target, smoothing, "torch")
    assert_close((total, plain), (exact_total, exact_plain))
    # rounded once
    assert_close(slopes, exact.to(dtype))
    assert_close(both(logits, target, smoothing, "triton", trains=False), (total, plain, logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("V", [2, 63, 200])
def test_rows_become_their_gradient(dtype: torch.dtype, smoothing: float, V: int, monkeypatch) -> None:
    monkeypatch.setattr(cross_entropy_triton, "WIDEST", 64)  # several blocks to a row
    check("cpu", dtype, V, smoothing)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [100, 16384, 50257])
def test_rows_become_their_gradient_on_a_gpu(dtype: torch.dtype, V: int) -> None:
    check("cuda", dtype, V, 0.0)
    check("cuda", dtype, V, 0.1)
