"""Softmax attention over packed rows of different lengths: against each row by itself."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.kernels import ragged

COUNTS = [5, 0, 7, 1]


def attend_rows(queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, scale: float) -> Tensor:
    """What PyTorch's attention for variable lengths computes; behind the last row lies anything."""
    o = torch.zeros_like(queries)
    for a, b, c, d in zip(starts, starts[1:], ends, ends[1:], strict=False):
        logits = scale * torch.einsum("thd,shd->hts", queries[a:b], keys[c:d])
        o[a:b] = torch.einsum("hts,shd->thd", logits.softmax(-1).nan_to_num(0), values[c:d])
    return torch.cat([o[: starts[-1]], torch.full_like(o[starts[-1] :], torch.nan)])


@pytest.fixture
def packed_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("varlen")
    module.varlen_attn = lambda q, k, v, starts, ends, T, S, *, scale: attend_rows(q, k, v, starts, ends, scale)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)


def tensors(T: int, S: int, *, G: int = 4, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = ((4, 4, T, 8), (4, G, S, 8), (4, G, S, 8), (4, 4, T, 8))
    gen = torch.Generator().manual_seed(T + S)
    return [torch.randn(size, generator=gen, dtype=torch.float64).to(device, dtype) for size in sizes]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, count: list[int], own: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows = []
    for b, n in enumerate(count):
        o = (0.3 * q[b] @ k[b, :, :n].mT).softmax(-1) @ v[b, :, :n]
        if own:
            o = torch.cat([o[:, :n], torch.zeros_like(o[:, n:])], 1)
        rows.append(o)
    return torch.stack(rows)


@pytest.mark.usefixtures("packed_attention")
@pytest.mark.parametrize(("own", "G"), [(True, 4), (False, 4), (True, 2)])
def test_rows_are_those_computed_alone(own: bool, G: int) -> None:
    *leaves, grad = tensors(7, 7, G=G) if own else tensors(3, 7, G=G)
    leaves = [x.requires_grad_() for x in leaves]
    expected = one_by_one(*leaves, COUNTS, own)
    actual = ragged.attend_ragged(*leaves, torch.tensor(COUNTS), 0.3, own=own)
    assert_close(actual, expected)
    # what flows back to padding is zero, also where the kernel left memory as it was
    for a, b in zip(
        torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        assert_close(a, b)


def test_packing_is_a_permutation_with_padding_last() -> None:
    order, place, ends = ragged.packing(torch.tensor(COUNTS), 7)
    assert_close(order[place], torch.arange(28))
    assert ends.tolist() == [0, 5, 5, 12, 13]
    assert order[:13].tolist() == [*range(5), *range(14, 21), 21]


def test_taken_only_where_it_runs_and_pays() -> None:
    def runs(**changes: object) -> bool:
        q = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(2, 4, 4096, 64))
        return ragged.takes(SimpleNamespace(**vars(q) | changes), SimpleNamespace(shape=changes.get("shape", q.shape)))

    assert runs()
    assert not runs(is_cuda=False)
    assert not runs(dtype=torch.float32)
    assert not runs(shape=(2, 4, 1024, 64))
    assert not runs(shape=(2, 4, 4096, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("role", ["self", "cross"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_of_ragged_rows_on_a_gpu(role: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = regard.attention("softmax", width=256, heads=4, role=role).cuda()
    x, memory = (torch.randn(3, N, 256, device="cuda", dtype=torch.float64) for N in (2500, 2500))
    keep = torch.arange(2500, device="cuda") < torch.tensor([2500, 3, 700], device="cuda")[:, None]
    given = {"keep": keep} if role == "self" else {"memory": memory, "memory_keep": keep}

    def outputs(dtype: torch.dtype, packed: bool) -> list[Tensor]:
        calls = []
        inner = ragged.attend_ragged
        monkeypatch.setattr(ragged, "attend_ragged", lambda *a, **k: calls.append(1) or inner(*a, **k))
        monkeypatch.setattr(ragged, "FEWEST", 2048 if packed else 10**9)
        cast = {name: t if t.dtype == torch.bool else t.to(dtype) for name, t in given.items()}
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        layer.to(dtype).zero_grad()
        y = layer(leaf, **cast)
        (y.double() * x.cos()).sum().backward()
        monkeypatch.undo()
        assert len(calls) == packed
        return [y, leaf.grad, *(p.grad.clone() for p in layer.parameters())]

    exact, dense, packed = outputs(torch.float64, False), outputs(dtype, False), outputs(dtype, True)
    for a, b, c in zip(exact, dense, packed, strict=True):
        assert (c.double() - a).norm() <= 2 * (b.double() - a).norm() + 1e-6 * a.norm()
