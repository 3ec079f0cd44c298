"""The HTTP application: every request is checked before a model sees it, and every error is told in OpenAI's shape."""

import asyncio
import base64
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from regard.decoding import DecodingConfig
from regard.http.listening import equal, read_json
from regard.http.refused import Refused
from regard.http.schema import check
from regard.serve.completions import Completion
from regard.serve.gathering import Job
from regard.serve.generating import Generator, Item
from regard.serve.limits import Limits
from regard.serve.observing import LOG, Metrics, Trace
from regard.serve.requests import Failed, Finished, Generation, Update
from regard.serve.schemas import openapi, schemas
from regard.serve.served import Ability, Runs

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
OPEN = ("/healthz", "/readyz")  # answered to anybody, by any name, and while the server drains
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
METRICS_SECONDS = 1.0
LEFT = 499  # the status of a request whose client left, for the log

Handler = Callable[[Request], Awaitable[Response]]


class Mail:
    """Brings what a generator's thread delivers to whoever waits for it on the event loop."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    def deliver(self, items: list[tuple[Generation, Item]]) -> None:
        if self.loop is not None:
            # a loop that has ended has nobody who waits
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._sort, items)

    def _sort(self, items: list[tuple[Generation, Item]]) -> None:
        for generation, item in items:
            generation.owner.put_nowait((generation, item))


class Guard:
    """Who may ask: requests to our own name, from no other site, with the key if there is one."""

    def __init__(self, hosts: set[str] | None, key: str | None):
        if hosts is None and key is None:
            raise ValueError("a server that answers to any name needs an API key")
        self.hosts, self.key = hosts, key

    def check(self, request: Request) -> None:
        if request.url.path in OPEN:
            return
        host = request.headers.get("host", "").lower()
        if self.hosts is not None and host not in self.hosts:
            raise Refused(403, "this server answers to its own name only: see --allow-host")
        origin = request.headers.get("origin")
        names = self.hosts or {host}
        if origin is not None and origin.lower().partition("://")[2] not in names:
            raise Refused(403, "this server answers no page of another site")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refused(403, "this server answers no page of another site")
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        if self.key is not None and not (kind.lower() == "bearer" and equal(sent, self.key)):
            raise Refused(401, "this server needs its API key, as 'Authorization: Bearer KEY'", code="invalid_api_key")


class Api:
    """One method per route."""

    def __init__(self, runs: Runs, limits: Limits, mail: Mail, guard: Guard):
        self.runs, self.limits, self.mail, self.guard = runs, limits, mail, guard
        self.schemas = schemas(limits)
        self.metrics = Metrics(runs, shared=limits.processes > 1)
        self.draining = False
        self.description = openapi(runs, limits, guard.key is not None)

    def application(self) -> Starlette:
        gets: dict[str, Handler] = {
            "/v1/models": self.models,
            "/v1/models/{model}": self.model,
            "/openapi.json": self.describe,
            "/metrics": self.tell_metrics,
            "/healthz": self.is_alive,
            "/readyz": self.is_ready,
        }
        posts: dict[str, Handler] = {
            "/v1/completions": self.complete,
            "/v1/embeddings": self.embed,
            "/translate": self.translate,
            "/classify": self.classify,
            "/fill": self.fill,
        }
        routes = [Route(path, self.guarded(path, handler), methods=["GET"]) for path, handler in gets.items()]
        routes += [Route(path, self.guarded(path, handler), methods=["POST"]) for path, handler in posts.items()]
        return Starlette(
            routes=routes,
            lifespan=self.live,
            exception_handlers={
                404: _missing(404, "there is no such route: /openapi.json has those there are"),
                405: _missing(405, "this route takes another method"),
            },
        )

    @contextlib.asynccontextmanager
    async def live(self, app: Starlette) -> AsyncIterator[None]:
        """The threads of the runs live as long as the application."""
        self.mail.loop = asyncio.get_running_loop()
        for worker in self.runs.workers:
            worker.start()
        updating = asyncio.create_task(self._update_metrics()) if self.metrics.is_shared else None
        try:
            yield
        finally:
            if updating is not None:
                updating.cancel()
            for worker in self.runs.workers:
                worker.close()
            for worker in self.runs.workers:
                await run_in_threadpool(worker.thread.join, 5)

    async def _update_metrics(self) -> None:
        """Writes the metrics of this process regularly, because any process may be asked for all."""
        while True:
            self.metrics.update()
            await asyncio.sleep(METRICS_SECONDS)

    def guarded(self, route: str, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            trace = Trace(self.metrics, route, f"req-{uuid.uuid4().hex[:16]}")
            request.state.trace = trace
            try:
                response = await self._checked(request, route, handler)
            except BaseException:
                # the server ends before its answer
                trace.status = 503
                trace.end()
                raise
            trace.status = response.status_code
            response.headers["X-Request-Id"] = trace.number
            for header, value in HEADERS.items():
                response.headers.setdefault(header, value)
            if self.draining:
                response.headers["Connection"] = "close"
            if not isinstance(response, Events):
                trace.end()
            return response

        return handle

    async def _checked(self, request: Request, route: str, handler: Handler) -> Response:
        try:
            self.guard.check(request)
            if self.draining and route not in (*OPEN, "/metrics"):
                raise Refused(503, "the server is shutting down: send the request to another one", retry_after=1)
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=LEFT)
        except Exception as error:
            return told(error)

    # about the server

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.runs.by_name]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self.runs.by_name:
            raise Refused(404, f"there is no model {name[:100]!r} here", param="model", code="model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        one = self.runs.by_name[name]
        about: dict[str, Any] = {"id": name, "object": "model", "created": one.created, "owned_by": "regard"}
        about |= {"task": one.task, "abilities": one.abilities}
        return about | ({} if one.generator is None else {"context": one.generator.context})

    async def describe(self, request: Request) -> Response:
        return JSONResponse(self.description)

    async def tell_metrics(self, request: Request) -> Response:
        return Response(self.metrics.tell(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def is_alive(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def is_ready(self, request: Request) -> Response:
        ready = not self.draining and all(worker.thread.is_alive() for worker in self.runs.workers)
        return PlainTextResponse("ready\n" if ready else "not ready\n", 200 if ready else 503)

    # texts that are continued

    async def complete(self, request: Request) -> Response:
        values = await self._body(request, "/v1/completions")
        served = self.runs.find(values["model"], "complete")
        assert served.generator is not None, "what completes has a generator"
        # a long prompt takes a while to encode
        asked = await run_in_threadpool(Completion, values, served.name, served.generator.language, self.limits)
        trace: Trace = request.state.trace
        trace.fields["model"] = served.name
        answers = Answers(asked.generations, served.generator)
        if asked.streams:
            return Events(self._stream(asked, answers, request.receive, trace), trace)
        async with contextlib.aclosing(answers.items(request.receive)) as items:
            async for _ in items:
                pass
        self._note(asked, trace)
        # the tokens of long prompts take a while to place, too
        return JSONResponse(await run_in_threadpool(asked.answer) if asked.echoes else asked.answer())

    async def _stream(
        self, asked: Completion, answers: "Answers", receive: Receive, trace: Trace
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(answers.items(receive)) as items:
                async for generation, item in items:
                    if isinstance(item, Update):
                        for chunk in asked.chunks(generation, item):
                            yield chunk
            for chunk in asked.last_chunks():
                yield chunk
        except Refused as error:
            # the status was sent long ago
            trace.status = error.status
            yield b"data: " + bytes(told(error).body) + b"\n\n"
        finally:
            self._note(asked, trace)

    def _note(self, asked: Completion, trace: Trace) -> None:
        usage = asked.usage()
        trace.fields |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        for one in asked.generations:
            if one.first_token is not None:
                self.metrics.first_token.observe(one.first_token - one.created)

    # texts that are read whole

    async def embed(self, request: Request) -> Response:
        values = await self._body(request, "/v1/embeddings")
        found = await self._gathered(request, values, "embed", values["input"], None)
        data, tokens = [], 0
        for number, (vector, length) in enumerate(found):
            listed: Any = vector.tolist()
            if values.get("encoding_format") == "base64":
                listed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": number, "embedding": listed})
            tokens += length
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": values["model"], "usage": usage})

    async def translate(self, request: Request) -> Response:
        values = await self._body(request, "/translate")
        best = values.get("nbest") or 1
        decoding = DecodingConfig(beam=values.get("beam") or max(5, best), nbest=best)
        found = await self._gathered(request, values, "translate", values["text"], decoding)
        answers = [one[0] | ({"nbest": one} if best > 1 else {}) for one in found]
        return JSONResponse({"translations": answers})

    async def classify(self, request: Request) -> Response:
        values = await self._body(request, "/classify")
        return JSONResponse({"answers": await self._gathered(request, values, "classify", values["text"], None)})

    async def fill(self, request: Request) -> Response:
        values = await self._body(request, "/fill")
        top = values.get("top") or 5
        return JSONResponse({"answers": await self._gathered(request, values, "fill", values["text"], top)})

    async def _gathered(
        self, request: Request, values: dict[str, Any], ability: Ability, texts: str | list[str], settings: Any
    ) -> list[Any]:
        """The answers for texts, with those of other requests in one batch."""
        served = self.runs.find(values.get("model"), ability)
        request.state.trace.fields |= {"model": served.name, "texts": 1 if isinstance(texts, str) else len(texts)}
        job = Job([texts] if isinstance(texts, str) else texts, settings, self.limits.deadline)
        served.gatherers[ability].submit(job)
        answer = asyncio.wrap_future(job.future)
        leaving = asyncio.create_task(_left(request.receive))
        try:
            left = max(0.0, job.deadline - time.monotonic())
            await asyncio.wait((answer, leaving), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if leaving.done():
                raise ClientDisconnect
            # what computes looks at the clock only now and then
            spent = time.monotonic() - job.created
            raise Refused(504, f"the request took too long: {spent:.1f} seconds so far", retry_after=1)
        finally:
            leaving.cancel()
            if not answer.done():
                # who is late has not left
                job.cancelled = time.monotonic() <= job.deadline
                answer.cancel()

    async def _body(self, request: Request, route: str) -> dict[str, Any]:
        values = await read_json(request, self.limits.body)
        check(values, self.schemas[route])
        return values


class Answers:
    """What comes of generations. They are submitted when it is made, so that a refusal is told before any answer."""

    def __init__(self, generations: list[Generation], generator: Generator):
        self.generations, self.generator = generations, generator
        self.queue: asyncio.Queue[tuple[Generation, Item] | None] = asyncio.Queue()
        for one in generations:
            one.owner = self.queue
        generator.submit(generations)

    async def items(self, receive: Receive) -> AsyncGenerator[tuple[Generation, Item], None]:
        """All there is, until every generation is finished. When the client leaves, they are cancelled."""
        leaving = asyncio.create_task(self._watch(receive))
        going = set(self.generations)
        try:
            while going:
                found = await self.queue.get()
                if found is None:
                    raise ClientDisconnect
                generation, item = found
                if isinstance(item, Failed):
                    going.discard(generation)
                    raise item.why
                if isinstance(item, Finished):
                    going.discard(generation)
                yield generation, item
        finally:
            leaving.cancel()
            for one in going:
                self.generator.cancel(one)

    async def _watch(self, receive: Receive) -> None:
        await _left(receive)
        self.queue.put_nowait(None)


class Events(Response):
    """Server-sent events. It ends the trace of its request."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], trace: Trace):
        super().__init__()
        del self.headers["content-length"]
        self.chunks, self.trace = chunks, trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientDisconnect, OSError):
            self.trace.status = LEFT
        except asyncio.CancelledError:
            self.trace.status = 503
            raise
        finally:
            await self.chunks.aclose()
            self.trace.end()


async def _left(receive: Receive) -> None:
    """Returns when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def told(error: Exception) -> JSONResponse:
    """An error in OpenAI's shape. One of ours is told in the log, not to the client."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        error = Refused(400, " ".join(str(error).split())[:400])
    elif not isinstance(error, Refused):
        LOG.error("a request failed", exc_info=error)
        error = Refused(500, "something went wrong in the server; its log says what")
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    words = {"message": error.why, "type": kind, "param": error.param, "code": error.code}
    headers = {} if not error.retry_after else {"Retry-After": str(error.retry_after)}
    if error.status in (408, 413):
        headers["Connection"] = "close"
    return JSONResponse({"error": words}, error.status, headers)


def _missing(status: int, why: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        response = told(Refused(status, why))
        allow: Iterable[tuple[str, str]] = (getattr(error, "headers", None) or {}).items()
        response.headers.update(HEADERS | {name: value for name, value in allow if name == "Allow"})
        return response

    return handle


def quiet_asyncio() -> None:
    """A client that leaves in the middle of an answer is no error of ours."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
