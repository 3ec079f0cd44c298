"""Several processes behind one address: connections are spread, metrics are sums, and what dies is replaced."""

import asyncio
import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest

from regard.cli import main
from regard.serve import processes, server, start
from regard.serve.app import Api, Guard, Mail
from regard.serve.limits import Limits
from regard.serve.observing import LOG, SHARED, Metrics
from regard.serve.processes import CONNECTION, DRAIN, ENDED, READY, Behind, Front, Handed
from regard.serve.served import Runs
from regard.serve.server import Service, configured
from regard.tasks.load import BUNDLED

TEXTS = ["The cat is small.", "Where is the station?", "I read a book."]


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    """What a test did not close is said by this test, not by a later one in which Python happens to collect it."""
    yield
    gc.collect()


class Command:
    """`regard serve` with two processes behind the one in front."""

    def __init__(self, folder, *flags):
        self.log, self.folder, self.connections = folder / "log", folder / "temporary", []
        self.folder.mkdir()
        command = [sys.executable, "-m", "regard", "serve", str(BUNDLED / "english-german"), "--device", "cpu"]
        with self.log.open("w") as log:
            self.front = subprocess.Popen(
                [*command, "--port", "0", "--processes", "2", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"TMPDIR": str(self.folder)},
                start_new_session=True,
            )
        first = self.front.stdout.readline()
        assert "Regard serves at" in first, self.log.read_text()
        self.port = int(first.split(";")[0].rpartition(":")[2])

    def connect(self):
        self.connections.append(HTTPConnection("127.0.0.1", self.port, timeout=60))
        return self.connections[-1]

    def behind(self):
        """The processes that serve: those that it started, but for Python's own helper."""
        started = [pid for pid, (parent, _) in stats().items() if parent == self.front.pid]
        return [pid for pid in started if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]

    def session(self):
        return [pid for pid, (_, session) in stats().items() if session == self.front.pid]

    def events(self, name):
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [one for one in map(json.loads, lines) if one["event"] == name]

    def end(self):
        for one in self.connections:
            one.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.front.pid, signal.SIGKILL)
        self.front.wait()
        self.front.stdout.close()


def stats():
    """Parent and session of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(path.parent.name)] = int(fields[1]), int(fields[3])
    return found


@pytest.fixture
def command(tmp_path):
    if not Path("/proc/self/stat").exists():
        pytest.skip("the processes of a server are found in /proc, which this system does not have")
    started = []

    def start(*flags):
        started.append(Command(tmp_path, *flags))
        return started[-1]

    yield start
    for one in started:
        one.end()


def ask(connection, text, path="/translate"):
    connection.request("POST", path, json.dumps({"text": text}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)
    return found


def metric(server, name):
    connection = server.connect()
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    values = [float(line.split()[-1]) for line in lines if line.startswith(name)]
    assert len(values) < 2, "a series has one value"
    return values[0] if values else None


def test_connections_metrics_and_a_process_that_dies(command):
    server = command()
    connections = [server.connect() for _ in range(6)]
    answers = [ask(one, TEXTS[number % 3]) for number, one in enumerate(connections)]
    assert {status for status, _ in answers} == {200}
    assert answers[:3] == answers[3:], "both processes answer alike"
    spread = Counter(one["process"] for one in server.events("request"))
    assert spread == {0: 3, 1: 3}
    # every second one ends, so that one process has none: the next three go there
    for one in connections[::2]:
        one.close()
    time.sleep(0.5)
    later = [server.connect() for _ in range(3)]
    assert [ask(one, TEXTS[0])[0] for one in later] == [200] * 3
    spread = Counter(one["process"] for one in server.events("request"))
    assert sorted(spread.values()) == [3, 6]

    assert metric(server, 'regard_requests_total{route="/translate",status="200"}') == 9
    until(lambda: metric(server, 'regard_texts_total{model="english-german"}') == 9)
    assert metric(server, "regard_requests_in_flight") == 1, "this one"

    # a signal for one of them does nothing: it is the one in front that says when to end
    first, second = server.behind()
    os.kill(first, signal.SIGTERM)
    os.kill(first, signal.SIGINT)
    os.kill(second, signal.SIGKILL)
    ended = until(lambda: server.events("a process ended, and is replaced"))
    assert [one["status"] for one in ended] == [-signal.SIGKILL]
    kept = 0
    for one in [*connections[1::2], *later]:
        with contextlib.suppress(OSError):
            kept += ask(one, TEXTS[1])[0] == 200
    assert kept == 6 - ended[0]["connections"]
    assert kept in (3, 6)
    until(lambda: len(server.behind()) == 2)
    # the new one has the fewest, and is chosen as soon as it is ready
    until(lambda: ask(server.connect(), TEXTS[2]) == answers[2] and _answered_by_both(server, ended[0]["number"]))
    total = metric(server, 'regard_requests_total{route="/translate",status="200"}')
    assert total == len([one for one in server.events("request") if one["route"] == "/translate"]), "none is forgotten"
    assert metric(server, "regard_requests_in_flight") == 1


def _answered_by_both(server, number):
    """Whether the process that took a dead one's place has answered."""
    after = server.log.read_text().partition("is replaced")[2].splitlines()[1:]
    return any(json.loads(line).get("process") == number for line in after)


def test_what_was_accepted_is_answered(command):
    server = command()
    texts = [f"{TEXTS[0]} {TEXTS[1]} The {number} dogs sleep." for number in range(40)]
    found = []

    def client(part):
        connection = server.connect()
        # one request is there before the signal
        ask(connection, part[0])
        for text in part[1:]:
            try:
                found.append(ask(connection, [text] * 20)[0])
            except OSError:
                return

    clients = [threading.Thread(target=client, args=(texts[number::4],)) for number in range(4)]
    for one in clients:
        one.start()
    until(lambda: len(server.events("request")) >= 8)
    os.killpg(server.front.pid, signal.SIGTERM)  # as systemd does, which signals every process
    for one in clients:
        one.join()
    assert server.front.wait(60) == 0
    assert len(server.events("draining")) == 1
    statuses = Counter(one["status"] for one in server.events("request"))
    assert set(statuses) <= {200, 503}
    assert Counter(found) == statuses - Counter({200: 4})
    until(lambda: not server.session())  # Python's own helper ends a moment later
    assert not list(server.folder.glob("regard-metrics-*"))


def test_without_the_one_in_front_the_others_end(command):
    server = command()
    assert len(server.behind()) == 2
    server.front.kill()
    until(lambda: not server.session())
    assert not list(server.folder.glob("regard-metrics-*")), "the last one has cleaned up"


def test_a_run_that_cannot_be_opened(tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(BUNDLED / "english", folder)
    weights = next(folder.glob("checkpoints/average/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), "--port", "0", "--processes", "2", "--device", "cpu"])
    assert ended.value.code == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "model.safetensors" in told


def test_channels_are_closed_when_a_run_cannot_be_opened(monkeypatch):
    """Also those of processes that have not said anything yet."""
    stubs = []

    class Starting(Stub):
        def __init__(self, context, service, number, count):
            super().__init__(number)
            self.is_ready = False
            self.process = SimpleNamespace(join=lambda *_: None, kill=lambda: None, pid=2**30, exitcode=0)
            stubs.append(self)
            if number == 0:
                self.theirs.sendall(b"the run is gone")
                self.theirs.close()

    monkeypatch.setattr(processes, "Behind", Starting)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ValueError, match="the run is gone"):
        Front(Service([], "cpu", Limits(), {"localhost"}, None), listener, 2).run(lambda: None)
    stubs[1].theirs.close()
    assert [one.channel.fileno() for one in stubs] == [-1, -1]


def test_an_address_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit):
        main(["serve", "--port", str(other.getsockname()[1]), "--processes", "2"])
    assert "choose another --port" in capsys.readouterr().err


def test_limits_are_those_of_all_together():
    limits = Limits(rows=16, queue=5, memory=1001, prefix_memory=500, connections=10, deadline=7.0).shared_by(3)
    assert limits == Limits(
        rows=16, queue=5, memory=333, prefix_memory=166, connections=10, deadline=7.0, processes=3
    ), "they share the memory, and what a request may ask for stays"
    assert Limits().shared_by(1) == Limits(processes=1)
    assert Limits(memory=1).shared_by(2).memory == 1
    assert Limits(processes=256).processes == 256
    with pytest.raises(ValueError, match="--processes must be at most 256, got 257"):
        Limits(processes=257)


def test_metrics_are_shared_by_several_only(monkeypatch):
    """Whatever the environment of the user says."""
    monkeypatch.setenv(SHARED, "/nonexistent")
    for count, shared in ((0, False), (1, False)):
        api = Api(Runs([]), Limits(processes=count), Mail(), Guard({"localhost"}, None))
        assert api.metrics.is_shared is shared
    with pytest.raises(ValueError, match="not a directory"):
        Api(Runs([]), Limits(processes=2), Mail(), Guard({"localhost"}, None))


def test_a_run_with_several_workers_has_one_value():
    def gatherer(waiting, batches):
        return SimpleNamespace(waiting=[None] * waiting, batches=batches, texts_done=7, cancelled=0)

    run = SimpleNamespace(name="a", workers=[gatherer(2, 10), gatherer(3, 20)])
    told = Metrics(SimpleNamespace(by_name={"a": run}), shared=False).tell().decode()
    assert 'regard_waiting{model="a"} 5.0' in told
    assert 'regard_batches_total{model="a"} 30.0' in told


def test_requests_of_processes_that_died_are_not_in_flight():
    assert Metrics(Runs([]), shared=False).in_flight._multiprocess_mode == "livesum"


def handed(channel):
    """A server that has no runs, at the end of a channel."""
    return Handed(Api(Runs([]), Limits(), Mail(), Guard({"localhost"}, None)), channel)


def test_the_end_of_each_connection_is_told():
    """Also where more end at once than the channel takes."""
    ours, theirs = socket.socketpair()

    async def tell():
        server, told = handed(theirs), 0
        theirs.setblocking(False)
        for _ in range(5000):
            server.announce_end()
        assert server.ended, "the channel is full"
        ours.setblocking(False)
        async with asyncio.timeout(60):
            while told < 5000:
                told += len(await asyncio.get_running_loop().sock_recv(ours, 65536))
        assert (told, server.ended) == (5000, 0), "once each"
        assert not asyncio.get_running_loop().remove_writer(theirs), "nothing more is to be told"

    with ours, theirs:
        asyncio.run(tell())


def test_a_connection_for_which_there_is_no_descriptor(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = handed(theirs)
        # what Linux tells where too many files are open
        monkeypatch.setattr(socket, "recv_fds", lambda *_: (CONNECTION, [], socket.MSG_CTRUNC, None))

        async def read():
            server._read()

        asyncio.run(read())
        assert ours.recv(10) == ENDED


def test_a_connection_that_cannot_be_taken_has_ended():
    ours, theirs = socket.socketpair()

    async def connect():
        server = handed(theirs)

        async def refuse(*_):
            raise OSError(22, "Invalid argument")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "connect_accepted_socket", refuse)
            server.lifespan = SimpleNamespace(state={})
            connection = socket.socket()
            await server._connect(connection)
            assert connection.fileno() == -1

    with ours, theirs:
        asyncio.run(connect())
        ours.setblocking(False)
        assert ours.recv(10) == ENDED


def test_what_was_accepted_is_answered_when_the_one_in_front_dies_while_it_drains():
    ours, theirs = socket.socketpair()

    async def drain():
        server = handed(theirs)
        ours.sendall(DRAIN)
        server._read()
        assert (server.should_exit, server.force_exit) == (True, False)
        ours.close()
        server._read()
        assert not server.force_exit
        assert server.is_alone

    async def drain_twice():
        server = handed(theirs)
        ours.sendall(DRAIN * 2)
        server._read()
        server._read()
        assert server.force_exit, "that is for the second signal"

    with theirs:
        asyncio.run(drain())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asyncio.run(drain_twice())


@pytest.mark.parametrize("unread", [b"", ENDED])
def test_what_was_accepted_is_answered_when_nobody_is_in_front(unread):
    """The end of the channel is read once: a second word would end the process at once."""
    ours, theirs = socket.socketpair()

    async def lose_the_front():
        server, loop = handed(theirs), asyncio.get_running_loop()
        theirs.setblocking(False)
        theirs.send(unread)  # closed so, Linux tells of a reset before the end
        loop.add_reader(theirs, server._read)
        ours.close()
        async with asyncio.timeout(60):
            while not server.should_exit:
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not server.force_exit
        assert server.is_alone
        assert not loop.remove_reader(theirs), "nothing more is read"

    with theirs:
        asyncio.run(lose_the_front())


class Stub(Behind):
    """A process that serves, without the process."""

    def __init__(self, number=0):
        self.number, self.connections, self.is_ready, self.complaint = number, 0, True, b""
        self.channel, self.theirs = socket.socketpair()
        self.channel.setblocking(False)


@contextlib.contextmanager
def fronted():
    """The one in front of a stub, which is ready."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(SHARED, f"{folder}/metrics")
        front = Front(Service([], "cpu", Limits(), {"localhost"}, None), listener, 1)
        front.behind[0] = Stub()
        with front.behind[0].channel, front.behind[0].theirs:
            yield front


def test_connections_wait_for_processes_that_are_busy():
    """Their channels are full: nothing is closed."""

    async def offer():
        with fronted() as front, socket.socket() as filler:
            front.loop = asyncio.get_running_loop()
            front.all_ready = front.loop.create_future()
            front.all_ready.set_result(None)
            one = front.behind[0]
            while one.take(filler):
                pass
            before = one.connections
            front.listener.setblocking(False)
            with socket.create_connection(front.listener.getsockname()) as client:
                front._accept()
                client.setblocking(False)
                with pytest.raises(BlockingIOError):  # it is open
                    client.recv(1)
                assert one.connections == before
                for _ in range(before):
                    descriptor = socket.recv_fds(one.theirs, 1, 1)[1][0]
                    os.close(descriptor)
                async with asyncio.timeout(60):
                    while one.connections == before:
                        await asyncio.sleep(0.01)
                with socket.socket(fileno=socket.recv_fds(one.theirs, 1, 1)[1][0]) as connection:
                    assert connection.getpeername() == client.getsockname()

    asyncio.run(offer())


class Later:
    """A loop that remembers what is to be done later, and what is read no more."""

    def __init__(self):
        self.calls, self.removed = [], []
        self.all_ready = Future()

    def call_later(self, seconds, function, *given):
        self.calls.append((seconds, function, given))

    def remove_reader(self, channel):
        self.removed.append(channel)


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(LOG, "propagate", True)
    return caplog


def test_the_log_says_why_a_process_cannot_be_replaced(logged):
    with fronted() as front:
        front.loop, one, dead = Later(), front.behind[0], []
        front.all_ready = front.loop.all_ready
        front.all_ready.set_result(None)
        one.is_ready, one.complaint = False, b"the run is gone"
        one.process = SimpleNamespace(join=lambda *_: None, kill=lambda: None, pid=2**30, exitcode=0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "mark_process_dead", dead.append)
            front._gone(one)
        assert dead == [2**30], "its requests are no longer in flight"
        assert logged.records[-1].fields == {"number": 0, "status": 0, "connections": 0, "reason": "the run is gone"}
        assert front.loop.calls == [(processes.AGAIN_SECONDS, front._start, (0,))]


def test_a_process_that_the_system_does_not_start_is_tried_again(logged, monkeypatch):
    def refuse(*_):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(processes, "Behind", refuse)
    with fronted() as front:
        front.loop = Later()
        front.all_ready = front.loop.all_ready
        with pytest.raises(ValueError, match=r"a process cannot be started: .*unavailable"):
            front._start(0)
        front.all_ready.set_result(None)
        front._start(0)
        assert Path(os.environ[SHARED]).is_dir(), "also where a system has cleaned its temporary folders"
        assert "unavailable" in logged.records[-1].fields["reason"]
        assert front.loop.calls == [(processes.AGAIN_SECONDS, front._start, (0,))]


def test_a_second_signal_ends_a_process_that_is_stuck():
    with fronted() as front:
        front.loop, killed = Later(), []
        front.all_ended, one = Future(), front.behind[0]
        one.process = SimpleNamespace(kill=lambda: killed.append(True))
        front._drain(signal.SIGTERM)
        assert not front.loop.calls, "the first gives it time"
        front._drain(signal.SIGTERM)
        assert one.theirs.recv(10) == DRAIN * 2
        [(_, kill, given)] = front.loop.calls
        assert not killed
        kill(*given)
        assert killed


def test_one_that_dies_is_replaced_at_once(monkeypatch):
    monkeypatch.setattr(processes, "mark_process_dead", lambda pid: None)
    with fronted() as front:
        front.loop, front.all_ready, one = Later(), Future(), front.behind[0]
        front.all_ready.set_result(None)
        one.process = SimpleNamespace(join=lambda *_: None, kill=lambda: None, pid=2**30, exitcode=-9)
        front._gone(one)
        assert front.loop.calls == [(0.0, front._start, (0,))]
        assert front.loop.removed == [one.channel, front.listener], "connections wait until there is one again"


def test_what_a_process_tells():
    with fronted() as front:
        front.loop, one = Later(), front.behind[0]
        front.all_ready = front.loop.all_ready
        one.is_ready = False
        # it may begin with any letter
        for letter in "abcdefghijklmnopqrstuvwxyz":
            one.complaint = b""
            one.theirs.sendall(f"{letter}uns/a: is damaged: äöü".encode())
            front._read(one)
            assert (one.is_ready, one.complaint.decode()) == (False, f"{letter}uns/a: is damaged: äöü")
        one.is_ready, one.connections = True, 5
        one.theirs.sendall(ENDED * 3)
        front._read(one)
        assert one.connections == 2
        # one that says that it is ready when all are to end
        one.is_ready, front.draining = False, True
        one.theirs.sendall(READY)
        front._read(one)
        assert not one.is_ready
        assert not front.all_ready.done()


def test_a_signal_while_the_last_process_gets_ready(monkeypatch):
    """It is no error, and nobody is told that it serves."""
    stubs, said = [], []

    class Getting(Stub):
        def __init__(self, context, service, number, count):
            super().__init__(number)
            self.is_ready = False
            self.process = SimpleNamespace(join=lambda *_: None, kill=self.theirs.close, pid=2**30, exitcode=0)
            stubs.append(self)

    class Signalled(Front):
        def _read(self, one):
            super()._read(one)
            if one.is_ready:
                self._drain(signal.SIGTERM)
                one.theirs.close()

    monkeypatch.setattr(processes, "Behind", Getting)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        front = Signalled(Service([], "cpu", Limits(), {"localhost"}, None), listener, 1)
        start = front._start

        def started(number):
            start(number)
            stubs[-1].theirs.sendall(READY)

        front._start = started
        front.run(lambda: said.append(True))
    assert not said


@pytest.mark.parametrize("draining", [False, True])
def test_a_connection_that_no_process_takes(draining):
    with fronted() as front, socket.socket() as client:
        front.loop, front.draining = Later(), draining
        client.connect(front.listener.getsockname())
        connection, _ = front.listener.accept()
        front.behind[0].theirs.close()
        front._hand_on(connection)
        if draining:
            assert connection.fileno() == -1
            assert not front.loop.calls
        else:
            assert front.loop.removed == [front.listener], "others wait, too"
            assert front.loop.calls == [(processes.BUSY_SECONDS, front._hand_on, (connection,))]
            connection.close()


def test_nothing_is_started_while_it_drains(monkeypatch):
    monkeypatch.setattr(processes, "Behind", lambda *_: pytest.fail("it was started"))
    with fronted() as front:
        front.draining = True
        front._start(0)


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_the_environment_is_as_it_was(monkeypatch, before):
    if before is None:
        monkeypatch.delenv(SHARED, raising=False)
    else:
        monkeypatch.setenv(SHARED, before)
    found = []

    async def serve(self, tell):
        found.append(os.environ[SHARED])

    monkeypatch.setattr(Front, "_serve", serve)
    with fronted() as front:
        monkeypatch.setattr(os, "environ", dict(os.environ))
        outside = os.environ.get(SHARED)
        front.behind.clear()
        front.run(lambda: None)
        assert found != [outside]
        assert os.environ.get(SHARED) == outside


def test_what_is_served_by_whom(monkeypatch):
    """Each process has its part of the limits, the key and the log."""
    found = []

    class Remembering:
        def __init__(self, service, listener, count):
            found.append((service, count))

        def run(self, tell):
            tell()

    monkeypatch.setattr(start, "Front", Remembering)
    limits = Limits(memory=100, prefix_memory=10, processes=2)
    said = []
    start.serve(
        ["a"],
        host="127.0.0.1",
        port=0,
        device="cpu",
        limits=limits,
        key="secret",
        log="error",
        ready=lambda *given: said.append(given),
    )
    [(service, count)] = found
    assert (service.folders, service.device, service.key, service.log, count) == (["a"], "cpu", "secret", "error", 2)
    assert service.limits == limits.shared_by(2)
    assert service.limits.memory == 50
    [(address, made)] = said
    assert address.startswith("http://127.0.0.1:")
    assert made is None


def test_the_graceful_end_has_its_time():
    api = Api(Runs([]), Limits(drain=7.4), Mail(), Guard({"localhost"}, None))
    assert configured(api).timeout_graceful_shutdown == 7


def test_runs_are_loaded_in_a_thread_that_ends(monkeypatch):
    found = []
    monkeypatch.setattr(server, "open_runs", lambda *_: found.append(threading.current_thread()) or Runs([]))
    Service([], "cpu", Limits(), {"localhost"}, None).open()
    assert found[0] is not threading.current_thread()
    assert not found[0].is_alive()


def test_metrics_of_another_program_are_left_alone():
    """Its folder need not exist. Prometheus' client reads the environment when it is imported."""
    code = (
        "from regard.cli import main\n"
        "try:\n    main(['serve', '--port', '70000'])\nexcept SystemExit:\n    pass\n"
        "from prometheus_client.values import ValueClass\nprint(ValueClass.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {SHARED: "/nonexistent"}, capture_output=True, text=True
    )
    assert done.stdout == "MutexValue\n", done.stderr


def test_a_signal_ends_a_process_that_still_loads():
    with fronted() as front:
        front.loop, front.all_ended, killed = Later(), Future(), []
        front.behind[0].is_ready = False
        front.behind[0].process = SimpleNamespace(kill=lambda: killed.append(True))
        front._drain(signal.SIGTERM)
        assert killed
        assert front.listener.fileno() == -1, "nobody waits for it any more"


def test_it_listens_again_after_too_many_files_were_open(logged):
    def refuse():
        raise OSError(24, "Too many open files")

    with fronted() as front:
        front.loop, front.listener = Later(), SimpleNamespace(accept=refuse)
        front._accept()
        assert front.loop.removed == [front.listener], "it would be told of the same connection again and again"
        assert front.loop.calls == [(processes.PAUSE_SECONDS, front._listen, ())]
        assert "Too many open files" in logged.records[-1].fields["reason"]


def test_what_a_process_sets_before_it_opens_the_runs(monkeypatch):
    found = {}
    monkeypatch.setattr(processes.signal, "signal", found.__setitem__)
    monkeypatch.setattr(processes, "keep_memory", lambda what: found.update(kept=what))
    monkeypatch.setattr(processes, "log_to_stderr", lambda level, number: found.update(log=(level, number)))
    monkeypatch.setattr(processes.torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(processes.torch, "set_num_threads", lambda count: found.update(threads=count))

    def refuse():
        raise ValueError("no run")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        processes._serve_behind(SimpleNamespace(log="warning", open=refuse), theirs, 1, 3)
        assert ours.recv(100) == b"no run"
    expected = {"kept": processes.SERVER_IDLE, "log": ("warning", 1), "threads": 2}
    assert found == {signal.SIGTERM: signal.SIG_IGN, **expected}


def test_a_process_is_started_deaf_to_the_terminal():
    before, found = signal.getsignal(signal.SIGINT), []
    started = SimpleNamespace(start=lambda: found.append(signal.getsignal(signal.SIGINT)))
    one = Behind(SimpleNamespace(Process=lambda **_: started), None, 0, 1)
    one.channel.close()
    assert found == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before
