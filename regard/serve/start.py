"""Listening: the socket, the API key, and how many processes serve."""

import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from regard.http.listening import bracketed, is_loopback, reached_by
from regard.serve.cores import suitable_processes
from regard.serve.limits import Limits
from regard.serve.observing import LOG
from regard.serve.processes import Front
from regard.serve.served import DEFAULT
from regard.serve.server import DrainingServer, Service

BACKLOG = 2048  # connections that wait to be taken


def serve(
    folders: Sequence[str | Path],
    *,
    host: str,
    port: int,
    device: str,
    limits: Limits,
    key: str | None = None,
    names: Sequence[str] = (),
    log: str = "info",
    ready: Callable[[str, str | None], None],
) -> None:
    """Serves runs until a signal. Port 0 takes a free port. `names` are further names that it answers to. `ready` is
    called with the address, and with the API key where one was made: beyond this machine there is always one."""
    count = limits.processes or suitable_processes(folders or DEFAULT, device)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=BACKLOG) as listener:
        port = listener.getsockname()[1]
        made = None
        if key is None and not is_loopback(host):
            key = made = secrets.token_urlsafe(24)
        service = Service(folders, device, limits.shared_by(count), allowed_hosts(host, port, names), key, log)
        shown = socket.gethostname() if reached_by(host, port) is None else bracketed(host)

        def tell() -> None:
            address = f"http://{shown}:{port}"
            ready(address, made)
            models = [Path(folder).resolve().name for folder in folders or DEFAULT]
            LOG.info("ready", extra={"fields": {"address": address, "models": models, "processes": count}})

        if count > 1:
            Front(service, listener, count).run(tell)
        else:
            server = DrainingServer(service.open())
            tell()
            server.run(sockets=[listener])
    LOG.info("ended")


def allowed_hosts(host: str, port: int, names: Sequence[str]) -> set[str] | None:
    """The Host headers that are answered; None: any, where it listens on all addresses and no names are given."""
    known = reached_by(host, port)
    named = {part for name in names for part in (name.lower(), f"{name.lower()}:{port}")}
    if known is None:
        return named | (reached_by("127.0.0.1", port) or set()) if named else None
    return known | named
