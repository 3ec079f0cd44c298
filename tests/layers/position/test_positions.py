"""Position schemes: what the conformance suite, which runs them inside mechanisms, cannot see."""

import math

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.core.rows import Mask, Rows
from regard.core.shape import Shape
from regard.core.tally import Tally
from regard.layers.position.base import angles, rates
from regard.spec import ATTENTION, POSITIONS
from regard.testing.cases import Case
from regard.testing.counting import check_cost

SCHEMES = [spec for name in POSITIONS.names() for spec in POSITIONS.find(name).examples]


def scheme(spec, *, width=16, heads=4, role="causal"):
    torch.manual_seed(0)
    return POSITIONS.build(spec, Shape.of(width=width, heads=heads, role=role)).double()


def rows(T, start=0, B=1):
    return Rows(torch.full((B,), start), torch.full((B,), T), T, start)


def test_none_is_no_position():
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    for role, given in (("self", {}), ("causal", {}), ("cross", {"memory": memory})):
        torch.manual_seed(0)
        plain = regard.attention("softmax", width=16, heads=4, role=role)
        torch.manual_seed(0)
        named = regard.attention("softmax", width=16, heads=4, role=role, position="none")
        assert_close(named(x, **given), plain(x, **given), rtol=0, atol=0)


@pytest.mark.parametrize("spec", [spec for spec in SCHEMES if spec != "none"])
def test_cross_refuses(spec):
    name = spec.split("(")[0]
    with pytest.raises(ValueError, match=f"position '{name}' cannot take role 'cross': .*position='none'"):
        regard.attention("softmax", width=16, heads=4, role="cross", position=spec)


def test_mechanisms_refuse_kinds_they_lack():
    refused = 0
    for name in ATTENTION.names():
        spec = ATTENTION.find(name).examples[0]
        facts = regard.facts(spec)
        roles = [role for role in facts.roles if role != "cross"]
        for position in ("rotary", "alibi", "shaw") if roles else ():
            if POSITIONS.find(position).facts.kind not in facts.positions:
                with pytest.raises(ValueError, match=f"cannot take position '{position}'.*sinusoidal"):
                    regard.attention(spec, width=16, heads=4, role=roles[0], position=position)
                refused += 1
    assert refused


@pytest.mark.parametrize("width", [6, 7])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoids_are_the_formula(width, layout):
    got = scheme(f"sinusoidal(layout={layout!r})", width=width, heads=1)
    for start in (0, 5, 123_456_789):
        placed = got.add(torch.zeros(1, 3, width, dtype=torch.float64), rows(3, start))[0]
        for t, row in enumerate(placed):
            waves = []
            for i in range((width + 1) // 2):
                angle = (start + t) / 10000 ** (2 * i / width)
                waves.append((math.sin(angle), math.cos(angle)))
            if layout == "interleaved":
                expected = [number for pair in waves for number in pair]
            else:
                expected = [sine for sine, _ in waves] + [cosine for _, cosine in waves]
            # 2^-49 turns a step is what a rate is rounded by
            assert_close(row, torch.tensor(expected[:width], dtype=torch.float64), rtol=0, atol=1e-8 + start * 1.2e-14)


@pytest.mark.parametrize("columns", [None, 4])
def test_fourier_features_are_the_formula(columns):
    """Coordinates from -1 to 1 and frequencies from 1 to half the tokens of an axis; W shows them one by one."""
    width = 7 if columns is None else 14
    got = scheme(f"fourier(bands=3, longest=24, columns={columns})", width=width, heads=1)
    with torch.no_grad():
        got.project.weight.copy_(torch.eye(width))
    axes = [24] if columns is None else [6, 4]
    cells = torch.cartesian_prod(*(torch.linspace(-1, 1, n, dtype=torch.float64) for n in axes)).view(24, -1)
    waves = [math.pi * f * c for c, n in zip(cells.T, axes, strict=True) for f in (1, (1 + n / 2) / 2, n / 2)]
    angle = torch.stack(waves, -1)
    expected = torch.cat([cells, angle.sin(), angle.cos()], -1)
    zeros = torch.zeros(1, 24, width, dtype=torch.float64)
    assert_close(got.add(zeros, rows(24))[0], expected)
    assert_close(got.add(zeros[:, 5:], rows(19, 5))[0], expected[5:])


def test_added_fourier_features_are_concatenated_ones():
    """Before a linear map, as the authors have them beside the pixels."""
    position = scheme("fourier(bands=2, columns=3, longest=12)")
    pixels, V = torch.randn(2, 12, 5, dtype=torch.float64), torch.randn(16, 5, dtype=torch.float64)
    added, W = position.add(pixels @ V.T, rows(12, B=2)), position.project.weight.detach().clone()
    with torch.no_grad():
        position.project.weight.copy_(torch.eye(16, 10))
    features = position.add(torch.zeros(2, 12, 16, dtype=torch.float64), rows(12, B=2))[..., :10]
    assert_close(added, torch.cat([pixels, features], -1) @ torch.cat([V, W], -1).T)


def test_fourier_features_of_small_axes():
    """An axis of one token has the coordinate 0, and no frequency is below 1."""
    for spec in ("fourier(longest=1)", "fourier(longest=3, columns=1)", "fourier(longest=2, columns=4, apart=True)"):
        for options in (", bands=1)", ", bands=5)", ", bands=5, highest=9.0)"):
            position = scheme(spec[:-1] + options)
            x = torch.randn(position.longest, 16, dtype=torch.float64)
            assert_close(position.add(x[None], rows(len(x)))[0], position.plain_add(x))


def test_fourier_features_ask_for_what_is_longer():
    layer = regard.attention("softmax", width=16, heads=4, position="fourier(longest=8)")
    assert layer(torch.randn(1, 8, 16)).shape == (1, 8, 16)
    with pytest.raises(ValueError, match=r"'fourier' has longest=8 positions.*position 8.*fourier\(longest=9\)"):
        layer(torch.randn(1, 9, 16))


def test_angles_stay_exact_in_half_precision_and_far_out():
    layer = regard.attention("softmax", width=16, heads=2, role="causal", position="rotary").to(torch.bfloat16)
    assert_close(layer.position.rates, rates(8, 10000.0))
    at = torch.tensor([1_000_000, -1_000_000])
    got = angles(at, layer.position.rates, torch.bfloat16)
    assert got.dtype == torch.float32
    exact = at.double()[:, None] / 10000 ** (torch.arange(4).double() / 4)
    assert_close(got.double().sin(), exact.sin(), rtol=0, atol=1e-6)
    assert_close(got[0], -got[1])


@pytest.mark.parametrize("options", ["", "(layout='interleaved')", "(fraction=0.5)", "(fraction=0.8, base=500.0)"])
def test_rotary_products_depend_on_the_distance_alone(options):
    torch.manual_seed(0)
    rotary = POSITIONS.build(f"rotary{options}", Shape.of(width=32, heads=2, role="causal"))
    q, k = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)

    def product(i, j):
        return (rotary.rotate(q, torch.tensor([[i]])) * rotary.rotate(k, torch.tensor([[j]]))).sum(-1)

    assert_close(product(0, 0), (q * k).sum(-1))
    assert (product(7, 0) - product(0, 0)).abs().max() > 0.1
    for far in (1, 1000, 2_000_000):
        assert_close(product(7 + far, far), product(7, 0), rtol=1e-4, atol=1e-5)
    turned = rotary.turned
    assert_close(rotary.rotate(q, torch.tensor([[9]]))[..., turned:], q[..., turned:], rtol=0, atol=0)


def test_alibi_slopes():
    gap = torch.tensor([[-1, 0]])
    assert_close(-scheme("alibi", heads=8).bias(gap)[:, 0, 0], 0.5 ** torch.arange(1, 9).double())
    twelve = -scheme("alibi", width=24, heads=12).bias(gap)[:, 0, 0]
    assert_close(twelve, torch.tensor([*(0.5**h for h in range(1, 9)), *(0.5 ** (h + 0.5) for h in range(4))]).double())
    both = scheme("alibi", role="self").bias(torch.tensor([[-3, 0, 3]]))
    assert_close(both[:, 0, 0], both[:, 0, 2])
    assert not both[:, 0, 1].any()


@pytest.mark.parametrize("spec", SCHEMES)
def test_mixed_heads_keep_their_place_among_all(spec):
    """heads(a, a) = a, also where a scheme treats heads differently."""
    sizes = {"width": 24, "heads": 6, "head_width": 4, "role": "causal", "position": spec}
    torch.manual_seed(0)
    whole = regard.attention("softmax", **sizes).double()
    mixed = regard.attention("heads(softmax, softmax)", **sizes).double()
    state = whole.state_dict()
    with torch.no_grad():
        for name, tensor in mixed.named_parameters():
            part, rest = name.removeprefix("parts.").split(".", 1)
            axes = [d for d in range(tensor.dim()) if state[rest].shape[d] != tensor.shape[d]]
            tensor.copy_(state[rest].chunk(2, axes[0])[int(part)] if axes else state[rest])
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    assert_close(mixed(x), whole(x))


def masks(role):
    """Whole sequences, a step, a segment, keys long past; each as the host may know it and as it may not."""
    causal = role == "causal"
    for T, S, shift in ((5, 5, 0), (1, 6, 5), (3, 9, 6), (4, 3, 11), (2, 12, 4)):
        if causal or T == S:
            q0 = torch.tensor([shift + 2, shift + 2])
            known = Mask(q0, q0 - shift, q0 + T, T, S, causal, True, shift)
            yield known
            yield known._replace(shift=None)


def plain(position, function, mask, *arguments):
    """The `plain_` twin over every visible pair, and the pairs."""
    gap = mask._replace(shift=None).gap()[0]
    heads = range(position.shape.heads)
    visible = gap <= 0 if mask.causal else torch.ones_like(gap, dtype=torch.bool)
    numbers = torch.zeros(len(heads), mask.T, mask.S, dtype=torch.float64)
    for h in heads:
        for t, s in visible.nonzero().tolist():
            numbers[h, t, s] = function(h, *(part[h, n] for part, n in zip(arguments, (t, s), strict=False)), t, s)
    return numbers, visible


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize("spec", ["alibi", "buckets", "buckets(buckets=8, distance=12)"])
def test_biases_of_any_mask(spec, role):
    position = scheme(spec, role=role)
    for mask in masks(role):
        first = int(mask.q0[0] - mask.k0[0])
        expected, visible = plain(position, lambda h, t, s, i=first: position.plain_bias(h, i + t, s), mask)
        for got in (position.biases(mask), position.bias(mask.gap())):
            got = got if got.dim() == 3 else got[1]
            assert_close(torch.where(visible, got, 0), expected)


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize("spec", ["shaw(distance=3)", "music(longest=4)", "music(longest=4, shared=True)", "xl"])
def test_scores_of_any_mask(spec, role):
    position = scheme(spec, role=role)
    for mask in masks(role):
        q, k = (torch.randn(2, 4, n, 4, dtype=torch.float64) for n in (mask.T, mask.S))
        first = int(mask.q0[0] - mask.k0[0])

        def score(h, q, k, t, s, i=first):
            return 0.3 * (q @ k + position.plain_score(h, q, k, i + t, s))

        got = position.scores(q, k, mask, 0.3)
        for b in range(2):
            expected, visible = plain(position, score, mask, q[b], k[b])
            assert_close(torch.where(visible, got[b], 0), expected)


def test_shaw_values_of_any_mask():
    position = scheme("shaw(distance=3)")
    for mask in masks("causal"):
        weights = torch.rand(2, 4, mask.T, mask.S, dtype=torch.float64)
        first = int(mask.q0[0] - mask.k0[0])
        expected = torch.zeros(2, 4, mask.T, 4, dtype=torch.float64)
        for b, h, t, s in torch.ones_like(weights).nonzero().tolist():
            expected[b, h, t] += weights[b, h, t, s] * position.plain_value(h, first + t, s)
        assert_close(position.values(weights, mask), expected)


@pytest.mark.parametrize("role", ["self", "causal"])
def test_music_has_no_term_beyond_its_table(role):
    position = scheme("music(longest=4)", role=role)
    q = torch.randn(1, 4, 9, 4, dtype=torch.float64)
    mask = Mask(*torch.zeros(3, 1, dtype=torch.long), 9, 9, role == "causal", True, 0)
    term = position.scores(q, torch.zeros_like(q), mask, 1.0)
    gap = mask.gap()
    assert not term[..., gap <= -4].any()
    assert term[..., (gap > -4) & (gap <= 0)].all()
    if role == "self":
        assert not term[..., gap >= 4].any()
        assert term[..., (gap > 0) & (gap < 4)].all()
        assert position.table.shape == (4, 7, 4)
    else:
        assert position.table.shape == (4, 4, 4)


@pytest.mark.parametrize("spec", [s for s in SCHEMES if POSITIONS.find(s.split("(")[0]).facts.kind == "content"])
def test_content_schemes_store_nothing_larger_than_logits(spec):
    H, T = 4, 128
    layer = regard.attention("softmax", width=64, heads=H, role="causal", position=spec)
    with Tally() as tally:
        layer(torch.randn(1, T, 64)).sum().backward()
    assert tally.largest <= 4 * H * T * (T + 8)


def test_learned_ends_in_words():
    layer = regard.attention("softmax", width=16, heads=4, role="causal", position="learned(longest=8)")
    match = r"longest=8 positions.*position 8.*learned\(longest=9\)"
    assert layer(torch.randn(1, 8, 16)).shape == (1, 8, 16)
    with pytest.raises(ValueError, match=match):
        layer(torch.randn(1, 9, 16))
    with torch.no_grad():
        _, state = layer.extend(torch.randn(2, 8, 16), layer.start(2))
        with pytest.raises(ValueError, match=match):
            layer.extend(torch.randn(2, 1, 16), state)
        # rows of different length: padding may lie beyond the table, tokens may not
        keep = torch.arange(6) < torch.tensor([6, 3])[:, None]
        _, state = layer.extend(torch.randn(2, 6, 16), layer.start(2), keep=keep)
        keep = torch.arange(5) < torch.tensor([2, 5])[:, None]
        _, state = layer.extend(torch.randn(2, 5, 16), state, keep=keep)
        with pytest.raises(ValueError, match=match):
            layer.extend(torch.randn(2, 1, 16), state)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("learned(longest=0)", "'longest' of 'learned' must be at least 1, got 0"),
        ("fourier(bands=0)", "'bands' of 'fourier' must be at least 1, got 0"),
        ("fourier(highest=0.5)", "'highest' of 'fourier' must be at least 1, the lowest frequency, got 0.5"),
        ("fourier(longest=0)", "'longest' of 'fourier' must be at least 1, got 0"),
        ("fourier(longest=1, columns=2, apart=True)", "'longest' of 'fourier' must be at least 2, got 1"),
        ("fourier(apart=True)", "'apart' of 'fourier' is for a grid: give columns"),
        ("fourier(columns=0)", "'columns' of 'fourier' must be at least 1, or None for a line, got 0"),
        ("sinusoidal(base=1.0)", "'base' of 'sinusoidal' must be more than 1, got 1.0"),
        ("sinusoidal(layout='half')", "'layout' of 'sinusoidal' must be 'interleaved' or 'halves', got 'half'"),
        ("shaw(distance=0)", "'distance' of 'shaw' must be at least 1, got 0"),
        ("music(longest=0)", "'longest' of 'music' must be at least 1, got 0"),
        ("xl(clamp=0)", "'clamp' of 'xl' must be at least 1 or None, got 0"),
        ("rotary(base=0.5)", "'base' of 'rotary' must be more than 1, got 0.5"),
        ("rotary(stretch=(8.0, 4.0, 1.0, 9.0))", "'stretch' of 'rotary' must be four numbers"),
        ("rotary(fraction=0.2)", "'fraction' of 'rotary' .*at least 2 of the 4 channels.*got 0.2"),
        ("rotary(fraction=1.5)", "'fraction' of 'rotary' must be at most 1.*got 1.5"),
        ("buckets(buckets=3)", "'buckets' of 'buckets' must be an even number of at least 4 for role 'self', got 3"),
        ("buckets(distance=8)", "'distance' of 'buckets' must be more than 8.*got 8"),
        ("alibi(slope=1)", "'alibi' has no option 'slope'"),
    ],
)
def test_bad_options(spec, words):
    with pytest.raises(ValueError, match=words):
        scheme(spec, role="self")


def test_rotary_needs_pairs():
    with pytest.raises(ValueError, match="even head width, got 5"):
        regard.attention("softmax", width=20, heads=4, position="rotary")
    assert regard.attention("softmax", width=20, heads=4, position="rotary(fraction=0.8)").position.turned == 4


@pytest.mark.parametrize("position", ["alibi", "buckets(buckets=8)", "xl", "shaw(distance=4)", "music(longest=64)"])
@pytest.mark.parametrize("role", ["self", "causal"])
def test_positions_keep_the_memory_of_softmax_linear(position, role):
    check_cost(Case("softmax", role, position))


@pytest.mark.parametrize("spec", ["alibi", "buckets(buckets=8, distance=12)"])
def test_kernels_get_the_bias_of_places(spec):
    """Of a model whose tokens stand several places apart, as those of a funnel do."""
    scheme = POSITIONS.build(spec, Shape.of(width=8, heads=2, role="self"))
    scheme.step = 4
    found, gaps = scheme.run_bias(3, 2), torch.arange(-3, 3)
    expected = scheme.bias(4 * gaps[None])[:, 0]
    assert_close(-found.slopes[:, None] * gaps.abs() if found.table is None else found.table, expected)
