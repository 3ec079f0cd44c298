"""Attention of short rows by random features in Triton, compared with PyTorch's operators in float64."""

from pathlib import Path

import pytest
import torch
from compiled_kernels import check_compiles
from interpreted import interpreter_as_a_gpu  # noqa: F401  (a fixture)
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.shape import Role
from regard.kernels import choose, random_features


def check(device: str, dtype: torch.dtype, T: int, S: int, D: int, R: int, *, causal: bool, far: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(T)
    values = min(D + 3, random_features.TILE)  # a width of their own, where a tile has room for it
    q, k, v, g = (
        torch.randn(3, n, 2, width, generator=draw).to(device, dtype).transpose(1, 2)
        for n, width in ((T, D), (S, D), (S, values), (T, values))
    )
    k = k * far
    W = torch.randn(R, D, generator=draw).to(device)
    # all keys of the first row are real, half of the second, none of the third
    real = torch.arange(S, device=device) < torch.tensor([S, (S + 1) // 2, 0], device=device)[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = [random_features.exp_logits(x, W, scale=0.4) for x in (q, k)]
        # log a_ij, exactly: no maximum is divided by
        pairs = (logits[0][:, :, :, None] + logits[1][:, :, None]).logsumexp(-1)
        seen = real[:, None, None].expand(pairs.shape)
        seen = seen.tril() if causal else seen
        weights = torch.where(seen, pairs, -torch.inf).softmax(-1)
        return torch.where(seen.any(-1, keepdim=True), weights.nan_to_num(), 0) @ v

    def both(precision: torch.dtype, fused: bool) -> list[Tensor]:
        q_leaf, k_leaf, v_leaf = leaves = [x.to(precision).detach().requires_grad_() for x in (q, k, v)]
        if fused:
            with choose.use("triton"):
                assert random_features.attends_pairs(q_leaf, k_leaf, v_leaf)
                o = random_features.attend_pairs(q_leaf, k_leaf, v_leaf, W, scale=0.4, real=real, causal=causal)
        else:
            o = attend(q_leaf, k_leaf, v_leaf)
        return [o.detach(), *torch.autograd.grad(o, leaves, g.to(o.dtype))]

    least = {torch.bfloat16: 0.02, torch.float16: 1e-3, torch.float32: 1e-4}[dtype]
    for one, exact in zip(both(dtype, True), both(torch.float64, False), strict=True):
        assert one.dtype == dtype
        assert one[2].count_nonzero() == 0
        assert (one.double() - exact.nan_to_num()).norm() <= least * exact.nan_to_num().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("T", "S", "causal"), [(19, 19, True), (7, 31, False)])
def test_attention_of_short_rows(dtype: torch.dtype, T: int, S: int, causal: bool) -> None:
    check("cpu", dtype, T, S, 10, 70, causal=causal)


def test_keys_far_apart_neither_overflow_nor_vanish() -> None:
    check("cpu", torch.float32, 9, 9, 8, 20, causal=True, far=12.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("T", "S", "D", "R"), [(24, 24, 32, 256), (32, 32, 29, 256), (2, 5, 5, 7), (31, 17, 16, 100)])
def test_attention_of_short_rows_on_a_gpu(dtype: torch.dtype, T: int, S: int, D: int, R: int) -> None:
    check("cuda", dtype, T, S, D, R, causal=False)
    if T == S:
        check("cuda", dtype, T, S, D, R, causal=True)


@pytest.mark.parametrize("role", ["self", "causal"])
def test_performer_takes_it_for_rows_of_a_tile(role: Role) -> None:
    layer = regard.attention("performer(features=20)", width=16, heads=2, role=role)
    for T in (9, random_features.TILE + 1):
        x = torch.randn(2, T, 16, generator=torch.Generator().manual_seed(0))
        keep = torch.arange(T) < torch.tensor([T, 5])[:, None]
        with choose.use("torch"):
            wanted = layer(x, keep=keep)
        with choose.use("triton"), choose.record() as answers:
            got = layer(x, keep=keep)
        assert (("pairs", "triton") in answers) == (T == 9)
        assert_close(
            torch.where(keep[..., None], got, 0), torch.where(keep[..., None], wanted, 0), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("which", ["one", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_kernels_compile(which: str, tmp_path: Path) -> None:
    check_compiles(tmp_path, "gathers_compile.py", "pairs", which)
