"""ByteNet against loops written from the paper; and as every translator."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from translators import KEEP, TARGET_KEEP, VOCABULARY, Doubled, check_translator, ids

from regard.core.reference import plain_layer_norm
from regard.core.rows import Memory, Rows
from regard.models import ByteNet, ByteNetConfig, build
from regard.models.bytenet import ResidualBlock
from regard.models.registry import presets

SMALL = {"vocabulary": VOCABULARY, "width": 5, "layers": 3, "dilations": (1, 3), "dropout": 0.0}


def built(**options) -> ByteNet:
    torch.manual_seed(0)
    model = build(ByteNetConfig(**SMALL | options)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def block_reference(block: ResidualBlock, xs: list[Tensor], causal: bool, drop: float) -> list[Tensor]:
    first, second, third = block.norms

    def relu(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0)

    narrow = [block.narrow.weight @ relu(plain_layer_norm(x, first)) + block.narrow.bias for x in xs]
    read = [relu(plain_layer_norm(x, second)) for x in narrow]
    k, outs = block.taps.weight.shape[2], []
    for t, x in enumerate(xs):
        total = block.taps.bias
        for i in range(k):
            at = t + (i - (k - 1 if causal else k // 2)) * block.dilation
            if 0 <= at < len(xs):
                total = total + block.taps.weight[:, :, i] @ read[at]
        outs.append(x + drop * (block.widen.weight @ relu(plain_layer_norm(total, third)) + block.widen.bias))
    return outs


def reference(model: ByteNet, source: Tensor, target: Tensor, drop: float = 1) -> Tensor:
    """Logits of one sentence, column by column; where dropout stands, vectors are multiplied by `drop`."""
    config, zero = model.config, torch.zeros(2 * model.config.width, dtype=torch.float64)
    columns = math.ceil(config.unfold_ratio * len(source) + config.unfold_extra)
    xs = [drop * model.source_embedding.weight[w] for w in source] + [zero] * (columns - len(source))
    for block in model.encoder:
        xs = block_reference(block, xs, False, drop)
    ys = []
    for t, word in enumerate(target):
        column, y = xs[t] if t < columns else zero, drop * model.target_embedding.weight[word]
        if model.joined is None:
            ys.append(y + column)
        else:
            ys.append(model.joined.weight @ torch.cat([y, column]) + model.joined.bias)
    for block in model.decoder:
        ys = block_reference(block, ys, True, drop)
    ys = [plain_layer_norm(y, model.norm) for y in ys]
    return torch.stack([model.output.weight @ torch.where(y > 0, y, 0) + model.output.bias for y in ys])


OPTIONS = [
    {},
    {"join": "concatenate", "tied": False, "target_vocabulary": VOCABULARY, "unfold_ratio": 1.5, "unfold_extra": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["add", "concatenate"])
def test_scores_and_gradients_are_those_of_the_paper(options):
    """The third row has 3 or 4 columns for 5 tokens."""
    model = built(**options)
    model.dropout = Doubled()
    source, target = ids(), ids(T=7, seed=2)
    logits = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).logits
    expected = torch.zeros_like(logits)
    for row in range(3):
        expected[row, TARGET_KEEP[row]] = reference(model, source[row, KEEP[row]], target[row, TARGET_KEEP[row]], 2)
    assert_close(logits, expected)
    torch.manual_seed(3)
    towards = torch.randn_like(logits)
    parameters = dict(model.named_parameters())
    ours, theirs = (torch.autograd.grad((made * towards).sum(), parameters.values()) for made in (logits, expected))
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", OPTIONS, ids=["add", "concatenate"])
def test_it_decodes_as_every_translator(options):
    check_translator(built(**options))


def test_a_target_longer_than_the_columns():
    model = built().eval()
    source, target = ids(B=1, T=1), ids(B=1, T=9, seed=2)
    logits = model(source, target).logits
    assert_close(logits[0], reference(model, source[0], target[0]))
    state, found = model.start(1, memory=model.encode(source)), []
    for t in range(9):
        made, state = model.extend(target[:, t : t + 1], state)
        found.append(made)
    assert_close(torch.cat(found, 1), logits)


def test_maps_are_gradients():
    model = built().eval()
    source, target = ids(), ids(T=7, seed=2)
    with torch.inference_mode():
        (found,) = model.maps(source, target, keep=KEEP, target_keep=TARGET_KEEP)
    assert found.shape == (3, 1, 7, 9)
    assert_close(found.sum(-1)[:, 0], TARGET_KEEP.double())
    assert not found.transpose(1, 3)[~KEEP].any()
    for row in (0, 1):
        own, words = source[row, KEEP[row]], target[row, TARGET_KEEP[row]]
        table = model.source_embedding.weight.detach().clone()
        e = table[own].requires_grad_()
        state = model.start(1, memory=Memory(*model._columns(e[None], Rows.full(own[None]))))
        logits = model.output(model.decode_packed(words[None], Rows.full(words[None]), state, None).out.y)
        # behind the last token, the best
        for t, word in enumerate([*words[1:], logits[0, -1].argmax()]):
            grad = torch.autograd.grad(logits[0, t, word], e, retain_graph=True)[0].norm(dim=1)
            assert_close(found[row, 0, TARGET_KEEP[row]][t, KEEP[row]], grad / grad.sum())


def test_taps_stand_where_they_should():
    """Noise in the place of a token: a norm would take a constant away."""
    torch.manual_seed(0)
    block = ResidualBlock(6, 3, 4).double()
    x, noise = torch.randn(2, 1, 25, 12, dtype=torch.float64)
    for causal, reads in ((True, {4, 8, 12}), (False, {8, 12, 16})):
        found = set()
        for at in range(25):
            changed = x.clone()
            changed[:, at] = noise[:, at]
            both = (part + block.convolve(block.read(part), None, not causal) for part in (x, changed))
            if not torch.equal(*(part[0, 12] for part in both)):
                found.add(at)
        assert found == reads


def test_a_new_block_adds_little():
    torch.manual_seed(0)
    block = ResidualBlock(64, 3, 1)
    x = torch.randn(2, 20, 128)
    added = block.convolve(block.read(x), None, True)
    assert 0.03 < added.std() / x.std() < 0.15


def test_published_sizes():
    preset = presets("translation")["bytenet-30"]
    config = preset.form.config(**preset.values | {"vocabulary": 300})
    with torch.device("meta"):
        model = preset.form.module(config)
    assert {sum(part.numel() for part in block.parameters()) for block in model.encoder} == {4_489_600}
    assert len(model.encoder) + len(model.decoder) == 60
    assert config.receptive_field == 373
    assert sum(2 * block.dilation for block in model.decoder) == 372


def test_wrong_configs_and_states_are_refused():
    for options, words in (
        ({"kernel": 2}, "kernel must be odd"),
        ({"dilations": ()}, "dilations must name at least one"),
        ({"unfold_ratio": 0.5}, "unfold_ratio must be at least 1"),
        ({"kind": "encoder"}, "kind must be 'bytenet'"),
    ):
        with pytest.raises(ValueError, match=words):
            ByteNetConfig(**SMALL | options)
    model = built().eval()
    memory = model.encode(ids())
    for call, words in (
        (lambda: model.start(2), r"needs memory=model\.encode"),
        (lambda: model.start(4, memory=memory), "a memory of 3 rows serves a multiple"),
        (lambda: model.extend(ids(T=1), memory), "expected the state of this model"),
        (lambda: model.extend(ids(T=1), model.start(6, memory=memory)), "tokens have 3 rows and the state 6"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
