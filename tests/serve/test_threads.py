"""Of two cores a small model decodes on one; everything else has all."""

import pytest
import torch
from generators import ByHand, small_language
from torch import nn

from regard.serve import threads
from regard.serve.gathering import Gatherer, Job
from regard.serve.limits import Limits
from regard.serve.served import Served
from regard.tasks.load import BUNDLED
from regard.tasks.masked.masked_model import MaskedModel
from regard.tasks.translate.translator import Translator


@pytest.fixture(autouse=True)
def restored():
    """New threads begin with what was set last, in whichever thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("parameters", "available", "expected"),
    [(threads.SMALL - 1, 2, 1), (threads.SMALL, 2, 2), (threads.SMALL - 1, 3, 3), (1, 1, 1)],
)
def test_by_the_size_of_the_model(monkeypatch, parameters, available, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: available)
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(parameters, device="meta"))
    assert threads.decoding_threads(model) == expected


@pytest.mark.parametrize(("asked", "decodes", "encodes"), [(0, 1, 2), (2, 2, 2), (5, 5, 5)])
def test_what_decodes_and_what_does_not(monkeypatch, asked, decodes, encodes):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    limits = Limits(threads=asked)
    translator = Served("t", Translator.load(device="cpu"), limits, print)
    encoder = Served("e", MaskedModel.load(BUNDLED / "english", device="cpu"), limits, print)
    cats = Served("c", small_language(), limits, print)
    assert translator.gatherers["translate"].threads == cats.generator.threads == decodes
    assert {one.threads for one in encoder.gatherers.values()} == {encodes}


def test_the_worker_has_them_and_no_other_thread():
    before, found = torch.get_num_threads(), []
    gatherer = Gatherer(
        lambda *_: found.append(torch.get_num_threads()) or ["x"], waiting=1, texts=1, threads=before + 2
    )
    gatherer.start()
    job = Job(["a"], None)
    gatherer.submit(job)
    assert job.future.result(60) == ["x"]
    gatherer.close()
    gatherer.thread.join(60)
    assert (found, torch.get_num_threads()) == ([before + 2], before)


def test_the_generator_has_them():
    found = []
    engine = ByHand(small_language(), rows=1)
    engine.threads, engine.advance = 5, lambda: (found.append(torch.get_num_threads()), engine.waiting.clear())
    engine.waiting.append(object())
    engine.close()
    engine.start()
    engine.thread.join(60)
    assert found == [5]
