"""Python's garbage collector is off while CUDA graphs are captured."""

import gc
import threading

import pytest
import torch

from regard.core.capture import without_collection
from regard.decoding import captured


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_off_until_the_last_capture_ends(was_enabled, request):
    request.addfinalizer(gc.enable)
    (gc.enable if was_enabled else gc.disable)()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() == was_enabled


def test_a_capture_that_fails_turns_it_on_again():
    with pytest.raises(RuntimeError, match="refused"), without_collection():
        raise RuntimeError("refused")
    assert gc.isenabled()


def test_captures_of_two_threads_overlap():
    begun, ended = threading.Event(), threading.Event()

    def capture():
        with without_collection():
            begun.set()
            ended.wait(60)

    thread = threading.Thread(target=capture)
    with without_collection():
        thread.start()
        assert begun.wait(60)
    assert not gc.isenabled()
    ended.set()
    thread.join()
    assert gc.isenabled()


def test_also_where_a_step_of_decoding_is_captured(monkeypatch):
    seen = []

    def note(*_, **__):
        seen.append(gc.isenabled())

    graph = type("Graph", (), {"capture_begin": note, "capture_end": note, "replay": note})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    captured.CudaGraph(torch.device("cpu"))(note)
    assert seen == [False] * 3
    assert gc.isenabled()
