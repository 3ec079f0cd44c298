"""The page where other machines can reach it: nothing without the token."""

import json
import re

import pytest
from browser import launched, needs_chromium
from shown import serving

from regard.cli import main
from regard.page import server
from regard.page.engine import Engine

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def page():
    with serving({}, token=TOKEN) as page:
        yield page


@pytest.mark.parametrize(
    "path", ["/", "/openapi.json", "/page/main.js", "/page/client.js", "/api/about", "/api/export"]
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Cookie": "regard-token=wrong"},
        {"Cookie": "regard-token="},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer é".encode("latin-1").decode("latin-1")},
    ],
    ids=str,
)
def test_nothing_without_the_token(page, path, headers):
    method, body = ("POST", "{}") if path.startswith("/api") else ("GET", None)
    status, _, got = page.request(method, path, body, headers)
    assert status == 401
    assert "?token=" in json.loads(got)["error"]
    assert TOKEN.encode() not in got


def test_the_token_in_the_address_becomes_a_cookie(page):
    status, headers, _ = page.request("GET", f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert re.search(r"HttpOnly", cookie)
    assert re.search(r"SameSite=lax", cookie, re.I)
    with_cookie = {"Cookie": cookie.split(";")[0]}
    assert page.request("GET", "/", None, with_cookie)[0] == 200
    assert page.request("POST", "/api/about", "{}", with_cookie)[0] == 200
    assert page.request("POST", "/api/about", "{}", {"Authorization": f"Bearer {TOKEN}"})[0] == 200
    # in the address of anything else it is worth nothing
    assert page.request("POST", f"/api/about?token={TOKEN}", "{}")[0] == 401
    assert page.request("GET", "/?token=wrong")[0] == 401


@pytest.mark.parametrize(
    "spec", ["local(window={[]: 1})", "local(window=" + "(" * 280, "performer(features=9999999999)"]
)
def test_specs_made_to_break_the_server_are_refused_in_words(page, spec):
    values = {"spec": spec, "role": "self", "length": 8, "heads": 2}
    status, _, got = page.request("POST", "/api/pattern", json.dumps(values), {"Authorization": f"Bearer {TOKEN}"})
    assert status == 400
    assert json.loads(got)["error"]


def test_other_sites_have_nothing_of_it(page):
    given = {"Authorization": f"Bearer {TOKEN}"}
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
        assert page.request("POST", "/api/about", "{}", given | headers)[0] == 403
    # any name of this machine, with the origin that goes with it
    named = {"Host": "workstation:8642", "Origin": "http://workstation:8642"}
    assert page.request("POST", "/api/about", "{}", given | named)[0] == 200


def test_which_addresses_need_a_token():
    assert all(map(server.is_loopback, ("127.0.0.1", "127.0.0.2", "localhost", "::1")))
    assert not any(map(server.is_loopback, ("0.0.0.0", "::", "192.168.1.5", "workstation", "")))
    assert server.reached_by("0.0.0.0", 80) is None
    assert server.reached_by("192.168.1.5", 8642) == {"192.168.1.5:8642"}
    with pytest.raises(ValueError, match="needs a token"):
        server.application(Engine({}), None)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_show_warns_and_prints_the_token(monkeypatch, capsys, host):
    used = []
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda self, sockets: [part.close() for part in sockets])
    whole = server.application
    monkeypatch.setattr(server, "application", lambda *given: used.append(given[1:]) or whole(*given))
    assert main(["show", "--host", host, "--port", "0", "--no-browser"]) == 0
    said = capsys.readouterr()
    ((hosts, token),) = used
    if host == "127.0.0.1":
        assert (token, said.err) == (None, "")
        assert "token" not in said.out
        return
    assert hosts is None
    assert len(token) >= 32
    assert f"/?token={token}#run=" in said.out
    assert "lets other machines reach this page" in said.err
    assert token not in said.err


@needs_chromium
def test_a_browser_opens_the_address_and_keeps_no_token_in_it(page):
    with launched() as browser:
        context = browser.new_context()
        opened = context.new_page()
        opened.set_default_timeout(60_000)
        opened.goto(f"{page.address}?token={TOKEN}#view=mechanisms")
        opened.wait_for_function("() => window.regard && window.regard.view")
        assert opened.url.startswith(f"{page.address}#")
        assert "view=mechanisms" in opened.url
        assert TOKEN not in opened.evaluate("document.cookie + location.href + document.documentElement.outerHTML")
        other = browser.new_context().new_page()
        assert other.goto(page.address).status == 401
