"""Several processes that serve the same runs behind one address.

The process in front listens, and hands each connection to the process behind it that has the fewest; requests and
answers do not pass through it. (Processes that listen to one socket together take connections as they happen to wake:
one may have them all.) A process that dies is replaced, and only its own connections are lost.

Between the one in front and each one behind it is a channel of single bytes: forward CONNECTION, which comes with the
descriptor of a connection, and DRAIN, the second time to end at once; backward READY, and ENDED for each connection. A
process that cannot open the runs sends why, in place of READY.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.context import SpawnContext
from types import FrameType
from typing import Any

import torch
from prometheus_client.multiprocess import mark_process_dead
from uvicorn import Config
from uvicorn.server import ServerState

from regard.core.allocator import SERVER_IDLE, keep_memory
from regard.http.listening import Prompt
from regard.serve.app import Api, quiet_asyncio
from regard.serve.observing import LOG, SHARED, log_to_stderr, remove_metrics
from regard.serve.server import DrainingServer, Service

CONNECTION, DRAIN, READY, ENDED = b"\xfc", b"\xfd", b"\xfe", b"\xff"  # no text has these bytes in UTF-8
BUSY_SECONDS = 0.05  # before a connection that no process takes is offered again
STUCK_SECONDS = 2.0  # for a process that is to end, and does not
AGAIN_SECONDS = 5.0  # before a process that could not start is started again
PAUSE_SECONDS = 1.0  # after a connection could not be taken, as where too many files are open


class Front:
    """The process that listens."""

    def __init__(self, service: Service, listener: socket.socket, count: int):
        if not hasattr(socket, "send_fds"):
            raise ValueError("several processes need a system that hands sockets over: use --processes 1 on Windows")
        self.service, self.listener, self.count = service, listener, count
        self.context = multiprocessing.get_context("spawn")
        self.behind: dict[int, Behind] = {}  # by number
        self.draining = False

    def run(self, tell: Callable[[], None]) -> None:
        """Until a signal. `tell` is called when all processes are ready."""
        with tempfile.TemporaryDirectory(prefix="regard-metrics-") as folder:
            before = os.environ.get(SHARED)
            os.environ[SHARED] = folder
            try:
                asyncio.run(self._serve(tell))
            finally:
                for one in self.behind.values():
                    one.process.kill()
                for one in self.behind.values():
                    one.channel.close()
                    one.process.join()
                del os.environ[SHARED]
                if before is not None:
                    os.environ[SHARED] = before

    async def _serve(self, tell: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.all_ready, self.all_ended = self.loop.create_future(), self.loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._drain, number)
        for number in range(self.count):
            self._start(number)
        await asyncio.wait((self.all_ready, self.all_ended), return_when=asyncio.FIRST_COMPLETED)
        if self.all_ready.done():
            self.all_ready.result()
            if not self.draining:
                tell()
                self.listener.setblocking(False)
                self._listen()
            await self.all_ended

    def _start(self, number: int) -> None:
        if self.draining:
            return
        # a system may clean its temporary folders
        os.makedirs(os.environ[SHARED], exist_ok=True)
        try:
            one = Behind(self.context, self.service, number, self.count)
        except OSError as error:
            if not self.all_ready.done():
                raise ValueError(f"a process cannot be started: {error}") from error
            LOG.error("a process cannot be started", extra={"fields": {"number": number, "reason": str(error)}})
            self.loop.call_later(AGAIN_SECONDS, self._start, number)
            return
        self.behind[number] = one
        self.loop.add_reader(one.channel, self._read, one)

    def _listen(self) -> None:
        """Takes connections while there is a process for them; until then they wait."""
        if self.draining or not self.all_ready.done():
            return
        if any(one.is_ready for one in self.behind.values()):
            self.loop.add_reader(self.listener, self._accept)
        else:
            self.loop.remove_reader(self.listener)

    def _accept(self) -> None:
        """Hands on a connection that has come."""
        try:
            connection, _ = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            LOG.error("connections cannot be taken", extra={"fields": {"reason": str(error)}})
            self.loop.remove_reader(self.listener)
            self.loop.call_later(PAUSE_SECONDS, self._listen)
            return
        self._hand_on(connection)

    def _hand_on(self, connection: socket.socket) -> None:
        """Gives a connection to a process. One that does not take it is about to end, or too busy to read its channel;
        where all are, it waits, and those that have not been taken wait with it."""
        ready = [one for one in self.behind.values() if one.is_ready]
        taken = any(one.take(connection) for one in sorted(ready, key=lambda one: one.connections))
        if taken or self.draining:
            connection.close()
            self._listen()
        else:
            self.loop.remove_reader(self.listener)
            self.loop.call_later(BUSY_SECONDS, self._hand_on, connection)

    def _read(self, one: "Behind") -> None:
        """What a process tells."""
        told = one.read()
        if not told:
            self._gone(one)
        elif one.is_ready:
            one.connections -= told.count(ENDED)
        elif told.startswith(READY):
            if self.draining:
                return  # it is about to end
            one.is_ready = True
            self._listen()
            if all(other.is_ready for other in self.behind.values()) and not self.all_ready.done():
                self.all_ready.set_result(None)
        else:
            one.complaint += told

    def _gone(self, one: "Behind") -> None:
        self.loop.remove_reader(one.channel)
        one.channel.close()
        one.process.join(STUCK_SECONDS)
        one.process.kill()
        one.process.join()
        mark_process_dead(one.process.pid)
        del self.behind[one.number]
        if self.draining:
            if not self.behind and not self.all_ended.done():
                self.all_ended.set_result(None)
        elif not self.all_ready.done():
            why = one.complaint.decode() or f"a process ended before it was ready, with status {one.process.exitcode}"
            self.all_ready.set_exception(ValueError(why))
            self.draining = True  # none is replaced any more
        else:
            fields = {"number": one.number, "status": one.process.exitcode, "connections": one.connections}
            if one.complaint:
                fields["reason"] = one.complaint.decode()
            LOG.error("a process ended, and is replaced", extra={"fields": fields})
            self._listen()
            self.loop.call_later(0.0 if one.is_ready else AGAIN_SECONDS, self._start, one.number)

    def _drain(self, number: int) -> None:
        if self.draining:
            self.loop.call_later(STUCK_SECONDS, self._kill)
        else:
            self.draining = True
            LOG.info("draining", extra={"fields": {"signal": signal.Signals(number).name}})
            self.loop.remove_reader(self.listener)
            self.listener.close()
        for one in self.behind.values():
            if one.is_ready:
                one.tell(DRAIN)
            else:
                one.process.kill()
        if not self.behind and not self.all_ended.done():
            self.all_ended.set_result(None)

    def _kill(self) -> None:
        """Ends those that do not read their channel."""
        for one in self.behind.values():
            one.process.kill()


class Behind:
    """A process that serves, as the one in front knows it."""

    def __init__(self, context: SpawnContext, service: Service, number: int, count: int):
        self.number = number
        self.connections = 0
        self.is_ready = False
        self.complaint = b""  # why it cannot start
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        with theirs:
            self.process = context.Process(target=_serve_behind, args=(service, theirs, number, count), daemon=True)
            # Ctrl-C in a terminal is for all processes of it: this one does not see it, also while it starts
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                self.process.start()
            except OSError:
                self.channel.close()
                raise
            finally:
                signal.signal(signal.SIGINT, before)

    def take(self, connection: socket.socket) -> bool:
        """Gives it a connection, unless it does not listen."""
        try:
            socket.send_fds(self.channel, [CONNECTION], [connection.fileno()])
        except OSError:
            return False
        self.connections += 1
        return True

    def tell(self, word: bytes) -> None:
        try:
            self.channel.send(word)
        except OSError:
            self.process.kill()  # it reads nothing any more

    def read(self) -> bytes:
        try:
            return self.channel.recv(65536)
        except OSError:
            return b""


def _serve_behind(service: Service, channel: socket.socket, number: int, count: int) -> None:
    """What a process behind the one in front does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keep_memory(SERVER_IDLE)
    log_to_stderr(service.log, number)
    quiet_asyncio()
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    try:
        server = Handed(service.open(), channel)
    except (ValueError, OSError) as error:
        channel.sendall(str(error).encode())
        return
    server.run(sockets=[])
    if server.is_alone:
        remove_metrics()


class Handed(DrainingServer):
    """Serves the connections that are handed to it. It drains when it is told to, or when nobody is in front."""

    def __init__(self, api: Api, channel: socket.socket):
        super().__init__(api)
        self.channel = channel
        self.coming: set[asyncio.Task] = set()
        self.ended = 0  # connections whose end is not told yet
        self.is_alone = False  # nobody is in front any more

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self.channel, self._read)
        # nobody may be in front any more, which is read next
        with contextlib.suppress(OSError):
            self.channel.send(READY)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signals are for the process in front, which tells the others: a terminal sends them to all."""

    def _read(self) -> None:
        word, descriptors, _, _ = socket.recv_fds(self.channel, 1, 1)
        if word == CONNECTION and not descriptors:
            LOG.error("a connection is lost", extra={"fields": {"reason": "too many files are open"}})
            self.announce_end()
        for descriptor in descriptors:
            task = asyncio.create_task(self._connect(socket.socket(fileno=descriptor)))
            self.coming.add(task)
            task.add_done_callback(self.coming.discard)
        # the end of the channel is no second word: what was accepted is answered
        if word == DRAIN or not (word or self.should_exit):
            self.drain()
        if not word:
            self.is_alone = True
            asyncio.get_running_loop().remove_reader(self.channel)

    async def _connect(self, connection: socket.socket) -> None:
        prompt = partial(Announced, self.announce_end, self.config, self.server_state, self.lifespan.state)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(prompt, connection)
        except OSError:
            connection.close()
            self.announce_end()

    def announce_end(self) -> None:
        """Tells that a connection has ended."""
        self.ended += 1
        self._tell_ended()

    def _tell_ended(self) -> None:
        """Of many that end together the channel takes only some at once."""
        loop = asyncio.get_running_loop()
        try:
            self.ended -= self.channel.send(ENDED * self.ended)
        except BlockingIOError:
            pass
        except OSError:
            self.ended = 0  # nobody is in front
        if self.ended:
            loop.add_writer(self.channel, self._tell_ended)
        else:
            loop.remove_writer(self.channel)


class Announced(Prompt):
    """A connection whose end is announced."""

    def __init__(self, announce: Callable[[], None], config: Config, states: ServerState, app: dict[str, Any]):
        super().__init__(config, states, app)
        self.announce = announce

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.announce()
