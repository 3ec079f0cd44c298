"""Perceiver and TokenLearner over patches, and the network of convolutions that they are compared with."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from regard.core.rows import Memory, Rows
from regard.models import (
    Convnet,
    ConvnetConfig,
    ImagePerceiver,
    ImagePerceiverConfig,
    ImageTokenLearner,
    ImageTokenLearnerConfig,
    build,
    complete_config,
    registry,
)

SIZES = {"image": (16, 24), "patch": 4, "width": 16, "heads": 4, "inner": 24, "layers": 2, "classes": 5}
SELF = ["axial", "linear", "linformer", "local(window=2)", "luna", "mixer", "swin(window=2)"]
CROSS = ["linear", "linformer", "luna", "performer"]


def perceiver(**options) -> ImagePerceiver:
    torch.manual_seed(0)
    return ImagePerceiver(ImagePerceiverConfig(**(SIZES | {"latents": 6} | options))).double().eval()


def tokenlearner(**options) -> ImageTokenLearner:
    torch.manual_seed(0)
    return ImageTokenLearner(ImageTokenLearnerConfig(**(SIZES | {"tokens": 3} | options))).double().eval()


def convnet(**options) -> Convnet:
    torch.manual_seed(0)
    sizes = {"image": (16, 24), "width": 4, "layers": (1, 2), "classes": 5}
    return Convnet(ConvnetConfig(**(sizes | options))).double().eval()


def pictures(B: int = 2, image: tuple[int, int] = (16, 24)) -> torch.Tensor:
    return torch.randn(B, 3, *image, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("perceiver", 3_253_002), ("tokenlearner", 3_212_114), ("convnet", 2_777_674), ("resnet-20", 272_474)],
)
def test_parameter_counts(preset, parameters):
    found = registry.presets("image class")[preset]
    with torch.device("meta"):
        model = build(found.form.config(**found.values))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("make", [perceiver, tokenlearner, convnet])
def test_an_image_alone_is_the_image_in_a_batch(make):
    model, images = make(), pictures(3)
    assert_close(model(images).logits[1:2], model(images[1:2]).logits)
    assert model(images).logits.shape == (3, 5)
    with pytest.raises(ValueError, match=r"images must be \[batch, 3, 16, 24\]"):
        model(pictures(image=(24, 16)))


@pytest.mark.parametrize("make", [perceiver, tokenlearner, convnet])
def test_gradients_reach_every_parameter(make):
    model, images = make(drop_path=0.1).train(), pictures().requires_grad_()
    model(images).logits.square().sum().backward()
    assert (images.grad.abs().sum(1) > 0).all()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("position", ["fourier", "fourier(columns=None)", "sinusoidal", "learned", "none"])
def test_latents_read_patches_with_their_places(position):
    """The order of patches matters by their positions alone."""
    model, images = perceiver(position=position), pictures()
    moved = torch.cat([images[:, :, 4:], images[:, :, :4]], 2)
    same = (model(images).logits - model(moved).logits).abs().max() < 1e-9
    assert same == (position == "none")
    x = model.stem.vectors(images)
    read = Memory(model.position.add(x, Rows.full(x)), None)
    assert_close(model.read(images).x, read.x)
    assert_close(model.encode(images).x, model.norm(model.think(read).y))


def test_logits_do_not_grow_with_what_layers_add():
    model, images = perceiver(), pictures()
    grown, old = perceiver(), perceiver(final_norm=False)
    for one in (grown, old):
        for linear in (one.blocks[-1].feedforward.outer, one.blocks[-1].attention.output):
            linear.weight.data *= 1e4
    largest = [one(images).logits.abs().max() for one in (model, grown, old)]
    assert largest[1] < 5 * largest[0]
    assert largest[2] > 100 * largest[0]
    assert not [name for name, _ in perceiver(norm="post").named_parameters() if name.startswith("norm.")]


def test_a_saved_perceiver_without_a_final_norm_stays_without():
    old = perceiver(final_norm=False)
    saved = {name: value for name, value in dataclasses.asdict(old.config).items() if name != "final_norm"}
    loaded = build(ImagePerceiverConfig(**complete_config(saved))).double().eval()
    loaded.load_state_dict(old.state_dict())
    assert_close(loaded(pictures()).logits, old(pictures()).logits, rtol=0, atol=0)


def test_fourier_features_know_the_grid():
    model = perceiver()
    assert model.position.facts.name == "fourier"
    assert model.position.sizes == (4, 6)
    model = perceiver(position="fourier(bands=3, columns=None)")
    assert model.position.sizes == (24,)
    with pytest.raises(ValueError, match="'fourier' has columns=4, and for this model it is 6"):
        perceiver(position="fourier(columns=4)")


@pytest.mark.parametrize("position", ["fourier(bands=3)", "fourier(bands=3, highest=3.0)", "learned"])
def test_a_perceiver_of_images_of_another_size(position):
    model = perceiver(position=position)
    same, larger = model.resize((16, 24)), model.resize((28, 44))
    assert_close(same(pictures()).logits, model(pictures()).logits, rtol=0, atol=0)
    assert larger(pictures(image=(28, 44))).logits.shape == (2, 5)
    zeros = [torch.zeros(1, one.grid.tokens, 16, dtype=torch.float64) for one in (model, larger)]
    before, after = (one.position.add(x, Rows.full(x))[0] for one, x in zip((model, larger), zeros, strict=True))
    after = after.unflatten(0, (7, 11))[::2, ::2].flatten(0, 1)
    # what stood at the same place of the image; frequencies that are not given follow the grid
    same_place = (after - before).abs().max() < 1e-9
    assert same_place == (position != "fourier(bands=3)")


@pytest.mark.parametrize("spec", CROSS)
def test_any_attention_reads_the_patches(spec):
    model, images = perceiver(cross_attention=spec), pictures().requires_grad_()
    model(images).logits.square().sum().backward()
    assert torch.isfinite(images.grad).all()


@pytest.mark.parametrize("spec", SELF)
@pytest.mark.parametrize("make", [perceiver, tokenlearner])
def test_any_attention_in_the_layers(make, spec):
    model, images = make(attention=spec), pictures().requires_grad_()
    model(images).logits.square().sum().backward()
    assert torch.isfinite(images.grad).all()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_learned_tokens_are_sums_of_patches(version):
    model = tokenlearner(version=version, layers=3)
    assert len(model.first.blocks) == 1
    assert len(model.blocks) == 2
    found = model.map(pictures())
    assert found.shape == (2, 3, 24)
    if version == "1.1":
        assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    x = model.first.encode(pictures()).x
    z = found @ x
    y = z
    for block in model.blocks:
        y = block(y, Rows.full(y)).y
    assert_close(model.encode(pictures()).x, model.norm(y))


def test_a_convnet_is_its_formula():
    model, images = convnet(), pictures()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))

    def convolve(x, layer, norm, stride=1):
        x = F.conv2d(x, layer.weight, stride=stride, padding=layer.weight.shape[2] // 2)
        mean, variance, weight, bias = (
            part.view(-1, 1, 1) for part in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    x = convolve(images, model.stem, model.stem_norm).clamp(min=0)
    for block, stride in zip(model.blocks, (1, 2, 1), strict=True):
        y = convolve(x, block.first, block.first_norm, stride).clamp(min=0)
        short = x if stride == 1 else convolve(x, *block.shortcut, stride)
        x = (short + convolve(y, block.second, block.second_norm)).clamp(min=0)
    assert_close(model.eval()(images).logits, F.linear(x.mean((2, 3)), model.output.weight, model.output.bias))


def test_a_convnet_halves_the_map_of_every_stage_but_the_first():
    model = convnet(layers=(1, 1, 1), image=(18, 22))
    assert model.encode(pictures(image=(18, 22))).x.shape == (2, 5 * 6, 16)
    model.train()
    images = pictures(3, (18, 22))
    assert (model(images).logits[1:2] - model(images[1:2]).logits).abs().max() > 1e-6, "batch norms read the batch"


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (perceiver, {"position": "rotary"}, "a Perceiver cannot take position 'rotary'"),
        (perceiver, {"pooling": "first"}, "a Perceiver has no class token"),
        (perceiver, {"classes": None}, "needs classes"),
        (tokenlearner, {"pooling": "first"}, "no class token"),
        (tokenlearner, {"classes": None}, "needs classes"),
        (tokenlearner, {"learn_after": 2}, "must leave layers on both sides: 1 to 1 of 2, got 2"),
        (convnet, {"layers": 2}, "layers must be a number for each stage"),
    ],
)
def test_refusals(make, options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)


def test_stochastic_depth_rises_over_all_layers():
    """Also over both halves of a TokenLearner."""
    expected = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
    learner, latents = tokenlearner(layers=5, drop_path=0.4), perceiver(layers=5, drop_path=0.4)
    assert min(len(learner.first.blocks), len(learner.blocks)) > 1
    for blocks in ([*learner.first.blocks, *learner.blocks], latents.blocks):
        assert_close(torch.tensor([block.drop_path.p for block in blocks]), expected)
