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
