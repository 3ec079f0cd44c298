"""A page that runs, for the tests of the server and of the page: small runs of every task beside the shipped one."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import torch
import uvicorn

from regard.cli import main
from regard.page import wire
from regard.page.cancel import Cancelled
from regard.page.engine import Engine
from regard.page.server import application, configured
from regard.page.subjects import open_run

WORDS = ("good fine great lovely", "bad poor awful dull")


def small_runs(folder):
    """A language model with mixed attention and a classifier, a few steps old."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"the cat {i} sat on the mat and the dog {i} ran" for i in range(200)), encoding="utf-8")
    table = folder / "table.tsv"
    rows = ["text\tlabel"]
    for i in range(240):
        word = WORDS[i % 2].split()[i // 2 % 4]
        rows.append(f"a {word} film number {i}\t{'positive' if i % 2 == 0 else 'negative'}")
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    small = ["--model.width", "32", "--model.heads", "4", "--model.inner", "32", "--model.layers", "2"]
    quick = ["--training.steps", "12", "--training.tokens", "512", "--training.evaluate_every", "12"]
    quick += ["--training.tensorboard", "false", "--training.device", "cpu"]
    main(
        [
            "train",
            "language",
            "--data.text",
            str(text),
            "--data.tokenizer",
            "characters",
            "--data.length",
            "64",
            "--model.attention",
            "heads(local(window=4), strided(stride=4))",
            "--out",
            str(folder / "cats"),
            *small,
            *quick,
        ]
    )
    main(
        [
            "train",
            "classify",
            "--data.text",
            str(table),
            "--data.tokenizer",
            "words",
            "--data.held_out",
            "40",
            "--out",
            str(folder / "films"),
            *small,
            *quick,
        ]
    )
    return {"cats": folder / "cats", "films": folder / "films"}


def masked_run(folder):
    """A model that names hidden words, a few steps old, with eight heads and learned positions."""
    text = folder / "gaps.txt"
    text.write_text("\n".join(f"the cat {i % 9} sat on the mat and the dog ran" for i in range(150)), encoding="utf-8")
    main(
        [
            "train",
            "masked",
            "--data.text",
            str(text),
            "--data.tokenizer",
            "words",
            "--data.length",
            "32",
            "--model.position",
            "learned",
            "--model.width",
            "32",
            "--model.heads",
            "8",
            "--model.inner",
            "32",
            "--model.layers",
            "1",
            "--training.steps",
            "4",
            "--training.tokens",
            "256",
            "--training.tensorboard",
            "false",
            "--training.device",
            "cpu",
            "--out",
            str(folder / "gaps"),
        ]
    )
    return {"gaps": folder / "gaps"}


class Endless:
    """An answer that is never ready; it says when it was asked for, and when it was cancelled."""

    def __init__(self):
        self.began, self.ended = threading.Event(), threading.Event()

    def __call__(self, **values):
        self.began.set()
        try:
            for _ in range(100_000):
                torch.ones(2).sum()
                time.sleep(0.001)
        except Cancelled:
            self.ended.set()
            raise


class Page:
    """The address of a server in this process."""

    def __init__(self, engine, port):
        self.engine, self.port = engine, port
        self.address = f"http://127.0.0.1:{port}/"

    def request(self, method, path, body=None, headers=None):
        """(status, headers, body)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        given = {"Host": f"127.0.0.1:{self.port}"} | ({"Content-Type": "application/json"} if body is not None else {})
        connection.request(method, path, body, given | (headers or {}))
        response = connection.getresponse()
        got = response.status, dict(response.getheaders()), response.read()
        connection.close()
        return got

    def ask(self, name, **values):
        status, _, body = self.request("POST", f"/api/{name}", json.dumps(values))
        assert status == 200, body
        return wire.decode(body)


@contextmanager
def serving(runs, subjects=None, token=None):
    """The page of run folders, and of subjects that are there already, beside the shipped run. With a token: as where
    other machines can reach it."""
    opened = {name: (lambda path=path, name=name: open_run(path, name)) for name, path in runs.items()}
    opened |= {name: (lambda subject=subject: subject) for name, subject in (subjects or {}).items()}
    engine = Engine(opened | {"shipped": lambda: open_run(None, "shipped")})
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = application(engine, None if token else {f"127.0.0.1:{port}", f"localhost:{port}"}, token)
    server = uvicorn.Server(configured(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield Page(engine, port)
    finally:
        server.should_exit = True
        thread.join(10)
