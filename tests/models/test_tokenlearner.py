"""TokenLearner: the formulas of the paper and of its authors' code in loops, and padding that changes nothing."""

import pytest
import torch
from lengths import (
    KEEP,
    VOCABULARY,
    block,
    check_gradients,
    check_padding,
    embedded,
    gelu,
    ids,
    linear,
    norm,
    shaken,
)
from quick import one_of_each
from torch.testing import assert_close

import regard
from regard.core.reference import blend
from regard.core.rows import Rows
from regard.models.tokenlearner import TokenLearner, TokenLearnerConfig
from regard.spec import ATTENTION

SPECS = [ATTENTION.find(name).examples[0] for name in ATTENTION.names()]
FORMS = [
    {},
    {"norm": "post"},
    {"classes": 5},
    {"tokens": 1},
    {"learn_after": 2},
    {"fuse": "end"},
    {"classes": 5, "fuse": "layers"},
    {"version": "1.0", "grid": 3},
    {"version": "1.0", "grid": 4, "classes": 5},
    {"classes": 5, "pooling": "pma", "seeds": 2},
]


def raw(**options) -> TokenLearner:
    sizes = {"vocabulary": VOCABULARY, "width": 16, "heads": 4, "inner": 32, "dropout": 0.0, "layers": 3}
    return TokenLearner(TokenLearnerConfig(**(sizes | {"tokens": 4, "learner_inner": 10} | options)))


def build(**options) -> TokenLearner:
    return shaken(raw(**options))


def scores(layer, vector: torch.Tensor) -> torch.Tensor:
    return linear(gelu(linear(norm(vector, layer.norm), layer.inner)), layer.outer)


def convolved(maps: list, kernel: torch.Tensor, width: int) -> list:
    """A 3 x 3 convolution of tokens that lie in lines of so many, with zeros around them and where the text has
    ended."""
    outs = []
    for t in range(len(maps)):
        total = torch.zeros(len(kernel), dtype=torch.float64)
        for up in (-1, 0, 1):
            for aside in (-1, 0, 1):
                line, column = t // width + up, t % width + aside
                if line >= 0 and 0 <= column < width and line * width + column < len(maps):
                    total = total + kernel[:, :, up + 1, aside + 1] @ maps[line * width + column]
        outs.append(total)
    return outs


def learned(learner, x: torch.Tensor, config: TokenLearnerConfig) -> torch.Tensor:
    """The tokens that are made of all."""
    if config.version == "1.1":
        found = [scores(learner.scores, vector) for vector in x]
        return torch.stack([blend(torch.stack([score[s] for score in found]), list(x)) for s in range(config.tokens)])
    maps = [norm(vector, learner.norm) for vector in x]
    for index, kernel in enumerate(learner.kernels):
        maps = convolved([gelu(part) for part in maps] if index else maps, kernel, config.grid)
    shares = [1 / (1 + torch.exp(-part)) for part in maps]
    return torch.stack(
        [sum(share[s] * vector for share, vector in zip(shares, x, strict=True)) for s in range(config.tokens)]
    )


def fused(fuser, z, x: torch.Tensor) -> torch.Tensor:
    """What the learned tokens give back to each of all."""
    normed = [norm(vector, fuser.before) for vector in z]
    weight, bias = fuser.across.weight, fuser.across.bias
    mixed = [sum(w * vector for w, vector in zip(line, normed, strict=True)) for line in weight]
    u = [norm(vector + number, fuser.after) for vector, number in zip(mixed, bias, strict=True)]
    outs = []
    for vector in x:
        gates = [1 / (1 + torch.exp(-score)) for score in scores(fuser.scores, vector)]
        outs.append(sum(gate * part for gate, part in zip(gates, u, strict=True)))
    return torch.stack(outs)


def plain(model: TokenLearner, row: torch.Tensor) -> torch.Tensor:
    """The logits of one row in loops."""
    config = model.config
    x = embedded(model.first.embedding, model.first.position, row)
    for layer in model.first.blocks:
        x = block(layer, x, gelu)
    if config.fuses == "layers":
        for learner, layer, fuser in zip(model.learners, model.blocks, model.fusers, strict=True):
            x = x + fused(fuser, block(layer, learned(learner, x, config), gelu), x)
    else:
        z = learned(model.learner, x, config)
        for layer in model.blocks:
            z = block(layer, z, gelu)
        x = z if config.classes is not None else x + fused(model.fuser, z, x)
    x = [norm(vector, model.norm) if config.norm == "pre" else vector for vector in x]
    if config.classes is not None:
        return linear(sum(x) / len(x), model.answer.output)
    return torch.stack(x) @ model.first.embedding.weight.T


@pytest.mark.parametrize("form", FORMS[:-1], ids=str)
@pytest.mark.parametrize("T", [1, 2, 9])
def test_reference(form, T):
    model, tokens = build(**form), ids(B=2, T=T)
    for row, logits in zip(tokens, model(tokens).logits, strict=True):
        assert_close(logits, plain(model, row))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_padding_and_gradients(form):
    model = build(**form)
    check_padding(model)
    if form.get("tokens") != 1:
        # a single token attends to itself, whatever its query and key
        check_gradients(model)


@pytest.mark.parametrize("spec", one_of_each([spec for spec in SPECS if "self" in regard.facts(spec).roles]))
def test_any_attention(spec):
    check_padding(build(attention=spec))


@pytest.mark.parametrize("position", regard.names("position"))
def test_positions(position):
    check_padding(build(position=position))


@pytest.mark.parametrize("form", [{}, {"fuse": "end"}, {"version": "1.0", "grid": 3}], ids=str)
def test_map(form):
    """A share of each real token for each learned one, and none of padding."""
    model = build(**form)
    found = model.map(ids(), keep=KEEP)
    assert found.shape == (4, 4, 11)
    if "version" in form:
        assert ((found > 0) & (found < 1)).mT[KEEP].all()
    else:
        assert_close(found.sum(-1), torch.ones(4, 4, dtype=torch.float64))
    assert not found.mT[~KEEP].any()
    for row in range(4):
        assert_close(found[row][:, KEEP[row]], model.map(ids()[row : row + 1, KEEP[row]])[0])
    if "fuse" not in form:
        assert (model.map(ids(), keep=KEEP, layer=1) - found).abs().max() > 1e-3


def test_every_layer_learns_and_fuses_by_weights_of_its_own():
    model = raw(layers=5, learn_after=2)
    assert len(model.learners) == len(model.fusers) == 3
    for parts in (model.learners, model.fusers):
        weights = [weight for part in parts for weight in part.parameters()]
        assert len({id(weight) for weight in weights}) == len(weights)


def test_equal_scores_give_the_mean():
    learner = build().learners[0]
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    with torch.no_grad():
        learner.scores.outer.weight.zero_()
        learner.scores.outer.bias.zero_()
    assert_close(learner(x, Rows.full(x)), x.mean(1, keepdim=True).expand(-1, 4, -1))


def test_version_one_is_four_convolutions():
    """Of a square of pixels, by PyTorch's own convolutions: sums of all, with weights from 0 to 1."""
    learner = build(version="1.0", grid=5).learners[0]
    x = torch.randn(2, 25, 16, dtype=torch.float64)
    maps = torch.nn.functional.layer_norm(x, (16,), learner.norm.weight, learner.norm.bias).mT.unflatten(2, (5, 5))
    assert [tuple(kernel.shape) for kernel in learner.kernels] == [(4, 16, 3, 3)] + [(4, 4, 3, 3)] * 3
    for index, kernel in enumerate(learner.kernels):
        maps = torch.nn.functional.conv2d(torch.nn.functional.gelu(maps) if index else maps, kernel, padding=1)
    assert_close(learner(x, Rows.full(x)), torch.sigmoid(maps).flatten(2) @ x)


def test_the_fuser_adds_nothing_at_first():
    model = raw().double().eval()
    tokens = ids()
    x = model.first(tokens, Rows.full(tokens)).y
    assert_close(model(tokens).logits, model.norm(x) @ model.first.embedding.weight.T)


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if regard.facts(spec).auxiliary_loss and "self" in regard.facts(spec).roles]
)
def test_second_losses_are_handed_on(spec):
    """Of every layer: one before the length changes, one behind."""
    both, one = (build(attention=specs, layers=2).train()(ids()).auxiliary_loss for specs in (spec, [spec, "softmax"]))
    assert both > one > 0
    assert build()(ids()).auxiliary_loss is None


def test_refusals():
    with pytest.raises(ValueError, match="learn_after must leave layers on both sides: 1 to 2 of 3, got 3"):
        build(learn_after=3)
    with pytest.raises(ValueError, match="layers must be at least 2, got 1"):
        TokenLearnerConfig(layers=1)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        TokenLearnerConfig(tokens=0)
    with pytest.raises(ValueError, match="kind must be 'tokenlearner', got 'encoder'"):
        TokenLearnerConfig(kind="encoder")
    with pytest.raises(ValueError, match=r"version '1.0' needs grid, the number of tokens in a line"):
        TokenLearnerConfig(version="1.0")
    with pytest.raises(ValueError, match=r"grid is for version '1.0', got version '1.1'"):
        TokenLearnerConfig(grid=4)
    with pytest.raises(ValueError, match="fuse must be 'layers' or 'end' or None, got 'never'"):
        TokenLearnerConfig(fuse="never")
    with pytest.raises(ValueError, match=r"version must be '1.0' or '1.1', got '2'"):
        TokenLearnerConfig(version="2")
    with pytest.raises(ValueError, match="layer must be 0, the tokens are learned once, got 1"):
        build(fuse="end").map(ids(), layer=1)
    with pytest.raises(ValueError, match="cannot take role 'self'"):
        build(attention="xl")
