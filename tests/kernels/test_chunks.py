"""What runs on a GPU only, run here: sorted chunks and norms in Triton, interpreted; a convolution by blocks."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import check_compiles
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.rows import Mask
from regard.kernels import choose, norm
from regard.layers.attention.nystrom import convolve, convolve_blocks

ON_GPU = os.environ.get("REGARD_GPU") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS = (
    ("reformer(chunk=16, buckets=4, rounds=2)", 64, None),
    ("reformer(chunk=8, buckets=6, rounds=3)", 45, None),
    ("reformer(chunk=16, buckets=4, rounds=1)", 40, (40, 7, 0, 17)),
    ("reformer(chunk=5, buckets=[2, 4], rounds=3)", 33, (33, 1, 12, 16)),
)


def attended(layer, mask: Mask, given: list[Tensor], grad: Tensor, choice: str) -> list[Tensor]:
    """Output and gradients."""
    given = [x.detach().requires_grad_() for x in given]
    with choose.use(choice), choose.record() as answers:
        o = layer.attend(mask, *given)
    assert (("chunks", "triton") in answers) == (choice == "triton")
    return [o, *torch.autograd.grad(o, given, grad)]


@pytest.mark.parametrize("role", ["causal", "self"])
@pytest.mark.parametrize(("spec", "T", "lengths"), ROWS)
def test_sorted_chunks_in_triton(spec, T, lengths, role):
    torch.manual_seed(0)
    layer = regard.attention(spec, width=32, heads=2, role=role).to(DEVICE)
    end = torch.tensor(lengths or (T, T), device=DEVICE)
    zero = torch.zeros_like(end)
    mask = Mask(zero, zero, end, T, T, role == "causal", lengths is None, 0)
    k, v, grad = (torch.randn(len(end), T, 2, 16, device=DEVICE).transpose(1, 2) for _ in range(3))
    real = (torch.arange(T, device=DEVICE) < end[:, None])[:, None, :, None]
    grad = torch.where(real, grad, 0)
    got = attended(layer, mask, [k, v], grad, "triton")
    # the same hashes: those of float64 may fall on the other side
    rounded = attended(layer, mask, [k, v], grad, "torch")
    exact = attended(layer.double(), mask, [k.double(), v.double()], grad.double(), "torch")
    for ours, plain, slow in zip(got, rounded, exact, strict=True):
        ours, plain, slow = (torch.where(real, x.double(), 0) for x in (ours, plain, slow))
        allowed = 2 * (plain - slow).norm() + 4 * torch.finfo(torch.float32).eps * slow.norm()
        assert (ours - slow).norm() <= allowed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["causal", "self"])
@pytest.mark.parametrize("T", [1, 63, 65, 1000, 4097])
def test_sorted_chunks_on_a_gpu(T, role, dtype, monkeypatch):
    torch.manual_seed(T)
    layer = regard.attention("reformer(rounds=2)", width=128, heads=2, role=role).cuda()
    # one order for all precisions
    order = torch.rand(2, 2, 2, T + -T % 64, device="cuda")
    order[..., T:] = 2
    order = order.argsort(-1)
    monkeypatch.setattr(layer, "_sorted", lambda *_, **__: order)
    end = torch.full((2,), T, device="cuda")
    mask = Mask(0 * end, 0 * end, end, T, T, role == "causal", True, 0)
    k, v, grad = (torch.randn(2, T, 2, 64, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3))
    got, rounded = (attended(layer, mask, [k, v], grad, choice) for choice in ("triton", "torch"))
    exact = attended(layer, mask, [k.double(), v.double()], grad.double(), "torch")
    for ours, plain, slow in zip(got, rounded, exact, strict=True):
        ours, plain = ours.double(), plain.double()
        assert (ours - slow).norm() <= 2 * (plain - slow).norm() + 4 * torch.finfo(dtype).eps * slow.norm()


@pytest.mark.parametrize(("B", "H", "T", "D"), [(2, 3, 70, 16), (1, 2, 5, 24), (1, 1, 1, 64)])
def test_norm_in_triton(B, H, T, D):
    torch.manual_seed(0)
    x = torch.randn(B, T, H, D, device=DEVICE).transpose(1, 2).requires_grad_()
    grad = torch.randn(B, H, T, D, device=DEVICE)
    with choose.use("triton"), choose.record() as answers:
        got = norm.norm(x, 1e-6)
    assert answers == [("norm", "triton")]
    expected = F.layer_norm(x, (D,), eps=1e-6)
    assert_close(got, expected)
    assert_close(torch.autograd.grad(got, x, grad), torch.autograd.grad(expected, x, grad))


def test_pieces_are_larger_on_a_gpu():
    layer = regard.attention("synthesizer(longest=64)", width=32, heads=2)

    def queries(rows: int, device: str) -> SimpleNamespace:
        return SimpleNamespace(shape=(rows, 16, 4096, 64), device=torch.device(device))

    assert layer.piece_size(queries(1, "cpu"), 4096) == 64
    assert layer.piece_size(queries(1, "cuda"), 4096) == 64 * 32
    assert layer.piece_size(queries(1000, "cuda"), 4096) == 64


@pytest.mark.parametrize(("T", "taps", "block"), [(33, 5, 8), (1, 5, 4), (200, 33, 16), (64, 1, 16), (50, 31, 8)])
def test_a_convolution_by_blocks(T, taps, block):
    torch.manual_seed(0)
    v = torch.randn(2, 3, T, 4, dtype=torch.float64, requires_grad=True)
    filters = torch.randn(3, taps, dtype=torch.float64, requires_grad=True)
    plain, blocks = convolve(v, filters), convolve_blocks(v, filters, block)
    assert_close(blocks, plain)
    grad = torch.randn_like(plain)
    for ours, expected in zip(*(torch.autograd.grad(o, (v, filters), grad) for o in (blocks, plain)), strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize("which", ["one", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_kernels_compile(which, tmp_path):
    check_compiles(tmp_path, "gathers_compile.py", "chunks", "picks", which)
