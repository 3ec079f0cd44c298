"""Queries, keys and values as parts of one product, as where a GPU trains: the same as from a product each."""

import copy

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.layers.attention import heads, projected

JOINED = ("local(window=3)", "routing(clusters=2)", "heads(local(window=3), routing(clusters=2))")


@pytest.mark.parametrize(
    "spec", [*JOINED, "xl(segment=3, memory=2)", "rfa(gate=True)", "heads(softmax, rfa(gate=True))"]
)
def test_one_product_projects_as_each_does(spec, monkeypatch):
    torch.manual_seed(0)
    options = {"kv_heads": 2, "bias": True} if spec in JOINED else {}
    layer = regard.attention(spec, width=16, heads=4, role="causal", **options).double()
    x, calls = torch.randn(2, 7, 16, dtype=torch.float64), []

    def outputs() -> list[torch.Tensor]:
        again = copy.deepcopy(layer)  # a step in training moves the centroids
        last = again.parts[-1] if spec.startswith("heads") else again
        last.project["k"].register_forward_hook(lambda *_: calls.append(1))
        out = again.forward_packed(x)
        loss = out.y.square().sum() + (0 if out.auxiliary_loss is None else 1e4 * out.auxiliary_loss)
        return [out.y, *torch.autograd.grad(loss, list(again.parameters()))]

    expected, before = outputs(), len(calls)
    for module in (projected, heads):
        monkeypatch.setattr(module, "one_product_is_faster", lambda x: True)
    assert_close(outputs(), expected)
    assert (len(calls) == before) == (spec in JOINED)
