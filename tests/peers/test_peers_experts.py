"""Feed-forward layers beside public implementations with the same weights."""

import importlib
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import MixtralConfig, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.switch_transformers import modeling_switch_transformers as switch

import regard
from regard.core.rows import Rows
from regard.core.state import Out
from regard.layers.feedforward.base import FeedForward

WIDTH, INNER, EXPERTS, T = 12, 20, 4, 33


def build(spec: str) -> FeedForward:
    torch.manual_seed(0)
    layer = regard.feedforward(spec, width=WIDTH, inner=INNER).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def tokens(B: int = 1) -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(layer: FeedForward, x: Tensor) -> Out:
    return layer.forward_packed(x, Rows.full(x))


def gradients(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    toward = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    return torch.autograd.grad((y * toward).sum(), leaves)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("B", [1, 3])
def test_switch(training, B):
    """Theirs drops in evaluation too: there its room is for all. Its groups are the rows of a batch."""
    ours = build(f"switch(experts={EXPERTS}, capacity=0.9, jitter=0.0, group={T})").train(training)
    room = math.ceil(0.9 * T / EXPERTS) if training else T
    config = SwitchTransformersConfig(
        d_model=WIDTH,
        d_ff=INNER,
        num_experts=EXPERTS,
        expert_capacity=room,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
    )
    theirs = switch.SwitchTransformersSparseMLP(config).double().train(training)
    theirs.router.dtype = torch.float64
    with torch.no_grad():
        theirs.router.classifier.weight.copy_(ours.router)
        for index, expert in enumerate(theirs.experts.values()):
            expert.wi.weight.copy_(ours.networks.inner[index].T)
            expert.wo.weight.copy_(ours.networks.outer[index].T)
    x = tokens(B)
    out, other = run(ours, x), theirs(x)
    assert_close(out.y, other)
    assert not training or 0.1 < out.statistics["dropped"] < 0.9
    mine = gradients(out.y, [ours.router])
    assert_close(mine, gradients(other, [theirs.router.classifier.weight]))
    if training:
        logits = x @ ours.router.T
        shares = torch.softmax(logits, -1)
        assert_close(
            out.auxiliary_loss, 0.01 * switch.load_balancing_loss_func(shares, shares.argmax(-1, keepdim=True)).double()
        )


def test_router_z_loss():
    """Beside the loss of balance, neither at zero: of the first choices, as in Switch."""
    ours = build(f"stmoe(experts={EXPERTS}, balance=0.3, z=0.7)").train()
    x = tokens()
    logits = x @ ours.router.T
    shares = torch.softmax(logits, -1)
    balance = switch.load_balancing_loss_func(shares, shares.argmax(-1, keepdim=True)).double()
    assert_close(run(ours, x).auxiliary_loss, 0.3 * balance + 0.7 * switch.router_z_loss_func(logits))


def test_glam_without_capacity_is_mixtral_with_its_activation():
    ours = build(f"glam(experts={EXPERTS})").eval()
    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        hidden_act="gelu",
        experts_implementation="eager",
    )
    theirs = MixtralSparseMoeBlock(config).double().eval()
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router)
        theirs.experts.gate_up_proj.copy_(torch.cat([ours.networks.gate, ours.networks.inner], 2).mT)
        theirs.experts.down_proj.copy_(ours.networks.outer.mT)
    x = tokens()
    # their gates are in float32
    assert_close(run(ours, x).y, theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("B", [1, 3])
def test_gshard(B, threshold):
    """Capacity binds and second choices are dropped; the loss with it. Their groups are the rows of a batch. With a
    threshold second experts are asked by chance, by the same draws."""
    peer = importlib.import_module("mixture_of_experts")
    ours = build(f"gshard(experts={EXPERTS}, capacity=1.5, threshold={threshold}, group={T})").train()
    # theirs rounds down
    factor = math.ceil(1.5 * T / EXPERTS) * EXPERTS / T
    policy = {"second_policy_train": "random" if threshold else "all", "second_threshold_train": threshold}
    policy["capacity_factor_train"] = factor + 1e-6
    theirs = peer.MoE(WIDTH, num_experts=EXPERTS, hidden_dim=INNER, **policy).double().train()
    with torch.no_grad():
        theirs.gate.w_gating.copy_(ours.router.T)
        theirs.experts.w1.copy_(ours.networks.inner)
        theirs.experts.w2.copy_(ours.networks.outer)
    x = tokens(B)
    torch.manual_seed(3)
    out = run(ours, x)
    torch.manual_seed(3)
    other, loss = theirs(x)
    assert 0.02 < out.statistics["dropped"] < 0.9
    assert_close(out.y, other, rtol=1e-6, atol=1e-6)
    assert_close(out.auxiliary_loss, loss, rtol=1e-6, atol=1e-6)
    mine = gradients(out.y, [ours.router, ours.networks.inner])
    their = gradients(other, [theirs.gate.w_gating, theirs.experts.w1])
    assert_close(mine[0], their[0].T, rtol=1e-5, atol=1e-5)
    assert_close(mine[1], their[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_product_keys_with_the_authors_network(training):
    """Linear, batch norm and ReLU for each layer of the queries, the last without ReLU, by PyTorch's modules; then
    every one of the keys^2 values is scored."""
    heads, keys, half = 3, 6, 5
    options = f"keys={keys}, heads={heads}, choices=4, key_width={2 * half}, query_layers=(9, 7)"
    ours = build(f"productkey({options})").train(training)
    widths = [WIDTH, 9, 7, heads * 2 * half]
    layers = []
    for linear, norm in zip([*ours.hidden, ours.query], [*ours.hidden_norms, ours.norm], strict=True):
        theirs = nn.BatchNorm1d(len(norm.weight)).double()
        torch.nn.init.normal_(norm.mean)
        torch.nn.init.uniform_(norm.variance, 0.5, 2.0)
        state = {"weight": norm.weight, "bias": norm.bias, "running_mean": norm.mean, "running_var": norm.variance}
        theirs.load_state_dict({name: part.detach().clone() for name, part in state.items()}, strict=False)
        layers += [linear, theirs, nn.ReLU()]
    assert [layer.out_features for layer in layers[::3]] == widths[1:]
    network = nn.Sequential(*layers[:-1]).train(training)
    x = tokens()
    q = network(x[0]).view(T, heads, 2, half)
    one, two = (torch.einsum("thd,hkd->thk", q[:, :, side], ours.table[:, side]) for side in (0, 1))
    best, at = (one[..., :, None] + two[..., None, :]).flatten(2).topk(4, -1)
    other = (torch.softmax(best, -1)[..., None] * ours.values[at]).sum((1, 2))
    y = run(ours, x).y[0]
    assert_close(y, other)
    leaves = [ours.hidden[0].weight, ours.table, ours.values]
    assert_close(gradients(y, leaves), gradients(other, leaves))
    assert_close(ours.hidden_norms[1].variance, layers[4].running_var)


def test_product_keys():
    peer = importlib.import_module("product_key_memory")
    heads, keys, half = 3, 6, 5
    ours = build(f"productkey(keys={keys}, heads={heads}, choices=4, key_width={2 * half}, norm='layer')").eval()
    theirs = peer.PKM(WIDTH, heads=heads, num_keys=keys, topk=4, dim_head=half).double().eval()
    with torch.no_grad():
        ours.query.bias.zero_()
        # theirs has the halves outside, the heads inside
        theirs.to_queries.weight.copy_(ours.query.weight.view(heads, 2, half, WIDTH).transpose(0, 1).flatten(0, 2))
        theirs.norm.load_state_dict(ours.norm.state_dict())
        theirs.keys.copy_(ours.table.transpose(1, 2))
        theirs.values.weight.copy_(ours.values)
    x = tokens()
    y, other = run(ours, x).y, theirs(x)
    assert_close(y, other)
    mine = gradients(y, [ours.table, ours.values])
    their = gradients(other, [theirs.keys, theirs.values.weight])
    assert_close(mine[0], their[0].transpose(1, 2))
    assert_close(mine[1], their[1])
