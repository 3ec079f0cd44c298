"""The Vision Transformer: published sizes, any attention over patches, grids, positions and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import regard
from regard.core.rows import Rows
from regard.models import ModelConfig, Vit, VitConfig, build, registry
from regard.models.block import Block, BlockState
from regard.models.recording import take_map
from regard.models.vision.grid import Grid, resize_table
from regard.models.vision.patches import Convolutions, Patches
from regard.spec import ATTENTION, POSITIONS

IMAGENET = {"image": (224, 224), "classes": 1000}
# of CCT the authors print 0.28, 3.17 and 3.76 million
PARAMETERS = [
    ("vit-tiny", IMAGENET, 5_717_416),
    ("vit-small", IMAGENET, 22_050_664),
    ("vit-base", IMAGENET, 86_567_656),
    ("vit-base", {"image": (384, 384), "classes": 1000}, 86_859_496),
    ("vit-base-32", IMAGENET, 88_224_232),
    ("vit-large", IMAGENET, 304_326_632),
    ("vit-huge", IMAGENET, 632_045_800),
    ("vit-tiny-4", {}, 5_362_762),
    ("vit-lite", {}, 3_190_538),
    ("cvt", {}, 3_190_283),
    ("cct-2", {}, 283_723),
    ("cct-6", {}, 3_168_267),
    ("cct-7", {}, 3_760_139),
    ("vit-nano", {}, 141_898),
    # DeiT with its second token and output layer
    ("vit-tiny", IMAGENET | {"distillation": "answer"}, 5_910_800),
    ("vit-small", IMAGENET | {"distillation": "answer"}, 22_436_432),
    ("vit-base", IMAGENET | {"distillation": "answer"}, 87_338_192),
]
SPECS = dict.fromkeys([*ATTENTION.names(), *(ATTENTION.find(name).examples[0] for name in ATTENTION.names())])
REFUSED = {
    spec: "cannot take role 'self'" for spec in SPECS if "self" not in ATTENTION.find(spec.split("(")[0]).facts.roles
}
REFUSED |= {"heads": "needs the specs to mix"}


def small(**options) -> Vit:
    torch.manual_seed(0)
    sizes = {"image": (16, 24), "patch": 4, "width": 16, "heads": 4, "inner": 24, "layers": 2, "classes": 5}
    return Vit(VitConfig(**(sizes | {"pooling": "mean"} | options))).double().eval()


def pictures(B: int = 2, image: tuple[int, int] = (16, 24), seed: int = 1) -> torch.Tensor:
    return torch.randn(B, 3, *image, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("preset", "options", "parameters"), PARAMETERS)
def test_published_parameter_counts(preset, options, parameters):
    values = registry.presets("image class")[preset].values
    with torch.device("meta"):
        model = build(VitConfig(**values | options))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_every_preset_is_counted():
    assert {name for name, *_ in PARAMETERS} == set(registry.find("vit").forms["image class"].presets)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in REFUSED])
def test_every_attention_reads_patches(spec):
    """On a grid of 4 x 6 patches, by its name alone, and with small windows and blocks."""
    model, images = small(attention=spec).train(), pictures().requires_grad_()
    out = model(images)
    assert out.logits.shape == (2, 5)
    loss = out.logits.square().mean() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)
    loss.backward()
    assert torch.isfinite(out.logits).all()
    assert torch.isfinite(images.grad).all()
    assert images.grad.flatten(1).norm(dim=1).min() > 0
    model.eval()(pictures())


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cannot_read_patches_says_so(spec):
    with pytest.raises(ValueError, match=REFUSED[spec]):
        small(attention=spec)


def test_patches_are_a_convolution():
    torch.manual_seed(0)
    stem, images = Patches(3, 7, 4).double(), pictures()
    grid = F.conv2d(images, stem.weight, stem.bias, stride=4)
    assert_close(stem(images), grid)
    assert_close(stem.vectors(images), grid.flatten(2).mT)


@pytest.mark.parametrize(
    ("image", "options", "grid"),
    [
        ((32, 32), {"layers": 1}, (16, 16)),
        ((32, 32), {"layers": 2}, (8, 8)),
        ((9, 5), {"layers": 2}, (3, 2)),
        ((12, 20), {"layers": 1, "pooling": False}, (12, 20)),
        ((64, 33), {"layers": 2, "kernel": 7, "stride": 2}, (4, 3)),
        ((32, 24), {"layers": 3, "pooling": 2, "norm": True}, (8, 6)),
    ],
)
def test_convolutions_leave_the_grid_they_say(image, options, grid):
    options = {"layers": 1, "kernel": 3, "stride": 1, "between": 4, "pooling": True, "norm": False} | options
    stem = Convolutions(3, 5, **options).double()
    assert stem.grid(*image) == grid
    assert stem(pictures(image=image)).shape == (2, 5, *grid)
    assert stem.vectors(pictures(image=image)).shape == (2, grid[0] * grid[1], 5)


def test_a_convolution_stem_is_its_layers():
    """Convolution, ReLU and the largest of 3 x 3 at every second place, written out."""
    options = {"kernel": 3, "stride": 1, "between": 4}
    stem = Convolutions(2, 3, layers=1, pooling=True, norm=False, **options).double()
    images = pictures()[:1, :2]
    h, w = images.shape[2:]
    maps, weight = torch.zeros(3, h, w, dtype=torch.float64), stem.convolve[0].weight
    padded = F.pad(images[0], (1, 1, 1, 1))
    for r in range(h):
        for c in range(w):
            maps[:, r, c] = (weight * padded[:, r : r + 3, c : c + 3]).sum((1, 2, 3)).clamp(min=0)
    pooled = torch.stack(
        [
            maps[:, max(2 * r - 1, 0) : 2 * r + 2, max(2 * c - 1, 0) : 2 * c + 2].amax((1, 2))
            for r in range(h // 2)
            for c in range(w // 2)
        ]
    )
    assert_close(stem.vectors(images)[0], pooled)


def test_a_stem_with_norms_pools_after_its_last_layers():
    stem = Convolutions(2, 3, layers=3, kernel=3, stride=1, between=4, pooling=1, norm=True).double().train()
    x = images = pictures()[:, :2]
    for convolution in stem.convolve:
        x = F.conv2d(x, convolution.weight, padding=1)
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
        x = ((x - mean) / (variance + 1e-5).sqrt()).clamp(min=0)
    assert_close(stem(images), F.max_pool2d(x, 3, 2, 1))
    with pytest.raises(ValueError, match=r"at most stem_layers \(3\), got 4"):
        Convolutions(2, 3, layers=3, kernel=3, stride=1, between=4, pooling=4, norm=False)


def test_a_class_token_stands_first():
    model = small(pooling="first")
    with torch.no_grad():
        model.first.normal_()
    y = model.encode(pictures()).x
    assert y.shape == (2, 25, 16)
    assert_close(model(pictures()).logits, model.answer.output(y[:, 0]))
    assert model.grids() == [Grid(4, 6, 1)] * 2
    assert torch.zeros_like(Vit(model.config).first).equal(Vit(model.config).first)


def test_without_classes_there_are_vectors():
    model = small(classes=None)
    assert model.encode(pictures()).x.shape == (2, 24, 16)
    assert not any(name.startswith("answer") for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match="no classes: build it with classes, or use encode"):
        model(pictures())


@pytest.mark.parametrize("pooling", ["mean", "max", "sequence", "pma"])
def test_without_positions_the_order_of_patches_does_not_matter(pooling):
    model, images = small(position="none", pooling=pooling), pictures()
    patches = (
        images.unflatten(3, (6, 4)).unflatten(2, (4, 4)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    )  # [B, n, C, P, P]
    mixed = patches[:, torch.randperm(24, generator=torch.Generator().manual_seed(2))]
    mixed = mixed.unflatten(1, (4, 6)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    assert_close(model(mixed).logits, model(images).logits)
    learned = small(pooling=pooling)
    assert (learned(mixed).logits - learned(images).logits).abs().max() > 1e-5


def test_images_in_a_batch_do_not_meet():
    model, images = small(attention="performer(features=8)", pooling="first"), pictures(3)
    assert_close(model(images).logits[1:2], model(images[1:2]).logits)


@pytest.mark.parametrize(
    "attention", ["image(block=[2, 3], memory=[1, 2])", "heads(image(block=[2, 2], memory=[1, 1]))"]
)
@pytest.mark.parametrize("position", ["learned", "rotary", "rotary(columns=None)", "none"])
def test_blocks_of_an_image_are_read_in_their_order_and_answered_in_ours(attention, position):
    """Whole blocks of the size of the image are softmax, whatever the order; smaller ones see what lies around them."""
    whole = small(attention="image(block=[4, 6], memory=[0, 0])", position=position)
    plain = small(attention="softmax", position=position)
    plain.load_state_dict(whole.state_dict())
    assert_close(whole(pictures()).logits, plain(pictures()).logits)
    model = small(attention=attention, position=position, layers=1)
    plain = small(attention="softmax", position=position, layers=1)
    for name, tensor in zip(plain.state_dict(), model.state_dict().values(), strict=True):
        plain.state_dict()[name].copy_(tensor)
    (grid,), (maps,) = model.grids(), model.maps(pictures())
    (dense,) = plain.maps(pictures())
    block = [(t // 6 // 2, t % 6 // (3 if "3" in attention else 2)) for t in range(24)]
    rows, columns = (1, 2) if "3" in attention else (1, 1)
    high, wide = 2, 3 if "3" in attention else 2
    for i in range(24):
        top, left = block[i][0] * high, block[i][1] * wide
        seen = [
            j
            for j in range(24)
            if top - rows <= j // 6 < top + high + rows and left - columns <= j % 6 < left + wide + columns
        ]
        expected = torch.zeros_like(dense[:, :, i])
        expected[..., seen] = dense[:, :, i, seen] / dense[:, :, i, seen].sum(-1, keepdim=True)
        assert_close(maps[:, :, i], expected)
    assert sorted(grid.order.tolist()) == list(range(24))
    # a recorder sees the tokens as the layer does
    (raw,) = model.maps(pictures(), recorder=lambda layer, *a, **o: take_map(layer, *a, **o))
    assert_close(raw[:, :, grid.order.argsort()][..., grid.order.argsort()], maps)


def test_axial_knows_its_columns():
    model = small(attention="axial", layers=1)
    assert model.blocks[0].attention.width == 6
    (maps,) = model.maps(pictures())
    layer, x = (
        model.blocks[0].attention,
        model.blocks[0].norms[0](
            model.position.add(model.stem.vectors(pictures()), Rows.full(pictures()[:, 0, 0, :24]))
        ),
    )
    assert_close(maps, layer.weights(x))


@pytest.mark.parametrize(
    "spec", ["mixer(inner=5)", "gmlp", "linformer(rank=3)", "synthesizer", "heads(mixer(inner=5), softmax)"]
)
def test_tables_have_the_length_of_the_image(spec):
    model = small(attention=spec)
    lengths = {part.longest for part in model.blocks.modules() if isinstance(getattr(part, "longest", None), int)}
    assert lengths == {24}
    assert model.position.longest == 24
    assert regard.models.max_positions(model) == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "axial(width=8)"}, "'axial' has width=8, and the tokens stand in rows of 6: leave width out"),
        ({"attention": "axial", "pooling": "first"}, "a class token is no cell: use pooling='mean'"),
        ({"attention": "mixer(longest=20)"}, "'mixer' has longest=20, and the model 24 tokens"),
        ({"attention": "image(block=[2, 4], memory=[1, 1])"}, "multiple of the columns of a block"),
        ({"attention": "image(block=[3, 3], memory=[1, 1])"}, "multiple of 3 rows of a block, got 4"),
        ({"attention": "heads(image(block=[2, 2], memory=[1, 1]), softmax)"}, "in different orders"),
        ({"position": "rotary(columns=4)"}, "'rotary' has columns=4, and for this model it is 6"),
        ({"position": "sinusoidal(apart=True)"}, "'sinusoidal' has apart=True, and for this model it is False"),
        ({"position": "learned(longest=99)"}, "'learned' has longest=99, and for this model it is 24"),
        (
            {"patch": 5},
            "16 x 24 pixels is not cut into patches of 5 x 5 without a rest: .* resize the images to 15 x 20",
        ),
        ({"image": (16,)}, "image must be height and width in pixels"),
        ({"seeds": 2}, "seeds and seed_layers are for pooling 'pma'"),
        ({"kind": "vits"}, "kind must be 'vit'"),
        ({"drop_path": 1.0}, "drop_path must be at least 0 and below 1"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        small(**options)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(2, 3, 16, 16), r"\[batch, 3, 16, 24\], got \[2, 3, 16, 16\]: resize"),
        (torch.zeros(2, 1, 16, 24), r"got \[2, 1, 16, 24\]"),
        (torch.zeros(3, 16, 24), r"got \[3, 16, 24\]"),
        (torch.zeros(2, 3, 16, 24, dtype=torch.uint8), "floating-point numbers, got torch.uint8: divide by 255"),
        ([1], "got list"),
    ],
)
def test_images_of_another_kind(images, words):
    with pytest.raises(ValueError, match=words):
        small()(images)


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("position", ["sinusoidal", "fourier", "rotary", "alibi", "buckets", "xl", "shaw", "none"])
def test_positions_do_not_tell_the_class_token_where_it_is(position, pooling):
    """Where distances are added to logits, the class token reads patches as if none of them stood anywhere."""
    model = small(position=position, pooling=pooling, layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert torch.isfinite(model(pictures()).logits).all()
    layer = model.blocks[0].attention
    if position in ("alibi", "buckets", "xl", "shaw"):
        assert layer.position.apart == (pooling == "first")
    kind = POSITIONS.find(position).facts.kind
    if pooling == "first" and kind == "bias":
        (maps,) = model.maps(pictures())
        plain = small(position="none", pooling=pooling, layers=1)
        plain.load_state_dict({n: t for n, t in model.state_dict().items() if "attention.position" not in n})
        assert_close(maps[:, :, 0], plain.maps(pictures())[0][:, :, 0])


def test_rotations_depend_on_rows_and_columns_apart():
    """Moving query and key together along either axis changes no product; the class token is not turned."""
    rotary = small(position="rotary(base=10.0)", pooling="first").blocks[0].attention.position
    q, k = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64).unbind()

    def product(i, j):
        at = [torch.tensor([[1 + r * 6 + c]]) for r, c in (i, j)]
        return (rotary.rotate(q, at[0]) * rotary.rotate(k, at[1])).sum()

    assert_close(product((0, 1), (2, 3)), product((1, 3), (3, 5)))
    assert (product((0, 1), (2, 3)) - product((0, 1), (3, 2))).abs() > 1e-3
    # as far along the line, in another row
    assert (product((0, 5), (1, 0)) - product((1, 0), (1, 1))).abs() > 1e-3
    assert_close(rotary.rotate(q, torch.tensor([[0]])), q)


def test_resize_keeps_what_is_linear_and_the_class_row():
    old, new = Grid(4, 6, 1), Grid(7, 3, 1)
    row, column = torch.meshgrid(torch.linspace(0, 1, 4), torch.linspace(0, 1, 6), indexing="ij")
    table = torch.cat([torch.tensor([[9.0, -9.0]]), torch.stack([row + 2 * column, row], -1).flatten(0, 1)])
    resized = resize_table(table, old, new)
    row, column = torch.meshgrid(torch.linspace(0, 1, 7), torch.linspace(0, 1, 3), indexing="ij")
    assert_close(resized[1:], torch.stack([row + 2 * column, row], -1).flatten(0, 1))
    assert_close(resized[0], table[0], rtol=0, atol=0)
    assert resize_table(table, old, old) is table


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "first"},
        {"position": "rotary"},
        {"position": "fourier", "pooling": "first"},
        {"attention": "axial"},
        {"position": "none"},
    ],
)
def test_a_model_for_images_of_another_size(options):
    model = small(**options)
    same, larger = model.resize((16, 24)), model.resize((20, 32))
    assert_close(same(pictures()).logits, model(pictures()).logits, rtol=0, atol=0)
    assert larger.config.image == (20, 32)
    assert larger(pictures(image=(20, 32))).logits.shape == (2, 5)
    assert_close(larger.blocks[0].norms[0].weight, model.blocks[0].norms[0].weight)
    with torch.no_grad():
        larger.stem.weight.zero_()
    assert model.stem.weight.any(), "the weights are copies"


def test_weights_of_places_cannot_be_resized():
    model = small(attention="mixer(inner=5)")
    with pytest.raises(ValueError, match=r"blocks.0.attention.gather is \[5, 24\] here and \[5, 40\] for the new size"):
        model.resize((20, 32))


def test_stochastic_depth_leaves_rows_out_in_training_only():
    model = small(drop_path=0.6, layers=3, position="none").float()
    assert [block.drop_path.p for block in model.blocks] == [0.0, 0.3, 0.6]
    x = torch.ones(4000, 2, 16)
    torch.manual_seed(0)
    out = model.blocks[2].drop_path.train()(x)
    kept = out[:, 0, 0] > 0
    assert_close(out[kept], (x / 0.4)[kept])
    assert not out[~kept].any(), "a row is left out as a whole"
    assert abs(kept.float().mean() - 0.4) < 0.03
    assert model.blocks[2].drop_path.eval()(x) is x
    assert model.blocks[0].drop_path.train()(x) is x
    images = pictures(8).float()
    assert_close(model.eval()(images).logits, small(layers=3, position="none").float()(images).logits)
    torch.manual_seed(0)
    assert (model.train()(images).logits - model(images).logits).abs().max() > 1e-4


def test_a_layer_that_decodes_is_never_left_out():
    config = ModelConfig(kind="decoder", width=16, heads=4, inner=16, dropout=0.0)
    block = Block(config, "softmax", None, "causal", drop_path=0.9).train()
    x = torch.randn(50, 3, 16)
    state = block.attention.start(50)
    y = block(x, state.progress.place(Rows.full(x)), state=BlockState(state, None)).y
    assert_close(y, block.eval()(x, Rows.full(x)).y)


def test_half_precision_under_autocast():
    model = small(pooling="first", attention=["softmax", "local(window=3)"]).float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(pictures().float()).logits
    assert_close(logits.float(), model(pictures().float()).logits, rtol=0.1, atol=0.05)


def test_a_second_token_answers_too():
    model, images = small(pooling="first", distillation="answer"), pictures()
    with torch.no_grad():
        model.second.normal_()
    hidden = model.encode(images).x
    assert hidden.shape[1] == 2 + 24
    both = (model.answer.output(hidden[:, 0]) + model.second_answer.output(hidden[:, 1])) / 2
    assert_close(model(images).logits, both)
    resized = model.resize((16, 32))
    assert_close(resized.position.table[:2], model.position.table[:2], rtol=0, atol=0)
    assert small(pooling="first", distillation="token").second_answer is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooling": "mean"}, "use pooling 'first'"),
        ({"pooling": "first", "position": "rotary"}, "takes position 'learned' or 'none', got 'rotary'"),
    ],
)
def test_where_a_second_token_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        small(distillation="token", **options)
