"""How many processes serve, and how many threads compute in each."""

import json
import socket

import pytest
import torch
from generators import ByHand, small_language

from regard.serve import cores
from regard.serve.gathering import Gatherer, Job
from regard.serve.limits import Limits
from regard.serve.served import DEFAULT, Served
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
    ("parameters", "available", "device", "expected"),
    [
        ((5, cores.SMALL - 1), 2, "cpu", 2),
        ((5, cores.SMALL - 1), 64, "auto", cores.MOST),
        ((5,), 1, "cpu", 1),
        ((5, cores.SMALL), 2, "cpu", 1),
        ((5, None), 2, "cpu", 1),
        ((5,), 2, "cuda", 1),
    ],
)
def test_processes_by_the_sizes_of_the_models(monkeypatch, tmp_path, parameters, available, device, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    for number, size in enumerate(parameters):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run.json").write_text(json.dumps({} if size is None else {"parameters": size}))
    folders = [tmp_path / str(number) for number in range(len(parameters))]
    assert cores.suitable_processes(folders, device) == expected


def test_those_that_are_bundled_have_two_processes(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cores.suitable_processes(DEFAULT, "cpu") == 2
    monkeypatch.delattr(socket, "send_fds")
    assert cores.suitable_processes(DEFAULT, "cpu") == 1


@pytest.mark.parametrize(("asked", "expected"), [(0, 2), (5, 5)])
def test_threads_of_each_model(monkeypatch, asked, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    limits = Limits(threads=asked)
    translator = Served("t", Translator.load(device="cpu"), limits, print)
    encoder = Served("e", MaskedModel.load(BUNDLED / "english", device="cpu"), limits, print)
    cats = Served("c", small_language(), limits, print)
    found = [worker.threads for one in (translator, encoder, cats) for worker in one.workers]
    assert found == [expected] * 4


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
