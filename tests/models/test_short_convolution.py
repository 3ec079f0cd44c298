"""The short convolution before attention: off by default, the identity at first, the same whole and in steps."""

import pytest
import torch
from torch.testing import assert_close

from regard.config import from_json
from regard.core.rows import Rows
from regard.models import ClassifierConfig, ModelConfig, build, complete_config
from regard.models.block import ShortConvolution

SIZES = {"vocabulary": 20, "width": 8, "heads": 2, "inner": 16, "layers": 2, "dropout": 0.0}
IDS = torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(0))
KEEP = torch.arange(9) < torch.tensor([[9], [4], [6]])


def built(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build(ModelConfig(**SIZES | options)).double().eval()
    for part in model.modules():
        if isinstance(part, ShortConvolution):
            torch.nn.init.normal_(part.weight)
    return model


@pytest.mark.parametrize("attention", ["softmax", "linear", "recurrent", "convolution(gated=True)"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_steps_are_the_whole(attention, norm):
    model = built(kind="decoder", attention=attention, short_convolution=3, norm=norm, reversible=norm == "pre")
    whole = model(IDS, keep=KEEP).logits
    state, found = model.start(3), []
    for first, n in ((0, 2), (2, 1), (3, 5), (8, 1)):
        part = slice(first, first + n)
        logits, state = model.extend(IDS[:, part], state, keep=KEEP[:, part])
        found.append(logits)
    assert_close(torch.cat(found, 1), whole)
    rows = torch.tensor([2, 0, 0])
    logits = model.extend(IDS[:, :1], state.select(rows))[0]
    one_more = torch.cat([IDS[rows], IDS[:, :1]], 1)
    expected = model(one_more, keep=torch.cat([KEEP[rows], KEEP[:, :1]], 1)).logits[:, -1:]
    assert_close(logits, expected)


def test_an_encoder_looks_to_both_sides_and_not_at_padding():
    model = built(kind="encoder-decoder", short_convolution=4)
    memory = model.encode(IDS, keep=KEEP).x
    for row, n in enumerate((9, 4, 6)):
        assert_close(memory[row, :n], model.encode(IDS[row : row + 1, :n]).x[0])
    beams = model.start(6, memory=model.encode(IDS, keep=KEEP))
    target = IDS.repeat_interleave(2, 0)
    expected = model(target, target, keep=KEEP.repeat_interleave(2, 0)).logits[:, :2]
    _, beams = model.extend(target[:, :1], beams)
    order = torch.tensor([1, 0, 3, 2, 5, 4])
    assert_close(model.extend(target[order, 1:2], beams.reorder(order))[0], expected[order, 1:])
    layer = ShortConvolution(2, 4, centred=True)
    torch.nn.init.ones_(layer.weight)
    x = torch.arange(10.0).view(1, 5, 2)
    assert_close(layer(x, Rows.full(x), None)[0][0, 0], x[0, :3].sum(0))


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder-decoder"])
def test_it_starts_as_the_identity(kind):
    with_it, without = (build(ModelConfig(kind=kind, short_convolution=size, **SIZES)) for size in (3, 0))
    state = {name: tensor for name, tensor in with_it.state_dict().items() if ".short." not in name}
    assert len(state) < len(with_it.state_dict())
    without.load_state_dict(state)
    both = (IDS, IDS) if kind == "encoder-decoder" else (IDS,)
    assert_close(with_it.eval()(*both).logits, without.eval()(*both).logits)


def test_a_config_of_before_has_none():
    config = from_json(ModelConfig, complete_config({"kind": "decoder", "vocabulary": 20}))
    assert config.short_convolution == 0
    assert not [name for name, _ in build(ModelConfig(kind="decoder", **SIZES)).named_parameters() if "short" in name]
    classifier = build(ClassifierConfig(short_convolution=3, **SIZES))
    assert sum("short" in name for name, _ in classifier.named_parameters()) == 2
