"""The HTTP server of the page: on loopback, one question per request, every request checked before it is answered.

A request reaches the engine only with an exact Host, an Origin of ours or none, JSON of at most 256 KiB, and values
within the schema of its question. A saved view may have 4 MiB, since it repeats its text in every question, and an
image file 8 MiB. Replies are bytes (wire.py). Errors are one sentence, without paths or tracebacks.

If other machines can reach the server, every request needs a token too. The address that `regard show` prints has it as
?token=. Opening that address gives the browser a cookie and removes the token from the address. Programs send
"Authorization: Bearer TOKEN".
"""

import asyncio
import json
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from regard import __version__
from regard.http.listening import Prompt, bracketed, equal, is_loopback, reached_by, read_json
from regard.http.refused import Refused
from regard.http.schema import check
from regard.page import wire
from regard.page.cancel import Cancelled, IsCancelled
from regard.page.engine import Engine
from regard.page.export import page
from regard.page.images import MOST_UPLOADED
from regard.page.questions import schema_of

PAGE = Path(__file__).parent / "static"
MOST_BYTES = 256 << 10
MORE_BYTES = {"export": 4 << 20, "upload": MOST_UPLOADED * 4 // 3 + 1024}
WAITING = 32  # questions in the queue; further ones get status 503
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SCHEMAS = {name: schema_of(function) for name, function in Engine.questions().items()}
SCHEMAS |= {"translate": schema_of(Engine.translate), "export": schema_of(page)}
MEDIA_TYPES = {"translate": "application/x-ndjson", "export": "text/html"}  # of questions without a Reply

Handler = Callable[[Request], Awaitable[Response]]


def openapi() -> dict[str, Any]:
    """The API as OpenAPI 3.1."""
    words = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    error = {"description": "the reason, in words", "content": {"application/json": {"schema": words}}}
    paths = {}
    for name, body in SCHEMAS.items():
        about = inspect_line(name)
        paths[f"/api/{name}"] = {
            "post": {
                "operationId": name,
                "summary": about,
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": {
                    "200": {"description": about, "content": {MEDIA_TYPES.get(name, "application/octet-stream"): {}}},
                    **{str(code): error for code in (400, 401, 403, 405, 408, 413, 415, 503)},
                },
            }
        }
    return {"openapi": "3.1.0", "info": {"title": "Regard", "version": __version__}, "paths": paths}


def inspect_line(name: str) -> str:
    return (getattr(Engine, name, page).__doc__ or "").strip().splitlines()[0]


COOKIE = "regard-token"


def application(engine: Engine, hosts: set[str] | None, token: str | None = None) -> Starlette:
    """The app. `hosts` are the exact Host headers it answers to. None means any, as a machine may have many names; this
    needs a token, which a page of another site that uses one of these names does not have."""
    if hosts is None and token is None:
        raise ValueError("a server that answers to any name needs a token")
    handlers, guarded = Handlers(engine), Guard(hosts, token).guarded
    return Starlette(
        routes=[
            Route("/", guarded(handlers.static), methods=["GET"]),
            Route("/openapi.json", guarded(handlers.describe), methods=["GET"]),
            Route("/api/translate", guarded(handlers.translate), methods=["POST"]),
            Route("/api/export", guarded(handlers.export), methods=["POST"]),
            Route("/api/{name}", guarded(handlers.ask), methods=["POST"]),
            Route("/page/{path:path}", guarded(handlers.static), methods=["GET"]),
        ],
        exception_handlers={
            404: _missing(404, "there is no such page"),
            405: _missing(405, "this address takes another method"),
        },
    )


class Handlers:
    """One method per address."""

    def __init__(self, engine: Engine):
        self.engine = engine
        paths = [path for path in PAGE.rglob("*") if path.suffix in KINDS]
        self.files = {path.relative_to(PAGE).as_posix(): path.read_bytes() for path in paths}
        self.queue, self.waiting = asyncio.Semaphore(1), 0

    async def ask(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in SCHEMAS or name in MEDIA_TYPES:
            raise Refused(404, "there is no such question")
        values = await _body(request, name)
        reply = await self._work(
            request, lambda is_cancelled: wire.encode(self.engine.answer(name, values, is_cancelled))
        )
        return Response(reply, media_type="application/octet-stream")

    async def translate(self, request: Request) -> Response:
        values = await _body(request, "translate")
        # errors in the values are reported before the stream begins
        subject = await self._work(request, lambda is_cancelled: self.engine.subject(values["run"]))
        if subject.task != "translate":
            raise ValueError(f"{values['run']} does not translate: choose another run")
        if not values["text"].strip():
            raise ValueError("there is nothing to translate yet: type a sentence")
        return StreamingResponse(self._stream(request, values), media_type="application/x-ndjson")

    async def export(self, request: Request) -> Response:
        values = await _body(request, "export")
        for question in values["questions"]:
            check(question["values"], SCHEMAS[question["name"]], question["name"])
        made = await self._work(request, lambda is_cancelled: page(self.engine, **values, is_cancelled=is_cancelled))
        name = {"Content-Disposition": 'attachment; filename="regard.html"'}
        return Response(made, media_type="text/html; charset=utf-8", headers=name)

    async def static(self, request: Request) -> Response:
        name = request.path_params.get("path", "index.html")
        if name not in self.files:
            raise Refused(404, "there is no such page")
        return Response(self.files[name], media_type=f"{KINDS[Path(name).suffix]}; charset=utf-8")

    async def describe(self, request: Request) -> Response:
        return JSONResponse(openapi())

    async def _work(self, request: Request, work: Callable[[IsCancelled], Any]) -> Any:
        """Does work in a thread, one at a time. When the client disconnects, it is cancelled, or leaves the queue."""
        if self.waiting >= WAITING:
            raise Refused(503, "the server has too much to do: try again in a moment")
        gone = threading.Event()
        leaving = asyncio.create_task(_left(request, gone))
        self.waiting += 1
        try:
            await self._turn(leaving)
            try:
                return await run_in_threadpool(work, gone.is_set)
            except Cancelled:
                raise ClientDisconnect from None
            finally:
                self.queue.release()
        finally:
            self.waiting -= 1
            leaving.cancel()

    async def _turn(self, leaving: asyncio.Task[None]) -> None:
        """Waits in the queue, but no longer than the client does: a page that cancels all it asked may ask anew."""
        turn = asyncio.create_task(self.queue.acquire())
        await asyncio.wait((turn, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            if not turn.cancel():
                self.queue.release()
            raise ClientDisconnect

    async def _stream(self, request: Request, values: dict[str, Any]) -> AsyncIterator[bytes]:
        """The steps of a search, one line each, as they come."""
        loop, lines, gone = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None](), False

        def emit(record: dict[str, Any]) -> None:
            if gone:
                raise Cancelled
            loop.call_soon_threadsafe(lines.put_nowait, record)

        def search(is_cancelled: IsCancelled) -> dict[str, Any]:
            return self.engine.translate(**values, emit=emit, is_cancelled=is_cancelled)

        async def work() -> None:
            try:
                lines.put_nowait(await self._work(request, search))
            except ClientDisconnect:
                pass
            except Exception as error:
                lines.put_nowait({"error": _words(error)[1]})
            finally:
                lines.put_nowait(None)

        task = asyncio.create_task(work())
        try:
            while (record := await lines.get()) is not None:
                if await request.is_disconnected():
                    break
                yield json.dumps(record, ensure_ascii=False).encode() + b"\n"
        finally:
            gone = True
            await asyncio.shield(asyncio.wait([task]))


class Guard:
    """Admits requests to our own host name, from our own page or none, with the token if there is one."""

    def __init__(self, hosts: set[str] | None, token: str | None):
        self.hosts, self.token = hosts, token

    def guarded(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                self._check_origin(request)
                response = self._admit(request) or await handler(request)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                status, why = _words(error)
                response = JSONResponse({"error": why}, status)
                if status in (413, 408):
                    response.headers["Connection"] = "close"
                if status == 503:
                    response.headers["Retry-After"] = "1"
            for header, value in HEADERS.items():
                response.headers.setdefault(header, value)
            return response

        return handle

    def _check_origin(self, request: Request) -> None:
        host = request.headers.get("host", "").lower()
        if self.hosts is not None and host not in self.hosts:
            raise Refused(403, "this server answers to its own name only")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{name}" for name in self.hosts or (host,)}:
            raise Refused(403, "this server answers its own page only")
        # a link on another site may open the page itself, in a window of its own, and nothing else
        followed = request.url.path == "/" and request.headers.get("sec-fetch-dest") == "document"
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not followed:
            raise Refused(403, "this server answers its own page only")

    def _admit(self, request: Request) -> Response | None:
        """Refuses a request without the token. Returns the redirect for one that has it in the address."""
        if self.token is None:
            return None
        in_address = request.query_params.get("token")
        if request.method == "GET" and request.url.path == "/" and in_address and equal(in_address, self.token):
            # the browser keeps what follows #
            response = RedirectResponse("/", 303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="lax")
            return response
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        has_cookie = equal(request.cookies.get(COOKIE, ""), self.token)
        if not has_cookie and not (kind == "Bearer" and equal(bearer, self.token)):
            raise Refused(401, "this server needs its token: open the address that 'regard show' printed, with ?token=")
        return None


async def _body(request: Request, name: str) -> dict[str, Any]:
    """The values of a question, within its schema."""
    values = await read_json(request, MORE_BYTES.get(name, MOST_BYTES))
    check(values, SCHEMAS[name])
    return values


def _missing(status: int, why: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        allow = {name: value for name, value in (getattr(error, "headers", None) or {}).items() if name == "Allow"}
        return JSONResponse({"error": why}, status, headers=HEADERS | allow)

    return handle


async def _left(request: Request, gone: threading.Event) -> None:
    """Sets `gone` when the client disconnects, and ignores all other messages."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


def _words(error: Exception) -> tuple[int, str]:
    """A status and a sentence. An error of ours is reported in the terminal, not on the page."""
    if isinstance(error, Refused):
        return error.status, error.why
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return 400, " ".join(str(error).split())[:400]
    traceback.print_exception(error, file=sys.stderr)
    return 500, "something went wrong in the server; its terminal says what"


def serve(engine: Engine, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serves until interrupted. Port 0 takes a free port. `ready` is called with the address, with a token in it if
    other machines can reach the server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    hosts, token, shown = reached_by(host, port), None, bracketed(host)
    if not is_loopback(host):
        token = secrets.token_urlsafe(24)
        shown = socket.gethostname() if hosts is None else shown
    ready(f"http://{shown}:{port}/" + ("" if token is None else f"?token={token}"))
    uvicorn.Server(configured(application(engine, hosts, token))).run(sockets=[listener])


def configured(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=256,
        h11_max_incomplete_event_size=32 << 10,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=2,
        http=Prompt,
        ws="none",
        lifespan="off",
    )
