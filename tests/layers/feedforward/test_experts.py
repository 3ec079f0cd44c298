"""Experts in models and in training: the products, every kind of model, decoding, exact resume, what the log tells."""

import copy
import dataclasses
import itertools
import json
import math
import os
import signal
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import check_compiles
from torch import Tensor
from torch.testing import assert_close
from torch.torch_version import TorchVersion
from training_runs import assert_same, config, finish, in_child

import regard
from regard.core.rows import Rows
from regard.kernels import choose, experts_triton, grouped, moves, router
from regard.kernels.packed import pack_linears
from regard.layers.feedforward import moe
from regard.layers.feedforward.experts import one_by_one
from regard.models import build
from regard.models.config import ModelConfig
from regard.models.feedback import FeedbackConfig
from regard.models.funnel import FunnelConfig
from regard.models.perceiver import PerceiverARConfig, PerceiverConfig
from regard.models.pooling import ClassifierConfig
from regard.models.tokenlearner import TokenLearnerConfig
from regard.models.transformer import Transformer
from regard.spec import FEEDFORWARD
from regard.tasks.train import resume
from regard.training import checkpoint, compiling, loop
from regard.training.compact import compact, expand
from regard.training.display import Display, describe_experts
from regard.training.graphs import CudaGraphs
from regard.training.run import Run

SIZES = {"vocabulary": 40, "width": 16, "heads": 2, "inner": 32, "dropout": 0.0}
SPECS = [FEEDFORWARD.find(name).examples[0] for name in FEEDFORWARD.names()]
CAUSAL = [spec for spec in SPECS if "causal" in regard.facts(spec, "feedforward").roles]


def ids(B: int = 3, T: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(40, (B, T), generator=torch.Generator().manual_seed(seed))


def holes(T: int = 11) -> Tensor:
    keep = torch.ones(3, T, dtype=torch.bool)
    keep[0, 7:], keep[1, 2:4] = False, False
    return keep


# the products

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]  # interpreted, and as they are


def shares(M: int, groups: int) -> Tensor:
    """An empty group, a large one, and some that are nobody's."""
    group = torch.randint(groups + 1, (M,), generator=torch.Generator().manual_seed(2))
    return torch.where(group == 1, 2, group)


def unwritten(x: Tensor, weight: Tensor, *, offs: Tensor, product=F.grouped_mm) -> Tensor:
    """The grouped product, with what may lie in memory behind the last group, and where a group has no rows."""
    end = int(offs[-1])
    if weight.dim() == 2:
        found = product(x[:, :end], weight[:end], offs=offs)
        return torch.where((offs.diff(prepend=offs.new_zeros(1)) == 0)[:, None, None], torch.nan, found)
    found = product(x[:end], weight, offs=offs)
    return torch.cat([found, torch.full((len(x) - end, found.shape[1]), torch.nan)])


@pytest.mark.parametrize(("limit", "most"), [(None, None), (5, 5), (5, 9), (0, 1), (0, None)])
@pytest.mark.parametrize("layout", ["flat", "flat as on a GPU", "padded"])
@pytest.mark.parametrize("fused", [False, True])
def test_grouped_products(monkeypatch, fused, layout, limit, most):
    """Both layouts against a loop over the pairs, values and gradients; first come, first served. Moved by PyTorch and
    by kernels of our own."""
    monkeypatch.setattr(grouped, "_flat", lambda *_: layout != "padded")
    monkeypatch.setattr(moves, "kernels", lambda *_: experts_triton if fused else None)
    if layout == "flat as on a GPU":
        monkeypatch.setattr(grouped, "_counted", lambda _: False)
        monkeypatch.setattr(grouped.F, "grouped_mm", unwritten)
    N, groups = 24, 4
    group = shares(2 * N, groups).view(2, N)
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(N, 8, generator=draw, requires_grad=True)
    weight = torch.randn(groups, 8, 12, generator=draw, requires_grad=True)
    vectors = torch.randn(groups, 12, generator=draw, requires_grad=True)
    gate = torch.randn(2, N, generator=draw, requires_grad=True)
    bound = None if limit is None else torch.tensor(limit)
    dealt = grouped.deal(group, groups, x.dtype, (8, 12), most, bound)
    y = dealt.product(dealt.spread(x, x.dtype), weight) * dealt.each(vectors)
    y = dealt.collect(y, gate.flatten()[dealt.pair])
    taken, rows = [0] * groups, []
    for pair, own in enumerate(group.flatten().tolist()):
        served = own < groups and (limit is None or taken[own] < limit)
        if served:
            taken[own] += 1
        rows.append(x[pair % N] @ weight[own] * vectors[own] if served else torch.zeros(12))
        assert dealt.taken.flatten()[pair] == served
    expected = (torch.stack(rows).view(2, N, 12) * gate[..., None]).sum(0)
    assert_close(y, expected)
    if any(taken):
        toward = torch.randn(y.shape, generator=draw)
        leaves = (x, weight, vectors, gate)
        assert_close(
            torch.autograd.grad((y * toward).sum(), leaves),
            torch.autograd.grad((expected * toward).sum(), leaves),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("kind", [moves, experts_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 48, 2500])
@pytest.mark.parametrize("device", DEVICES)
def test_moves(device, kind, dtype, width):
    """Each function against its formula, also wider than what a program holds at once; what is masked may be anything,
    and nothing that is given changes."""
    draw = torch.Generator().manual_seed(4)
    # columns and rows lie the other way round in memory
    x, y, grad = (torch.randn(width, rows, generator=draw).to(device).T for rows in (7, 9, 7))
    y, row = y.to(dtype), torch.randint(7, (9,), generator=draw).to(device)
    used = (torch.rand(9, generator=draw) < 0.7).to(device)
    x[row[~used]] = torch.where(torch.isin(row[~used], row[used])[:, None], x[row[~used]], torch.nan)
    # a column of a table, whose numbers lie apart
    factor = torch.randn(9, 2, generator=draw).to(device)[:, 0]
    off = {"rtol": 0 if dtype == torch.float32 else 0.01, "atol": 1e-4 if dtype == torch.float32 else 0.05}
    some, every = moves.places_by_row(row, used, 7), moves.places_by_row(row, torch.ones_like(used), 7)
    strange = torch.where(used, factor, torch.nan)
    found = kind.taken(x, some, strange, dtype)
    assert found.dtype == dtype
    assert_close(found.float(), torch.where(used[:, None], factor[:, None] * x[row], 0), **off)
    assert_close(kind.taken(x.nan_to_num(), every._replace(used=None), None, dtype).float(), x.nan_to_num()[row], **off)
    # any number of slots for a row
    y[~used] = torch.nan
    before = y.clone()
    read = torch.where(used[:, None], y.float(), 0)
    assert_close(kind.added(y, some, None, torch.float32), torch.zeros_like(grad).index_add(0, row, read), **off)
    weighted = torch.zeros_like(grad).index_add(0, row, factor[:, None] * read)
    assert_close(kind.added(y, some, factor, torch.float32), weighted, **off)
    found = kind.products(y, some, grad, torch.float32)
    assert_close(found, (read * grad[row]).sum(1), rtol=1e-4, atol=1e-3)
    whole = y.nan_to_num()
    found = kind.products(whole, every._replace(used=None), grad, torch.float32)
    assert_close(found, (whole * grad[row]).sum(1), rtol=1e-4, atol=1e-3)
    # three for each
    at = torch.randint(9, (7, 3), generator=draw).to(device).T
    kept = used[at] & (torch.rand(7, 3, generator=draw) < 0.7).to(device).T
    three = moves.Places(row, used, at, kept, None)
    read = torch.where(kept[..., None], y.float()[at], 0)
    assert_close(kind.added(y, three, None, torch.float32), read.sum(0), **off)
    weighted = torch.where(kept[..., None], factor[at][..., None] * read, 0)
    assert_close(kind.added(y, three, strange, torch.float32), weighted.sum(0), **off)
    assert_close(kind.added(whole, three._replace(kept=None), None, dtype).float(), whole.float()[at].sum(0), **off)
    assert_close(y, before, rtol=0, atol=0, equal_nan=True)
    # sums are made in float32
    ones, row = torch.ones(300, width, dtype=dtype, device=device), torch.zeros(300, dtype=torch.long, device=device)
    many = (
        moves.places_by_row(row, row == 0, 1),
        moves.Places(row, None, torch.arange(300, device=device)[:, None], None, None),
    )
    for places in many:
        assert_close(kind.added(ones, places, None, torch.float32), torch.full((1, width), 300.0, device=device))


@pytest.mark.parametrize("size", [(), (3,), (33, 400)])
@pytest.mark.parametrize("device", DEVICES)
def test_copies_in_another_dtype(device, size):
    x = torch.randn(size).bfloat16().to(device)
    assert_close(experts_triton.copied(x, torch.float32), x.float(), rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "width", "outputs"), [(3, 16, 2), (130, 72, 20), (200, 257, 130)])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("device", DEVICES)
def test_router(monkeypatch, device, rows, width, outputs, jitter):
    """Logits and gradients beside PyTorch's; forward and backward see the same noise."""
    monkeypatch.setattr(moves, "kernels", lambda *_: experts_triton)
    draw = torch.Generator().manual_seed(5)
    sizes = (rows, width), (outputs, width), (rows, outputs), (rows, width)
    # columns and rows lie the other way round in memory
    x, weight, toward, onward = (torch.randn(size[::-1], generator=draw).to(device).T for size in sizes)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    torch.manual_seed(6)
    with torch.autocast(device, torch.bfloat16):
        found, tokens = router.logits(x, weight, jitter)
    torch.manual_seed(6)
    seed = torch.randint(2**31, (1,), device=device) if jitter else None
    # a row of ones times the identity tells the noise
    ones, identity = torch.ones(rows, width, device=device), torch.eye(width, device=device)
    noise = experts_triton.logits(ones, identity, jitter, seed, torch.bfloat16)[0]
    assert found.dtype == torch.float32
    assert_close(tokens, x)
    assert_close(found, (x * noise) @ weight.T, rtol=1e-5, atol=1e-4)
    ours = torch.autograd.grad((found * toward).sum() + (tokens * onward).sum(), (x, weight))
    exact = torch.autograd.grad((((x * noise) @ weight.T) * toward).sum() + (x * onward).sum(), (x, weight))
    for got, slow in zip(ours, exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - slow).norm() < 0.01 * slow.norm()
    if not jitter:
        assert_close(noise, ones)
    elif noise.numel() > 10000:
        check_noise(noise, jitter)


def check_noise(noise: Tensor, jitter: float) -> None:
    """Evenly from 1 - jitter to 1 + jitter, and neighbours do not go together."""
    spread = (noise - 1) / jitter
    assert 0.99 < spread.abs().max() <= 1.0001
    assert abs(spread.mean()) < 0.02
    assert abs(spread.var() - 1 / 3) < 0.02
    assert abs((spread[:, 1:] * spread[:, :-1]).mean()) < 0.02
    assert abs((spread[1:] * spread[:-1]).mean()) < 0.02


def test_router_without_triton():
    """The noise; and in float64 autocast changes nothing."""
    torch.manual_seed(0)
    noise, tokens = router.logits(torch.ones(200, 300), torch.eye(300), 0.1)
    check_noise(noise, 0.1)
    assert_close(tokens, torch.ones(200, 300))
    with torch.autocast("cpu", torch.bfloat16):
        assert router.product_dtype(noise) == torch.bfloat16
        assert router.product_dtype(noise.double()) == torch.float64


def test_router_of_narrow_tokens(monkeypatch):
    """Their gradient is as narrow as they are."""
    monkeypatch.setattr(moves, "kernels", lambda *_: experts_triton)
    x, weight = torch.randn(5, 16).bfloat16().requires_grad_(), torch.randn(3, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, tokens = router.logits(x, weight)
    assert (found.dtype, tokens.dtype) == (torch.float32, torch.bfloat16)
    of_x, of_weight = torch.autograd.grad(found.sum() + tokens.float().sum(), (x, weight))
    assert (of_x.dtype, of_weight.dtype) == (torch.bfloat16, torch.float32)
    assert_close(of_x.float(), 1 + weight.sum(0).expand(5, -1), rtol=0.02, atol=0.02)


def test_when_kernels_are_used(monkeypatch):
    on_gpu, exact, on_cpu = (
        SimpleNamespace(device=torch.device(device), dtype=dtype)
        for device, dtype in (("cuda", torch.float32), ("cuda", torch.float64), ("cpu", torch.float32))
    )
    monkeypatch.setattr(choose, "_problems", {"cuda": None})
    assert moves.kernels(on_gpu, on_gpu) is experts_triton
    assert moves.kernels(on_gpu, exact) is None
    assert moves.kernels(on_gpu, on_cpu) is None
    with choose.use("torch"):
        assert moves.kernels(on_gpu) is None
    monkeypatch.setattr(choose, "_problems", {"cuda": "no compiler"})
    assert moves.kernels(on_gpu) is None


@pytest.mark.parametrize(
    ("dtype", "widths", "most", "capability", "flat"),
    [
        (torch.bfloat16, (64, 128), None, (9, 0), True),
        (torch.bfloat16, (64, 128), 5, (9, 0), True),
        (torch.bfloat16, (64, 128), 5, (8, 0), False),  # the host would have to wait
        (torch.float32, (64, 128), 5, (9, 0), False),
        (torch.float32, (64, 128), None, (9, 0), True),  # it has to anyway
        (torch.bfloat16, (60, 128), None, (9, 0), False),  # rows of other than 16 bytes
        (torch.float64, (64, 128), None, (9, 0), False),
    ],
)
def test_layouts_on_a_gpu(monkeypatch, dtype, widths, most, capability, flat):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert grouped._flat(torch.device("cuda"), dtype, widths, most) == flat


@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 2, 2), (300, 5, 3), (70, 129, 4)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_noisy_top(monkeypatch, device, rows, experts, k, padded):
    """Choices, chances and gradients of the kernels beside PyTorch's."""
    monkeypatch.setattr(moves, "kernels", lambda *_: experts_triton)
    draw = torch.Generator().manual_seed(7)
    sizes = (rows, 2 * experts), (rows, experts), (rows, k), (experts,)
    # what is given need not lie close together
    logits, noise, *goals = (torch.randn(*size, 2, generator=draw).to(device)[..., 0] for size in sizes)
    logits.requires_grad_()
    real = torch.arange(rows, device=device) % 3 > 0 if padded else None
    results = []
    for way in (moe.noisy_top, moe._NoisyTop.apply):
        top, expert, chosen = way(logits, noise, real, k)
        grad = torch.autograd.grad((top, chosen), logits, goals)
        results.append((top, expert, chosen, *grad))
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    if device == "cuda":
        # interpreted, nothing is the largest of what is no number
        lost = moe._NoisyTop.apply(torch.full_like(logits, torch.nan), noise, real, k)[1]
        assert lost.min() >= 0
        assert lost.max() < experts


def test_gates_of_noisy_choices():
    """The shares of those chosen, and of no other, among them."""
    torch.manual_seed(0)
    layer, logits = regard.feedforward("moe(experts=5, choices=2)", width=8, inner=8).train(), torch.randn(9, 10)
    torch.manual_seed(1)
    route = layer.route(logits, None)
    torch.manual_seed(1)
    noisy = logits[:, :5] + torch.randn_like(logits[:, :5]) * (F.softplus(logits[:, 5:]) + 0.01)
    assert_close(route.gate, torch.softmax(noisy.gather(1, route.expert), 1))
    assert_close(route.expert, noisy.topk(2, 1).indices)


def test_noise_where_all_experts_are_chosen():
    """Nothing is likely or not then: as wide as it is otherwise."""
    torch.manual_seed(0)
    layer = regard.feedforward("moe(experts=3, choices=3)", width=8, inner=8).train()
    torch.manual_seed(1)
    route = layer.route(torch.zeros(50, 6), None)
    torch.manual_seed(1)
    noisy = torch.randn_like(torch.zeros(50, 6)[:, :3]) * (math.log(2) + 0.01)
    assert_close(route.gate, torch.softmax(noisy.sort(1, descending=True).values, 1))
    assert [name for name, *_ in route.losses] == ["importance"]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_best_one_by_one(k):
    x = torch.randn(30, 7, requires_grad=True)
    ours, theirs = one_by_one(x, k), x.topk(k, 1)
    assert_close(ours, tuple(theirs))
    assert_close(*(torch.autograd.grad(found[0].square().sum(), x)[0] for found in (ours, theirs)))


def test_capacity_is_rounded_up_but_not_by_rounding():
    """1.1 / 2 times 20 is a little above 11 in a computer."""
    layer = regard.feedforward("switch(experts=2, capacity=1.1)", width=4, inner=4).train()
    for count in (20, 100_000):
        real = torch.arange(count + 4) < count
        limit, most = layer._limits(torch.empty(count + 4, 1), real)
        assert int(limit) == round(0.55 * count)
        assert most == math.ceil(0.55 * (count + 4) - 1e-6)
    # and 2 / 7 times 21 a little above 6 in float32
    layer = regard.feedforward("switch(experts=7, capacity=2.0)", width=4, inner=4).train()
    assert int(layer._limits(torch.empty(30, 1), torch.arange(30) < 21)[0]) == 6
    wide = regard.feedforward("switch(experts=2, capacity=9.0)", width=4, inner=4).train()
    assert wide._limits(torch.empty(5, 1), None)[1] == 5


@pytest.mark.parametrize(("experts", "capacity"), [(4, 2.2), (4, 0.8), (5, 1.0)])
def test_choice_among_the_real(experts, capacity):
    """A padded row is the row alone; and how many tokens nobody chose."""
    torch.manual_seed(0)
    layer = regard.feedforward(f"choice(experts={experts}, capacity={capacity})", width=8, inner=8).train()
    x = torch.randn(1, 24, 8)
    padded = layer.forward_packed(x, Rows(torch.zeros(1, dtype=torch.long), torch.tensor([20]), 24, None))
    alone = layer.forward_packed(x[:, :20], Rows.full(x[:, :20]))
    assert_close(padded.y[:, :20], alone.y)
    lost = int((alone.y[0].abs().sum(1) == 0).sum())
    assert lost >= (4 if capacity < 1 else 0)
    for out in (padded, alone):
        assert_close(out.statistics["dropped"], torch.tensor(lost / 20))


def test_choice_of_a_third():
    """21 tokens times 2 / 7 are 6, also where they stand among 30."""
    torch.manual_seed(0)
    layer, x = regard.feedforward("choice(experts=7)", width=8, inner=16).eval(), torch.randn(1, 30, 8)
    assert_close(layer(x, keep=torch.arange(30)[None] < 21)[:, :21], layer(x[:, :21]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_no_tokens(spec, training, dtype):
    layer = regard.feedforward(spec, width=8, inner=8).to(dtype).train(training)
    for shape in ((0, 5, 8), (2, 0, 8)):
        assert layer(torch.zeros(shape, dtype=dtype)).shape == shape


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("switch(balance=-0.5)", "must not be negative"),
        ("switch(jitter=1.0)", "below 1"),
        ("moe(choices=0)", "at least one expert"),
        ("moe(experts=3)", "at least as many experts"),
    ],
)
def test_options_that_cannot_be(spec, words):
    with pytest.raises(ValueError, match=words):
        regard.feedforward(spec, width=8, inner=8)


@pytest.mark.parametrize("spec", ["switch(experts=4)", "moe(experts=4, choices=2)", "choice(experts=4)"])
def test_products_are_as_autocast_says(spec):
    layer, x = regard.feedforward(spec, width=16, inner=16), torch.randn(1, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.forward_packed(x, Rows.full(x)).y.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(33, 40), (300, 301)])
@pytest.mark.parametrize("device", DEVICES)
def test_groups_without_rows_are_cleared(device, size):
    """Also those larger than all programs of a group clear at once."""
    weights = torch.full((4, *size), torch.nan, device=device)
    weights[1], weights[3] = 1.0, 2.0
    experts_triton.clear_empty(weights, torch.tensor([0, 5, 5, 6], dtype=torch.int32, device=device))
    assert_close(weights.mean((1, 2)).cpu(), torch.tensor([0.0, 1.0, 0.0, 2.0]))


@pytest.mark.parametrize("which", [(), pytest.param(("all",), marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_kernels_compile(tmp_path, which):
    check_compiles(tmp_path, "kernels_compile.py", *which)


@pytest.mark.parametrize("spec", [*SPECS, "moe(experts=4, choices=2)", "moe(experts=3, choices=3)"])
def test_layers_with_fused_moves(monkeypatch, spec):
    """What a GPU runs, interpreted: answers and gradients as PyTorch's operators give them."""
    results = []
    for fused in (False, True):
        monkeypatch.setattr(moves, "kernels", lambda *_, fused=fused: experts_triton if fused else None)
        torch.manual_seed(0)
        layer = regard.feedforward(spec, width=16, inner=24)
        x = torch.randn(2, 13, 16, requires_grad=True)
        torch.manual_seed(1)
        out = layer.forward_packed(x, Rows(torch.zeros(2, dtype=torch.long), torch.tensor([13, 7]), 13, None))
        (out.y.square().sum() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)).backward()
        results.append([out.y, x.grad, *(torch.zeros(()) if p.grad is None else p.grad for p in layer.parameters())])
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["torch", "auto"], indirect=True)
def test_a_gpu_gives_the_same(spec, precision, kernels):
    """Answers, losses and gradients beside the CPU's in float64, with padding, empty groups and used memory."""
    torch.manual_seed(0)
    layer = regard.feedforward(spec, width=64, inner=128)
    with torch.no_grad():
        for part in layer.parameters():
            part.add_(0.05 * torch.randn_like(part))
    x = torch.randn(4, 32, 64)
    rows = Rows(torch.zeros(4, dtype=torch.long), torch.tensor([32, 7, 20, 1]), 32, None)
    training = not layer.facts.random
    exact, fast = copy.deepcopy(layer).double().train(training), copy.deepcopy(layer).cuda().train(training)
    # what is left in memory must not be read
    del_me = [torch.full((2**22,), torch.nan, device="cuda") for _ in range(8)]
    del del_me
    results = []
    for part, device in ((exact, "cpu"), (fast, "cuda")):
        given = x.to(device, torch.float64 if device == "cpu" else torch.float32).requires_grad_()
        on = Rows(rows.start.to(device), rows.count.to(device), 32, None)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and precision == "bfloat16"):
            out = part.forward_packed(given, on)
        y = torch.where(on.real()[..., None], out.y.to(given.dtype), 0)
        (y.sum() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)).backward()
        grads = [torch.zeros(()) if p.grad is None else p.grad for p in part.parameters()]
        results.append([y.detach(), given.grad, *grads])
    for ours, slow in zip(results[1], results[0], strict=True):
        # a unit next to zero may be on in one and off in the other: single numbers say little
        off = (ours.double().cpu() - slow.double()).norm()
        assert off <= (1e-3 if precision == "float32" else 0.1) * max(1e-3, slow.norm().item())


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("moe")])
@pytest.mark.parametrize("kernels", ["torch", "auto"], indirect=True)
def test_steps_with_experts_are_recorded(spec, kernels):
    """The host never waits: a graph of the step is made, and replayed it gives what it gave."""
    causal = spec if spec in CAUSAL else "dense"
    torch.manual_seed(0)
    model = Transformer(ModelConfig(layers=2, feedforward=spec, decoder_feedforward=causal, **SIZES)).cuda().train()
    for part in model.parameters():
        part.grad = torch.zeros_like(part)

    class Pair(NamedTuple):
        source: Tensor
        target: Tensor
        keep: Tensor

        def to(self, device):
            return Pair(*(part.to(device) for part in self))

    def work(batch, weights):
        out = model(batch.source, batch.target, keep=batch.keep)
        goal = out.logits.square().mean() * weights[0]
        (goal if out.auxiliary_loss is None else goal + out.auxiliary_loss * weights[1]).backward()
        return {"plain": goal.detach(), **(out.statistics or {})}

    said = []
    recorded = CudaGraphs(work, torch.device("cuda"), said.append)
    batch, found = Pair(ids(), ids(T=9, seed=2), holes()), []
    with torch.cuda.stream(recorded.stream):
        for _ in range(4):
            torch.manual_seed(3)
            found.append(recorded(batch, [1.0, 1.0]))
    torch.cuda.synchronize()
    assert not said
    assert recorded.graphs
    for name in found[0]:
        for later in found[1:]:
            assert_close(later[name], found[0][name], rtol=1e-3, atol=1e-4)


# models


@pytest.mark.parametrize("spec", CAUSAL)
def test_decoding_is_the_whole_however_it_is_cut(spec):
    """Also in a list over the layers, with prompts of different length."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(kind="decoder", layers=2, feedforward=["dense", spec], **SIZES)).double().eval()
    tokens = ids()
    whole = model(tokens).logits
    for cuts in ([11], [1] * 11, [4, 1, 6]):
        state, first, found = model.start(3), 0, []
        for n in cuts:
            logits, state = model.extend(tokens[:, first : first + n], state)
            found.append(logits)
            first += n
        assert_close(torch.cat(found, 1), whole)
    keep = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    _, state = model.extend(tokens[:, :6], model.start(3), keep=keep)
    logits, _ = model.extend(tokens[:, 6:], state)
    for row in range(3):
        own = torch.cat([tokens[row, :6][keep[row]], tokens[row, 6:]])
        assert_close(logits[row : row + 1], model(own[None]).logits[:, -5:])


@pytest.mark.parametrize("spec", SPECS)
def test_a_translator_takes_it(spec):
    """Every parameter learns, padding changes nothing, losses and statistics come with their layer's name."""
    causal = spec if spec in CAUSAL else "dense"
    torch.manual_seed(0)
    settings = ModelConfig(layers=2, feedforward=["dense", spec], decoder_feedforward=["dense", causal], **SIZES)
    model = Transformer(settings).double()
    source, target, keep = ids(), ids(T=9, seed=2), holes()
    model.train()
    out = model(source.repeat(8, 1), target.repeat(8, 1), keep=keep.repeat(8, 1))
    layer = model.encoder.blocks[1].feedforward
    assert (out.auxiliary_loss is None) != layer.facts.auxiliary_loss
    names = set(out.statistics or {})
    assert {name.rsplit(".", 1)[0] for name in names} <= {"encoder.1", "decoder.1"}
    ((out.auxiliary_loss or 0) + out.logits.square().sum()).backward()
    idle = [name for name, part in model.named_parameters() if part.grad is None]
    assert not idle
    model.eval()
    whole = model(source, target, keep=keep).logits
    for row in range(3):
        alone = model(source[row : row + 1, keep[row]], target[row : row + 1]).logits
        assert_close(whole[row : row + 1], alone)


@pytest.mark.parametrize(
    "settings",
    [
        ClassifierConfig(layers=2, pooling="pma", seeds=2, **SIZES),
        PerceiverConfig(latents=6, layers=2, blocks=2, reads="each", **SIZES),
        PerceiverConfig(latents=6, layers=2, classes=3, **SIZES),
        PerceiverARConfig(latents=6, layers=2, **SIZES),
        FunnelConfig(layers=(2, 2), **SIZES),
        FunnelConfig(layers=(2, 2), classes=3, pooling="pma", **SIZES),
        TokenLearnerConfig(layers=2, tokens=4, **SIZES),
    ],
    ids=lambda settings: settings.kind,
)
def test_every_kind_of_model_takes_experts_and_hands_on_their_losses(settings):
    """As many statistics as there are layers of experts that run, each with a name of its own."""
    settings = dataclasses.replace(settings, feedforward="switch(experts=3, jitter=0.0)")
    torch.manual_seed(0)
    model = build(settings).train()
    calls = []
    for part in model.modules():
        if getattr(getattr(part, "facts", None), "name", None) == "switch":
            run = part.forward_packed
            part.forward_packed = lambda x, rows, run=run: calls.append(run(x, rows)) or calls[-1]
    out = model(ids(), keep=holes())
    assert len(calls) > 1
    assert_close(out.auxiliary_loss, sum(call.auxiliary_loss for call in calls))
    assert len([name for name in out.statistics if name.endswith(".balance")]) == len(calls)


def test_a_feedback_model_takes_what_works_on_tokens_alone():
    build(FeedbackConfig(layers=2, feedforward=["dense", "scaling(block=8)"], **SIZES))
    with pytest.raises(ValueError, match="cannot take feedforward 'switch'"):
        build(FeedbackConfig(layers=2, feedforward=["dense", "switch"], **SIZES))


def test_experts_that_choose_are_not_for_decoders():
    with pytest.raises(ValueError, match="later ones too"):
        Transformer(ModelConfig(layers=2, feedforward="choice", **SIZES))
    Transformer(ModelConfig(layers=2, feedforward="choice", decoder_feedforward="dense", **SIZES))


@pytest.mark.parametrize("spec", CAUSAL)
def test_a_packed_model_answers_the_same(spec):
    """Linear layers laid out for a CPU, also where a layer reads their weights itself."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(layers=2, feedforward=spec, **SIZES)).eval()
    source, target = ids(), ids(T=9, seed=2)
    with torch.inference_mode():
        whole = model(source, target, keep=holes()).logits
        assert_close(pack_linears(model)(source, target, keep=holes()).logits, whole, rtol=1e-4, atol=1e-5)


def test_experts_are_made_small_as_matrices_are():
    layer = regard.feedforward("switch(experts=4)", width=32, inner=64)
    small = compact(layer.state_dict())
    assert small["networks.inner"].dtype == torch.int8
    back = expand(small)
    for name, part in layer.state_dict().items():
        assert_close(back[name], part, rtol=0, atol=part.abs().max().item() / 127)


# training


def settings_of(tmp_path, name="run", **training):
    made = config(tmp_path, name, **training)
    feeds = ["switch(experts=3)", "productkey(keys=4, heads=2, choices=2, key_width=4)", "gshard(experts=3)"]
    return dataclasses.replace(made, model=dataclasses.replace(made.model, layers=3, feedforward=feeds))


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """Router noise, second choices, running means and the sums that the log is made of; averaged at the end."""
    options = {"log_every": 4, "average": 2}
    whole, other = settings_of(tmp_path, "whole", **options), settings_of(tmp_path, "other", **options)
    finish(whole)

    def dies():
        update, calls = loop.Loop._update, itertools.count()

        def wrapped(self):
            update(self)
            if next(calls) == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        loop.Loop._update = wrapped
        finish(other)

    assert in_child(dies) == -signal.SIGKILL
    resume(other.out, Display(quiet=True))
    assert_same(whole.out, other.out)
    means = [checkpoint.read(Run(folder).checkpoints / "average").tensors["model"] for folder in (whole.out, other.out)]
    assert any("feedforward.norm.mean" in name for name in means[0])
    assert_close(means[0], means[1], rtol=0, atol=0)


def test_the_log_tells_of_the_experts(tmp_path, capsys):
    """Means over the batches of a line, of accumulated ones too, as a hand-made sum of them is."""
    settings = settings_of(tmp_path, steps=4, log_every=2, accumulate=2, evaluate_every=4)
    told = []
    backward = loop.Loop._backward

    def noted(self, batch, weights):
        told.append(backward(self, batch, weights))
        return dict(told[-1])

    loop.Loop._backward = noted
    try:
        finish(settings)
    finally:
        loop.Loop._backward = backward
    steps = [record for record in Run(settings.out).records() if record["event"] == "step"]
    assert len(steps) == 2
    assert len(told) == 8
    for record, batches in zip(steps, (told[:4], told[4:]), strict=True):
        assert set(record["layers"]) == {f"{side}.{index}" for side in ("encoder", "decoder") for index in range(3)}
        found = record["layers"]["encoder.0"]
        assert set(found) == {"balance", "load", "dropped"}
        for name, value in found.items():
            mean = sum(batch[f"encoder.0.{name}"].double() for batch in batches) / 4
            assert_close(torch.tensor(value, dtype=torch.float64), mean, rtol=0, atol=6e-5)
        assert_close(sum(found["load"]), 1.0, rtol=0, atol=1e-3)
        assert set(record["layers"]["decoder.1"]) == {"used"}
    json.dumps(steps)


def test_an_old_compiler_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(ValueError, match=r"PyTorch 2\.11\.0"):
        finish(settings_of(tmp_path, compile=True))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
    compiling.check_compiles(regard.feedforward("switch(experts=3)", width=8, inner=8))


def test_the_progress_line_sums_it_up():
    layers = {
        "encoder.0": {"load": [0.5, 0.25, 0.25, 0.0], "dropped": 0.1},
        "decoder.0": {"load": [0.25] * 4, "dropped": 0.0},
    }
    assert describe_experts(layers) == "  dropped 5.0%  busiest 2.0x"
    assert describe_experts({}) == ""


def test_padded_tokens_count_in_no_loss_of_moe(monkeypatch):
    """Both losses of a padded call are those of its real tokens alone."""
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    layer = regard.feedforward("moe(experts=5, choices=2)", width=8, inner=8).double().train()
    torch.nn.init.normal_(layer.router)
    torch.nn.init.normal_(layer.spread)
    x, real = torch.randn(12, 8, dtype=torch.float64), torch.arange(12) % 3 > 0
    padded, alone = (
        {name: value for name, _, value in layer.route(layer.logits(rows)[0], keep).losses}
        for rows, keep in ((x, real), (x[real], None))
    )
    assert set(padded) == {"importance", "balance"}
    assert_close(padded, alone)
