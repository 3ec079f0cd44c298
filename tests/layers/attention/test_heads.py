"""Mixed heads whose parts attend to slots instead of tokens."""

import pytest
import torch

import regard
from regard.testing.cases import Case
from regard.testing.suite import CHECKS

X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
SLOTS = "heads(compressed(factor=3), compressed(factor=3, first='learned'))"


@pytest.mark.parametrize("role", ["self", "causal", "cross"])
@pytest.mark.parametrize("check", ["causality", "padding", "weights", "round_trip"])
def test_parts_with_the_same_slots_have_a_map(role, check):
    CHECKS[check](Case(SLOTS, role))


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize(
    "spec",
    [
        "heads(compressed(factor=3), softmax)",
        "heads(softmax, heads(compressed(factor=3), local(window=3)))",
        "heads(compressed(factor=3), compressed(factor=2))",
        "heads(compressed(factor=1, first='none'), softmax)",
    ],
)
def test_parts_without_a_map_in_common_say_so(spec, role):
    """They attend, decode and train as any other; only the map has no columns that both parts mean."""
    layer = regard.attention(spec, width=16, heads=4, role=role)
    assert layer.facts.columns == "slots"
    with pytest.raises(ValueError, match="no map in common"):
        layer.weights(X)
    with pytest.raises(ValueError, match="no map in common"):
        layer.weights(X, keep=torch.ones(2, 9, dtype=torch.bool))
    # nested or not, each part has its own
    assert layer.parts[0].weights(X).shape[:3] == (2, 2, 9)


def test_a_model_says_so_too():
    sizes = {"kind": "encoder", "vocabulary": 20, "width": 16, "heads": 4, "inner": 8, "layers": 1}
    model = regard.Transformer(regard.ModelConfig(attention="heads(compressed(factor=3), softmax)", **sizes))
    with pytest.raises(ValueError, match="no map in common"):
        model.maps(torch.randint(20, (2, 9)))
