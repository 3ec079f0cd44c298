"""An API server that runs in a thread, over models that are there already."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

from regard.http.listening import reached_by
from regard.serve.app import Api, Guard, Mail
from regard.serve.limits import Limits
from regard.serve.served import Runs, Served
from regard.serve.server import DrainingServer


class Running:
    """A server, its API, and a way to ask it."""

    def __init__(self, server, port):
        self.server, self.api, self.port = server, server.api, port
        self.address = f"http://127.0.0.1:{port}"

    def request(self, method, path, body=None, headers=None):
        """Status, headers by small names, and the body, as JSON where it is that."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, raw, kind | (headers or {}))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        told = {name.lower(): value for name, value in answer.getheaders()}
        is_json = told.get("content-type") == "application/json"
        return answer.status, told, json.loads(content) if is_json else content.decode()

    def post(self, path, **values):
        status, _, answer = self.request("POST", path, values)
        return status, answer

    def generator(self, name="cats"):
        return self.api.runs.by_name[name].generator


@contextmanager
def serving(models, key=None, hosts=(), small_buffers=False, **limits):
    listener = socket.create_server(("127.0.0.1", 0))
    if small_buffers:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    port = listener.getsockname()[1]
    bounds, mail = Limits(**{"context": 300, "rows": 4} | limits), Mail()
    runs = Runs([Served(name, model, bounds, mail.deliver) for name, model in models.items()])
    guard = Guard(reached_by("127.0.0.1", port) | set(hosts), key)
    server = DrainingServer(Api(runs, bounds, mail, guard))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(server, port)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
