"""Translators that are no Transformers, in the page: what they attend to, or without attention their gradients."""

import numpy as np
import pytest
import torch

from regard.data.tokenizer import Tokenizer
from regard.models import ByteNetConfig, ConvolutionalConfig, DeepRecurrentConfig, build
from regard.page.engine import Engine
from regard.page.subjects import of_model, of_translator
from regard.tasks.translate import Translator, align

LINES = ["one two three four", "five six seven eight", "nine ten"]
CONFIGS = {
    "convs2s": lambda size: ConvolutionalConfig(vocabulary=size, width=8, hidden=8, heads=2, layers=2, longest=40),
    "gnmt": lambda size: DeepRecurrentConfig(vocabulary=size, width=8, layers=2),
    "bytenet": lambda size: ByteNetConfig(vocabulary=size, width=8, layers=2),
}


@pytest.fixture(scope="module", params=CONFIGS)
def translator(request) -> Translator:
    tokenizer = Tokenizer.train(LINES, 100, "units")
    torch.manual_seed(0)
    model = build(CONFIGS[request.param](tokenizer.size)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return Translator(model, tokenizer, tokenizer, 30)


def test_it_is_read_and_drawn(translator):
    engine = Engine({"run": lambda: of_translator("run", "run", translator)})
    question = {"run": "run", "place": "cross", "text": LINES[0], "target": LINES[1]}
    reply = engine.answer("read", question)
    source = torch.tensor([[*translator.source.encode(LINES[0]), translator.source.eos]])
    target = torch.tensor([[translator.target.bos, *translator.target.encode(LINES[1])]])
    wanted = translator.model.maps(source, target)
    for layer, part in enumerate(wanted):
        np.testing.assert_allclose(reply.arrays[f"layer{layer}"], part[0].detach(), atol=1e-6)
        row = engine.answer("rows", question | {"layer": layer, "first": 1}).arrays["weights"][:, 0]
        np.testing.assert_allclose(row, part[0, :, 1].detach(), atol=1e-6)
        tile = engine.answer("tile", question | {"layer": layer, "level": 0, "row": 0, "column": 0})
        assert tile.arrays["largest"].shape == part[0].shape
    assert engine.answer("about", {}).meta


def test_words_are_aligned(translator):
    found = align(translator.model, translator.source, translator.target, [(LINES[0], LINES[1]), (LINES[2], LINES[0])])
    assert [part.matrix.shape for part in found] == [(4, 4), (4, 2)]
    for part in found:
        assert len(part.links) == len(part.target)
        assert (part.matrix.sum(1) <= 1 + 1e-6).all()
    assert translator(LINES[0])


def test_a_translator_is_shown_with_its_tokenizers(translator):
    with pytest.raises(ValueError, match="a model that translates is shown with its tokenizers"):
        of_model("model", translator.model, translator.source)
