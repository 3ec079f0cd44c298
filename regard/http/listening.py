"""How our servers listen: who can reach them, how requests come in, and how long a slow client is waited for."""

import asyncio
import contextlib
import ipaddress
import json
import secrets
import socket
from typing import Any

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.http.refused import Refused

HEAD_SECONDS = BODY_SECONDS = 10
WRITE_SECONDS = 30
DISCARDED = 64 << 20  # bytes beyond the largest request that are read before its client is told


async def read_json(request: Request, most: int) -> Any:
    """The body of a request, JSON of at most `most` bytes."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, "send JSON, with content-type application/json")
    raw, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most:
                    raw += chunk
                # most clients read no answer before all is sent
                elif size > most + DISCARDED:
                    break
    except TimeoutError:
        raise Refused(408, f"the request took longer than {BODY_SECONDS} seconds to come") from None
    if size > most:
        raise Refused(413, f"the request is larger than {most >> 10} KiB")
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError):
        raise Refused(400, "the request is not JSON") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reached_by(host: str, port: int) -> set[str] | None:
    """The Host headers of a server that listens on a host; None: any, since it listens on all addresses."""
    if host in ("0.0.0.0", "::", ""):
        return None
    names = {"127.0.0.1", "localhost", "[::1]"} if host in ("127.0.0.1", "localhost", "::1") else {bracketed(host)}
    # browsers omit the default port
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def equal(sent: str, secret: str) -> bool:
    """Compares in constant time."""
    return secrets.compare_digest(sent.encode(errors="replace"), secret.encode())


class Prompt(H11Protocol):
    """A connection that is closed if the head of a request takes longer than HEAD_SECONDS to come, or if the client
    reads nothing of its answer for WRITE_SECONDS."""

    late: asyncio.TimerHandle | None = None
    stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # asyncio does it only where the socket names its protocol; else the body of an answer, which is sent behind its
        # head, waits until the client acknowledges the head: 40 ms and more
        with contextlib.suppress(OSError):  # the client has left already
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.late = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        begun = self.cycle is not None and not self.cycle.response_complete
        if begun and self.late is not None:
            self.late.cancel()
            self.late = None
        elif not begun and self.late is None:
            self.late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        # close() would wait until all is written
        self.stuck = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stuck()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_stuck()
        if self.late is not None:
            self.late.cancel()

    def _forget_stuck(self) -> None:
        if self.stuck is not None:
            self.stuck.cancel()
            self.stuck = None
