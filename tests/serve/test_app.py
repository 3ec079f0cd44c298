"""The API over HTTP: OpenAI's client, every route, what is refused, who is cut, and how it ends."""

import asyncio
import functools
import json
import signal
import socket
import threading
import time

import openai
import pytest
import schemathesis
import torch
from folders import ROOT
from generators import SHARED, small_language, tokenizer
from hypothesis import HealthCheck, Phase, given, settings
from servers import serving

from regard import models
from regard.cli import main
from regard.cli.program import _parser
from regard.decoding import DecodingConfig
from regard.http import listening
from regard.serve import start
from regard.serve.app import Guard
from regard.serve.limits import Limits, read_bytes
from regard.serve.served import open_runs
from regard.tasks.classify.classifier import Classifier
from regard.tasks.load import BUNDLED
from regard.tasks.masked.masked_model import MaskedModel
from regard.tasks.translate.translator import Translator

KEY = "a key of this test"


@functools.cache
def opened():
    """A run of every task: a language model and a classifier with random weights, and those that are bundled."""
    torch.manual_seed(1)
    config = models.complete_config({"kind": "classifier", "vocabulary": tokenizer().size, "classes": 2, "width": 16})
    config |= {"heads": 4, "layers": 1, "inner": 16}
    classifier = models.build(models.config_class(config)(**config)).eval()
    return {
        "cats": small_language(attention=["local(window=8)", "softmax"]),
        "films": Classifier(classifier, tokenizer(), ["bad", "good"], 100),
        "english-german": Translator.load(device="cpu"),
        "english": MaskedModel.load(BUNDLED / "english", device="cpu"),
    }


@pytest.fixture(scope="module")
def api():
    with serving(opened()) as running:
        yield running


@pytest.fixture(scope="module")
def client(api):
    with openai.OpenAI(base_url=f"{api.address}/v1", api_key="any", max_retries=0) as client:
        yield client


def alone(prompt, tokens, **options):
    config = DecodingConfig(maximum=tokens, **({"beam": 1} if not options else {"sample": True} | options))
    return [found.text for found in opened()["cats"].generate(prompt, config)]


def test_completions_of_the_client_are_those_of_the_model(client):
    found = client.completions.create(model="cats", prompt=["the", "a dog"], max_tokens=9, temperature=0)
    assert [choice.text for choice in found.choices] == alone("the", 9) + alone("a dog", 9)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (8, 18)
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    drawn = client.completions.create(model="cats", prompt="the", max_tokens=9, seed=4, n=3, top_p=0.9)
    expected = alone("the", 9, seed=4, nbest=3, top_p=0.9)
    assert sorted(choice.text for choice in drawn.choices) == sorted(expected)
    ids = opened()["cats"].encode("the")
    by_ids = client.completions.create(model="cats", prompt=ids, max_tokens=9, temperature=0)
    assert by_ids.choices[0].text == alone("the", 9)[0]


def test_seeds(client):
    def text(**seed):
        return client.completions.create(model="cats", prompt="the", max_tokens=20, **seed).choices[0].text

    assert [text(seed=0)] == alone("the", 20, seed=0)
    assert [text(seed=-4)] == alone("the", 20, seed=2**63 - 4)
    assert text() != text(), "without a seed every answer is drawn anew"


def test_streams_of_several_prompts(client):
    options = {"model": "cats", "prompt": ["the", "a dog"], "max_tokens": 9, "seed": 4, "n": 2}
    texts = [""] * 4
    for part in client.completions.create(**options, stream=True):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [choice.text for choice in client.completions.create(**options).choices]


def test_streams(client):
    options = {"model": "cats", "prompt": "the", "max_tokens": 12, "seed": 4, "n": 2, "stream": True}
    parts = list(client.completions.create(**options, stream_options={"include_usage": True}, logprobs=1))
    texts = ["", ""]
    for part in parts[:-1]:
        (choice,) = part.choices
        texts[choice.index] += choice.text
    assert sorted(texts) == sorted(alone("the", 12, seed=4, nbest=2))
    assert (parts[-1].choices, parts[-1].usage.completion_tokens) == ([], 24)
    scores = [part.choices[0].logprobs for part in parts[:-1]]
    assert sum(len(score.token_logprobs) for score in scores) == 24


def test_stop_log_probabilities_and_echo(client):
    (text,) = alone("the", 30, seed=2)
    stop = text[5:7]
    found = client.completions.create(model="cats", prompt="the", max_tokens=30, seed=2, stop=[stop, "never"])
    assert (found.choices[0].text, found.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    told = client.completions.create(model="cats", prompt=SHARED, max_tokens=0, echo=True, logprobs=2).choices[0]
    assert (told.text, told.finish_reason) == (SHARED, "length")
    ((expected, count),) = opened()["cats"].likelihoods([(SHARED[0], SHARED[1:])])
    first, *values = told.logprobs.token_logprobs
    assert (first, len(values)) == (None, count)
    assert abs(sum(values) - expected) < 1e-3
    assert "".join(told.logprobs.tokens) == SHARED
    assert told.logprobs.text_offset == list(range(len(SHARED)))
    options = {"prompt": "the", "max_tokens": 2, "echo": True, "temperature": 0, "logprobs": 0}
    told = client.completions.create(model="cats", **options).choices[0].logprobs
    assert (told.text_offset[:4], len(told.token_logprobs)) == ([0, 1, 2, 3], 5)
    options["stream"] = True
    parts = [part.choices[0] for part in client.completions.create(model="cats", **options)]
    assert "".join(part.text for part in parts) == "the" + alone("the", 2)[0]
    assert parts[0].logprobs.text_offset == [0, 1, 2]
    assert parts[1].logprobs.text_offset[0] == 3


def test_offsets_of_a_prompt_count_characters_and_not_bytes(client):
    options = {"prompt": "日 at", "max_tokens": 1, "echo": True, "temperature": 0, "logprobs": 0}
    told = client.completions.create(model="cats", **options).choices[0].logprobs
    assert [text.startswith("token:") for text in told.tokens[:3]] == [True] * 3, "the bytes of one character"
    assert told.tokens[3:6] == [" ", "a", "t"]
    assert told.text_offset == [0, 0, 0, 1, 2, 3, 4]


def test_models_and_embeddings_of_the_client(client):
    assert [model.id for model in client.models.list()] == ["cats", "films", "english-german", "english"]
    assert client.models.retrieve("cats").id == "cats"
    both = client.embeddings.create(model="english", input=["A cat.", "A dog."])
    listed = client.embeddings.create(model="english", input="A dog.", encoding_format="float")
    assert len(both.data[0].embedding) == 256
    assert max(abs(a - b) for a, b in zip(both.data[1].embedding, listed.data[0].embedding, strict=True)) < 1e-6
    cut = client.embeddings.create(model="english", input="cat " * 1000)
    assert cut.usage.prompt_tokens == opened()["english"].length - 2, "a token before them and one behind"


def test_errors_of_the_client(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'nobody'"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="cannot complete; cats can") as told:
        client.completions.create(model="films", prompt="x")
    assert told.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="at most 300 fit") as told:
        client.completions.create(model="cats", prompt="x" * 290, max_tokens=20)
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="cats", messages=[])


def test_the_other_routes(api):
    status, found = api.post("/translate", text=["Where is the station?", ""], nbest=2)
    expected = [[one.text for one in best] for best in opened()["english-german"].translate(["Where is the station?"])]
    assert (status, found["translations"][0]["text"]) == (200, expected[0][0])
    assert len(found["translations"][0]["nbest"]) == 2
    assert found["translations"][1]["text"] == ""
    status, found = api.post("/classify", text="the cat", model="films")
    assert (status, found["answers"][0]["label"]) == (200, opened()["films"]("the cat").label)
    status, found = api.post("/fill", text="I took my [mask] for a walk.", top=3)
    expected = opened()["english"].fill("I took my [mask] for a walk.", top=3)
    assert (status, found["answers"][0]["text"]) == (200, expected.text)
    assert [one["token"] for one in found["answers"][0]["gaps"][0]] == [one.text for one in expected.gaps[0]]
    assert api.post("/fill", text=["one [mask]", "no gap"])[0] == 400


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 33}, "prompt"),
        ({"prompt": [[1], "x"]}, "prompt[1]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [tokenizer().size]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * (1 << 20)}, None),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1e9}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": 0, "n": 2}, "n"),
        ({"n": 17}, "n"),
        ({"n": 5}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"stop": ["x"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "5"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"\ud800": 1}, None),
    ],
)
def test_fields_out_of_bounds(api, change, param):
    body = json.dumps({"model": "cats", "prompt": "x", **change})
    status, headers, answer = api.request("POST", "/v1/completions", body.encode())
    assert status in (400, 413), answer
    assert answer["error"]["param"] == param
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert headers["x-request-id"].startswith("req-")


def test_a_client_that_sends_too_much_before_it_reads_is_told(api):
    status, headers, answer = api.request("POST", "/v1/completions", b" " * (16 << 20))
    assert (status, headers["connection"]) == (413, "close")
    assert "larger than 1024 KiB" in answer["error"]["message"]


def test_null_is_what_is_not_given(api):
    nulls = dict.fromkeys(("max_tokens", "temperature", "top_p", "n", "stream", "logprobs", "stop", "user", "suffix"))
    status, found = api.post("/v1/completions", model="cats", prompt="x", **nulls, logit_bias={}, presence_penalty=0)
    assert status == 200
    assert found["usage"]["completion_tokens"] <= 16


def test_who_may_ask(api):
    for headers, status in (
        ({"Host": "evil.example"}, 403),
        ({"Host": f"localhost:{api.port}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": f"http://127.0.0.1:{api.port}"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ):
        assert api.request("GET", "/v1/models", headers=headers)[0] == status, headers
        assert api.request("GET", "/healthz", headers=headers)[0] == 200, "probes may come by any name"
    status, headers, answer = api.request("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert answer["error"]["type"] == "invalid_request_error"
    assert api.request("GET", "/etc/passwd")[0] == 404
    assert api.request("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"})[0] == 415
    with pytest.raises(ValueError, match="needs an API key"):
        Guard(None, None)


def test_a_key_is_needed_where_there_is_one():
    with serving({"cats": opened()["cats"]}, key=KEY, hosts=["api.example.org"]) as api:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer no"}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": f"Bearer {KEY[:-1]}"}, 401),
            ({"Authorization": f"Bearer {KEY}s"}, 401),
            ({"Authorization": f"Basic {KEY}"}, 401),
            ({"Authorization": f"Bearer {KEY}"}, 200),
            ({"Authorization": f"bearer {KEY}"}, 200),
            ({"Authorization": f"Bearer {KEY}", "Host": "api.example.org"}, 200),
        ):
            assert api.request("GET", "/v1/models", headers=headers)[0] == status, headers
        assert api.request("GET", "/metrics")[0] == 401
        assert api.request("GET", "/healthz")[0] == 200
        assert api.request("GET", "/openapi.json", headers={"Authorization": f"Bearer {KEY}"})[2]["security"]


def test_metrics_tell_what_was_done(api):
    def value(name):
        lines = api.request("GET", "/metrics")[2].splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name + " ")), 0.0)

    names = [
        'regard_requests_total{route="/v1/completions",status="200"}',
        'regard_generated_tokens_total{model="cats"}',
    ]
    before = [value(name) for name in names]
    api.post("/v1/completions", model="cats", prompt="x", max_tokens=5, temperature=0)
    assert [value(name) - was for name, was in zip(names, before, strict=True)] == [1, 5]
    assert value("regard_requests_in_flight") == 1, "this one"
    lines = [line.split()[0] for line in api.request("GET", "/metrics")[2].splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)), "a series has one value, also of a run that fills and embeds"


class Held:
    """A generator that takes so many turns as it is given."""

    def __init__(self, generator, monkeypatch):
        self.turns = threading.Semaphore(0)
        advance = generator.advance
        monkeypatch.setattr(generator, "advance", lambda: self.turns.acquire() and advance())

    def go(self, turns=10**6):
        self.turns.release(turns)


def posted(api, path, values):
    """A request, as it is sent."""
    body = json.dumps(values).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{api.port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def completion(api, **values):
    return posted(
        api, "/v1/completions", {"model": "cats", "prompt": "the", "stream": True, "temperature": 0, **values}
    )


def open_stream(api, **values):
    """A connection over which a completion was asked for."""
    connection = socket.create_connection(("127.0.0.1", api.port), timeout=30)
    connection.sendall(completion(api, **values))
    return connection


def read_all(connection):
    """What comes until the answer is complete, or the server closes the connection."""
    raw = b""
    while not raw.endswith(b"0\r\n\r\n") and (part := connection.recv(65536)):
        raw += part
    connection.close()
    return raw


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_a_full_queue_is_told_and_who_leaves_makes_room(monkeypatch):
    with serving({"cats": opened()["cats"]}, queue=2) as api:
        generator = api.generator()
        held = Held(generator, monkeypatch)
        waiting = [open_stream(api, max_tokens=250) for _ in range(2)]
        until(lambda: len(generator.waiting) == 2)
        status, headers, answer = api.request("POST", "/v1/completions", {"model": "cats", "prompt": "x"})
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        waiting[0].close()
        until(lambda: any(one.cancelled for one in generator.waiting))
        held.go(3)
        until(lambda: generator.batch.rows)
        (row,) = generator.batch.rows
        waiting[1].close()
        until(lambda: row.generation.cancelled)
        held.go()
        until(lambda: generator.counts.cancelled == 2)
        until(lambda: generator.batch.state is None)
        assert api.post("/v1/completions", model="cats", prompt="x", max_tokens=1)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_who_closes_the_sending_side_has_left(stream, monkeypatch):
    """A connection of which only one side is closed cannot be told from one that is closed."""
    with serving({"cats": opened()["cats"]}) as api:
        generator = api.generator()
        held = Held(generator, monkeypatch)
        connection = open_stream(api, stream=stream, max_tokens=250)
        until(lambda: generator.waiting)
        held.go(2)
        until(lambda: generator.batch.rows)
        connection.shutdown(socket.SHUT_WR)
        (row,) = generator.batch.rows
        until(lambda: row.generation.cancelled)
        held.go()
        assert b"[DONE]" not in read_all(connection), "it is closed, not left open"
        until(lambda: generator.counts.cancelled == 1)
        assert (generator.batch.state, generator.counts.finished) == (None, 0)


def test_connections_that_are_half_closed_hold_nothing(api):
    for upto in (10, -5):
        # in the middle of the head, and of the body
        connection = socket.create_connection(("127.0.0.1", api.port), timeout=30)
        connection.sendall(completion(api)[:upto])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    finished = api.generator().counts.finished
    connection = socket.create_connection(("127.0.0.1", api.port), timeout=30)
    connection.shutdown(socket.SHUT_RD)
    connection.sendall(completion(api, max_tokens=5))
    until(lambda: api.generator().counts.finished == finished + 1)
    connection.close()
    until(lambda: not api.server.server_state.connections)
    assert "regard_requests_in_flight 1.0" in api.request("GET", "/metrics")[2]


def test_the_body_of_an_answer_does_not_wait_until_its_head_is_acknowledged(api, monkeypatch):
    made, found = listening.Prompt.connection_made, []

    def connection_made(self, transport):
        made(self, transport)
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(listening.Prompt, "connection_made", connection_made)
    assert api.request("GET", "/healthz")[0] == 200
    assert found == [1]


def test_requests_sent_at_once_are_answered_in_order(api):
    connection = socket.create_connection(("127.0.0.1", api.port), timeout=30)
    connection.sendall(b"".join(completion(api, max_tokens=n, stream=n == 2) for n in (1, 2, 3)))
    raw = b""
    while raw.count(b'"usage"') < 2:
        raw += connection.recv(65536)
    connection.close()
    first, second, third = raw.split(b"HTTP/1.1 200 OK")[1:]
    assert b'"completion_tokens":1' in first
    assert b"[DONE]" in second
    assert b'"completion_tokens":3' in third


def test_who_leaves_a_batch_of_texts_is_let_go(monkeypatch):
    with serving({"films": opened()["films"]}, deadline=7) as api:
        gatherer, go, jobs = api.api.runs.by_name["films"].gatherers["classify"], threading.Event(), []
        compute = gatherer.compute
        monkeypatch.setattr(
            gatherer, "compute", lambda *given: jobs.extend(gatherer.running) or (go.wait(30) and compute(*given))
        )
        connection = socket.create_connection(("127.0.0.1", api.port), timeout=30)
        connection.sendall(posted(api, "/classify", {"text": "the cat"}))
        until(lambda: jobs)
        assert jobs[0].deadline == jobs[0].created + 7
        connection.close()
        until(lambda: jobs[0].cancelled)
        go.set()
        assert api.post("/classify", text="the cat")[0] == 200


def test_late_requests_are_told(monkeypatch):
    with serving({"cats": opened()["cats"]}) as api:
        held = Held(api.generator(), monkeypatch)
        stream, answers = open_stream(api), []
        ask = {"model": "cats", "prompt": "x"}
        plain = threading.Thread(target=lambda: answers.append(api.request("POST", "/v1/completions", ask)))
        plain.start()
        until(lambda: len(api.generator().waiting) == 2)
        for one in api.generator().waiting:
            assert one.deadline == one.created + Limits().deadline
            one.deadline = 0
        held.go()
        plain.join(30)
        ((status, _, answer),) = answers
        assert (status, answer["error"]["type"]) == (504, "server_error")
        # of a stream the status is already sent
        assert b"took too long" in read_all(stream)


def test_late_texts_are_told_while_their_batch_is_computed(monkeypatch):
    with serving({"films": opened()["films"]}, deadline=1) as api:
        gatherer, go = api.api.runs.by_name["films"].gatherers["classify"], threading.Event()
        compute = gatherer.compute
        monkeypatch.setattr(gatherer, "compute", lambda *given: go.wait(60) and compute(*given))
        status, answer = api.post("/classify", text="the cat")
        assert (status, go.is_set(), "took too long" in answer["error"]["message"]) == (504, False, True)
        go.set()
        until(lambda: gatherer.failed == 1 and not gatherer.running)
        assert gatherer.cancelled == 0, "it has not left"


def test_it_drains(monkeypatch):
    """What was accepted is answered, and no more is taken."""
    with serving({"cats": opened()["cats"]}) as api:
        held = Held(api.generator(), monkeypatch)
        stream = open_stream(api, max_tokens=20)
        until(lambda: api.generator().waiting)
        # a connection that is kept
        kept = openai.OpenAI(base_url=f"{api.address}/v1", api_key="any", max_retries=0)
        kept.models.list()
        assert api.request("GET", "/readyz")[0] == 200
        api.api.draining = True
        assert api.request("GET", "/readyz")[0] == 503
        assert api.request("GET", "/healthz")[0] == 200
        with pytest.raises(openai.InternalServerError, match="shutting down") as told:
            kept.models.list()
        assert told.value.response.headers["retry-after"] == "1"
        api.api.draining = False
        api.server.handle_exit(signal.SIGTERM, None)
        assert (api.api.draining, api.server.should_exit, api.server.force_exit) == (True, True, False)
        held.go()
        assert b"data: [DONE]" in read_all(stream)
        until(lambda: not api.generator().thread.is_alive())
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", api.port))
        kept.close()
        api.server.handle_exit(signal.SIGTERM, None)
        assert api.server.force_exit, "a second signal ends it at once"


def test_who_reads_nothing_is_cut(monkeypatch):
    monkeypatch.setattr(listening, "WRITE_SECONDS", 0.2)
    with serving({"english": opened()["english"]}, small_buffers=True) as api:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", api.port))
        client.sendall(posted(api, "/v1/embeddings", {"model": "english", "input": ["a cat"] * 64}))
        until(lambda: api.server.server_state.connections)
        until(lambda: not api.server.server_state.connections)
        assert len(read_all(client)) < 100_000, "of more than 300,000 bytes"


def test_an_error_of_ours_is_not_told(api, monkeypatch, caplog):
    def broken(values):
        raise RuntimeError("secret in /home/somebody/file.py")

    monkeypatch.setattr(api.api, "_model", broken)
    status, _, answer = api.request("GET", "/v1/models")
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in str(answer)
    assert "secret in" in caplog.text


def test_a_load_of_mixed_requests(api, monkeypatch):
    """A few hundred of what `bench/serve.py --load` sends by the thousand."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import load

    asks = []
    for number in range(24):
        prompt, tokens = SHARED[: 1 + 7 * number % 70], 1 + number % 11
        options = {"temperature": 0} if number % 3 == 0 else {"seed": number}
        drawn = {} if number % 3 == 0 else {"seed": number}
        body = {"model": "cats", "prompt": prompt, "max_tokens": tokens, **options}
        asks.append(load.Ask(body, alone(prompt, tokens, **drawn)[0]))
        asks.append(load.Ask(body | {"stream": True, "max_tokens": tokens}, asks[-1].expected))
        asks.append(load.Ask(body | {"stream": True, "max_tokens": 200}, None, cut=True))
    found = asyncio.run(load.load(api.port, asks * 4, clients=12, wrong=0.1, patience=0.1))
    assert (found.lost, found.mixed_up) == ([], [])
    assert (found.right, found.cut) == (48 * 4, 24 * 4)
    assert found.refused > 10
    until(lambda: api.generator().batch.state is None)


ROUTES = ("complete", "embed", "translate", "classify", "fill", "/v1/models/{model}")


@pytest.mark.parametrize("examples", [5, pytest.param(420, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ROUTES)
def test_the_api_holds_what_its_openapi_says(api, name, examples):
    """Any request, in and out of the schema, is answered as declared and never with 5xx; exhaustively 5,000 of them."""
    described = schemathesis.openapi.from_dict(api.request("GET", "/openapi.json")[2])
    operations = [found.ok() for found in described.get_all_operations()]
    operation = next(one for one in operations if name in (one.path, one.definition.raw.get("operationId")))
    seen = set()
    for mode in schemathesis.GenerationMode:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            derandomize=True,
        )
        def once(case):
            response = case.call(base_url=api.address, timeout=30)
            assert response.status_code < 500, (response.status_code, response.text[:300])
            if response.status_code != 200:
                assert response.json()["error"]["message"]
            seen.add(response.status_code)

        once()
    assert seen & {400, 404, 405, 415}


def test_the_runs_that_are_served(tmp_path):
    with pytest.raises(ValueError, match="run of the task 'images', which is not served"):
        open_runs([BUNDLED / "cifar10"], "cpu", Limits(), print)
    with pytest.raises(ValueError, match="have one name, 'english'"):
        open_runs([BUNDLED / "english"] * 2, "cpu", Limits(), print)
    found = open_runs([], "cpu", Limits(queue=5), print)
    assert [worker.most_waiting for worker in found.workers] == [5, 5, 5]
    assert {name: one.abilities for name, one in found.by_name.items()} == {
        "english-german": ["translate"],
        "english": ["fill", "embed"],
    }


def test_the_command(monkeypatch, capsys, tmp_path):
    started = []
    monkeypatch.setattr(start.DrainingServer, "run", lambda self, sockets: started.append((self, sockets)))
    monkeypatch.delenv("REGARD_API_KEY", raising=False)
    flags = ["--port", "0", "--host", "0.0.0.0", "--rows", "3", "--memory", "2MB", "--threads", "5"]
    main(["serve", str(BUNDLED / "english"), *flags])
    server, (listener,) = started.pop()
    told = capsys.readouterr()
    assert "Regard serves at http://" in told.out
    assert server.api.guard.key in told.err
    limits = server.api.limits
    assert (limits.rows, limits.memory, limits.threads) == (3, 2_000_000, 5)
    listener.close()
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    main(["serve", str(BUNDLED / "english"), "--port", "0", "--api-key-file", str(file)])
    server, (listener,) = started.pop()
    assert server.api.guard.key == "0123456789abcdef"
    listener.close()
    file.write_text("short")
    capsys.readouterr()
    for words in (
        ["--port", "70000"],
        ["--rows", "0"],
        ["--memory", "much"],
        ["--api-key-file", str(file)],
        ["--api-key-file", str(tmp_path / "no")],
        [str(tmp_path / "no")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *words])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert "serve" in _parser().format_help()


@pytest.mark.parametrize("limit", [{"deadline": float("nan")}, {"drain": float("inf")}, {"rows": 0}, {"queue": 0}])
def test_limits_are_numbers(limit):
    with pytest.raises(ValueError, match=f"--{next(iter(limit))} must be a number of at least"):
        Limits(**limit)


def test_amounts_of_memory():
    assert [read_bytes(text) for text in ("2GiB", "500 MB", "1.5kb", "7")] == [2 << 30, 500_000_000, 1500, 7]
    for text in ("", "GB", "2 XB", "1e999", "-"):
        with pytest.raises(ValueError, match="amount of memory"):
            read_bytes(text)
