"""How fast the page answers at 4,096 tokens, and what its server holds: one line of JSON.

    python bench/page.py
    python bench/page.py --mechanisms            # a line for each mechanism instead
    python bench/page.py --mechanisms set fnet

Starts `regard show`, asks it as the page does, and reads the peak memory of the server. It needs no browser; the frames
per second that a browser draws while panning are measured by
`pytest -n 0 -s tests/page/test_show_browser.py -k 4096`. For mechanisms: the seconds of a pass through a layer (width
256, 4 heads), of the first tile of all its heads, and of an exact row.
"""

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

import regard
from regard.core.rows import Memory, Rows
from regard.page import maps
from regard.spec import ATTENTION

TOKENS = 4096
TEXT = " ".join(f"the animal {i} did not cross the street because it was too tired" for i in range(320))
ROWS = 64  # rows of a tile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="texts, each a new one (default: 3)")
    parser.add_argument("--mechanisms", nargs="*", metavar="NAME", help="mechanisms to measure (default: all)")
    arguments = parser.parse_args()
    if arguments.mechanisms is not None:
        for name in arguments.mechanisms or ATTENTION.names():
            print(json.dumps(layer_seconds(name)), flush=True)
        return
    command = [sys.executable, "-m", "regard", "show", "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://\S+/", server.stdout.readline())[0]
        ask(address, "about", {})
        idle = peak(server.pid)
        rounds = [measure(address, f"{number} {TEXT}") for number in range(arguments.rounds)]
        best = {name: min(one[name] for one in rounds) for name in rounds[0]}
        print(json.dumps(best | {"server_mib": peak(server.pid), "server_idle_mib": idle}))
    finally:
        server.terminate()
        server.wait()


def measure(address: str, text: str) -> dict[str, float]:
    """Seconds to the first band of the picture, to all of it, to a tile when zoomed in, to an exact row."""
    reading = {"run": "shipped", "place": "encoder", "text": text, "target": ""}
    began = time.perf_counter()
    ask(address, "read", reading)
    first = None
    for row in range(8):
        ask(address, "tile", reading | {"layer": 0, "level": 3, "row": row, "column": 0})
        first = first or time.perf_counter() - began
    whole = time.perf_counter() - began
    near = timed(address, "tile", reading | {"layer": 0, "level": 0, "row": 17, "column": 3, "head": 1})
    exact = timed(address, "rows", reading | {"layer": 0, "first": 2000})
    deep = timed(address, "tile", reading | {"layer": 2, "level": 3, "row": 0, "column": 0})
    seconds = {"first_picture": first, "whole": whole, "tile": near, "row": exact, "last_layer": deep}
    return {name: round(value, 3) for name, value in seconds.items()}


def layer_seconds(name: str) -> dict[str, Any]:
    """The parts of the map of one layer, untrained: what they cost does not depend on what is learned."""
    longest = any(option.name == "longest" for option in ATTENTION.options(name))
    spec = "heads(local, softmax)" if name == "heads" else f"{name}(longest={TOKENS})" if longest else name
    role = ATTENTION.find(name).facts.roles[0]
    layer = regard.attention(spec, width=256, heads=4, role=role).eval()
    x = torch.randn(1, TOKENS, 256)
    call = maps.LayerCall(layer=layer, x=x, rows=Rows.full(x), memory=Memory(x, None) if role == "cross" else None)
    level = maps.farthest(call.T, call.columns)
    work = {
        "run": lambda: layer.forward_packed(x, call.rows, memory=call.memory),
        "first_picture": lambda: maps.tile(call, level, 0, 0),
        "row": lambda: maps.rows(call, [TOKENS // 2]),
    }
    seconds = {}
    with torch.no_grad():
        for part, run in work.items():
            began = time.perf_counter()
            run()
            seconds[part] = round(time.perf_counter() - began, 3)
    return {"mechanism": spec, "role": role} | seconds


def timed(address: str, name: str, values: dict) -> float:
    began = time.perf_counter()
    ask(address, name, values)
    return time.perf_counter() - began


def ask(address: str, name: str, values: dict) -> bytes:
    body, headers = json.dumps(values).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}api/{name}", body, headers)) as response:
        return response.read()


def peak(pid: int) -> int:
    """MiB, if the system tells."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) // 1024 if found else 0


if __name__ == "__main__":
    main()
