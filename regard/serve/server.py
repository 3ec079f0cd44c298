"""Listening: the socket, the API key, and how the server ends.

SIGTERM and SIGINT let it drain: it takes no more requests, answers those it has taken, and ends. A second signal ends
it at once.
"""

import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from regard.http.listening import Prompt, bracketed, is_loopback, reached_by
from regard.serve.app import Api, Guard, Mail
from regard.serve.limits import Limits
from regard.serve.observing import LOG
from regard.serve.served import open_runs


class DrainingServer(uvicorn.Server):
    """Tells the application when it is to drain. It ends by returning, not by the signal."""

    def __init__(self, api: Api):
        super().__init__(configured(api))
        self.api = api

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        LOG.info("draining", extra={"fields": {"signal": signal.Signals(sig).name}})
        self.api.draining = self.should_exit = True


def configured(api: Api) -> uvicorn.Config:
    return uvicorn.Config(
        api.application(),
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=api.limits.connections,
        h11_max_incomplete_event_size=32 << 10,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=round(api.limits.drain),
        http=Prompt,
        ws="none",
        lifespan="on",
    )


def serve(
    folders: Sequence[str | Path],
    *,
    host: str,
    port: int,
    device: str,
    limits: Limits,
    key: str | None = None,
    names: Sequence[str] = (),
    ready: Callable[[str, str | None], None],
) -> None:
    """Serves runs until a signal. Port 0 takes a free port. `names` are further names that it answers to. `ready` is
    called with the address, and with the API key where one was made: beyond this machine there is always one."""
    mail = Mail()
    runs = open_runs(folders, device, limits, mail.deliver)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    made = None
    if key is None and not is_loopback(host):
        key = made = secrets.token_urlsafe(24)
    api = Api(runs, limits, mail, Guard(allowed_hosts(host, port, names), key))
    server = DrainingServer(api)
    shown = socket.gethostname() if reached_by(host, port) is None else bracketed(host)
    ready(f"http://{shown}:{port}", made)
    LOG.info("ready", extra={"fields": {"address": f"http://{shown}:{port}", "models": list(runs.by_name)}})
    server.run(sockets=[listener])
    LOG.info("ended")


def allowed_hosts(host: str, port: int, names: Sequence[str]) -> set[str] | None:
    """The Host headers that are answered; None: any, where it listens on all addresses and no names are given."""
    known = reached_by(host, port)
    named = {part for name in names for part in (name.lower(), f"{name.lower()}:{port}")}
    if known is None:
        return named | (reached_by("127.0.0.1", port) or set()) if named else None
    return known | named
