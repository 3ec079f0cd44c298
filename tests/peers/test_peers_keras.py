"""Additive attention against Keras, on its torch backend."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import pytest
import torch
from torch.testing import assert_close

import regard


@pytest.mark.parametrize("padded", [False, True])
def test_additive_is_keras_additive(padded):
    """Keras sums scale * tanh(query + key) over features that are already projected: one of our heads."""
    torch.manual_seed(0)
    layer = regard.attention("additive", width=8, heads=1, role="cross", memory_width=6, head_width=5)
    x, memory = torch.randn(3, 4, 8), torch.randn(3, 7, 6)
    keep = torch.arange(7) < torch.tensor([7, 3, 5])[:, None] if padded else torch.ones(3, 7, dtype=torch.bool)
    peer = keras.layers.AdditiveAttention(use_scale=True)
    projected = [layer.project["q"](x), layer.project["v"](memory), layer.project["k"](memory)]
    peer.build([part.shape for part in projected])
    peer.scale.assign(layer.reading.detach()[0])
    with torch.no_grad():
        context, weights = peer(projected, mask=[None, keep], return_attention_scores=True)
        assert_close(layer(x, memory=memory, memory_keep=keep), layer.output(context))
        assert_close(layer.weights(x, memory=memory, memory_keep=keep)[:, 0], weights)
