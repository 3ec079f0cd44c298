"""TokenLearner: the formulas of the paper in loops, and padding that changes nothing."""

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
from torch.testing import assert_close

import regard
from regard.attention.base import Rows
from regard.models.tokenlearner import TokenLearner, TokenLearnerConfig
from regard.reference import blend
from regard.spec import ATTENTION

SPECS = [ATTENTION.find(name).examples[0] for name in ATTENTION.names()]
FORMS = [{}, {"norm": "post"}, {"classes": 5}, {"classes": 5, "pooling": "pma", "seeds": 2}, {"tokens": 1}]


def raw(**options) -> TokenLearner:
    sizes = {"vocabulary": VOCABULARY, "width": 16, "heads": 4, "inner": 32, "dropout": 0.0, "layers": 3}
    return TokenLearner(TokenLearnerConfig(**(sizes | {"tokens": 4, "learner_inner": 10} | options)))


def build(**options) -> TokenLearner:
    return shaken(raw(**options))


def scores(layer, vector: torch.Tensor) -> torch.Tensor:
    return linear(gelu(linear(norm(vector, layer.norm), layer.inner)), layer.outer)


def plain(model: TokenLearner, row: torch.Tensor) -> torch.Tensor:
    """The logits of one row in loops."""
    config, learner, fuser = model.config, model.learner, model.fuser
    x = embedded(model.first.embedding, model.first.position, row)
    for layer in model.first.blocks:
        x = block(layer, x, gelu)
    found = [scores(learner.scores, vector) for vector in x]
    z = torch.stack([blend(torch.stack([score[s] for score in found]), list(x)) for s in range(config.tokens)])
    for layer in model.blocks:
        z = block(layer, z, gelu)
    if config.classes is not None:
        z = [norm(vector, model.norm) if config.norm == "pre" else vector for vector in z]
        return linear(sum(z) / len(z), model.answer.output)
    normed = [norm(vector, fuser.before) for vector in z]
    weight, bias = fuser.across.weight, fuser.across.bias
    mixed = [sum(w * vector for w, vector in zip(line, normed, strict=True)) for line in weight]
    u = [norm(vector + number, fuser.after) for vector, number in zip(mixed, bias, strict=True)]
    outs = []
    for vector in x:
        gates = [1 / (1 + torch.exp(-score)) for score in scores(fuser.scores, vector)]
        out = vector + sum(gate * part for gate, part in zip(gates, u, strict=True))
        outs.append(norm(out, model.norm) if config.norm == "pre" else out)
    return torch.stack(outs) @ model.first.embedding.weight.T


@pytest.mark.parametrize("form", [*FORMS[:3], FORMS[4], {"learn_after": 2}], ids=str)
@pytest.mark.parametrize("T", [1, 2, 9])
def test_reference(form, T):
    model, tokens = build(**form), ids(B=2, T=T)
    for row, logits in zip(tokens, model(tokens).logits, strict=True):
        assert_close(logits, plain(model, row))


@pytest.mark.parametrize("form", FORMS[:4], ids=str)
def test_padding_and_gradients(form):
    model = build(**form)
    check_padding(model)
    check_gradients(model)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "self" in regard.facts(spec).roles])
def test_any_attention(spec):
    check_padding(build(attention=spec))


@pytest.mark.parametrize("position", regard.names("position"))
def test_positions(position):
    check_padding(build(position=position))


def test_map():
    """A share of each real token for each learnt one, and none of padding."""
    model = build()
    found = model.map(ids(), keep=KEEP)
    assert found.shape == (4, 4, 11)
    assert_close(found.sum(-1), torch.ones(4, 4, dtype=torch.float64))
    assert not found.mT[~KEEP].any()
    for row in range(4):
        assert_close(found[row][:, KEEP[row]], model.map(ids()[row : row + 1, KEEP[row]])[0])


def test_equal_scores_give_the_mean():
    model = build()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    with torch.no_grad():
        model.learner.scores.outer.weight.zero_()
        model.learner.scores.outer.bias.zero_()
    assert_close(model.learner(x, Rows.full(x)), x.mean(1, keepdim=True).expand(-1, 4, -1))


def test_the_fuser_adds_nothing_at_first():
    model = raw().double().eval()
    tokens = ids()
    x = model.first(tokens, Rows.full(tokens)).y
    assert_close(model(tokens).logits, model.norm(x) @ model.first.embedding.weight.T)


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if regard.facts(spec).loss and "self" in regard.facts(spec).roles]
)
def test_second_losses_are_handed_on(spec):
    """Of every layer: one before the length changes, one behind."""
    both, one = (build(attention=specs, layers=2).train()(ids()).loss for specs in (spec, [spec, "softmax"]))
    assert both > one > 0
    assert build()(ids()).loss is None


def test_refusals():
    with pytest.raises(ValueError, match="learn_after must leave layers on both sides: 1 to 2 of 3, got 3"):
        build(learn_after=3)
    with pytest.raises(ValueError, match="layers must be at least 2, got 1"):
        TokenLearnerConfig(layers=1)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        TokenLearnerConfig(tokens=0)
    with pytest.raises(ValueError, match="kind must be 'tokenlearner', got 'encoder'"):
        TokenLearnerConfig(kind="encoder")
    with pytest.raises(ValueError, match="cannot take role 'self'"):
        build(attention="xl")
