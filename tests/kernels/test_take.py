"""Vectors of a head taken and added up by index: Triton against PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from regard.kernels import choose
from regard.kernels.take import add_per_head, take_per_head


def gradients(function: Callable[[Tensor], Tensor], x: Tensor, choice: choose.Choice) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with choose.use(choice), choose.record() as ran:
        y = function(x)
    assert ran == [("take", choice)]
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    return [y, *torch.autograd.grad(y, x, weights)]


def check(device: str, dtype: torch.dtype, N: int, n: int, D: int) -> None:
    gen = torch.Generator().manual_seed(N)
    # split from one projection: the numbers of a head do not lie side by side
    x, y = (torch.randn(2, m, 3, D, generator=gen).to(device, dtype).transpose(1, 2) for m in (N, n))
    at = torch.randint(N, (2, 3, n), generator=gen).to(device)
    for function, given in ((lambda x: take_per_head(x, at), x), (lambda y: add_per_head(y, at, N), y)):
        exact = gradients(function, given.float(), "torch")
        for a, b in zip(gradients(function, given, "triton"), exact, strict=True):
            # sums are in float32 and rounded once
            assert_close(a, b.to(dtype))
    wide = take_per_head(x, at.unflatten(2, (1, n)))
    assert_close(wide, take_per_head(x, at)[:, :, None])


@pytest.mark.parametrize(("N", "n", "D"), [(1, 1, 1), (7, 20, 5), (65, 200, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taken_and_added(N: int, n: int, D: int, dtype: torch.dtype) -> None:
    check("cpu", dtype, N, n, D)


def test_indices_are_taken_too() -> None:
    x, at = torch.arange(12).view(1, 2, 6, 1), torch.tensor([[[5, 0], [1, 1]]])
    assert take_per_head(x, at).flatten().tolist() == [5, 0, 7, 7]


def test_sums_in_a_fixed_order_are_left_to_pytorch() -> None:
    x, at = torch.randn(1, 1, 4, 2), torch.zeros(1, 1, 3, dtype=torch.long)
    torch.use_deterministic_algorithms(True)
    try:
        with choose.use("triton"), pytest.raises(ValueError, match="deterministic algorithms are asked for"):
            take_per_head(x, at)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_taken_and_added_on_a_gpu(dtype: torch.dtype) -> None:
    for N, n, D in ((1, 1, 1), (1000, 4097, 64), (65, 63, 130)):
        check("cuda", dtype, N, n, D)
