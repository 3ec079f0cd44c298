"""The server: exact hosts and origins, limits on every field, errors in words, alive after anything."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, settings
from shown import Endless, serving
from starlette.requests import ClientDisconnect, Request

from regard.cli import main
from regard.core.shape import Role
from regard.http import listening
from regard.page import engine, server
from regard.page.beams import Beam
from regard.page.cancel import Cancelled
from regard.page.export import bundle
from regard.page.questions import Index, Text, schema_of, whole
from regard.page.server import SCHEMAS, openapi
from regard.page.wire import Reply

READ = {"run": "shipped", "place": "encoder", "text": "a b", "target": ""}


@pytest.fixture(scope="module")
def page():
    with serving({}) as page:
        yield page


def said(body):
    found = json.loads(body)["error"]
    assert not re.search(r"Traceback|File \"|/[a-z]+/[a-z]+|site-packages|\.py", found), found
    return found


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", "", "127.0.0.1:{port}.evil"]
)
@pytest.mark.parametrize("path", ["/", "/openapi.json", "/page/main.js", "/api/about"])
def test_only_its_own_host(page, host, path):
    method, body = ("POST", "{}") if path.startswith("/api") else ("GET", None)
    status, _, got = page.request(method, path, body, {"Host": host.format(port=page.port)})
    assert status in (400, 403)
    if status == 403:
        said(got)
    assert page.request(method, path, body)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://127.0.0.1:{port}"},
    ],
)
def test_only_its_own_page(page, headers):
    headers = {name: value.format(port=page.port) for name, value in headers.items()}
    assert page.request("POST", "/api/about", "{}", headers)[0] == 403
    own = {"Origin": f"http://127.0.0.1:{page.port}", "Sec-Fetch-Site": "same-origin"}
    assert page.request("POST", "/api/about", "{}", own)[0] == 200


def test_a_link_on_another_site_opens_the_page_and_no_more(page):
    def status(method, path, site, dest):
        body = "{}" if method == "POST" else None
        return page.request(method, path, body, {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": dest})[0]

    for site in ("cross-site", "same-site", "anything"):
        assert status("GET", "/", site, "document") == 200
        assert status("GET", "/", site, "iframe") == 403
        assert status("GET", "/page/main.js", site, "document") == 403
        assert status("GET", "/openapi.json", site, "document") == 403
        assert status("POST", "/api/about", site, "document") == 403
    assert status("GET", "/page/main.js", "same-origin", "script") == 200


def test_headers_of_safety(page):
    for path in ("/", "/page/main.js", "/nothing", "/page/../server.py"):
        _, headers, _ = page.request("GET", path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


def test_the_page_has_no_inline_script(page):
    text = page.request("GET", "/")[2].decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"\son\w+=|javascript:|\sstyle=", text)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert sink not in bundle()


@pytest.mark.parametrize(
    "path",
    [
        "/page/../server.py",
        "/page/..%2fserver.py",
        "/page/%2e%2e/server.py",
        "//etc/passwd",
        "/page//etc/passwd",
        "/page/views",
        "/page/%00",
        "/api/subject",
        "/api/answer",
        "/api/__init__",
    ],
)
def test_no_path_leads_out(page, path):
    for method, body in (("GET", None), ("POST", "{}")):
        status, _, got = page.request(method, path, body)
        assert status in (400, 404, 405)
        assert b"import" not in got


@pytest.mark.parametrize("run", ["../shipped", "/etc/passwd", "shipped/..", "x" * 200, ""])
def test_runs_are_those_given(page, run):
    status, _, got = page.request("POST", "/api/read", json.dumps(READ | {"run": run}))
    assert status == 400
    assert "no such run" in said(got) or run == ""


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b'"x"', 400), (b"null", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400),
        (b'{"a":' * 20_000, 400), (b'{"run": NaN}', 400), (b'{"run": 1e999}', 400), (b"1" * 9_000, 400),
        (b'{"run": "shipped"}', 400), (b" " * (300 << 10), 413),
        (b'{"text": "\\ud800", "run": "shipped", "place": "encoder"}', 400),
    ],
)  # fmt: skip
def test_malformed_bodies(page, body, status):
    got, _, words = page.request("POST", "/api/read", body)
    assert got == status
    said(words)
    assert page.ask("example").meta["scale"] == 0.125


@pytest.mark.parametrize(
    "change",
    [
        {"text": "x" * 60_001},
        {"place": "attic"},
        {"text": 5},
        {"extra": 1},
        {"run": None},
        {"text": ["a"]},
        {"place": True},
    ],
)
def test_fields_out_of_bounds(page, change):
    status, _, got = page.request("POST", "/api/read", json.dumps(READ | change))
    assert status == 400
    said(got)


def test_only_json_and_only_the_method_asked_for(page):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert page.request("POST", "/api/about", "{}", {"Content-Type": kind})[0] == 415
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        assert page.request(method, "/api/about")[0] == 405
    assert page.request("POST", "/", "{}")[0] == 405


def test_a_slow_body_is_cut(page, monkeypatch):
    monkeypatch.setattr(listening, "BODY_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", page.port)) as slow, asking(page, "example", {}) as quick:
        head = f"POST /api/about HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        # others are served meanwhile
        assert b" 200 " in quick.recv(4096)
        assert b" 408 " in slow.recv(4096)


def test_slow_heads_are_cut(page, monkeypatch):
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.8)
    whole = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n\r\n".encode()
    with ExitStack() as stack:
        with page.engine.lock:
            # whoever takes long to be answered is not slow
            waiting = stack.enter_context(asking(page, "example", {}))
            # nothing, a part, and a part after a request that was answered
            opened = (socket.create_connection(("127.0.0.1", page.port), timeout=60) for _ in range(3))
            cut = [stack.enter_context(connection) for connection in opened]
            cut[1].sendall(whole[:20])
            cut[2].sendall(whole)
            assert cut[2].recv(65536).startswith(b"HTTP/1.1 200")
            cut[2].sendall(whole[:20])
            for slow in cut:
                while slow.recv(65536):
                    pass
        assert waiting.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_view_that_is_saved_may_be_larger(page):
    read = {"name": "read", "values": READ | {"text": "word " * 12_000}}
    tiles = [
        {"name": "tile", "values": read["values"] | {"layer": 0, "level": 3, "row": row, "column": 0}}
        for row in range(7)
    ]
    body = {"title": "t", "hash": "#" + "x" * 100_000, "theme": "auto", "questions": [read, *tiles]}
    assert len(json.dumps(body)) > server.MOST_BYTES
    status, _, got = page.request("POST", "/api/export", json.dumps(body))
    assert status == 200, got[:200]
    assert page.request("POST", "/api/export", b" " * (server.MORE_BYTES["export"] + 1))[0] == 413


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00" * 64,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /api/about HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    ],
)
def test_noise_leaves_it_alive(page, raw):
    with socket.create_connection(("127.0.0.1", page.port)) as noise:
        noise.settimeout(5)
        try:
            noise.sendall(raw)
            noise.recv(4096)
        except OSError:
            pass
    assert page.request("POST", "/api/example", "{}")[0] == 200


def test_too_many_questions_are_asked_to_come_back(page, monkeypatch):
    began, end, example = threading.Event(), threading.Event(), page.engine.example

    def long():
        began.set()
        assert end.wait(60)
        return example()

    page.engine._replies.kept.clear()
    monkeypatch.setattr(page.engine, "example", long)
    monkeypatch.setattr(server, "WAITING", 1)
    first = threading.Thread(target=page.ask, args=("example",))
    first.start()
    try:
        assert began.wait(60)
        status, headers, got = page.request("POST", "/api/example", "{}")
        assert (status, headers["retry-after"]) == (503, "1")
        said(got)
    finally:
        end.set()
    first.join(60)
    assert page.request("POST", "/api/example", "{}")[0] == 200


def test_who_leaves_the_queue_makes_room():
    """A page that cancels what it asked, and asks anew, is not refused for what it cancelled."""

    async def check():
        handlers, end = server.Handlers(engine.Engine({})), threading.Event()
        stays, leaves = asyncio.Event(), asyncio.Event()

        def ask(work, leaves):
            async def receive():
                await leaves.wait()
                return {"type": "http.disconnect"}

            return asyncio.create_task(handlers._work(Request({"type": "http"}, receive), work))

        first = ask(lambda is_cancelled: end.wait(60), stays)
        left = [ask(lambda is_cancelled: pytest.fail("nobody waits"), leaves) for _ in range(server.WAITING - 1)]
        await asyncio.sleep(0)
        with pytest.raises(server.Refused):
            await ask(lambda is_cancelled: None, stays)
        leaves.set()
        async with asyncio.timeout(60):
            for task in left:
                with pytest.raises(ClientDisconnect):
                    await task
        assert not first.done()
        second = ask(lambda is_cancelled: "answered", stays)
        end.set()
        assert (await first, await second) == (True, "answered")

    asyncio.run(check())


def lines(page, **values):
    status, _, body = page.request("POST", "/api/translate", json.dumps(values))
    assert status == 200
    return [json.loads(line) for line in body.decode().split("\n") if line]


def test_a_translation_comes_step_by_step(page):
    found = lines(page, run="shipped", text="Where is the station?", beam=4)
    assert found[0]["source"][-1] == "</s>"
    steps = [line for line in found if "beams" in line]
    assert [line["step"] for line in steps] == list(range(len(steps)))
    # what the first token came from, as the aligner says
    translator = page.engine.subject("shipped").translator
    source = torch.tensor([[*translator.source.encode("Where is the station?"), translator.source.eos]])
    best = max(steps[0]["beams"], key=lambda beam: beam["logprob"])["token"]
    (first,) = (i for i in range(translator.target.size) if translator.target.tokens([i]) == [best])
    target = torch.tensor([[translator.target.bos, first]])
    row = translator.model.maps(source, target, place="aligner")[0][0, 0, 0]
    assert steps[0]["link"] == int(row.argmax())
    assert steps[0]["weight"] == pytest.approx(float(row.max()), abs=1e-6)
    last = found[-1]["hypotheses"]
    assert last[0]["text"] == page.engine.subject("shipped").translator("Where is the station?")
    assert [one["score"] for one in last] == sorted((one["score"] for one in last), reverse=True)
    step, at = last[0]["place"]
    assert steps[step]["beams"][at]["logprob"] >= last[0]["logprob"]


def test_who_leaves_ends_the_search(page, monkeypatch):
    began, ended = threading.Event(), threading.Event()

    def endless(translator, ids, beam, seen):
        began.set()
        try:
            for _ in range(1000):
                seen([Beam(0, 5, -1.0, (5,))])
                time.sleep(0.01)
        except Cancelled:
            ended.set()
            raise
        return []

    monkeypatch.setattr(engine, "watch", endless)
    with asking(page, "translate", {"run": "shipped", "text": "a sentence", "beam": 1}) as gone:
        assert b"HTTP/1.1 200" in gone.recv(65536)
        assert began.wait(60)  # who leaves before is never searched for
    assert ended.wait(60)
    assert page.request("POST", "/api/example", "{}")[0] == 200


def asking(page, name, values):
    """A connection over which a question was asked, and that nobody reads."""
    body = json.dumps(values).encode()
    connection = socket.create_connection(("127.0.0.1", page.port))
    head = f"POST /api/{name} HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_work_ends_when_nobody_waits_for_it(page, monkeypatch):
    work = Endless()
    page.engine._replies.kept.clear()
    with monkeypatch.context() as changed:
        changed.setattr(page.engine, "example", work)
        with asking(page, "example", {}):
            assert work.began.wait(60)
            # whoever waits behind it goes on waiting
            waiting = threading.Thread(target=page.ask, args=("cost",), kwargs={"spec": "fnet", "role": "self"})
            waiting.start()
            assert not work.ended.wait(0.3)
        assert work.ended.wait(60)
    waiting.join(60)
    assert not waiting.is_alive()
    # what was not finished is not taken for an answer
    assert page.ask("example").meta["scale"] == 0.125


def test_an_error_of_ours_is_not_told(page, monkeypatch, capfd):
    def broken(**values):
        raise RuntimeError("secret in /home/somebody/file.py")

    monkeypatch.setattr(page.engine, "example", broken)
    page.engine._replies.kept.clear()
    status, _, got = page.request("POST", "/api/example", "{}")
    assert status == 500
    assert "secret" not in said(got)
    assert "secret in" in capfd.readouterr().err


def test_the_command_refuses_in_one_line(capsys, tmp_path):
    for words in (
        ["show", "--port", "70000"],
        ["show", "--out", "x.html"],
        ["show", "--out", "x.html", "--text", " "],
        ["show", "--out", str(tmp_path), "--text", "a word"],
        ["show", "--out", str(tmp_path / "no" / "x.html"), "--text", "a word"],
        ["show", "a", "b", "--out", "x.html", "--text", "a word"],
        ["show", str(tmp_path)],
        ["show", str(tmp_path / "no")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        main(["show", "--no-browser", "--port", str(taken.getsockname()[1])])
    assert "choose another --port" in capsys.readouterr().err


api = schemathesis.openapi.from_dict(openapi())


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_api_holds_what_its_openapi_says(page, name):
    """Any request, in and out of the schema, is answered with what is declared and never with 5xx."""
    operation = next(op.ok() for op in api.get_all_operations() if op.ok().path == f"/api/{name}")
    modes = list(schemathesis.GenerationMode)
    seen = set()
    for mode in modes:

        @settings(
            max_examples=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            derandomize=True,
        )
        def once(case):
            response = case.call(base_url=page.address, timeout=120, headers={"Host": f"127.0.0.1:{page.port}"})
            assert response.status_code < 500, (response.status_code, response.text[:300])
            if response.status_code != 200:
                said(response.content)
            seen.add(response.status_code)

        from hypothesis import given

        given(case=operation.as_strategy(generation_mode=mode))(once)()
    assert 400 in seen or 415 in seen or 405 in seen
    assert page.request("POST", "/api/example", "{}")[0] == 200


def test_the_schema_of_a_question_is_its_signature():
    def question(text: Text, role: Role, count: Annotated[int, whole(1, 9)] = 3, head: Index | None = None) -> Reply:
        """What nothing else restates."""

    def streamed(text: Text, emit: Callable[[str], None], is_cancelled: Callable[[], bool] | None = None) -> Reply:
        """Functions do not come in a request."""

    text = {"type": "string", "minLength": 0, "maxLength": 60_000}
    assert schema_of(question) == {
        "type": "object",
        "properties": {
            "text": text,
            "role": {"type": "string", "enum": ["self", "causal", "cross"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 9},
            "head": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["text", "role"],
        "additionalProperties": False,
    }
    assert schema_of(streamed)["properties"] == {"text": text}


def test_every_value_of_every_question_is_bounded():
    assert {"about", "read", "tile", "position", "translate", "export"} <= SCHEMAS.keys()
    assert not {"answer", "reading", "subject", "questions"} & SCHEMAS.keys()
    for name, schema in SCHEMAS.items():
        for field, part in schema["properties"].items():
            bounds = {"string": {"maxLength"}, "integer": {"minimum", "maximum"}, "array": {"maxItems"}}[part["type"]]
            assert bounds <= part.keys() or "enum" in part, (name, field)
