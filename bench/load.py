"""Clients that load an API server: many at a time, with right and wrong requests, and streams that are cut. Each answer
is compared with the one expected. Used by serve.py here and by the tests."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

WRONG: tuple[
    tuple[bytes | dict[str, Any], int], ...
] = (  # requests that must be refused, with the status of the answer
    (b"{", 400),
    (b"[1, 2", 400),
    ({"model": "nobody", "prompt": "x"}, 404),
    ({"prompt": "x"}, 400),
    ({"model": None, "prompt": "x"}, 400),
    ({"max_tokens": 10**9}, 400),
    ({"temperature": -1}, 400),
    ({"stop": ["a"] * 9}, 400),
    ({"n": 10**6}, 400),
    ({"tools": []}, 400),
)


@dataclass(frozen=True)
class Ask:
    """A request, and the answer it should get (None: any). `cut`: the client leaves in the middle of the stream."""

    body: dict[str, Any]
    expected: Any
    cut: bool = False


@dataclass
class Report:
    """What came of the requests."""

    right: int = 0
    cut: int = 0
    refused: int = 0  # wrong requests, with the status that they should get
    lost: list[str] = field(default_factory=list)  # without the answer they should get
    mixed_up: list[str] = field(default_factory=list)  # with another answer than alone
    turned_away: int = 0  # answers 429, after which the client tried again
    retry_after: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each right answer, without waiting after 429
    statuses: Counter[int] = field(default_factory=Counter)
    took: float = 0.0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")

    def summary(self) -> dict[str, Any]:
        return {
            "requests": self.right + self.cut + self.refused + len(self.lost) + len(self.mixed_up),
            "right": self.right,
            "cut": self.cut,
            "refused as they should be": self.refused,
            "lost": len(self.lost),
            "mixed up": len(self.mixed_up),
            "429": self.turned_away,
            "seconds": round(self.took, 1),
            "requests/s": round((self.right + self.refused + self.cut) / max(self.took, 1e-9), 1),
            "p50": round(self.percentile(0.5), 4),
            "p99": round(self.percentile(0.99), 4),
        }


class Connection:
    """A connection that is kept, to one server."""

    def __init__(self, port: int, path: str, key: str | None = None):
        self.port, self.path, self.key = port, path, key
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes, pieces: int | None = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; with `pieces` only so many chunks of it, and then it leaves."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n{key}Content-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        if "content-length" in headers:
            found = await reader.readexactly(int(headers["content-length"]))
        else:
            found = await self._chunks(reader, pieces)
        if pieces is not None or headers.get("connection") == "close":
            self.close()
        return status, headers, found

    async def _chunks(self, reader: asyncio.StreamReader, pieces: int | None) -> bytes:
        found, count = b"", 0
        while pieces is None or count < pieces:
            size = int(await reader.readline(), 16)
            part = await reader.readexactly(size + 2)
            if not size:
                break
            found, count = found + part[:-2], count + 1
        return found

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].transport.abort()
            self.streams = None


def text_of(body: dict[str, Any], raw: bytes) -> str:
    """The text of a completion, from one answer or from a stream."""
    if not body.get("stream"):
        return json.loads(raw)["choices"][0]["text"]
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream ends with {lines[-1:]}")
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


async def load(
    port: int,
    asks: Sequence[Ask],
    *,
    clients: int,
    path: str = "/v1/completions",
    read: Callable[[dict[str, Any], bytes], Any] = text_of,
    wrong: float = 0.0,
    seed: int = 0,
    patience: float = 1.0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Sends all requests from so many clients, and a share `wrong` of wrong ones more. `patience` scales the seconds of
    Retry-After that a client waits."""
    report, left, done = Report(), list(enumerate(asks)), 0
    left.reverse()

    async def client(number: int) -> None:
        nonlocal done
        rng, connection = random.Random(seed * 1_000_003 + number), Connection(port, path)
        while left:
            place, ask = left.pop()
            if rng.random() < wrong:
                await _ask_wrong(connection, rng, asks[0].body, report)
            await _ask(connection, rng, place, ask, read, report, patience)
            done += 1
            on_progress(done)
        connection.close()

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(clients)))
    report.took = time.monotonic() - began
    return report


async def _ask(
    connection: Connection,
    rng: random.Random,
    place: int,
    ask: Ask,
    read: Callable[[dict[str, Any], bytes], Any],
    report: Report,
    patience: float,
) -> None:
    body = json.dumps(ask.body).encode()
    try:
        while True:
            began = time.monotonic()
            status, headers, raw = await connection.ask(body, rng.randrange(1, 4) if ask.cut else None)
            report.statuses[status] += 1
            if status != 429:
                break
            report.turned_away += 1
            report.retry_after.append(float(headers["retry-after"]))
            await asyncio.sleep(patience * float(headers["retry-after"]) * rng.uniform(0.5, 1))
        if ask.cut and status == 200:
            report.cut += 1
        elif status != 200:
            report.lost.append(f"request {place}: status {status}: {raw[:200]!r}")
        elif (got := read(ask.body, raw)) != ask.expected and ask.expected is not None:
            report.mixed_up.append(f"request {place}: expected {ask.expected!r}, got {got!r}")
        else:
            report.right += 1
            report.seconds.append(time.monotonic() - began)
    except (OSError, asyncio.IncompleteReadError, ValueError, IndexError, KeyError) as error:
        connection.close()
        report.lost.append(f"request {place}: {type(error).__name__}: {error}")


async def _ask_wrong(connection: Connection, rng: random.Random, right: dict[str, Any], report: Report) -> None:
    change, expected = rng.choice(WRONG)
    body = change if isinstance(change, bytes) else json.dumps(_changed(right, change)).encode()
    try:
        status, _, raw = await connection.ask(body)
        report.statuses[status] += 1
        if status == expected:
            report.refused += 1
        else:
            report.lost.append(f"a wrong request {change!r}: status {status}: {raw[:200]!r}")
    except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
        connection.close()
        report.lost.append(f"a wrong request {change!r}: {type(error).__name__}: {error}")


def _changed(right: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A right request with some fields changed; one with a prompt is whole, and may lack the others."""
    return change if "prompt" in change else {**right, "stream": False, **change}
