"""ConvS2S against loops written from the paper, its gradients too, and as every translator."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from translators import KEEP, TARGET_KEEP, VOCABULARY, Doubled, check_translator, ids

from regard.models import Convolutional, ConvolutionalConfig, build
from regard.models.convolutional import Normed
from regard.models.registry import presets

SMALL = {"vocabulary": VOCABULARY, "width": 6, "blocks": ((8, 3), (10, 3), (10, 1)), "longest": 20, "dropout": 0.0}
R = math.sqrt(0.5)


def built(**options) -> Convolutional:
    torch.manual_seed(0)
    model = build(ConvolutionalConfig(**SMALL | options)).double()
    for parameter in model.parameters():
        # gains and biases that start at what does nothing would hide what they do
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def weight(normed: Normed) -> Tensor:
    rows = [g * v / torch.sqrt((v * v).sum()) for v, g in zip(normed.direction, normed.gain, strict=True)]
    return torch.stack(rows)


def linear(normed: Normed, x: Tensor) -> Tensor:
    return weight(normed) @ x + normed.bias


def gated(normed: Normed, xs: list[Tensor], t: int, first: int) -> Tensor:
    """GLU of the convolution whose first tap stands at t + first."""
    total, taps = normed.bias, weight(normed)
    for i in range(taps.shape[2]):
        if 0 <= t + first + i < len(xs):
            total = total + taps[:, :, i] @ xs[t + first + i]
    a, b = total.chunk(2)
    return a / (1 + torch.exp(-b))


def reference(model: Convolutional, source: Tensor, target: Tensor, drop: float) -> Tensor:
    """Logits of one sentence, token by token; where dropout stands, vectors are multiplied by `drop`."""
    e = [drop * (model.source_embedding.weight[w] + model.source_position.table[t]) for t, w in enumerate(source)]
    xs = [linear(model.encoder_in, x) for x in e]
    for block in model.encoder:
        k = block.convolution.direction.shape[2]
        res = xs if block.residual is None else [linear(block.residual, x) for x in xs]
        read = [drop * x for x in xs]
        xs = [R * (gated(block.convolution, read, t, -(k // 2)) + res[t]) for t in range(len(xs))]
    keys = [linear(model.encoder_out, x) for x in xs]
    # forward as it is, backward divided by twice the number of attentions
    share = 1 / (2 * len(model.decoder))
    keys = [share * z + (1 - share) * z.detach() for z in keys]
    values = [R * (z + x) for z, x in zip(keys, e, strict=True)]
    g = [drop * (model.target_embedding.weight[w] + model.target_position.table[t]) for t, w in enumerate(target)]
    xs = [linear(model.decoder_in, x) for x in g]
    for block, reading in zip(model.decoder, model.readings, strict=True):
        k = block.convolution.direction.shape[2]
        res = xs if block.residual is None else [linear(block.residual, x) for x in xs]
        after = []
        for t in range(len(xs)):
            h = gated(block.convolution, [drop * x for x in xs], t, 1 - k)
            q = R * (linear(reading.query, h) + g[t])
            a = torch.softmax(torch.stack([q @ z for z in keys]), 0)
            c = math.sqrt(len(keys)) * sum(share * v for share, v in zip(a, values, strict=True))
            after.append(R * (R * (linear(reading.answer, c) + h) + res[t]))
        xs = after
    out = [drop * linear(model.decoder_out, x) for x in xs]
    if model.config.tied:
        return torch.stack([model.target_embedding.weight @ x + model.output.bias for x in out])
    return torch.stack([linear(model.output, x) for x in out])


@pytest.mark.parametrize("options", [{}, {"tied": False, "out_width": 5, "target_vocabulary": VOCABULARY}], ids=str)
def test_scores_and_gradients_are_those_of_the_paper(options):
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


@pytest.mark.parametrize(
    "options", [{}, {"attention": "softmax", "heads": 2, "decoder_blocks": ((7, 2), (7, 4))}], ids=str
)
def test_it_decodes_as_every_translator(options):
    check_translator(built(**options))


def test_maps_say_what_is_read():
    model = built(heads=2).eval()
    source, target = ids(), ids(T=7, seed=2)
    maps = model.maps(source, target, keep=KEEP, target_keep=TARGET_KEEP)
    assert [tuple(part.shape) for part in maps] == [(3, 2, 7, 9)] * 3
    for part in maps:
        assert_close(part.sum(-1), TARGET_KEEP[:, None].expand(-1, 2, -1).double())
        assert not part.transpose(1, 3)[~KEEP].any()
    # of beams over one memory, as a state has it
    state = model.start(6, memory=model.encode(source, keep=KEEP))
    query = torch.randn(3, 4, 6, dtype=torch.float64)
    expected = model.cross.map(query, memory=model.encode(source, keep=KEEP))
    assert_close(model.cross.map(query, state=state.source), expected)


@pytest.mark.parametrize(
    ("name", "parameters", "field"),
    [
        ("convs2s-base", 126_772_864, 41),
        ("convs2s-en-ro", 137_144_448, 41),
        ("convs2s-en-de", 209_569_920, 27),
        ("convs2s-en-fr", 258_111_616, 27),
        ("convs2s-iwslt", 34_744_448, 9),
    ],
)
def test_published_sizes(name, parameters, field):
    """Counted on the authors' models, with 40,000 tokens on each side."""
    preset = presets("translation")[name]
    config = preset.form.config(**preset.values | {"vocabulary": 40_000, "target_vocabulary": 40_000})
    with torch.device("meta"):
        model = preset.form.module(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert config.receptive_field == field


def test_a_new_model_keeps_variances():
    torch.manual_seed(0)
    model = build(ConvolutionalConfig(vocabulary=50, width=256, hidden=256, layers=6, dropout=0.0)).eval()
    tokens = torch.randint(50, (2, 40))
    read = model._read(tokens, tokens, None, None)
    deviations = [query.std().item() for query in read.decoded.queries]
    assert max(deviations) < 3 * min(deviations)
    assert 0.05 < read.memory.x.std() < 0.5
    # what dropout takes away is made up for where it stands before a map
    model = build(ConvolutionalConfig(vocabulary=50, width=64, hidden=48, layers=1, dropout=0.5, tied=False))
    found = {name: part.direction.std().item() for name, part in model.named_modules() if isinstance(part, Normed)}
    assert found["encoder.0.convolution"] == pytest.approx(math.sqrt(4 * 0.5 / (3 * 48)), rel=0.1)
    for name, expected in (("encoder_in", 0.5 / 64), ("output", 0.5 / 64), ("readings.0.query", 1 / 48)):
        assert found[name] == pytest.approx(math.sqrt(expected), rel=0.1), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": ((8, 2),)}, "kernels of the encoder must be odd"),
        ({"blocks": ((8, 0),)}, "pairs of a width and a kernel, both at least 1"),
        ({"heads": 4}, "width 6 is not divisible by heads 4"),
        ({"out_width": 5}, "tied needs out_width as width 6, got 5: set tied=False"),
        ({"kind": "encoder"}, "kind must be 'convolutional'"),
        ({"attention": "gmlp"}, "cannot take role 'cross'"),
        ({"attention": "set"}, "no function of queries, keys and values"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        build(ConvolutionalConfig(**SMALL | options))


def test_wrong_states_are_refused():
    model = built().eval()
    with pytest.raises(ValueError, match=r"needs memory=model\.encode"):
        model.start(2)
    memory = model.encode(ids())
    with pytest.raises(ValueError, match="a memory of 3 rows serves a multiple"):
        model.start(4, memory=memory)
    with pytest.raises(ValueError, match="expected the state of this model"):
        model.extend(ids(T=1), memory)
    with pytest.raises(ValueError, match="tokens have 3 rows and the state 6"):
        model.extend(ids(T=1), model.start(6, memory=memory))
