"""What the suite does not ask of the Long-Short Transformer."""

import pytest
import torch
from torch.testing import assert_close

import regard


@pytest.mark.parametrize("role", ["self", "causal"])
def test_the_map_is_what_reaches_a_query(role):
    """Without norms the layer is linear in its values, so the map can be told from outside."""
    torch.manual_seed(0)
    layer = regard.attention("longshort(window=4, rank=2, chunk=3, norm=False)", width=16, heads=4, role=role).double()
    x = torch.randn(2, 21, 16, dtype=torch.float64)
    keep = torch.rand(2, 21) < 0.7
    for kept in (None, keep):
        v = layer.split("v", x)
        v = v if kept is None else torch.where(kept[:, None, :, None], v, 0)
        o = layer.weights(x, keep=kept) @ v
        assert_close(layer.output(o.transpose(1, 2).flatten(2)), layer(x, keep=kept))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="window must be at least chunk"):
        regard.attention("longshort(window=4, chunk=5)", width=16, heads=4, role="causal")
    with pytest.raises(ValueError, match="cannot take position 'rotary'"):
        regard.attention("longshort", width=16, heads=4, position="rotary")
    layer = regard.attention("longshort(window=4, chunk=3)", width=16, heads=4, role="causal")
    with pytest.raises(ValueError, match="a state has no map"):
        layer.weights(torch.randn(2, 3, 16), state=layer.start(2))
    regard.attention("longshort(window=4, chunk=5)", width=16, heads=4, role="self")


def test_a_position_scheme_is_added_to_the_tokens():
    torch.manual_seed(0)
    layer = regard.attention("longshort(window=4, chunk=3)", width=16, heads=4, role="causal", position="sinusoidal")
    x = torch.randn(1, 9, 16)
    state, steps = layer.start(1), []
    for t in range(9):
        y, state = layer.extend(x[:, t : t + 1], state)
        steps.append(y)
    assert_close(torch.cat(steps, 1), layer(x))
    assert_close(layer(x)[0].double(), layer.double().reference(x[0].double()), rtol=1e-4, atol=1e-5)


def test_relative_positions_of_a_window_alone_are_those_of_transformer_xl():
    """Theirs joins u and w to queries that are scaled already: those of Transformer-XL, divided by sqrt(D)."""
    torch.manual_seed(0)
    sizes = {"width": 16, "heads": 4, "role": "causal"}
    layer = regard.attention("longshort(window=20, rank=0, norm=False, relative=True)", **sizes).double()
    xl = regard.attention("softmax", position="xl", **sizes).double()
    xl.project.load_state_dict(layer.project.state_dict())
    xl.output.load_state_dict(layer.output.state_dict())
    with torch.no_grad():
        xl.position.project.weight.copy_(layer.near_place.weight)
        xl.position.u.copy_(2 * layer.u)
        xl.position.v.copy_(2 * layer.w)
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    assert_close(layer(x), xl(x))


def test_relative_positions_of_summaries():
    """They move every query that sees a summary, and none before the end of the first chunk."""
    torch.manual_seed(0)
    layer = regard.attention("longshort(window=6, rank=2, chunk=3, relative=True)", width=16, heads=4, role="causal")
    x = torch.randn(1, 9, 16)
    placed = layer(x)
    with torch.no_grad():
        layer.long_place.weight.zero_()
    assert_close(layer(x)[:, :3], placed[:, :3])
    assert (layer(x)[:, 4:] - placed[:, 4:]).abs().amax(-1).min() > 1e-6


def test_summaries_of_normed_tokens():
    """lra=True: with one window over the row and r = 1, what the authors' LRA layer computes, written out."""
    torch.manual_seed(0)
    layer = regard.attention("longshort(window=16, rank=1, lra=True)", width=16, heads=1, bias=True).double()
    with torch.no_grad():
        for norm in (layer.near_norm, layer.long_norm):
            norm.weight.normal_()
            norm.bias.normal_()
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    k, v = (layer.near_norm(layer.project[name](x)) for name in "kv")
    shares = layer.summary(x).softmax(1)
    k, v = (torch.cat([layer.long_norm(shares.mT @ part), part], 1) for part in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(layer.project["q"](x), k, v)
    assert_close(layer(x), layer.output(expected))


def test_what_the_forms_refuse():
    with pytest.raises(ValueError, match="cannot take role 'self'"):
        regard.attention("longshort(relative=True)", width=16, heads=4)
    with pytest.raises(ValueError, match="needs norm=True"):
        regard.attention("longshort(lra=True, norm=False)", width=16, heads=4)
