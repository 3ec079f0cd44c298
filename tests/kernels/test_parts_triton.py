"""The kernels of runs.py in Triton, interpreted on the CPU: against the formula in float64, at most twice as far from
it as PyTorch in the same dtype, and under the mechanisms that use them. tests/conformance/test_gpu.py has them on a
GPU."""

import copy
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from compiled_kernels import check_compiles
from interpreted import interpreter_as_a_gpu  # noqa: F401  (a fixture)
from torch import Tensor
from torch.testing import assert_close
from triton.runtime import interpreter

import regard
from regard.kernels import choose, parts_triton, portable, runs
from regard.kernels.parts_triton import Tile
from regard.kernels.runs import ALL, Bias, Bound, Far, Pass, Where
from regard.testing.cases import LONG, WIDTH, Case, extended, holes

EXHAUSTIVE = pytest.mark.exhaustive
WINDOW = [Pass(Bound(plus=-20), Bound(plus=1))]


class Pattern(NamedTuple):
    """Passes, and what they mean: which keys a query sees, from the positions of both; far tensors come first."""

    passes: list[Pass]
    sees: Callable[[Tensor, Tensor], Tensor]
    first: int = 0
    head: int = 0
    far: int = 0
    sees_far: Callable[[Tensor, Tensor], Tensor] | None = None
    unbounded: int = 0


def blocks(i: Tensor, j: Tensor) -> Tensor:
    return (i // 10 == j // 10) | (j % 10 >= 7)


PATTERNS = {
    "window": Pattern(WINDOW, lambda i, j: (j <= i) & (j >= i - 20)),
    "two-sided": Pattern([Pass(Bound(plus=-9), Bound(plus=10))], lambda i, j: abs(i - j) <= 9),
    "all": Pattern([Pass()], lambda i, j: (i >= 0) & (j >= 0)),
    "globals": Pattern(
        [Pass(Bound(plus=-9), Bound(plus=10), Far(5))], lambda i, j: (abs(i - j) <= 9) | (j < 5), first=5, head=5
    ),
    "unbounded": Pattern(
        [Pass(Bound(plus=-9), Bound(plus=10), Far(5))],
        lambda i, j: (abs(i - j) <= 9) | (j < 5) | (i < 5),
        first=5,
        unbounded=5,
    ),
    "unbounded and strided": Pattern(
        [Pass(Bound(plus=-9), Bound()), Pass(Bound(), Bound(plus=1))],
        lambda i, j: ((j <= i) & (j >= i - 9)) | (i < 37),
        unbounded=37,
    ),
    "earlier globals": Pattern(
        [Pass(Bound(), Bound(plus=1), Far(5, Bound()))], lambda i, j: (i == j) | ((j < 5) & (j < i))
    ),
    "summaries": Pattern(
        [Pass(Bound(plus=-19), Bound(plus=1), Far(20, Bound(0, 10, 2, 0)))],
        lambda i, j: (j <= i) & (j > i - 20),
        far=20,
        sees_far=lambda i, j: j < i // 10 * 2,
    ),
    "last summaries": Pattern(
        [Pass(Bound(0, 10, 10, -10), Bound(plus=1), Far(20, Bound(-10, 10, 2, 0), span=5, apart=8))],
        lambda i, j: (j <= i) & (j >= i // 10 * 10 - 10),
        far=20,
        sees_far=lambda i, j: (j < (i - 10) // 10 * 2) & (j >= (i - 10) // 10 * 2 - 5),
    ),
    "classes": Pattern([Pass(high=Bound(plus=1), fold=7)], lambda i, j: ((i - j) % 7 == 0) & (j <= i)),
    "dilated": Pattern(
        [Pass(Bound(plus=-3), Bound(plus=4), Far(2), fold=3)],
        lambda i, j: ((abs(i - j) <= 9) & ((i - j) % 3 == 0)) | (j < 2),
        first=2,
        head=2,
    ),
    "strided": Pattern(
        [Pass(Bound(plus=-6), Bound()), Pass(high=Bound(plus=1), fold=7)],
        lambda i, j: (((i - j) % 7 == 0) | (j >= i - 7)) & (j <= i),
    ),
    "strided both ways": Pattern(
        [Pass(Bound(plus=-6), Bound(plus=7), hole=True), Pass(fold=7)],
        lambda i, j: ((i - j) % 7 == 0) | (abs(j - i) <= 7),
    ),
    # far keys for the longest rows tested; of shorter ones fewer exist
    "fixed": Pattern(
        [Pass(Bound(0, 10, 10, 0), Bound(plus=1), Far(300, Bound(0, 10, 3, 0), 7, 3, 10))],
        lambda i, j: blocks(i, j) & (j <= i),
    ),
    "fixed in eights": Pattern(
        [Pass(Bound(0, 16, 16, 0), Bound(plus=1), Far(600, Bound(0, 16, 8, 0), 8, 8, 16))],
        lambda i, j: ((i // 16 == j // 16) | (j % 16 >= 8)) & (j <= i),
    ),
    "fixed both ways": Pattern([Pass(Bound(0, 10, 10, 0), Bound(0, 10, 10, 7), Far(300, ALL, 7, 3, 10))], blocks),
    "pooled": Pattern(
        [Pass(Bound(-9, 4, 1, 0), Bound(-2, 4, 1, 1))], lambda i, j: (4 * j + 2 <= i) & (4 * j >= i - 12)
    ),
}


ON_GPU = os.environ.get("REGARD_GPU") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=not ON_GPU)
def small_tiles(monkeypatch) -> None:
    """Tiles of a few rows, so that short sequences have several."""
    monkeypatch.setattr(parts_triton, "tile", lambda *_: Tile(32, 16))


@pytest.fixture(autouse=not ON_GPU)
def true_hints(monkeypatch) -> None:
    """A GPU loads several numbers at once where a kernel says that a place is a multiple of their count. The
    interpreter ignores that: here it is checked."""
    plain = interpreter.TensorHandle.set_attr

    def set_attr(self, name, values):
        if name == "tt.divisibility":
            assert (self.data % np.asarray(values) == 0).all(), f"{self.data} is no multiple of {values}"
        plain(self, name, values)

    monkeypatch.setattr(interpreter.TensorHandle, "set_attr", set_attr)


def drawn(*sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """[B, H, n, D] as heads split from projections are laid out, with NaN behind each row of a head."""

    def one(B: int, H: int, n: int, D: int) -> Tensor:
        wide = torch.full((B, n, H, D + 16), torch.nan)
        wide[..., :D] = torch.randn(B, n, H, D)
        return wide.to(DEVICE, dtype)[..., :D].transpose(1, 2).requires_grad_()

    return [one(*size) for size in sizes]


def softmax_over(q: Tensor, k: Tensor, seen: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    logits = q @ k.mT * q.shape[3] ** -0.5 + bias
    weights = torch.softmax(logits.masked_fill(~seen, torch.finfo(logits.dtype).min), -1)
    return torch.where(seen, weights, 0)


def compare(
    pattern: Pattern,
    T: int,
    S: int | None = None,
    *,
    where: Where | None = None,
    rows: Callable[[Tensor, Tensor], Tensor] | None = None,
    bias: Bias | None = None,
    biases: Callable[[Tensor, Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    B: int = 1,
    H: int = 2,
    G: int = 2,
    D: int = 16,
    seed: int = 0,
) -> None:
    """Output and gradients of the kernels: near float64, at most twice as far as PyTorch in the same dtype, or as
    rounding takes them."""
    torch.manual_seed(T + 10_000 * seed)
    S = S or T
    leaves = drawn((B, H, T, D), (B, G, S, D), (B, G, S, D), (B, H, min(pattern.head, T), D), dtype=dtype)
    leaves += drawn((B, G, pattern.far, D), (B, G, pattern.far, D), dtype=dtype) if pattern.far else []
    i, j = torch.arange(T, device=DEVICE)[:, None], torch.arange(S, device=DEVICE)
    if where is not None:
        q0, k0 = (x[:, None, None, None] if isinstance(x, Tensor) else x for x in where[:2])
        i, j = i + q0, j + k0
    seen = pattern.sees(i, j).expand(B, H, T, S)
    seen = seen & rows(i, j) if rows else seen
    if pattern.far:
        seen = torch.cat([pattern.sees_far(i, torch.arange(pattern.far, device=DEVICE)).expand(B, H, -1, -1), seen], 3)

    def joined(k, v, far):
        """The keys and values of every head, far ones first."""
        pairs = zip(far, (k, v), strict=True) if far else ((k,), (v,))
        return [torch.cat(pair, 2).repeat_interleave(H // G, 1) for pair in pairs]

    def weights(q, k):
        return softmax_over(q, k, seen, biases(i, j).to(q.dtype) if biases else 0.0)

    def plain(q, k, v, head, *far):
        k, v = joined(k, v, far)
        return torch.cat([head, (weights(q, k) @ v)[:, :, head.shape[2] :]], 2)

    def ours(q, k, v, head, *far):
        far = dict(zip(("far_k", "far_v"), far, strict=False))
        place = (where or Where())._replace(first=pattern.first)
        first = {"unbounded": pattern.unbounded} if pattern.unbounded else {"head": head}
        return runs.attend(q, k, v, pattern.passes, where=place, bias=bias, **first, **far)

    def rounding():
        """How far rounding takes output and gradients, by the sizes of what they sum up: also where that cancels. Of
        one key alone the gradient of the logit is the difference of two equal sums. Sums are in float32; the output,
        from which one of these two comes, is stored in the dtype."""
        given = [x.detach().double() for x in leaves]
        k, v = joined(*given[1:3], given[4:])
        share, sums = weights(given[0], k), torch.finfo(torch.float32).eps
        sizes = [x.abs().requires_grad_() for x in given]
        q, k_size, v_size, head, *far = sizes
        k_size, v_size = joined(k_size, v_size, far)
        logits, slope = q @ k_size.mT * D**-0.5, grad.double().abs()
        # a weight is off by as much of itself as its logit is off
        o = torch.cat([head, (share * (1 + logits.detach()) @ v_size)[:, :, head.shape[2] :]], 2) * sums
        seeing = slope.index_fill(2, torch.arange(head.shape[2], device=DEVICE), 0)
        of_share = seeing @ v_size.detach().mT
        stored = torch.finfo(dtype).eps * (seeing * (share @ v)).norm(dim=3, keepdim=True)
        of_logits = share * (sums * (of_share + (share * of_share).sum(3, keepdim=True)) + stored)
        ((o * slope).sum() + (of_logits * logits).sum()).backward()
        return [o.detach(), *(x.grad for x in sizes)]

    def results(function, dtype):
        given = [x.detach().to(dtype).requires_grad_() for x in leaves]
        o = function(*given)
        o.backward(grad.to(dtype))
        return [
            o.detach().double(),
            *(torch.zeros_like(x).double() if x.grad is None else x.grad.double() for x in given),
        ]

    grad = torch.randn(B, H, T, D).to(DEVICE, dtype)
    exact, rounded, got = results(plain, torch.float64), results(plain, dtype), results(ours, dtype)
    names = ["o", "q", "k", "v", "head", "far_k", "far_v"]
    for name, a, b, c, size in zip(names, got, rounded, exact, rounding(), strict=False):
        assert a.isfinite().all(), name
        allowed = 2 * (b - c).norm() + size.norm()
        assert (a - c).norm() <= allowed, f"{name}: off by {(a - c).norm():.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_what_cancels_is_close_whatever_the_seed(T, dtype):
    """A query with one key has no gradient: what is computed is rounding, of which some seeds have more."""
    for seed in range(12):
        compare(PATTERNS["window"], T, dtype=dtype, D=64, seed=seed)


@pytest.mark.parametrize("T", [1, 65])
def test_small_mistakes_are_caught(T, monkeypatch):
    """One of the two sums whose difference is the gradient of a logit off by 1e-5 of itself, and products in TF32."""
    plain = parts_triton._compute_key_gradients

    def off(part, inputs, grad, lse, delta, *rest):
        plain(part, inputs, grad, lse, delta * (1 + 1e-5), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(parts_triton, "_compute_key_gradients", off)
        with pytest.raises(AssertionError, match="k: off by"):
            compare(PATTERNS["window"], T, D=64)
    dot = interpreter.InterpreterBuilder.create_dot

    def cut(x):
        return interpreter.TensorHandle((x.data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda s, a, b, *rest: dot(s, cut(a), cut(b), *rest)
    )
    with pytest.raises(AssertionError, match="o: off by"):
        compare(PATTERNS["window"], T, D=64)


@pytest.fixture
def poisoned(monkeypatch) -> None:
    """What is allocated without being filled holds NaN."""

    def filled(make):
        def new(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return new

    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name, poisoned):
    compare(PATTERNS[name], 45, 12 if name == "pooled" else None)


@pytest.mark.parametrize("name", ["fixed", "unbounded", pytest.param("fixed both ways", marks=EXHAUSTIVE)])
def test_far_keys_of_more_rows(name, poisoned):
    """As many as a row of several tiles has: each query beyond the tenth block reads more than 30, and an unbounded one
    reads them in shares."""
    compare(PATTERNS[name], 130)


@pytest.mark.parametrize(
    "name", [n if n in ("window", "strided") else pytest.param(n, marks=EXHAUSTIVE) for n in PATTERNS]
)
def test_queries_in_eights(name, monkeypatch, poisoned):
    """A length that eight divides: kernels of keys begin at a multiple of eight queries."""
    monkeypatch.setattr(parts_triton, "tile", lambda *_: Tile(32, 16))
    compare(PATTERNS[name], 48, 16 if name == "pooled" else None, B=2, H=4)


@pytest.mark.parametrize("T", [136, pytest.param(130, marks=EXHAUSTIVE)])
def test_whole_tiles_of_far_keys(T, monkeypatch, poisoned):
    monkeypatch.setattr(parts_triton, "tile", lambda *_: Tile(32, 16))
    compare(PATTERNS["fixed"], T)
    compare(PATTERNS["fixed in eights"], 70, D=20)
    compare(PATTERNS["summaries"], 100)
    compare(PATTERNS["window"], T, D=20)


def test_flat_grid(monkeypatch, poisoned):
    """For more heads or batch rows than an axis of a grid may have."""
    assert parts_triton._grid(3, 8, 65535) == ((3, 8, 65535), False)
    assert parts_triton._grid(3, 8, 65536) == ((3 * 8 * 65536, 1), True)
    assert parts_triton._grid(3, 65536, 8) == ((3 * 8 * 65536, 1), True)
    launched = []

    def flat(tiles: int, heads: int, batch: int, splits: int = 1) -> tuple[tuple[int, ...], bool]:
        launched.append(splits)
        return (tiles * heads * batch, splits), True

    monkeypatch.setattr(parts_triton, "_grid", flat)
    compare(PATTERNS["strided"], 20, B=2)
    assert set(launched) == {1}


def test_as_many_heads_as_classes(poisoned):
    """With another number a mistaken division would still give each program a head and a class of its own."""
    pattern = Pattern([Pass(high=Bound(plus=1), fold=3)], lambda i, j: ((i - j) % 3 == 0) & (j <= i))
    compare(pattern, 10, H=3, G=3)


def test_a_dilated_window_with_a_bias_is_left_to_pytorch():
    """The kernels count distances within a class: with a dilation of 3 they would be a third of what they are."""
    layer = regard.attention("longformer(window=2, globals=0, dilation=3)", width=64, heads=4, position="alibi")
    with choose.use("triton"), pytest.raises(ValueError, match="with a dilation"):
        layer(torch.randn(1, 40, 64))


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_as_it_is_exported(name, monkeypatch):
    """In PyTorch's operators: at a length of several tiles, with ragged rows and heads of groups."""
    monkeypatch.setattr(runs, "portable_only", lambda: True)
    monkeypatch.setattr(portable, "TILE", 16)
    end = torch.tensor([100, 61], device=DEVICE)
    compare(PATTERNS[name], 100, where=Where(end=end), rows=lambda i, j: j < end[:, None, None, None], B=2, H=4)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 100])
def test_length(T, monkeypatch, poisoned):
    monkeypatch.setattr(parts_triton, "tile", lambda *_: Tile(32, 32))
    compare(PATTERNS["window"], T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["summaries", *(pytest.param(n, marks=EXHAUSTIVE) for n in ("two-sided", "strided"))])
def test_narrow_dtype(name, dtype, poisoned):
    compare(PATTERNS[name], 45, dtype=dtype)


@pytest.mark.parametrize(
    "name", ["globals", "unbounded", *(pytest.param(n, marks=EXHAUSTIVE) for n in ("window", "classes", "fixed"))]
)
def test_heads_of_groups_and_odd_widths(name, poisoned):
    compare(PATTERNS[name], 33, H=4, G=2, D=20)


@pytest.mark.parametrize("name", ["two-sided", "globals", "unbounded", "strided both ways", "fixed both ways", "all"])
def test_ragged_rows(name, poisoned):
    end = torch.tensor([31, 40])
    compare(PATTERNS[name], 40, where=Where(end=end), rows=lambda i, j: j < end[:, None, None, None], B=2)


@pytest.mark.parametrize(
    "name", ["window", "dilated", *(pytest.param(n, marks=EXHAUSTIVE) for n in ("strided", "classes"))]
)
@pytest.mark.parametrize("by_row", [pytest.param(False, marks=EXHAUSTIVE), True])
def test_queries_that_follow_a_past(name, by_row, poisoned):
    pattern = PATTERNS[name]._replace(head=0)
    start = torch.tensor([25, 11]) if by_row else 25
    # of a tail, whose first slots may lie before the row begins
    tail = torch.tensor([7, -3]) if by_row and name == "window" else 0
    end = start + 12 if by_row else torch.tensor([37, 37])
    where = Where(q0=start, k0=tail, end=end)
    compare(pattern, 12, 37, where=where, rows=lambda i, j: (j >= 0) & (j < end[:, None, None, None]), B=2)


def test_documents_of_a_packed_row(poisoned):
    bounds = torch.tensor([[0] * 10 + [10] * 23 + [33] * 12, [0] * 40 + [40] * 5])
    ends = torch.tensor([[10] * 10 + [33] * 23 + [45] * 12, [40] * 40 + [45] * 5])
    compare(
        PATTERNS["two-sided"],
        45,
        where=Where(since=bounds, until=ends),
        rows=lambda i, j: (j >= bounds[:, None, :, None]) & (j < ends[:, None, :, None]),
        B=2,
    )


def test_bias_of_positions():
    slopes, table = torch.tensor([0.5, 0.1]), torch.randn(2, 21)
    compare(PATTERNS["window"], 33, bias=Bias(slopes), biases=lambda i, j: -slopes[:, None, None] * abs(i - j))
    looked_up = lambda i, j: table[:, (j - i + 20).clamp(0, 20)]  # noqa: E731
    compare(PATTERNS["window"], 33, bias=Bias(None, table, 20), biases=looked_up)


def test_few_queries_split_the_keys(poisoned):
    compare(PATTERNS["all"], 3, 200)


def test_no_second_derivative_and_same_numbers_again():
    q, k, v = drawn((1, 2, 33, 16), (1, 2, 33, 16), (1, 2, 33, 16), dtype=torch.float32)
    first, second = (torch.autograd.grad(runs.attend(q, k, v, WINDOW).sum(), (q, k, v)) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(runs.attend(q, k, v, WINDOW).sum(), q, create_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_on_a_gpu(name, poisoned):
    compare(PATTERNS[name], 1000, 250 if name == "pooled" else None, dtype=torch.bfloat16, B=2, H=4, G=2, D=64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 1000, 4097])
def test_length_on_a_gpu(T, dtype, poisoned):
    compare(PATTERNS["window"], T, dtype=dtype, D=64)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [32, 80, 128, 256])
def test_width_on_a_gpu(D, poisoned):
    compare(PATTERNS["globals"], 1000, dtype=torch.bfloat16, H=4, G=2, D=D)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec",
    [
        *("bigbird(block=16)", "etc(globals=16, radius=20)", "xl(segment=64, memory=64)", "xl(segment=50, memory=75)"),
        "compressive(segment=64, memory=64, compressed=48, rate=4)",
        "compressive(segment=40, memory=40, compressed=25, rate=10, loss='none')",
    ],
)
def test_tables_and_lists_on_a_gpu(spec):
    """In float32 as PyTorch gives it in float64 on the CPU."""
    case = Case(spec, "causal" if spec.startswith(("xl", "compressive")) else "self")
    x, weights = torch.randn(2, 500, WIDTH, dtype=torch.float64), torch.randn(2, 500, WIDTH, dtype=torch.float64)
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        layer = case.build(dtype=dtype, heads=2).to(device)
        given = x.to(device, dtype).requires_grad_()
        with choose.record() as answers:
            y = layer(given)
        assert (("parts", "triton") in answers) == (device == "cuda")
        y.backward(weights.to(device, dtype))
        # the pooling of compressive learns from its auxiliary loss alone
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        results.append([z.detach().double().cpu() for z in (y, given.grad, *grads)])
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact, rtol=0, atol=1e-4 * max(1.0, exact.abs().max().item()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec",
    [
        "xl(segment=128, memory=128)",
        "xl(segment=100, memory=30)",
        "compressive(segment=128, memory=128, compressed=96, rate=4)",
        "longshort(window=64, rank=8, chunk=32)",
        "poolingformer(window=32, wide=128)",
        "poolingformer(window=32, wide=128, pooling='mean')",
    ],
)
@pytest.mark.parametrize("T", [1000, 1024])
def test_layer_in_bfloat16_on_a_gpu(spec, T, poisoned):
    """Outputs and gradients at most twice as far from float64 as PyTorch's operators in bfloat16."""
    layer = regard.attention(spec, width=256, heads=4, kv_heads=4 if "long" in spec else 2, role="causal").to(DEVICE)
    x, weights = (torch.randn(2, T, 256, device=DEVICE) for _ in range(2))
    results = []
    for kernels, dtype in (("torch", torch.float64), ("torch", torch.bfloat16), ("triton", torch.bfloat16)):
        own = copy.deepcopy(layer).to(dtype)
        # the same numbers, rounded once
        for parameter in own.parameters():
            parameter.data = parameter.data.bfloat16().to(dtype)
        given = x.bfloat16().to(dtype).requires_grad_()
        with choose.use(kernels):
            y = own(given)
        y.backward(weights.bfloat16().to(dtype))
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in own.parameters())
        results.append([z.detach().double() for z in (y, given.grad, *gradients)])
    for exact, rounded, ours in zip(*results, strict=True):
        assert (ours - exact).norm() <= 2 * (rounded - exact).norm() + 1e-6 * exact.norm()


LAYERS = [
    ("local(window=3)", None),
    ("local(window=8)", "alibi"),
    ("longformer(window=2, globals=5, dilation=3)", None),
    ("longformer(window=3, globals=2)", "alibi"),
    ("globals(tokens=3)", None),
    ("globals(tokens=3)", "alibi"),
    ("strided(stride=3)", None),
    ("sparse(stride=4)", None),
    ("sparse(pattern='fixed', stride=5, summary=3)", None),
    ("image(block=4, memory=3)", None),
    ("poolingformer(window=2, wide=6, kernel=3, stride=2, pooling='mean')", None),
    ("poolingformer(window=3, wide=6, kernel=5, stride=4)", None),
    ("longshort(window=5, rank=3, chunk=4)", None),
    ("longshort(window=4, rank=0)", None),
]
CASES = [Case(spec, role, position) for spec, position in LAYERS for role in ("self", "causal")]
CASES += [
    Case("etc(globals=3, radius=2, distance=2)", "self"),
    Case("etc(globals=4, radius=5, distance=7, segment=6)", "self"),
    Case("etc(globals=40, radius=5, distance=1)", "self"),
    Case("xl(segment=4, memory=6)", "causal"),
    Case("xl(segment=5, memory=3, clamp=4)", "causal"),
    Case("xl(segment=8, memory=0, relative=False)", "causal"),
    Case("xl(segment=8, memory=5)", "causal", "alibi"),
    Case("compressive(segment=4, memory=4, compressed=5, rate=2, loss='none')", "causal"),
    Case("compressive(segment=4, memory=8, compressed=2, rate=4, function='mean', clamp=5)", "causal"),
    Case("compressive(segment=4, memory=4, compressed=5, rate=2, relative=False)", "causal", "alibi"),
]


@pytest.fixture
def interpreted():
    with choose.use("triton"), choose.record() as answers:
        yield
    assert ("parts", "triton") in answers


# the interpreter is slow: of each mechanism one role, and of pieces a few
ONE_ROLE = [case for n, case in enumerate(CASES) if case.position is None and (n % 2 or n >= 2 * len(LAYERS))]
PIECES = [case for case in CASES if case.role == "causal" and not case.spec.startswith("xl")]


def often(cases: list[Case], chosen: list[Case]) -> list:
    """The others in `make test-all` only."""
    return [case if case in chosen else pytest.param(case, marks=EXHAUSTIVE) for case in cases]


@pytest.mark.parametrize("case", often(CASES, ONE_ROLE), ids=str)
def test_layer_with_padding(case, interpreted):
    """Outputs and gradients are those of PyTorch in float64, which the suite holds to the reference."""
    layer, exact = (case.build(dtype=dtype, heads=2, kv_heads=1) for dtype in (torch.float32, torch.float64))
    keep = holes(LONG)[[0, 3]]
    x = torch.where(keep[..., None], torch.randn(2, LONG, WIDTH, dtype=torch.float64), torch.nan)
    weights = torch.randn_like(x)
    y = layer(x.float(), keep=keep)
    y.backward(weights.float())
    with choose.use("torch"):
        wanted = exact(x, keep=keep)
        wanted.backward(weights)
    assert_close(y, wanted.float(), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        # of a parameter that nothing reads there is none
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        assert_close(torch.zeros_like(ours) if ours.grad is None else ours.grad, wanted.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", often(PIECES, [c for c in PIECES if c.spec[:5] in ("globa", "longs")]), ids=str)
def test_layer_in_pieces(case, interpreted):
    layer, x, keep = case.build(dtype=torch.float32, heads=2), torch.randn(2, LONG, WIDTH), holes(LONG)[[0, 3]]
    with torch.no_grad():
        with choose.use("torch"):
            wanted = extended(layer, x, [6, 14, 13], keep)
        assert_close(extended(layer, x, [6, 14, 13], keep), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("bigbird(block=16, random=2)", marks=EXHAUSTIVE),
        "bigbird(block=16, window=1, globals=2, random=1)",
    ],
)
def test_blocks_from_a_list(spec, interpreted):
    """Blocks of at least 16 tokens: rows of several blocks, the last one not full."""
    case = Case(spec, "self")
    layer, exact = (case.build(dtype=dtype, heads=2, kv_heads=1) for dtype in (torch.float32, torch.float64))
    keep = torch.arange(119) < torch.tensor([107])[:, None]
    x = torch.randn(1, 119, WIDTH, dtype=torch.float64)
    weights = torch.randn_like(x)
    y = layer(x.float(), keep=keep)
    y.backward(weights.float())
    with choose.use("torch"):
        wanted = exact(x, keep=keep)
        wanted.backward(weights)
    assert_close(y, wanted.float(), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_kernels_compile(which, tmp_path):
    check_compiles(tmp_path, "parts_compile.py", which)


@pytest.mark.parametrize("spec", ["longformer(window=3, globals=2)", pytest.param("local(window=3)", marks=EXHAUSTIVE)])
def test_compilers_see_one_graph(spec, interpreted):
    layer, x = Case(spec, "causal").build(dtype=torch.float32, heads=2), torch.randn(1, 17, WIDTH)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        given = x.clone().requires_grad_()
        y = run(given)
        y.square().sum().backward()
        results.append((y.detach(), given.grad))
    assert_close(*results)


def test_autocast(interpreted):
    layer, x = Case("local(window=3)", "causal").build(dtype=torch.float32, heads=2), torch.randn(1, 17, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_an_explicit_choice_does_not_fall_back():
    layer, x = Case("bigbird(block=3)", "self").build(dtype=torch.float32), torch.randn(1, 17, WIDTH)
    with choose.use("triton"), pytest.raises(ValueError, match="blocks of 16, 32, 64"):
        layer(x)
