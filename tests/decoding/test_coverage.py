"""The coverage penalty of GNMT: by hand, against all outputs, and through every translator with attention."""

import itertools
import math

import pytest
import torch
from translators import KEEP, VOCABULARY, ids

from regard.decoding import DecodingConfig, decode
from regard.decoding.base import Coverage
from regard.models import ConvolutionalConfig, DeepRecurrentConfig, ModelConfig, RecurrentConfig, build

CONFIGS = {
    "transformer": ModelConfig(vocabulary=VOCABULARY, width=8, heads=2, inner=8, layers=2, dropout=0.0),
    "lstm": RecurrentConfig(vocabulary=VOCABULARY, width=8, hidden=8, layers=1, dropout=0.0),
    "gru": RecurrentConfig(vocabulary=VOCABULARY, width=8, hidden=8, layers=1, cell="gru", input_feeding=False),
    "convs2s": ConvolutionalConfig(vocabulary=VOCABULARY, width=8, hidden=8, layers=2, longest=20, dropout=0.0),
    "gnmt": DeepRecurrentConfig(vocabulary=VOCABULARY, width=8, layers=2, dropout=0.0),
}


def built(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build(CONFIGS[name]).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model


def test_by_hand():
    """Two beams over three tokens, of which the last is padding."""
    attended = torch.tensor([[0.5, 1.5, 0.0], [1.0, 0.25, 0.0]])
    coverage = Coverage(attended, torch.tensor([[True, True, False]]))
    found = coverage.penalty(torch.tensor([[1, 0, 1]]))
    expected = [math.log(0.25), math.log(0.5), math.log(0.25)]
    assert found[0].tolist() == pytest.approx(expected)
    # what nothing was attended to costs much, and is a number all the same
    assert torch.isfinite(Coverage(attended[:1] * 0, torch.ones(1, 3).bool()).penalty(torch.tensor([[0]]))).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_the_maps(name):
    """The score of a hypothesis is its log probability under the penalty of its length, and what its maps leave out."""
    model, source = built(name), ids(T=9)
    config = DecodingConfig(beam=3, nbest=3, penalty=0.7, coverage=0.4, maximum=4)
    plain = DecodingConfig(beam=3, nbest=3, penalty=0.7, maximum=4)
    both, changed = (decode(model, source, KEEP, chosen) for chosen in (config, plain)), False
    for row, (found, without) in enumerate(zip(*both, strict=True)):
        changed |= found != without
        own = source[row : row + 1, KEEP[row]]
        for best in found:
            # the step behind the last token reads too, whether eos comes of it or the limit
            maps = model.maps(own, torch.tensor([[2, *best.ids]]))
            mass = torch.stack([part.mean(1) for part in maps]).mean(0)[0].sum(0)
            expected = best.logprob / config.scale(len(best.ids) + best.finished) + 0.4 * mass.clamp(max=1).log().sum()
            assert best.score == pytest.approx(expected.item(), abs=1e-9)
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert changed, "no score was changed by the penalty"


def test_the_best_of_all_outputs():
    """A beam as wide as all outputs finds the one that the whole score prefers."""
    torch.manual_seed(1)
    config = ModelConfig(vocabulary=6, width=8, heads=2, inner=8, layers=1, dropout=0.0)
    model = build(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    source = torch.tensor([[4, 5, 1, 3]])
    for coverage in (0.0, 1.0):
        beam = DecodingConfig(beam=100, penalty=0.5, coverage=coverage, maximum=3, stops_early=False)
        scores = {}
        for length in (1, 2, 3):
            for words in itertools.product((1, 4, 5), repeat=length):
                target = torch.tensor([[2, *words]])
                logp = model(source, target).logits[0].log_softmax(-1)
                total = sum(logp[t, token].item() for t, token in enumerate((*words, 3)))
                mass = model.maps(source, target)[0].mean(1)[0].sum(0)
                scores[words] = total / beam.scale(length + 1) + coverage * mass.clamp(max=1).log().sum().item()
        ((best,),) = decode(model, source, config=beam)
        assert tuple(best.ids) == max(scores, key=scores.__getitem__)
        assert best.score == pytest.approx(max(scores.values()))


def test_what_makes_no_sense_is_refused():
    for options in ({"beam": 1}, {"sample": True}):
        with pytest.raises(ValueError, match="coverage chooses among the hypotheses of a beam"):
            DecodingConfig(coverage=0.2, **options)
    with pytest.raises(ValueError, match="coverage must be a number from 0 to 100"):
        DecodingConfig(coverage=-1.0)
    blind = build(RecurrentConfig(vocabulary=VOCABULARY, width=8, hidden=8, layers=1, attention=None)).eval()
    with pytest.raises(ValueError, match="a recurrent model without attention has no maps"):
        decode(blind, ids(), config=DecodingConfig(coverage=0.2))
    slots = build(ModelConfig(vocabulary=VOCABULARY, width=8, heads=2, layers=1, cross_attention="compressed")).eval()
    with pytest.raises(ValueError, match="attends to slots, not to source tokens"):
        decode(slots, ids(), config=DecodingConfig(coverage=0.2))
