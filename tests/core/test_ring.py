"""Attention in a ring of processes: the answers and gradients of the whole row. With real processes it is tested by
training in tests/training/test_distributed.py; here threads stand for them, so that one GPU is enough."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from regard.core import ring
from regard.core.sequence import Split


def in_ring(size: int, monkeypatch: pytest.MonkeyPatch, inputs: list[Tensor], scale: float) -> list[Tensor]:
    """The answer, and the gradients of q, k and v: each process has some tokens of q, k, v and the gradient."""
    boxes, together = [Queue() for _ in range(size)], Barrier(size)

    def rotate(split: Split, tensors: list[Tensor]) -> list[Tensor]:
        boxes[(split.rank + 1) % size].put([x.clone() for x in tensors])
        found = boxes[split.rank].get(timeout=60)
        together.wait(60)
        return found

    def work(rank: int) -> list[Tensor]:
        q, k, v, grad = (x.chunk(size, 2)[rank].contiguous() for x in inputs)
        # the engine of autograd has one thread per device, in which two processes cannot wait for each other
        ctx: Any = SimpleNamespace()
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        with torch.no_grad():
            o = ring._Ring.forward(ctx, Split(None, rank, size), q, k, v, scale)
            _, *grads, _ = ring._Ring.backward(ctx, grad)
        return [o, *grads]

    monkeypatch.setattr(ring, "_rotate", rotate)
    with ThreadPoolExecutor(size) as pool:
        return [torch.cat(parts, 2) for parts in zip(*pool.map(work, range(size)), strict=True)]


def draw(device: str, dtype: torch.dtype, length: int = 24, width: int = 8) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, width, generator=made).to(device, dtype) for _ in range(4)]


def whole(inputs: list[Tensor], scale: float) -> list[Tensor]:
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), inputs[3].double())]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_attention_to_the_whole_row(size, dtype, monkeypatch):
    inputs = draw("cpu", dtype)
    assert ring.takes(inputs[0])
    for got, expected in zip(in_ring(size, monkeypatch, inputs, 0.4), whole(inputs, 0.4), strict=True):
        assert got.dtype == dtype
        assert_close(got.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_attention_to_the_whole_row_on_a_gpu(size, dtype, monkeypatch):
    """No worse than PyTorch's kernel over the whole row, but for one more rounding."""
    inputs = draw("cuda", dtype, length=384, width=64)
    assert ring.takes(inputs[0])
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1)
    plain = [o.detach(), *torch.autograd.grad(o, (q, k, v), inputs[3])]
    for got, near, expected in zip(in_ring(size, monkeypatch, inputs, 0.1), plain, whole(inputs, 0.1), strict=True):
        bound = 2 * (near.double() - expected).abs().max().item() + torch.finfo(dtype).eps * expected.abs().max().item()
        assert_close(got.double(), expected, rtol=0, atol=bound)


def test_the_kernel_for_gpus_is_asked_in_its_own_order(monkeypatch):
    """On tensors without data, which PyTorch checks as those of a GPU."""
    inputs = [torch.empty(2, 3, 64, 16, dtype=torch.bfloat16, device="meta") for _ in range(4)]
    found = in_ring(2, monkeypatch, inputs, 0.25)
    assert [x.shape for x in found] == [x.shape for x in inputs]
    assert {x.dtype for x in found} == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 12)])
def test_what_the_kernel_for_gpus_cannot_read_is_gathered(dtype, width):
    assert not ring.takes(torch.empty(1, 1, 8, width, dtype=dtype, device="cuda"))
