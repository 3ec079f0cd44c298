"""Queries, keys and values as parts of one product, as where a GPU trains: the same as from a product each."""

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.layers.attention import projected


@pytest.mark.parametrize(
    "spec", ["local(window=3)", "routing(clusters=2)", "xl(segment=3, memory=2)", "rfa(gate=True)"]
)
def test_one_product_projects_as_each_does(spec, monkeypatch):
    torch.manual_seed(0)
    joined = spec.startswith(("local", "routing"))
    options = {"kv_heads": 2, "bias": True} if joined else {}
    layer = regard.attention(spec, width=16, heads=4, role="causal", **options).double()
    x, calls = torch.randn(2, 7, 16, dtype=torch.float64), []
    layer.project["k"].register_forward_hook(lambda *_: calls.append(1))

    def outputs() -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), [p for p in layer.parameters() if p.requires_grad])]

    expected, before = outputs(), len(calls)
    monkeypatch.setattr(projected, "one_product_is_faster", lambda x: True)
    assert_close(outputs(), expected)
    assert (len(calls) == before) == joined
