"""No attribute of a layer hides a method; no layer depends on the default dtype, and each takes half precision."""

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.spec import ATTENTION, FEEDFORWARD
from regard.testing.cases import shake


def attentions():
    for name in ATTENTION.names():
        for spec in ATTENTION.find(name).examples:
            yield from (regard.attention(spec, width=16, heads=4, role=role) for role in regard.facts(spec).roles)


def feedforwards():
    for name in FEEDFORWARD.names():
        yield from (regard.feedforward(spec, width=16, inner=32) for spec in FEEDFORWARD.find(name).examples)


@pytest.mark.parametrize("layers", [attentions, feedforwards])
def test_no_attribute_hides_a_method(layers):
    for layer in layers():
        for module in layer.modules():
            hidden = [name for name in vars(module) if callable(getattr(type(module), name, None))]
            assert not hidden, f"{type(module).__name__} overwrites {hidden}"
        assert all(p.dtype in (torch.float16, torch.int64, torch.bool) for p in layer.half().state_dict().values())


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", FEEDFORWARD.names())
def test_feedforward_under_a_double_default_dtype(name, double_by_default):
    for spec in FEEDFORWARD.find(name).examples:
        torch.manual_seed(0)
        layer = regard.feedforward(spec, width=16, inner=32).eval()
        shake(layer)  # routers that start at zero leave all choices open
        x = torch.randn(1, 7, 16)
        y = layer(x)
        assert y.dtype == torch.float64
        assert_close(y[0], layer.reference(x[0]).y)
        layer.train()(x).sum().backward()


def test_attention_under_a_double_default_dtype(double_by_default):
    for name in ATTENTION.names():
        spec = ATTENTION.find(name).examples[0]
        for role in regard.facts(spec).roles:
            layer, x = regard.attention(spec, width=16, heads=4, role=role), torch.randn(2, 9, 16)
            memory = {"memory": torch.randn(2, 7, 16)} if role == "cross" else {}
            assert layer.train()(x, **memory).dtype == torch.float64
            assert layer.eval().weights(x, **memory).dtype == torch.float64
            if role == "causal":
                assert layer.extend(x, layer.start(2))[0].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_half_precision(dtype):
    """All a layer can do, and what it shows of itself."""
    for name in ATTENTION.names():
        spec = ATTENTION.find(name).examples[0]
        for role in regard.facts(spec).roles:
            layer = regard.attention(spec, width=16, heads=4, role=role).to(dtype)
            x = torch.randn(2, 9, 16, dtype=dtype)
            memory = {"memory": torch.randn(2, 7, 16, dtype=dtype)} if role == "cross" else {}
            assert layer.train()(x, **memory).dtype == dtype, spec
            assert layer.eval().weights(x, **memory).isfinite().all(), spec
            if role != "self":
                assert layer.extend(x, layer.start(2, **memory))[0].dtype == dtype, spec
