"""Ensembles: one model and equal models to the last bit, the mean by hand, and models of different kinds."""

import math

import pytest
import torch
from torch.testing import assert_close
from translators import KEEP, VOCABULARY, check_beams, ids

from regard.decoding import DecodingConfig, Ensemble, decode
from regard.decoding.ensemble import average
from regard.models import (
    ByteNetConfig,
    ConvolutionalConfig,
    DeepRecurrentConfig,
    ModelConfig,
    RecurrentConfig,
    build,
)

SIZES = {"vocabulary": VOCABULARY, "width": 8, "dropout": 0.0}
CONFIGS = (
    ModelConfig(heads=2, inner=8, layers=2, **SIZES),
    RecurrentConfig(hidden=8, layers=1, **SIZES),
    DeepRecurrentConfig(layers=2, **SIZES),
    ConvolutionalConfig(hidden=8, layers=2, longest=20, **SIZES),
    ByteNetConfig(layers=2, **SIZES),
)


def built(config, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = build(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_one_model_and_equal_ones_give_what_it_gives(config):
    model, source = built(config), ids()
    for beam in (1, 3):
        decoding = DecodingConfig(beam=beam, nbest=beam, maximum=8)
        alone = decode(model, source, KEEP, decoding)
        for count in (1, 2, 3):
            assert decode(Ensemble([model] * count).eval(), source, KEEP, decoding) == alone
        assert decode(Ensemble([model] * 2, "geometric").eval(), source, KEEP, decoding) == alone


def test_the_mean_by_hand():
    torch.manual_seed(0)
    logits = [torch.randn(2, 3, 7, dtype=torch.float64) for _ in range(3)]
    shares = [part.softmax(-1) for part in logits]
    assert_close(average(logits).softmax(-1), sum(shares) / 3)
    assert_close(average(logits[::-1]).log_softmax(-1), average(logits).log_softmax(-1))
    product = (shares[0] * shares[1] * shares[2]) ** (1 / 3)
    assert_close(average(logits, "geometric").softmax(-1), product / product.sum(-1, keepdim=True))


@pytest.mark.parametrize("first", [True, False])
def test_a_forbidden_token_is_only_less_likely(first):
    sure = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    open_ = torch.tensor([[2.0, 0.5, -300.0, -math.inf]])
    pair = [sure, open_] if first else [open_, sure]
    found = average(pair).softmax(-1)
    assert_close(found, (sure.softmax(-1) + open_.softmax(-1)) / 2)
    assert found[0, 1] > 0
    assert found[0, 3] == 0
    assert average(pair, "geometric").softmax(-1)[0, 1] == 0
    assert average([torch.tensor([[0.0, math.nan]]), torch.zeros(1, 2)]).isnan().any()


def test_models_of_different_kinds():
    """A Transformer, an LSTM, a GNMT, a ConvS2S and a ByteNet: in pieces as in a whole, over beams, with coverage."""
    models = [built(config, seed, torch.float64) for seed, config in enumerate(CONFIGS)]
    ensemble, source = Ensemble(models).eval(), ids()
    with torch.no_grad():
        check_beams(ensemble)
        target = ids(T=7, seed=2)
        expected = torch.stack([model(source, target, keep=KEEP).logits.softmax(-1) for model in models]).mean(0)
        assert_close(ensemble(source, target, keep=KEEP).logits.softmax(-1), expected)
    for decoding in (DecodingConfig(beam=3, maximum=6), DecodingConfig(beam=3, maximum=6, coverage=0.3)):
        found = decode(ensemble, source, KEEP, decoding)
        for row in range(3):
            ((alone,),) = decode(ensemble, source[row : row + 1, KEEP[row]], None, decoding)
            assert found[row][0].ids == alone.ids
        turned = decode(Ensemble(models[::-1]).eval(), source, KEEP, decoding)
        assert [one.ids for (one,) in turned] == [one.ids for (one,) in found]


def test_what_they_read_is_averaged():
    """The map of an aligner or of the last layer but one; in a step, the models that have attention."""
    aligned = ModelConfig(heads=2, inner=8, layers=1, aligner=True, **SIZES)
    three = ConvolutionalConfig(hidden=8, layers=3, longest=20, **SIZES)
    models = [built(config, seed, torch.float64) for seed, config in enumerate((aligned, three, *CONFIGS[1:]))]
    ensemble, source, target = Ensemble(models).eval(), ids(), ids(T=7, seed=2)
    (maps,) = ensemble.maps(source, target, keep=KEEP)
    first = models[0].maps(source, target, keep=KEEP, place="aligner")[0].mean(1, keepdim=True)
    places = (1, 0, 0, 0, 0)
    others = [model.maps(source, target, keep=KEEP)[at] for model, at in zip(models[1:], places, strict=True)]
    assert_close(maps, torch.stack([first, *(part.mean(1, keepdim=True) for part in others)]).mean(0))
    # of the last of several tokens, the mean over layers and heads
    state = ensemble.start(3, memory=ensemble.encode(source))
    _, _, weights = ensemble.extend_with_attention(target[:, :2], state)
    steps = [torch.stack([part.mean(1) for part in model.maps(source, target[:, :2])]) for model in models[:-1]]
    assert_close(weights, torch.stack([part.mean(0)[:, -1] for part in steps]).mean(0))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="needs at least one model"):
        Ensemble([])
    with pytest.raises(ValueError, match="mean must be 'arithmetic' or 'geometric'"):
        Ensemble([built(CONFIGS[0])], "harmonic")
    with pytest.raises(ValueError, match="need one vocabulary, got sizes 5, 6"):
        average([torch.zeros(1, 6), torch.zeros(1, 5)])
    with pytest.raises(ValueError, match="no model of the ensemble has attention"):
        decode(Ensemble([built(CONFIGS[-1])] * 2).eval(), ids(), config=DecodingConfig(coverage=0.2))
