"""The kernels of pool.py, interpreted on the CPU, against sums over windows in float64. On a GPU: test_parts_triton."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from regard.kernels import choose, pool, pool_triton


def plain(x: Tensor, weight: Tensor | None, kernel: int, stride: int, end: Tensor) -> Tensor:
    outs = []
    for row, length in zip(x, end.tolist(), strict=True):
        for middle in range(0, x.shape[2], stride):
            places = [j for j in range(kernel) if 0 <= middle - kernel // 2 + j < length]
            if not places:
                outs.append(torch.zeros_like(row[:, 0]))
                continue
            tokens = torch.stack([row[:, middle - kernel // 2 + j] for j in places], 1)  # [G, places, D]
            said = row[:, middle] if middle < length else torch.zeros_like(row[:, middle])
            logits = tokens.new_zeros(len(row), len(places)) if weight is None else said @ weight[places].T
            outs.append((logits.softmax(1)[..., None] * tokens).sum(1))
    return torch.stack(outs, 1).unflatten(1, (len(x), -1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("kernel", "stride", "learned"),
    [
        *((5, 4, True), (7, 2, True), (2, 3, False)),
        *(pytest.param(*sizes, marks=pytest.mark.exhaustive) for sizes in ((2, 3, True), (7, 2, False), (1, 1, True))),
    ],
)
def test_slots(kernel, stride, learned, monkeypatch):
    monkeypatch.setattr(pool_triton, "ROWS", 8)
    make = Tensor.new_empty

    def poisoned(self: Tensor, *size: int, **given) -> Tensor:
        made = make(self, *size, **given)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    end = torch.tensor([14, 5])
    x = torch.randn(2, 15, 3, 6).transpose(1, 2).requires_grad_()
    weight = torch.randn(kernel, 6, requires_grad=True) if learned else None
    leaves = [x, weight] if learned else [x]
    with choose.use("triton"):
        assert pool.takes(x, weight, kernel)
        y = pool.pool(x, weight, kernel=kernel, stride=stride, end=end)
    wanted = plain(x.double(), None if weight is None else weight.double(), kernel, stride, end)
    assert_close(y, wanted.float())
    grad = torch.randn_like(y)
    assert_close(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(wanted, leaves, grad.double()))
