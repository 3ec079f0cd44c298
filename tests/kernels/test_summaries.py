"""Sums of chunks in Triton, compared with products in float64."""

import pytest
import torch
from torch.testing import assert_close

from regard.kernels import choose, summaries


def check(device: str, dtype: torch.dtype, T: int, D: int, r: int, chunk: int) -> None:
    gen, n = torch.Generator().manual_seed(T), T // chunk
    # heads as they are split from projections
    k, v, p = (
        torch.randn(2, T, 3, width, generator=gen).to(device, dtype).transpose(1, 2).requires_grad_()
        for width in (D, D, r)
    )
    with choose.use("triton"):
        assert summaries.takes(k, v, p, chunk)
        sums = summaries.summarise(k, v, p, chunk)
    chunks = [x.double()[:, :, : n * chunk].unflatten(2, (n, chunk)) for x in (k, v, p)]
    shares = chunks[2].softmax(3).mT
    expected = [(shares @ x).flatten(2, 3) for x in chunks[:2]]
    grads = [torch.randn(x.shape, generator=gen, dtype=torch.float64).to(device) for x in expected]
    close = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 0.1}
    for ours, true in zip(sums, expected, strict=True):
        assert_close(ours.double(), true, **close)
    ours = torch.autograd.grad(sums, (k, v, p), [x.to(dtype) for x in grads])
    for one, true in zip(ours, torch.autograd.grad(expected, (k, v, p), grads), strict=True):
        assert_close(one.double(), true.double(), **close)


@pytest.mark.parametrize(("T", "D", "r", "chunk"), [(40, 16, 8, 16), (23, 5, 3, 7)])
def test_sums_of_chunks(T: int, D: int, r: int, chunk: int) -> None:
    check("cpu", torch.float32, T, D, r, chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "D", "r", "chunk"), [(1000, 64, 8, 64), (300, 128, 17, 128), (23, 5, 3, 7)])
def test_sums_of_chunks_on_a_gpu(dtype: torch.dtype, T: int, D: int, r: int, chunk: int) -> None:
    check("cuda", dtype, T, D, r, chunk)
