"""Pooling: the formulas of the papers, padding that changes nothing, and PMA on PyTorch's attention."""

import copy

import pytest
import torch
from lengths import VOCABULARY, block, check_gradients, check_padding, embedded, ids, linear, norm, relu, shaken
from sets import PMA, copy_attention
from torch.testing import assert_close

import regard
from regard.core.reference import blend
from regard.core.rows import Memory, Rows
from regard.models.config import ModelConfig
from regard.models.pooling import Classifier, ClassifierConfig, Pooling
from regard.models.stack import forward_blocks
from regard.models.transformer import Transformer
from regard.spec import ATTENTION

WIDTH = 16
LAYER = ModelConfig(kind="encoder", width=WIDTH, heads=4, inner=24, bias=True, dropout=0.0)
HOW = [
    ("mean", {}),
    ("root", {}),
    ("max", {}),
    ("mean_max", {}),
    ("sequence", {}),
    ("first", {}),
    ("last", {}),
    ("pma", {"seeds": 3}),
    ("pma", {"seeds": 2, "layers": 2}),
]
SPECS = [ATTENTION.find(name).examples[0] for name in ATTENTION.names()]
CROSS = [spec for spec in SPECS if "cross" in regard.facts(spec).roles]
SELF = [spec for spec in SPECS if "self" in regard.facts(spec).roles]


def pool(how: str = "pma", **options) -> Pooling:
    return shaken(Pooling(LAYER, how, **options))


def vectors(B: int = 4, T: int = 9) -> torch.Tensor:
    return torch.randn(B, T, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def plain(layer: Pooling, x: torch.Tensor) -> torch.Tensor:
    """One row [T, E] -> [k, E] in loops."""
    if layer.how == "first":
        return x[:1]
    if layer.how == "last":
        return x[-1:]
    if layer.how == "max":
        return torch.stack([max(column) for column in x.T])[None]
    if layer.how == "mean_max":
        return torch.stack([sum(x) / len(x), torch.stack([max(column) for column in x.T])])
    if layer.how == "sequence":
        return blend(torch.stack([linear(z, layer.score)[0] for z in x]), list(x))[None]
    if layer.how in ("mean", "root"):
        return (sum(x) / len(x) ** (1 if layer.how == "mean" else 0.5))[None]
    y = block(layer.blocks[0], layer.seed, relu, torch.stack([relu(linear(z, layer.feed)) for z in x]))
    for other in layer.blocks[1:]:
        y = block(other, y, relu)
    return y


def classifier(**options) -> Classifier:
    sizes = {"vocabulary": VOCABULARY, "classes": 5, "width": WIDTH, "heads": 4, "inner": 24, "layers": 2}
    return shaken(Classifier(ClassifierConfig(**(sizes | {"dropout": 0.0} | options))))


@pytest.mark.parametrize(("how", "options"), HOW)
@pytest.mark.parametrize("T", [1, 2, 9])
def test_reference(how, options, T):
    layer, x = pool(how, **options), vectors(T=T)
    y = layer(x)
    assert y.shape == (4, 2 if how == "mean_max" else options.get("seeds", 1), WIDTH)
    for row, out in zip(x, y, strict=True):
        assert_close(out, plain(layer, row))


@pytest.mark.parametrize("norms", ["pre", "post"])
def test_reference_of_either_norm(norms):
    layer = shaken(Pooling(ModelConfig(kind="encoder", width=WIDTH, heads=2, inner=24, norm=norms), seeds=3))
    x = vectors(T=5)
    for row, out in zip(x, layer(x), strict=True):
        assert_close(out, plain(layer, row))


@pytest.mark.parametrize(("how", "options"), HOW)
@pytest.mark.parametrize("fill", [0.0, 7.0, torch.inf, torch.nan])
def test_padding(how, options, fill):
    layer, x = pool(how, **options), vectors()
    keep = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 0, 1], [1] * 9, [0, 0, 0, 0, 0, 1, 0, 0, 0], [0] * 9]).bool()
    y = layer(torch.where(keep[..., None], x, fill), keep=keep)
    for row in range(3):
        assert_close(y[row : row + 1], layer(x[row : row + 1, keep[row]]))
    assert torch.isfinite(y).all()
    if how != "pma":
        assert not y[3].any()


@pytest.mark.parametrize(("how", "options"), HOW)
def test_order_matters_to_the_first_and_the_last_only(how, options):
    layer, x = pool(how, **options), vectors()
    y, turned = layer(x), layer(x.flip(1))
    if how in ("first", "last"):
        assert_close(turned, x[:, -1:] if how == "first" else x[:, :1])
    else:
        assert_close(y, turned)


@pytest.mark.parametrize("spec", CROSS)
def test_any_attention_reads(spec):
    layer, x = pool(attention=spec, seeds=2), vectors()
    for row, out in zip(x, layer(x), strict=True):
        assert_close(out, plain(layer, row))


@pytest.mark.parametrize("spec", SELF)
def test_classifier(spec):
    model = classifier(attention=spec, pooling="pma", seeds=2)
    check_padding(model)
    check_gradients(model)


@pytest.mark.parametrize("pooling", ["mean", "mean_max", "first", "last", "pma"])
@pytest.mark.parametrize("norms", ["pre", "post"])
def test_classifier_reference(pooling, norms):
    model = classifier(pooling=pooling, norm=norms, feedforward="dense")
    tokens, answer = ids(B=2, T=6), model.answer
    for row, logits in zip(tokens, model(tokens).logits, strict=True):
        x = embedded(model.stack.embedding, model.stack.position, row)
        for layer in model.stack.blocks:
            x = block(layer, x, relu)
        if norms == "pre":
            x = torch.stack([norm(vector, model.stack.norm) for vector in x])
        y = plain(answer.pooling, x).flatten()
        if norms == "pre" and pooling == "pma":
            y = norm(y, answer.norm)
        assert_close(logits, linear(y, answer.output))


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_classifier_takes_the_layers_of_a_trained_model(kind):
    body = ModelConfig(kind=kind, vocabulary=VOCABULARY, width=WIDTH, heads=4, inner=24, layers=2, dropout=0.0)
    trained = shaken(Transformer(body))
    model = classifier(body=body, causal=kind == "decoder", pooling="last")
    model.stack.load_state_dict((trained.encoder or trained.decoder).state_dict())
    tokens = ids()
    assert_close(model(tokens).logits, model.answer.output(trained.hidden(tokens).x[:, -1]))
    with pytest.raises(ValueError, match=f"width must be that of the body, got 8 and {WIDTH}"):
        classifier(body=body, width=8)


def test_a_causal_classifier_sees_no_token_behind():
    model = classifier(causal=True, pooling="first")
    changed = ids()
    changed[:, 1:] = (changed[:, 1:] + 1) % VOCABULARY
    assert_close(model(ids()).logits, model(changed).logits, rtol=0, atol=0)
    check_padding(classifier(causal=True, pooling="last"))


def test_a_set_transformer_reads_a_set():
    """Without positions, no order of the tokens changes the answer."""
    model = classifier(attention="set(points=4)", pooling="pma", position="none", norm="post", feedforward="dense")
    assert_close(model(ids()).logits, model(ids().flip(1)).logits)


@pytest.mark.parametrize("spec", [spec for spec in SELF if regard.facts(spec).auxiliary_loss])
def test_second_losses_are_handed_on(spec):
    model, tokens = classifier(attention=["softmax", spec]), ids()
    x = forward_blocks(model.stack.blocks[:1], model.stack.embed(tokens, Rows.full(tokens)), Rows.full(tokens)).y
    last = copy.deepcopy(model.stack.blocks[1]).train()  # which may learn from what it reads
    found = model.train()(tokens).auxiliary_loss
    assert_close(found, last.attention.forward_packed(last.norms[0](x), Rows.full(x)).auxiliary_loss)
    assert classifier()(tokens).auxiliary_loss is None


@pytest.mark.parametrize("padded", [False, True])
def test_pma_is_that_of_the_paper(padded):
    """The rFF inside MAB is one layer, which ours is with the second one the identity."""
    theirs = shaken(PMA(WIDTH, 4, 3))
    ours = Pooling(ModelConfig(kind="encoder", width=WIDTH, heads=4, inner=WIDTH, bias=True, dropout=0.0), seeds=3)
    ours = ours.double().eval()
    mab, (mine,) = theirs.block, ours.blocks
    with torch.no_grad():
        ours.seed.copy_(theirs.seeds)
        ours.feed.load_state_dict(theirs.feed.state_dict())
        copy_attention(mine.cross, mab.attention)
        mine.feedforward.inner.load_state_dict(mab.feed.state_dict())
        mine.feedforward.outer.weight.copy_(torch.eye(WIDTH))
        for layer, other in zip(mine.norms, mab.norms, strict=True):
            layer.load_state_dict(other.state_dict())
    x = vectors(T=7)
    keep = torch.arange(7) < torch.tensor([7, 3, 1, 6])[:, None] if padded else None
    assert_close(ours(x, keep=keep), theirs(x, keep))


@pytest.mark.parametrize(("how", "options"), HOW)
def test_no_token_at_all_is_a_row_of_padding(how, options):
    layer, memory = pool(how, **options), Memory(vectors(T=3), torch.zeros(4, dtype=torch.long))
    assert_close(layer(vectors(T=0)), layer.forward_packed(memory).y)


def test_refusals():
    with pytest.raises(ValueError, match="one of pma, mean, root, max, mean_max, sequence, first, last, got 'sum'"):
        Pooling(LAYER, "sum")
    with pytest.raises(ValueError, match="seeds and layers are for pooling 'pma'; 'mean' leaves one vector"):
        Pooling(LAYER, "mean", seeds=2)
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        Pooling(LAYER, seeds=0)
    with pytest.raises(ValueError, match="'local' cannot take role 'cross'"):
        Pooling(LAYER, attention="local")
    with pytest.raises(ValueError, match=r"x must be vectors \[batch, tokens, width\]"):
        pool()(ids())
    with pytest.raises(ValueError, match="keep must be boolean"):
        pool()(vectors(), keep=torch.ones(4, 9))
    with pytest.raises(ValueError, match="a classifier needs classes"):
        ClassifierConfig(classes=None)
    with pytest.raises(ValueError, match="classes must be at least 2, got 1"):
        ClassifierConfig(classes=1)
    with pytest.raises(ValueError, match="kind must be 'classifier', got 'encoder'"):
        ClassifierConfig(kind="encoder")
    with pytest.raises(ValueError, match="pooling must be"):
        ClassifierConfig(pooling="sum")
    with pytest.raises(ValueError, match="seeds and seed_layers are for pooling 'pma', got pooling 'mean'"):
        ClassifierConfig(seeds=2)
    with pytest.raises(ValueError, match="whole numbers"):
        classifier()(vectors())
