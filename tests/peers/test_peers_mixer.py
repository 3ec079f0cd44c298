"""Token mixing against the package `mlp-mixer-pytorch`, and its map against the Jacobian."""

import importlib

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.core.rows import Rows
from regard.layers.attention.base import Attention
from regard.models.block import Block
from regard.models.config import ModelConfig
from regard.spec import parse

WIDTH, LONGEST, INNER = 12, 10, 7


def layer() -> Attention:
    torch.manual_seed(0)
    made = regard.attention(f"mixer(longest={LONGEST}, inner={INNER})", width=WIDTH, heads=4).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return made


def test_block():
    """A pre-norm block of our Transformer is a layer of theirs."""
    peer = importlib.import_module("mlp_mixer_pytorch.mlp_mixer_pytorch")
    torch.manual_seed(0)
    tokens = peer.PreNormResidual(WIDTH, peer.FeedForward(LONGEST, INNER, 0.0, lambda a, b: torch.nn.Conv1d(a, b, 1)))
    channels = peer.PreNormResidual(WIDTH, peer.FeedForward(WIDTH, 20))
    theirs = torch.nn.Sequential(tokens, channels).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    config = ModelConfig(
        kind="encoder",
        width=WIDTH,
        heads=4,
        inner=20,
        norm="pre",
        feedforward="dense(activation='gelu')",
        dropout=0.0,
        position="none",
    )
    ours = Block(config, parse(f"mixer(longest={LONGEST}, inner={INNER})"), None, "self").double()
    with torch.no_grad():
        ours.attention.gather.copy_(tokens.fn[0].weight[..., 0])
        ours.attention.gather_offset.copy_(tokens.fn[0].bias)
        ours.attention.spread.copy_(tokens.fn[3].weight[..., 0])
        ours.attention.spread_offset.copy_(tokens.fn[3].bias)
    for mine, other in ((ours.feedforward.inner, channels.fn[0]), (ours.feedforward.outer, channels.fn[3])):
        mine.load_state_dict(other.state_dict())
    for mine, other in zip(ours.norms, theirs, strict=True):
        mine.load_state_dict(other.norm.state_dict())
    x = torch.randn(3, LONGEST, WIDTH, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = ours(mine, Rows.full(mine)).y, theirs(other)
    assert_close(y, z)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    assert_close(ours.attention.gather.grad, tokens.fn[0].weight.grad[..., 0])
    assert_close(ours.attention.spread.grad, tokens.fn[3].weight.grad[..., 0])


def test_map_is_the_jacobian():
    """The mean over the channels of a head of what an output moves with an input of the same channel."""
    ours, x = layer(), torch.randn(1, 6, WIDTH, dtype=torch.float64)
    moves = torch.autograd.functional.jacobian(lambda x: ours(x[None])[0], x[0])  # [T, E, S, E]
    same = moves.diagonal(dim1=1, dim2=3)  # [T, S, E]
    assert_close(ours.weights(x)[0], same.unflatten(-1, (4, 3)).mean(-1).movedim(-1, 0))
    assert_close(same.sum(), moves.sum())


def test_longer_inputs_are_refused_in_words():
    with pytest.raises(ValueError, match=r"'mixer' got 11 tokens .*longest=10: build it with longest=11"):
        layer()(torch.randn(1, LONGEST + 1, WIDTH, dtype=torch.float64))


def test_widths_and_options_that_make_no_layer_are_refused():
    with pytest.raises(ValueError, match="'mixer' has no projection: out_width must be the width 12, got 6"):
        regard.attention("mixer", width=WIDTH, heads=4, out_width=6)
    with pytest.raises(ValueError, match="option 'inner' of 'mixer' must be at least 1"):
        regard.attention("mixer(inner=0)", width=WIDTH, heads=4)
