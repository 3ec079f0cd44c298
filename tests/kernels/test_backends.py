"""Backends of PyTorch's attention: few masked queries of inference on a GPU take one that needs no plan."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

import regard
from regard.kernels import backends
from regard.layers.attention import attending


def allowed(queries=64, masked=True, is_cuda=True, heads=4, kv_heads=4):
    """The backends that a call may take."""
    q, k = (SimpleNamespace(is_cuda=is_cuda, shape=(2, h, queries, 16)) for h in (heads, kv_heads))
    with backends.for_few_queries(q, k, queries, masked=masked):
        return {
            SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
            SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
            SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        }


def test_few_masked_queries_need_no_plan():
    with torch.no_grad():
        found = allowed()
        assert not found[SDPBackend.CUDNN_ATTENTION]
        assert found[SDPBackend.EFFICIENT_ATTENTION]
        assert found[SDPBackend.MATH]
        assert all(allowed(queries=65).values())  # what was chosen ends with the call, too


@pytest.mark.parametrize("other", [{"queries": 65}, {"masked": False}, {"is_cuda": False}, {"kv_heads": 2}])
def test_others_take_what_pytorch_chooses(other):
    with torch.no_grad():
        assert all(allowed(**other).values())


def test_training_takes_what_pytorch_chooses():
    assert all(allowed().values())


def test_a_layer_asks_with_its_mask(monkeypatch):
    asked = []

    def record(q, k, queries, *, masked):
        asked.append((queries, masked))
        return nullcontext()

    monkeypatch.setattr(attending.backends, "for_few_queries", record)
    layer = regard.attention("softmax", width=16, heads=2).eval()
    x = torch.randn(2, 12, 16)
    with torch.no_grad():
        layer(x)
        layer(x, keep=torch.arange(12) < torch.tensor([[12], [9]]))
    assert asked == [(12, False), (12, True)]


@pytest.mark.gpu
def test_pieces_of_a_prompt_on_a_gpu():
    layer = regard.attention("softmax", width=64, heads=4, role="causal").eval()
    x = torch.randn(3, 40, 64)
    with torch.no_grad():
        wanted = layer(x)
        layer = layer.cuda()
        state, found = layer.start(3), []
        for piece in x.cuda().split(17, 1):
            y, state = layer.extend(piece, state)
            found.append(y)
    torch.testing.assert_close(torch.cat(found, 1).cpu(), wanted, rtol=1e-4, atol=1e-4)
