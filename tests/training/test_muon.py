"""Muon: against its formula, and resumed."""

import pytest
import torch
from torch import nn

from regard.models import Vit, VitConfig, registry
from regard.models import build as build_model
from regard.training import optimizer_state
from regard.training.checkpoint import CheckpointError
from regard.training.groups import parameter_groups
from regard.training.muon import Muon, orthogonalize


class Small(nn.Module):
    """Layers as a model has them, between an embedding and an output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(2))
        self.output = nn.Linear(6, 7)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.output(x)


def build(**options):
    model = Small()
    groups = parameter_groups(model, weight_decay=0.1, orthogonal=True)
    return model, Muon(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-9, **options)


def train(model, optimizers, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(7, (4, 5), generator=generator)
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 40), (2, 40, 5)])
def test_singular_values_come_near_one(shape):
    made = orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    values = torch.linalg.svdvals(made)
    assert made.shape == shape
    assert 0.6 < values.min() <= values.max() < 1.25


class OneByOne:
    """The formula for each matrix by itself, in float64."""

    def __init__(self, matrices):
        self.kept = [(matrix, torch.zeros_like(matrix, dtype=torch.float64)) for matrix in matrices]

    @torch.no_grad()
    def step(self):
        for matrix, momentum in self.kept:
            gradient = matrix.grad.double()
            momentum.copy_(0.95 * momentum + 0.05 * gradient)
            x = 0.95 * momentum + 0.05 * gradient
            x = x / x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
            matrix.sub_(0.01 * (0.2 * max(matrix.shape) ** 0.5 * x + 0.1 * matrix))


def test_steps_follow_the_formula():
    """The weights in layers are updated by the formula, all others by AdamW."""
    ours, optimizer = build()
    theirs, before = Small(), Small()
    matrices = [part.weight for part in theirs.blocks.modules() if isinstance(part, nn.Linear)]
    others = [one for one in theirs.parameters() if all(one is not matrix for matrix in matrices)]
    groups = [{"params": [one for one in others if one.ndim == n], "weight_decay": 0.1 * (n > 1)} for n in (1, 2)]
    train(ours, [optimizer], 4, seed=1)
    train(theirs, [OneByOne(matrices), torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-9)], 4, seed=1)
    for name, weight in ours.named_parameters():
        assert (weight - before.get_parameter(name)).abs().max() > 0.001
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_resumed_optimizer_goes_on_bit_for_bit(fused):
    straight, optimizer = build(fused=fused)
    train(straight, [optimizer], 2, seed=1)
    weights = {name: part.clone() for name, part in straight.state_dict().items()}
    tensors, facts = optimizer_state.pack_optimizer(optimizer, straight)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    assert {name.rpartition("/")[2] for name in tensors if "blocks" in name and "weight" in name} == {"momentum"}
    train(straight, [optimizer], 2, seed=2)
    resumed, other = build(fused=fused)
    resumed.load_state_dict(weights)
    optimizer_state.unpack_optimizer(other, resumed, tensors, facts)
    train(resumed, [other], 2, seed=2)
    for name, weight in straight.named_parameters():
        torch.testing.assert_close(resumed.get_parameter(name), weight, rtol=0, atol=0)
    del tensors["output.weight/exp_avg"]
    with pytest.raises(CheckpointError, match=r"'output\.weight' is not complete"):
        optimizer_state.unpack_optimizer(other, resumed, tensors, facts)


def test_layers_under_any_name_have_orthogonal_updates():
    """Not only `blocks`: what reads in a Perceiver, the stages of Swin and CoAtNet, the decoder of a Funnel, what pools
    in CoCa."""
    others = {
        ("image class", "perceiver"): {"position.project", "answer.output"},
        ("image class", "swin-nano"): {"merge.0.reduce", "merge.1.reduce", "output"},
        ("image class", "coatnet-nano"): {"hidden_layer", "output"},
        ("image class", "vit-nano"): {"answer.output"},
        ("class", "funnel"): {"answer.output"},
        ("caption", "coca-nano"): {"output"},
    }
    for (predicts, preset), expected in others.items():
        found = registry.presets(predicts)[preset]
        with torch.device("meta"):
            model = build_model(found.form.config(**found.values))
        groups = parameter_groups(model, weight_decay=0.1, orthogonal=True)
        matrices = {id(one) for group in groups if group["orthogonal"] for one in group["params"]}
        linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        assert matrices <= {id(part.weight) for part in linear.values()}
        assert {name for name, part in linear.items() if id(part.weight) not in matrices} == expected


def test_layers_of_an_answer_have_no_orthogonal_updates():
    """PMA pools by a layer, which belongs to the answer as the output does."""
    sizes = {"width": 32, "heads": 4, "inner": 64, "layers": 1}
    with torch.device("meta"):
        model = Vit(VitConfig(image=(32, 32), patch=4, classes=10, pooling="pma", **sizes))
    groups = parameter_groups(model, weight_decay=0.1, orthogonal=True)
    matrices = {id(one) for group in groups if group["orthogonal"] for one in group["params"]}
    pooling = [part for part in model.answer.modules() if isinstance(part, nn.Linear)]
    assert len(pooling) > 1
    assert matrices
    assert not matrices & {id(part.weight) for part in pooling}


def test_a_run_keeps_the_matrices_that_it_was_begun_with():
    """An older version took fewer layers: AdamW goes on with the others, bit for bit."""

    def build_older():
        model = Small()
        matrices = [layer.weight for layer in model.blocks[1] if isinstance(layer, nn.Linear)]
        others = [one for one in model.parameters() if all(one is not matrix for matrix in matrices)]
        groups = [
            {"params": [one for one in others if one.ndim == 2], "weight_decay": 0.1, "orthogonal": False},
            {"params": matrices, "weight_decay": 0.1, "orthogonal": True},
            {"params": [one for one in others if one.ndim == 1], "weight_decay": 0.0, "orthogonal": False},
        ]
        return model, Muon(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-9)

    straight, optimizer = build_older()
    train(straight, [optimizer], 2, seed=1)
    weights = {name: part.clone() for name, part in straight.state_dict().items()}
    tensors, facts = optimizer_state.pack_optimizer(optimizer, straight)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    train(straight, [optimizer], 2, seed=2)
    resumed, other = build()
    resumed.load_state_dict(weights)
    optimizer_state.unpack_optimizer(other, resumed, tensors, facts)
    train(resumed, [other], 2, seed=2)
    for name, weight in straight.named_parameters():
        torch.testing.assert_close(resumed.get_parameter(name), weight, rtol=0, atol=0)
    groups = facts["groups"]
    decayed = [groups[0] | {"options": groups[0]["options"] | {"weight_decay": 0.2}}, *groups[1:]]
    vectors = [*groups[:2], groups[2] | {"options": groups[2]["options"] | {"orthogonal": True}}]
    for wrong in (groups[:2], decayed, vectors, [*groups, groups[0]], [{"options": {}}]):
        model, other = build()
        before = optimizer_state.pack_optimizer(other, model)[1]
        with pytest.raises(CheckpointError, match="groups do not match"):
            optimizer_state.unpack_optimizer(other, model, tensors, facts | {"groups": wrong})
        assert optimizer_state.pack_optimizer(other, model)[1] == before


@pytest.mark.parametrize("orthogonal", [True, False])
def test_a_run_keeps_the_learning_rates_that_it_was_begun_with(orthogonal):
    """An older version counted other parameters among the embeddings, by which layer_decay gave them another share."""
    model = Small()
    groups = parameter_groups(model, layer_decay=0.5, orthogonal=orthogonal)
    if orthogonal:
        older = Muon([dict(group) for group in groups], lr=0.01)
        current = Muon([dict(group) for group in groups], lr=0.01)
    else:
        older = torch.optim.AdamW([dict(group) for group in groups], lr=0.01)
        current = torch.optim.AdamW([dict(group) for group in groups], lr=0.01)
    lowest = older.param_groups.pop(0)
    assert any(lowest["params"][0] is part for part in model.embedding.parameters())
    older.param_groups[-1]["params"] += lowest["params"]
    train(model, [older], 2, seed=1)
    tensors, facts = optimizer_state.pack_optimizer(older, model)
    optimizer_state.unpack_optimizer(current, model, tensors, facts)
    for ours, theirs in zip(current.param_groups, older.param_groups, strict=True):
        assert [id(part) for part in ours["params"]] == [id(part) for part in theirs["params"]]
        assert ours["share"] == theirs["share"]


@pytest.mark.gpu
def test_a_captured_update_is_the_same():
    """Gradients stay where they are, learning rates change from step to step."""
    found = []
    for captured in (False, True):
        model = Small().cuda()
        optimizer = Muon(parameter_groups(model, weight_decay=0.1, orthogonal=True), captured=captured)
        generator = torch.Generator("cuda").manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(6):
                for parameter in model.parameters():
                    parameter.grad.copy_(torch.randn(parameter.shape, generator=generator, device="cuda"))
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + step)
                optimizer.step()
        assert (optimizer.graph is not None) == captured
        torch.cuda.synchronize()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    for plain, replayed in zip(*found, strict=True):
        torch.testing.assert_close(replayed, plain, rtol=0, atol=0)


def test_a_vector_has_no_orthogonal_update():
    with pytest.raises(ValueError, match=r"one of a matrix, got a parameter of shape \(3,\)"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "orthogonal": True}])
