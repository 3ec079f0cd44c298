"""What a class of a layer may write: abstract methods it must, final ones it never does, and none builds on a mechanism
that is registered itself."""

import inspect

import pytest

import regard
from regard.core.shape import Shape
from regard.layers.attention.attending import Attending
from regard.layers.attention.base import Attention
from regard.layers.attention.cached import Cached, Scored
from regard.layers.attention.digested import Digested
from regard.layers.attention.projected import Projected
from regard.layers.attention.scanned import Scanned
from regard.layers.attention.softmax import Softmax
from regard.layers.attention.tailed import Tailed
from regard.layers.feedforward.base import FeedForward, Sizes
from regard.layers.feedforward.experts import Routed
from regard.spec import REGISTRIES

CLASSES = [cls for registry in REGISTRIES.values() for cls in registry.classes.values()]


def ours(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch" and base not in (object,)]


def overridden_finals(cls: type) -> list[str]:
    """CLASS.METHOD of what a class, or one it builds on, writes anew although a base says that it is final."""
    found = []
    for base in ours(cls):
        for name in vars(base):
            for older in base.__mro__[1:]:
                method = vars(older).get(name)
                if getattr(getattr(method, "fget", method), "__final__", False):
                    found.append(f"{base.__name__}.{name} (final in {older.__name__})")
    return found


def registered_bases(cls: type) -> list[str]:
    return [base.__name__ for base in cls.__mro__[1:] if "facts" in vars(base)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_layer_keeps_to_the_contract(cls):
    assert overridden_finals(cls) == []
    assert registered_bases(cls) == []
    assert not inspect.isabstract(cls)


def test_what_breaks_the_contract_is_found():
    class Twice(Softmax):
        def forward(self, x):
            return 2 * super().forward(x)

    assert overridden_finals(Twice) == ["Twice.forward (final in Attention)"]
    assert registered_bases(Twice) == ["Softmax"]
    for bases in ((Projected, "in_widths"), (Tailed, "attend_self"), (FeedForward, "forward")):
        cls, name = bases
        assert overridden_finals(type("Other", (cls,), {name: None})) == [f"Other.{name} (final in {cls.__name__})"]


@pytest.mark.parametrize(
    ("cls", "missing"),
    [
        (Attention, {"forward_packed", "apply_map", "reference"}),
        (Projected, {"attend_self"}),
        (Attending, {"attend", "attend_self"}),
        (Cached, {"attend"}),
        (Scored, {"score"}),
        (Tailed, {"attend"}),
        (Digested, {"digest", "consult"}),
        (Scanned, {"zero", "scan"}),
        (FeedForward, {"forward_packed", "reference"}),
        (Routed, {"route", "plain_route"}),
    ],
)
def test_a_base_says_what_is_to_be_written(cls, missing):
    assert cls.__abstractmethods__ == missing
    made = Sizes(8, 8) if issubclass(cls, FeedForward) else Shape.of(width=8, heads=2)
    with pytest.raises(TypeError, match="abstract"):
        cls(made)


def test_a_state_of_a_layer_without_parameters_has_a_map():
    """The queries and keys of `scaling` are made outside its attention, which so has nothing to learn."""
    import torch
    from torch.testing import assert_close

    layer = regard.attention("scaling(share_qk=True, output='multconv')", width=16, heads=4, role="causal").eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        _, state = layer.extend(x[:, :5], layer.start(2))
        assert_close(layer.weights(x[:, 5:], state=state), layer.weights(x)[:, :, 5:])
