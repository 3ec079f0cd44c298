"""Activation checkpointing: the same bits, less memory."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from training_runs import assert_same, config, finish, outcome

import regard
from regard import models
from regard.models.config import ModelConfig
from regard.spec import ATTENTION, FEEDFORWARD
from regard.tasks.train import resume
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.recomputing import recompute_layers

SMALL = {"vocabulary": 40, "width": 16, "heads": 4, "inner": 32, "layers": 2, "dropout": 0.3}
KEEP = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 0, 1], [1] * 9]).bool()


def build(**options) -> nn.Module:
    torch.manual_seed(0)
    return models.build(ModelConfig(**SMALL | options)).double()


def build_any(values: dict) -> nn.Module:
    return models.build(models.config_class(values)(**values))


def run_text(model: nn.Module) -> tuple:
    draw = torch.Generator().manual_seed(1)
    source, target = (torch.randint(40, (2, length), generator=draw) for length in (9, 7))
    given = (source, target) if model.config.kind == "encoder-decoder" else (source,)
    return model(*given, keep=KEEP)


def run_images(model: nn.Module) -> tuple:
    return model(torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).double())


def step(model: nn.Module, run: Callable[[nn.Module], tuple], recomputed: bool) -> dict[str, Tensor | None]:
    """Loss, statistics, gradients and buffers after a training step, and the next random number."""
    model = copy.deepcopy(model).train()
    if recomputed:
        recompute_layers(model)
    torch.manual_seed(5)
    # two passes before the backward pass: layers that learn without gradients have learned when the first is repeated
    total, found = torch.zeros((), dtype=torch.double), {}
    for number in range(2):
        logits, auxiliary, statistics = run(model)
        total = total + logits.square().mean() + (0 if auxiliary is None else 0.3 * auxiliary)
        found |= {f"{number} {name}": value for name, value in (statistics or {}).items()}
        found |= {} if auxiliary is None else {f"{number} auxiliary": auxiliary.detach()}
    total.backward()
    found |= {"loss": total.detach(), "next": torch.rand(1)}
    return found | {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


def same(model: nn.Module, run: Callable[[nn.Module], tuple] = run_text) -> dict[str, Tensor | None]:
    expected, got = (step(model, run, recomputed) for recomputed in (False, True))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert_close(got[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    return got


@pytest.mark.parametrize("name", ATTENTION.names())
def test_a_mechanism_gives_the_same_bits(name):
    spec = ATTENTION.find(name).examples[0]
    facts = regard.facts(spec)
    if "self" in facts.roles and facts.padding == "any":
        own, cross = (spec if role in facts.roles else "softmax" for role in ("causal", "cross"))
        same(build(attention=spec, decoder_attention=own, cross_attention=cross))
    elif "causal" in facts.roles:
        same(build(kind="decoder", attention=spec))


@pytest.mark.parametrize("name", FEEDFORWARD.names())
def test_a_feedforward_layer_gives_the_same_bits(name):
    got = same(build(kind="encoder", feedforward=FEEDFORWARD.find(name).examples[0]))
    assert ("0 auxiliary" in got) == FEEDFORWARD.find(name).facts.auxiliary_loss


def test_what_is_learned_without_gradients_is_learned_once():
    model = build(kind="decoder", attention=ATTENTION.find("routing").examples[0])
    got = same(model)["decoder.blocks.0.attention.sums"]
    assert (got - model.decoder.blocks[0].attention.sums).abs().max() > 1e-4


IMAGES = {"image": (16, 16), "classes": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "vit", "width": 8, "heads": 2, "inner": 16, "layers": 1, "stem": "convolution", "stem_norm": True},
        {"kind": "convnet", "width": 4, "layers": (1, 1), "drop_path": 0.5},
        {"kind": "coatnet", "stem_width": 8, "width": 8, "inner": 16, "head_width": 8, "layers": (1, 1, 1)},
    ],
    ids=lambda options: options["kind"],
)
def test_a_model_of_images_gives_the_same_bits(options):
    """Batch norms count each batch once."""
    torch.manual_seed(0)
    same(build_any(IMAGES | options).double(), run_images)


def test_a_feedback_model_gives_the_same_bits():
    options = {name: SMALL[name] for name in ("vocabulary", "width", "heads", "inner", "layers", "dropout")}
    torch.manual_seed(0)
    same(build_any({"kind": "feedback", **options}).double())


def saved_bytes(layers: int, recomputed: bool) -> int:
    """Of the tensors that a forward pass keeps for the backward pass, without the weights."""
    model = build(kind="encoder", layers=layers, dropout=0.1).train()
    if recomputed:
        recompute_layers(model)
    weights = {part.data_ptr() for part in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    # what a layer keeps is hidden from these hooks by those of a checkpoint, which keep its inputs
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        alive = model(torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1)))
    del alive
    return sum(kept.values())


def test_a_layer_keeps_no_activation():
    plain, recomputed = ([saved_bytes(layers, kind) for layers in (1, 5)] for kind in (False, True))
    one_input = 2 * 9 * 16 * 8
    assert recomputed[1] - recomputed[0] == 4 * one_input
    assert plain[1] - plain[0] > 10 * (recomputed[1] - recomputed[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "decoder", "reversible": True, "norm": "pre"}, "does not go with model.reversible"),
        ({"kind": "convolutional"}, "a model of kind 'convolutional' has none"),
    ],
)
def test_what_cannot_says_so(options, words):
    with pytest.raises(ValueError, match=words):
        recompute_layers(build_any({"vocabulary": 40, "width": 16, **options}))


def test_a_run_gives_the_same_bits_and_may_turn_to_it(tmp_path):
    options = {"schedule": "constant", "evaluate_every": 2, "save_every": 2}
    finish(config(tmp_path, "plain", steps=4, **options))
    finish(config(tmp_path, "recomputed", steps=4, recompute=True, **options))
    assert_same(tmp_path / "plain", tmp_path / "recomputed")
    finish(config(tmp_path, "turned", steps=2, **options))
    resume(tmp_path / "turned", Display(quiet=True), changes={"training.recompute": True}, steps=4)
    tensors = [outcome(tmp_path / name)[0] for name in ("plain", "turned")]
    assert_close(*tensors, rtol=0, atol=0)


def test_a_refusal_leaves_no_run_behind(tmp_path):
    """Otherwise the command with other settings would be refused, too: the folder holds a run."""
    settings = config(tmp_path, recompute=True)
    settings = replace(settings, model=replace(settings.model, reversible=True, norm="pre"))
    with pytest.raises(ValueError, match=r"does not go with model.reversible"):
        finish(settings)
    assert not (tmp_path / "run").exists()


def test_it_does_not_go_with_the_compiler():
    with pytest.raises(ValueError, match=r"training.recompute does not go with training.compile"):
        TrainingConfig(recompute=True, compile=True)
