"""The scan in Triton, interpreted on the CPU: against the recurrence in float64, at most twice as far from it as
PyTorch in the same dtype, and under the mechanisms that use it."""

import pytest
import scans
import torch
from compiled_kernels import check_compiles
from interpreted import interpreter_as_a_gpu  # noqa: F401  (a fixture)
from torch import Tensor
from torch.testing import assert_close

from regard.kernels import (
    choose,
    random_features,
    random_features_triton,
    scan,
    scan_triton,
    scan_triton_cut,
    sums_triton,
)
from regard.kernels.scan_triton_cut import Tuning
from regard.testing.cases import LONG, WIDTH, Case, extended, holes, inputs, reference


@pytest.fixture(autouse=True)
def poisoned(monkeypatch) -> None:
    """What is allocated and not written is NaN."""
    monkeypatch.setattr(scan_triton_cut, "POISON", True)


def in_triton(q, k, v, S=None, z=None, **rest) -> tuple[Tensor, ...]:
    o, den, state = scan_triton.scan(q, k, v, state=None if S is None else (S, z), **rest)
    return o, den, *state


def in_torch(q, k, v, S=None, z=None, decay=None, first=None, lengths=None, map="none", normalise=True, floor=0.0):
    at, times = torch.arange(q.shape[2]), q.shape[1] // k.shape[1]
    real = None if lengths is None else at < lengths[:, None]
    q, k = scan.features(q, map), scan.features(k, map)
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    state, starts = None if S is None else (S, z), None if first is None else first == at
    numerator, denominator, state = scan._scan(q, k, v, state, decay, starts, real)
    o = scan.ratio(numerator, denominator, floor).to(v.dtype) if normalise else numerator
    if real is not None:
        o, denominator = torch.where(real[:, None, :, None], o, 0), torch.where(real[:, None], denominator, 0)
    return o, denominator, *state


def results(function, given, dtype, options, device="cpu") -> dict[str, Tensor]:
    """Outputs and the gradients of all that has one, by name."""
    wide = torch.promote_types(dtype, torch.float32)
    given = {
        name: x.to(device, dtype if name in "qkv" else wide).requires_grad_() if x.is_floating_point() else x.to(device)
        for name, x in given.items()
    }
    o, den, S, z = function(**given, **options)
    outs = {"o": o, "S at the end": S, "z at the end": z}
    if not options.get("normalise", True):
        outs["den"] = den
    draw = torch.Generator().manual_seed(5)
    loss = sum(
        (x.double().cpu() * torch.randn(x.shape, generator=draw, dtype=torch.float64)).sum() for x in outs.values()
    )
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    return outs | dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def compare(dtype: torch.dtype = torch.float32, options=None, *, plain: bool = True, device="cpu", **sizes) -> None:
    options = options or {}
    given = scans.inputs(**sizes)
    # as the dtype has them: its rounding of what is given is nobody's error
    for name, x in given.items():
        if x.is_floating_point():
            given[name] = x.to(dtype if name in "qkv" else torch.float32).double()
    exact, got = (
        results(scans.recurrence, given, torch.float64, options),
        results(in_triton, given, dtype, options, device),
    )
    rounded = results(in_torch, given, dtype, options) if plain else {}
    for name, wanted in exact.items():
        off = (got[name].double().cpu() - wanted).norm()
        if plain:
            # a state of float32 from narrow inputs has the digits of two narrow parts
            least = (2**-16 if "end" in name and dtype == torch.bfloat16 else 1e-6) * wanted.norm()
            allowed = 2 * (rounded[name].double() - wanted).norm() + least
            # the gradient of a single query is zero, of parts that cancel
            allowed += torch.finfo(dtype).eps * exact["o"].norm() if name == "q" and sizes["T"] == 1 else 0
        else:
            allowed = 5e-6 * wanted.norm()
        assert off <= allowed, f"{name}: off by {off:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("T", [1, 63, 64, 65, 100])
def test_length(T):
    compare(options={"map": "elu"}, T=T, B=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", [None, "scalar"])
def test_narrow_dtype(dtype, decay):
    compare(dtype, {"map": "elu"}, T=65, B=1, K=64, V=64, decay=decay, state=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 1000, 4097])
def test_length_on_a_gpu(T, dtype):
    compare(dtype, {"map": "elu"}, T=T, B=1, K=64, V=64, device="cuda")
    compare(dtype, {"map": "elu"}, T=T, K=40, V=72, decay="scalar", state=True, reset=True, ragged=True, device="cuda")


@pytest.mark.parametrize("options", [{"map": "relu"}, {"map": "exp"}, {"normalise": False}, {"floor": 0.5}], ids=str)
def test_what_is_done_to_features_and_sums(options):
    compare(options=options, T=40, B=1, K=5, V=7, positive=True, state=True)


def test_segments(monkeypatch):
    monkeypatch.setattr(scan_triton_cut, "SEGMENTS", 3)
    compare(options={"map": "elu"}, T=70, B=1)
    compare(options={"map": "elu"}, T=70, H=1, G=1, decay="scalar", state=True, reset=True, ragged=True)
    # more than the four that are linked at a time
    monkeypatch.setattr(scan_triton_cut, "SEGMENTS", 6)
    compare(options={"map": "elu"}, T=190, B=1, H=1, G=1, state=True)


def test_gradients_of_early_decays(monkeypatch):
    """What is rounded at the end, where the last state has a gradient, does not reach the gradients of early decays,
    which are far smaller."""
    monkeypatch.setattr(scan_triton_cut, "SEGMENTS", 3)
    given = scans.inputs(T=200, B=1, H=1, G=1, K=32, V=32, decay="scalar", positive=True)
    given = {name: x.float().double() for name, x in given.items()}
    options = {"floor": 0.5}
    exact, plain, ours = (
        results(function, given, dtype, options)["decay"][..., :96].double()
        for function, dtype in (
            (scans.recurrence, torch.float64),
            (in_torch, torch.float32),
            (in_triton, torch.float32),
        )
    )
    assert (ours - exact).norm() <= 2 * (plain - exact).norm() + 1e-6 * exact.norm()


def test_documents_ragged_rows_groups():
    compare(options={"map": "elu"}, T=50, G=1, K=5, V=7, decay="scalar", state=True, reset=True, ragged=True)
    compare(options={"map": "elu"}, T=40, H=1, G=1, reset=True, ragged=True)


@pytest.mark.parametrize("segments", [1, 2])
def test_decay_of_each_feature(monkeypatch, segments):
    monkeypatch.setattr(scan_triton_cut, "SEGMENTS", segments)
    sizes = {
        "T": 37,
        "H": segments,
        "G": 1,
        "K": 10,
        "V": 5,
        "decay": "vector",
        "state": True,
        "reset": True,
        "ragged": True,
    }
    compare(options={"map": "elu"}, plain=False, **sizes)
    compare(options={"each": True}, plain=False, positive=True, **sizes)


def test_wide_states_are_cut(monkeypatch):
    monkeypatch.setattr(scan_triton_cut, "HELD", 512)
    compare(options={"map": "elu"}, T=40, B=1, K=16, V=40, decay="scalar", state=True)
    compare(options={"each": True}, plain=False, T=20, B=1, V=40, positive=True, decay="vector", state=True)
    both_ways(torch.float32, T=20, S=30, K=16, V=40)


@pytest.mark.parametrize("options", [{}, {"normalise": False}, {"floor": 0.5}], ids=str)
def test_wide_features_are_cut(monkeypatch, options):
    """Numerators and denominators of parts of K are added up."""
    monkeypatch.setattr(scan_triton_cut, "FEATURES", 16)
    monkeypatch.setattr(scan_triton_cut, "HELD", 512)
    sizes = {"T": 18, "B": 1, "H": 1, "G": 1, "K": 20, "V": 20, "decay": "scalar", "state": True}
    compare(options={"map": "elu"} | options, **sizes)
    if not options:
        compare(options={"each": True}, plain=False, positive=True, **sizes | {"decay": "vector"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("spread", "features", "segments"),
    [
        (0.0, 16, 2),
        pytest.param(1.0, 128, 2, marks=pytest.mark.exhaustive),
        pytest.param(1.0, 16, 1, marks=pytest.mark.exhaustive),
        pytest.param(1e3, 128, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_softmax_of_each_feature(monkeypatch, dtype, spread, features, segments):
    """Running maxima in units of a chunk where no head grows too much (1.0), token by token (1e3), and some of both."""
    monkeypatch.setattr(scan_triton_cut, "SEGMENTS", segments)
    monkeypatch.setattr(scan_triton_cut, "FEATURES", features)
    softmax_of_each_feature(dtype, spread, T=70, K=20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [1.0, 1e3, 0.0])
def test_softmax_of_each_feature_on_a_gpu(dtype, spread):
    for T in (63, 1000):
        softmax_of_each_feature(dtype, spread, T=T, K=64, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_256_features_on_a_gpu(dtype):
    compare(dtype, {"floor": 0.5}, T=1000, K=256, V=64, decay="scalar", positive=True, device="cuda")


def softmax_of_each_feature(dtype: torch.dtype, spread: float, *, T: int, K: int, device: str = "cpu") -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, T, width, generator=draw).double() for width in (K, K, 12, 12))
    k = k * (spread or torch.tensor([1.0, 1e3])[None, :, None, None])
    q, (k, v, g) = q.softmax(-1).float(), (x.to(dtype) for x in (k, v, g))
    state = [torch.randn(1, 2, K, *width, generator=draw).abs() for width in ((12,), (), ())]
    real = torch.arange(T)[None] < T - 3
    q, k, v, g, real, *state = (x.to(device) for x in (q, k, v, g, real, *state))
    safe = scan_triton._maxima(k, state[2], real.sum(1).int())[1]
    assert_close(safe.cpu(), torch.tensor({1.0: [1, 1], 1e3: [0, 0], 0.0: [1, 0]}[spread]).expand(1, 2).int())

    def run(precision: torch.dtype, choice: choose.Choice) -> list[Tensor]:
        wide = torch.promote_types(precision, torch.float32)
        leaves = [q.to(wide), k.to(precision), v.to(precision), *(x.to(wide) for x in state[:2])]
        leaves = [x.requires_grad_() for x in leaves]
        with choose.use(choice), choose.record() as answers:
            o, (S, z, top) = scan.feature_scan(*leaves[:3], state=(*leaves[3:], state[2].to(wide)), real=real)
        assert answers == [("scan", choice)]
        o = torch.where(real[:, None, :, None], o, 0)
        loss = (o * g.to(o.dtype)).sum() + (S * leaves[3].detach()).sum() + (z * leaves[4].detach()).sum()
        return [o, S, z, top, *torch.autograd.grad(loss, leaves)]

    exact, plain, ours = run(torch.float64, "torch"), run(dtype, "torch"), run(dtype, "triton")
    for wanted, rounded, got in zip(exact, plain, ours, strict=True):
        least = 2**-7 if dtype == torch.bfloat16 else 1e-5
        assert (got - wanted).norm() <= 2 * (rounded - wanted).norm() + least * wanted.norm()


def both_ways(
    dtype: torch.dtype, *, T: int, S: int, K: int, V: int, G: int = 2, floor: float = 0.0, device: str = "cpu"
) -> None:
    """Sums over all keys and their reading, against the same in float64 and in PyTorch."""
    draw = torch.Generator().manual_seed(S)
    given = [torch.randn(2, H, n, W, generator=draw).to(dtype) for H, n, W in ((2, T, K), (G, S, K), (G, S, V))]
    given = [x.to(device) for x in given]
    lengths = torch.tensor([S, S // 2], device=device).int()
    grad = torch.randn(2, 2, T, V, generator=draw).to(device, dtype)

    def plain(q, k, v):
        q, k = (scan.features(x, "elu") for x in (q, k))
        k = torch.where((torch.arange(S, device=device) < lengths[:, None])[:, None, :, None], k, 0)
        sums = k.mT @ v.to(k.dtype), k.sum(2)
        sums = [x.repeat_interleave(2 // G, 1) for x in sums]
        return scan.ratio(q @ sums[0], (q * sums[1][:, :, None]).sum(-1), floor).to(v.dtype)

    def ours(q, k, v):
        sums = sums_triton.absorb(k, v, lengths=lengths, map="elu")
        return sums_triton.read(q, *sums, dtype=dtype, map="elu", floor=floor)[0]

    found = []
    for function, precision in ((plain, torch.float64), (plain, dtype), (ours, dtype)):
        leaves = [x.to(precision).requires_grad_() for x in given]
        o = function(*leaves)
        found.append([o, *torch.autograd.grad(o, leaves, grad.to(precision))])
    for exact, rounded, got in zip(*found, strict=True):
        allowed = 2 * (rounded.double() - exact).norm() + 1e-6 * exact.norm()
        assert (got.double() - exact).norm() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_ways(monkeypatch, dtype):
    both_ways(dtype, T=33, S=70, K=20, V=12)
    monkeypatch.setattr(scan_triton_cut, "SEGMENTS", 2)
    both_ways(dtype, T=1, S=65, K=16, V=16, G=1, floor=30.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("K", [64, 256])
def test_both_ways_on_a_gpu(dtype, K):
    both_ways(dtype, T=1000, S=4097, K=K, V=64, device="cuda")
    both_ways(dtype, T=65, S=1000, K=K, V=72, G=1, floor=30.0, device="cuda")


def test_segment_count():
    """No round of programs is nearly empty."""
    assert scan_triton_cut.segment_count(16, 264) == 16
    assert scan_triton_cut.segment_count(64, 264) == 4
    assert scan_triton_cut.segment_count(256, 264) == 1
    assert scan_triton_cut.segment_count(5000, 264) == 1


def test_tiles_of_other_sizes(monkeypatch):
    """Kernels of one call may walk in chunks of different size."""
    sizes = {"forward": 64, "queries": 32, "keys": 32, "sums": 64}
    monkeypatch.setattr(scan_triton_cut, "tuned", lambda kernel, *_: Tuning(sizes[kernel], 4, 1))
    monkeypatch.setattr(scan_triton_cut, "SEGMENTS", 2)
    compare(options={"map": "elu"}, T=100, B=1, state=True)


def test_what_compilers_are_told():
    given = scans.inputs(T=5, G=1, decay="scalar", state=True, reset=True, ragged=True)
    q, k, v, decay, S, z = (given[name].float() for name in ("q", "k", "v", "decay", "S", "z"))
    checks, flags = ("test_schema", "test_faketensor"), (1, 1, 0.0)
    forward = (q, k, v, decay, None, None, S, z, given["first"], given["lengths"], *flags, True)
    torch.library.opcheck(scan_triton._forward_operator, forward, test_utils=checks)
    o, rest, den, S_end, z_end, *starts = scan_triton._forward(*forward)
    backward = (*forward[:10], o, rest, den, *starts, S_end, z_end, torch.randn_like(o), None, S_end, z_end)
    backward = (*backward, *flags, True, True)
    torch.library.opcheck(scan_triton._backward_operator, backward, test_utils=checks)
    torch.library.opcheck(sums_triton._absorb_operator, (k, v, given["lengths"], 1), test_utils=checks)
    torch.library.opcheck(sums_triton._absorb_backward_operator, (k, v, None, S[:, :1], z[:, :1], 1), test_utils=checks)
    torch.library.opcheck(sums_triton._read_operator, (q, S, z, torch.float32, *flags), test_utils=checks)
    given = (q, S, z, den, torch.randn_like(o), None, torch.float32, *flags)
    torch.library.opcheck(sums_triton._read_backward_operator, given, test_utils=checks)


def test_no_second_derivative_and_same_numbers_again():
    q, k, v = (x.float().requires_grad_() for x in scans.inputs(T=20, B=1).values())

    def run():
        return scan_triton.scan(q, k, v, map="elu", final=False)[0]

    first, second = (torch.autograd.grad(run().sum(), (q, k, v)) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(run().sum(), q, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_features(dtype):
    """Of queries, relative to each row, and of keys, relative to a running maximum; padding may lie above it."""
    draw = torch.Generator().manual_seed(0)
    x, W, g = (torch.randn(*size, generator=draw) for size in ((2, 2, 37, 10), (24, 10), (2, 2, 37, 24)))
    x = x.to(dtype)
    real = torch.arange(37) < torch.tensor([37, 20])[:, None]
    x = torch.where(real[:, None, :, None], x, 5)
    top = torch.tensor([[0.0, 3.0], [-1.0, -torch.inf]])

    def run(precision: torch.dtype, choice: choose.Choice) -> list[Tensor]:
        leaf, weights = x.to(precision).requires_grad_(), W.to(torch.promote_types(precision, torch.float32))
        with choose.use(choice), choose.record() as answers:
            q = random_features.exp_features(leaf, weights, scale=0.5)
            k, decay, last = random_features.stabilised_features(
                leaf, weights, scale=0.5, top=top.to(weights), real=real
            )
            both_ways = random_features.exp_features_of_all(leaf, weights, scale=0.5, real=real)
        assert answers == [("features", choice)] * 3
        k = torch.where(real[:, None, :, None], k, 0)
        grads = [torch.autograd.grad((y * g.to(y)).sum(), leaf)[0] for y in (q, k, both_ways)]
        return [q, k, decay, last, both_ways, *grads]

    exact, plain, ours = run(torch.float64, "torch"), run(dtype, "torch"), run(dtype, "triton")
    least = 2**-7 if dtype == torch.bfloat16 else 1e-6
    for wanted, rounded, got in zip(exact, plain, ours, strict=True):
        assert (got.double() - wanted).norm() <= 2 * (rounded.double() - wanted).norm() + least * wanted.norm()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trigonometric_features(dtype, gated, monkeypatch):
    """Of several programs, whose gradients of W are added."""
    monkeypatch.setattr(random_features_triton, "blocks_each", lambda *_: 1)
    trigonometric(dtype, gated, T=70)


def trigonometric(dtype: torch.dtype, gated: bool, *, T: int, device: str = "cpu") -> None:
    draw = torch.Generator().manual_seed(0)
    x, W, g, gate = (
        torch.randn(*size, generator=draw) for size in ((2, 3, T, 10), (3, 7, 10), (2, 3, T, 14), (2, 3, T))
    )
    x, W, g, gate = (y.to(dtype) for y in (x, W * 3, g, gate))
    x[0, 0, 3] = 0
    weights = W.float() if gated else W  # a layer under autocast has weights of float32

    def run(precision: torch.dtype, choice: choose.Choice) -> list[Tensor]:
        leaves = [y.to(device, torch.promote_types(precision, y.dtype)) for y in (x, weights, gate)]
        leaves = [y.clone().requires_grad_() for y in leaves[: 2 + gated]]
        with choose.use(choice), choose.record() as answers:
            y = random_features.trigonometric_features(*leaves[:2], gate=leaves[2] if gated else None)
        assert answers == [("features", choice)]
        grads = torch.autograd.grad((y * g.to(y)).sum(), leaves)
        # the row of zeros has no direction, and whatever gradient
        return [y, grads[0][:, :, 4:], *grads[1:]]

    exact, plain, ours = run(torch.float64, "torch"), run(dtype, "torch"), run(dtype, "triton")
    # features of narrow rows are narrow here, and float32 there
    least = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for wanted, rounded, got in zip(exact, plain, ours, strict=True):
        assert got.isfinite().all()
        assert (got.double() - wanted).norm() <= 2 * (rounded.double() - wanted).norm() + least * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_trigonometric_features_on_a_gpu(dtype, gated):
    trigonometric(dtype, gated, device="cuda", T=1000)


def test_too_many_features():
    x = torch.zeros(1, 1, 2, 300)
    with choose.use("triton"), pytest.raises(ValueError, match="at most 256 features of a head, got 300"):
        scan.attend_past(x, x, x)
    assert scan.attend_past(x, x, x)[0].shape == x.shape


@pytest.mark.parametrize("which", [(), pytest.param(("all",), marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_kernels_compile(tmp_path, which):
    check_compiles(tmp_path, "scans_compile.py", *which)


# under the mechanisms

FEW = [Case("linear", "self"), Case("linear", "causal"), Case("linear", "cross"), Case("efficient", "causal")]
FEW += [Case("performer(features=8)", "causal"), Case("rfa(features=5, gate=True, floor=0.5)", "causal")]
MORE = ["performer(features=8)", "performer(features=6, kernel='relu')", "rfa(features=5, floor=0.5)", "efficient"]
REST = [case for spec in MORE for role in ("self", "causal", "cross") if (case := Case(spec, role)) not in FEW]
CASES = [*FEW, *(pytest.param(case, marks=pytest.mark.exhaustive, id=str(case)) for case in REST)]


@pytest.fixture
def interpreted(monkeypatch):
    # rows as short as these would not be scanned
    monkeypatch.setattr(random_features, "TILE", 0)
    with choose.use("triton"), choose.record() as answers:
        yield
    assert ("scan", "triton") in answers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_as_its_reference(case, interpreted):
    layer, exact = case.build(dtype=torch.float32, kv_heads=2), case.build(kv_heads=2)
    given = {name: x.requires_grad_() for name, x in inputs(case, 9, B=2, S=11).items()}
    y, wanted = layer(**{name: x.float() for name, x in given.items()}), reference(exact, given)
    assert_close(y, wanted.float(), rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(wanted)
    y.backward(weights.float())
    wanted.backward(weights)
    for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_with_padding(case, interpreted):
    """Whatever stands in it; outputs and the gradients of the inputs."""
    layer, exact = case.build(dtype=torch.float32, heads=2), case.build(heads=2)
    # padding on the left, inside, and nothing else
    rows = [0, 2, 5]
    given, masks = inputs(case, B=3), {"keep": holes(LONG)[rows]}
    if case.role == "cross":
        masks["memory_keep"] = holes(21, seed=4)[rows]
    results = []
    for built, choice in ((layer, "triton"), (exact, "torch")):
        leaves = {}
        for (name, x), keep in zip(given.items(), masks.values(), strict=True):
            leaves[name] = (
                torch.where(keep[..., None], x, torch.nan).to(next(built.parameters()).dtype).requires_grad_()
            )
        with choose.use(choice):
            y = built(**leaves, **masks)
            y.square().sum().backward()
        results.append([y, *(x.grad for x in leaves.values())])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in FEW if case.role == "causal"], ids=str)
def test_layer_in_pieces(case, interpreted):
    layer = case.build(dtype=torch.float32, heads=2)
    x, keep = torch.randn(3, LONG, WIDTH), holes(LONG)[[0, 2, 5]]
    with torch.no_grad():
        for cuts, mask in (([13, 19, 1], None), ([6, 14, 13], keep)):
            with choose.use("torch"):
                wanted = extended(layer, x, cuts, mask)
            assert_close(extended(layer, x, cuts, mask), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("role", ["self", "causal"])
def test_compiled(role, interpreted):
    """One graph, with the kernels as operators in it."""
    graphs = []

    def counter(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer = Case("linear", role).build(dtype=torch.float32)
    x = torch.randn(2, 20, WIDTH, requires_grad=True)
    y, fast = (
        layer.forward_packed(x).y,
        torch.compile(lambda x: layer.forward_packed(x).y, backend=counter, fullgraph=True)(x),
    )
    assert_close(fast, y)
    assert_close(torch.autograd.grad(fast.square().sum(), x), torch.autograd.grad(y.square().sum(), x))
    assert len(graphs) == 1
    assert "regard.linear" in graphs[0].print_readable(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(layer.forward_packed(x).y.float(), y, rtol=0.05, atol=0.05)
