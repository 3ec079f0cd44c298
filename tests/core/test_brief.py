"""Programs that load in one thread and compute in another leave no threads of OpenMP behind."""

import threading

import pytest

from regard.cli import show
from regard.core.brief import in_brief_thread
from regard.page import subjects
from regard.serve import server
from regard.serve.limits import Limits
from regard.serve.served import Runs


def test_the_thread_has_ended():
    thread = in_brief_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_what_it_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_brief_thread(lambda: 1 / 0)


@pytest.mark.parametrize("opens", ["serve", "show"])
def test_servers_load_so(monkeypatch, opens):
    threads = []
    if opens == "serve":
        monkeypatch.setattr(server, "open_runs", lambda *_: threads.append(threading.current_thread()) or Runs([]))
        server.Service([], "cpu", Limits(), {"localhost"}, None).open()
    else:
        open_run = subjects.open_run
        monkeypatch.setattr(
            subjects, "open_run", lambda *given: threads.append(threading.current_thread()) or open_run(*given)
        )
        show._open_engine([None], "cpu")
    assert threads
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)
