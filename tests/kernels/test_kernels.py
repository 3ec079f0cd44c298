"""The kernels by themselves, at lengths of many chunks and tiles, against dense formulas in float64."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from regard.kernels import parts
from regard.kernels.band import band_parts
from regard.kernels.parts import Blocks, Part, Runs, union
from regard.kernels.scan import absorb, feature_scan, ratio, read, scan, stabilise


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(outs, leaves):
    loss = sum((o * draw(*o.shape, seed=9).to(o.dtype)).sum() for o in outs)
    return torch.autograd.grad(loss, leaves)


def dense(q, k, v, visible, bias=0.0):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    logits = q @ k.mT / q.shape[-1] ** 0.5 + bias
    weights = torch.softmax(logits.masked_fill(~visible, -1e300), -1)
    return torch.where(visible, weights, 0) @ v


def leaves(B, H, G, T, S, D):
    return [x.requires_grad_() for x in (draw(B, H, T, D), draw(B, G, S, D, seed=1), draw(B, G, S, D, seed=2))]


@pytest.mark.parametrize("after", [False, True], ids=["causal", "both"])
@pytest.mark.parametrize("window", [0, 1, 8, 31, 100, 1000])
@pytest.mark.parametrize("N", [1, 2, 33, 100, 513])
def test_band(N, window, after):
    qkv = leaves(2, 4, 2, N, N, 8)
    after = window if after else 0
    count = torch.tensor([N, max(1, N // 2)])
    gap = torch.arange(N) - torch.arange(N)[:, None]
    live = (torch.arange(N) < count[:, None])[:, None, :, None]
    visible = ((gap >= -window) & (gap <= after)) & live.mT
    # no causal query of a whole sequence sees what stands behind it
    real = live[:, 0, :, 0] if after else None
    o = torch.where(live, union(*qkv, band_parts(N, before=window, after=after), real=real), 0)
    expected = torch.where(live, dense(*qkv, visible), 0)
    assert_close(o, expected)
    assert_close(gradients([o], qkv), gradients([expected], qkv))


@pytest.mark.parametrize("N", [7, 100, 300])
def test_band_with_bias(N):
    qkv, bias = leaves(2, 4, 2, N, N, 8), draw(4, 37 + 5 + 1, seed=4).requires_grad_()
    gap = torch.arange(N) - torch.arange(N)[:, None]
    o = union(*qkv, band_parts(N, before=37, after=5, bias=bias))
    expected = dense(*qkv, (gap >= -37) & (gap <= 5), bias[:, (gap + 37).clamp(0, 42)])
    assert_close(o, expected)
    assert_close(gradients([o], [*qkv, bias]), gradients([expected], [*qkv, bias]))


@pytest.mark.parametrize("before", [0, 1, 8, 100])
@pytest.mark.parametrize("T", [1, 2, 33, 300])
def test_band_tail(T, before):
    S = before + T
    qkv = leaves(3, 4, 2, T, S, 8)
    real = torch.arange(S) >= torch.tensor([0, before // 2, before])[:, None]
    gap = torch.arange(S) - torch.arange(T)[:, None] - before
    visible = ((gap <= 0) & (gap >= -before)) & real[:, None, None]
    o = union(*qkv, band_parts(T, before=before, after=0, shift=before), real=real)
    expected = dense(*qkv, visible)
    assert_close(o, expected)
    assert_close(gradients([o], qkv), gradients([expected], qkv))


def test_band_in_several_chunks(monkeypatch):
    monkeypatch.setattr(parts, "CHUNK", 1 << 12)
    for window in (3, 31, 200):
        test_band(513, window, True)


@pytest.fixture
def elsewhere(monkeypatch):
    """The path of other devices, on this one: no flash kernel, and pieces that fold rows and runs together."""
    monkeypatch.setattr(parts, "_flash", lambda q, v: False)
    monkeypatch.setattr(parts, "_on_cpu", lambda x: False)
    monkeypatch.setattr(parts, "DEVICE_CHUNK", 1 << 13)


def test_band_elsewhere(elsewhere):
    for window, after in itertools.product((3, 100), (False, True)):
        test_band(300, window, after)
    test_band_with_bias(100)
    test_band_tail(33, 8)


def test_causal_parts_elsewhere(elsewhere):
    test_causal_parts()


def test_causal_parts():
    """Residue classes, each causal in itself."""
    qkv = leaves(2, 2, 2, 12, 12, 4)
    classes = Runs(0, 4, 3, 1, 3)
    gap = torch.arange(12) - torch.arange(12)[:, None]
    o, expected = union(*qkv, [Part(classes, classes, causal=True)]), dense(*qkv, (gap <= 0) & (gap % 3 == 0))
    assert_close(o, expected)
    assert_close(gradients([o], qkv), gradients([expected], qkv))


def test_no_second_derivative_in_silence():
    qkv = leaves(1, 2, 2, 9, 9, 4)
    outs = [union(*qkv, band_parts(9, before=3, after=0)), scan(*(x.abs() for x in qkv))[0]]
    outs.append(feature_scan(qkv[0].softmax(-1), *qkv[1:])[0])
    for o in outs:
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(o.square().sum(), qkv[0], create_graph=True)


def test_union_of_gathered_blocks_and_empty_rows():
    qkv = leaves(2, 2, 2, 12, 12, 4)
    index = torch.tensor([[0, 2], [1, 5], [4, 3]])
    pieces = [Part(Runs(0, 3, 3, 3), Blocks(index, 2)), Part(Runs(0, 1), Runs(7, 5))]
    visible = torch.zeros(12, 12, dtype=torch.bool)
    for n, blocks in enumerate(index.tolist()):
        for block in blocks:
            visible[3 * n : 3 * n + 3, 2 * block : 2 * block + 2] = True
    visible[0, 7:12] = True
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 4:6] = False
    o, expected = union(*qkv, pieces, real=real), dense(*qkv, visible & real[:, None, None])
    assert_close(o, expected)
    assert not o[:, :, 9:].any(), "queries that no part names see nothing"
    assert_close(gradients([o], qkv), gradients([expected], qkv))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_what_compilers_are_told_of_union(count, masked):
    """Shapes and strides of both directions, for one part (the shortcut of decoding) and for several."""
    q, k, v = (x.detach().float() for x in leaves(2, 4, 4, 6, 6, 8))
    plan = [number for i in range(count) for number in (i * 3, 6 // count, 1, 0, 1, 0, 6, 1, 0, 1, 0)]
    mask = torch.ones(6 // count, 6).tril().bool() if masked else None
    tensors = [None, *[mask] * count, *[None] * count]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(parts._forward_operator, (q, k, v, 0.5, plan, tensors), test_utils=checks)
    o, lse = parts._forward(q, k, v, 0.5, plan, tensors)
    learned = [False] * len(tensors)
    given = (o, q, k, v, o, lse, 0.5, plan, tensors, learned)
    torch.library.opcheck(parts._backward_operator, given, test_utils=checks)


def recurrence(q, k, v, decay, S, z):
    """Token by token."""
    numerators, denominators = [], []
    for t in range(q.shape[2]):
        g = torch.exp(decay[:, :, t])
        S = g[..., None, None] * S + k[:, :, t, :, None] * v[:, :, t, None]
        z = g[..., None] * z + k[:, :, t]
        numerators.append(torch.einsum("bhr,bhrd->bhd", q[:, :, t], S))
        denominators.append((q[:, :, t] * z).sum(-1))
    return torch.stack(numerators, 2), torch.stack(denominators, 2), S, z


@pytest.mark.parametrize(
    "cuts", [(0, 1), (0, 33), (0, 64), (0, 65), (0, 300), (0, 63, 65, 66, 300), (0, 128, 513)], ids=str
)
@pytest.mark.parametrize("gated", [False, True])
def test_scan(cuts, gated):
    T = cuts[-1]
    q, k, v = draw(2, 3, T, 5).abs(), draw(2, 3, T, 5, seed=1).abs(), draw(2, 3, T, 4, seed=2)
    decay = (
        -draw(2, 3, T, seed=3).abs() * (draw(2, 3, T, seed=5) > 1.5) * 50 if gated else torch.zeros(2, 3, T).double()
    )
    S, z = draw(2, 3, 5, 4, seed=6), draw(2, 3, 5, seed=7).abs()
    given = [x.requires_grad_() for x in (q, k, v, decay, S, z)]
    state, outs = (S, z), []
    for a, b in itertools.pairwise(cuts):
        at = slice(a, b)
        rest = {"decay": decay[:, :, at]} if gated else {}
        n, d, state = scan(q[:, :, at], k[:, :, at], v[:, :, at], state=state, **rest)
        outs.append((n, d))
    got = (torch.cat([n for n, _ in outs], 2), torch.cat([d for _, d in outs], 2), *state)
    expected = recurrence(*given)
    assert_close(got, expected)
    needed = given if gated else [x for x in given if x is not decay]
    assert_close(gradients(got, needed), gradients(expected, needed))


@pytest.mark.parametrize("spread", [1.0, 300.0])
@pytest.mark.parametrize("cuts", [(0, 33), (0, 300), (0, 1, 2, 70, 300)], ids=str)
def test_scan_of_log_features(cuts, spread):
    """Features whose exponentials overflow by far: the ratio is right all the same."""
    T = cuts[-1]
    b, v = draw(2, 2, T, 6).requires_grad_(), draw(2, 2, T, 3, seed=1).requires_grad_()
    a = (draw(2, 2, T, 6, seed=2) + spread * draw(2, 2, T, 1, seed=3)).requires_grad_()
    top, state, outs = None, None, []
    for i, j in itertools.pairwise(cuts):
        k, decay, top = stabilise(a[:, :, i:j], top=top)
        q = (b[:, :, i:j] - b[:, :, i:j].amax(-1, keepdim=True)).exp()
        n, d, state = scan(q, k, v[:, :, i:j], state=state, decay=decay)
        outs.append(ratio(n, d))
    got = torch.cat(outs, 2)
    logits = (b[:, :, :, None] + a[:, :, None]).logsumexp(-1)
    expected = torch.softmax(logits.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf), -1) @ v
    assert_close(got, expected)
    assert_close(gradients([got], [b, a, v]), gradients([expected], [b, a, v]))


@pytest.mark.parametrize("spread", [1.0, 1e4])
@pytest.mark.parametrize("cuts", [(0, 1), (0, 33), (0, 200), (0, 1, 2, 70, 200)], ids=str)
def test_feature_scan(cuts, spread):
    T = cuts[-1]
    q, k, v = draw(2, 2, T, 5).softmax(-1), draw(2, 2, T, 5, seed=1) * spread, draw(2, 2, T, 3, seed=2)
    k[..., 0] = k[..., 0].sort(-1).values  # a maximum that never stops growing
    given = [x.requires_grad_() for x in (q, k, v)]
    state, outs = None, []
    for i, j in itertools.pairwise(cuts):
        o, state = feature_scan(q[:, :, i:j], k[:, :, i:j], v[:, :, i:j], state=state)
        outs.append(o)
    got = torch.cat(outs, 2)
    past = torch.ones(T, T).tril().bool()[..., None]
    shares = torch.where(past, k[:, :, None], -torch.inf).softmax(3)
    expected = torch.einsum("bhtr,bhtjr,bhjd->bhtd", q, shares, v)
    assert_close(got, expected)
    assert_close(gradients([got], given), gradients([expected], given))


@pytest.mark.parametrize("form", ["sums", "gate", "log-features", "feature softmax"])
@pytest.mark.parametrize("T", [33, 300])
def test_no_bit_of_the_past_moves(T, form):
    def run(q, k, v, decay):
        if form == "sums":
            return ratio(*scan(q.abs(), k.abs(), v)[:2])
        if form == "gate":
            return ratio(*scan(q.abs(), k.abs(), v, decay=-decay.abs())[:2])
        if form == "log-features":
            features, decay, _ = stabilise(k)
            return ratio(*scan((q - q.amax(-1, keepdim=True)).exp(), features, v, decay=decay)[:2])
        return feature_scan(q.softmax(-1), k, v)[0]

    given = [draw(2, 2, T, 6, seed=seed, dtype=torch.float32) for seed in range(3)]
    given.append(draw(2, 2, T, seed=3, dtype=torch.float32))
    large = torch.finfo(torch.float32).max ** 0.25
    before = run(*given)
    for cut, fill in itertools.product((1, T // 2, T - 1), (large, -large, 0.0)):
        changed = [x.clone() for x in given]
        for x in changed:
            x[:, :, cut:] = fill
        assert torch.equal(run(*changed)[:, :, :cut], before[:, :, :cut])


def test_absorb_and_read():
    q, k, v = draw(3, 2, 9, 5).abs(), draw(3, 2, 9, 5, seed=1).abs(), draw(3, 2, 9, 4, seed=2)
    real = torch.arange(9) < torch.tensor([9, 4, 0])[:, None]
    weights = torch.where(real[:, None, None], q @ k.mT, 0)
    numerator, denominator = read(q, *absorb(k, v, real=real))
    assert_close(numerator, weights @ v)
    assert_close(denominator, weights.sum(-1))
    assert not ratio(numerator, denominator)[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32(dtype):
    large = torch.full((1, 1, 2000, 8), 30.0, dtype=dtype)
    numerator, denominator, _ = scan(large, large, large)
    assert numerator.isfinite().all()
    assert denominator.max() == 30 * 30 * 8 * 2000
