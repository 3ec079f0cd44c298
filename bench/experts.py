"""The time of a training step of layers of experts, compared with a dense layer of the same active parameters.

    python bench/experts.py                              one thread of a CPU, float32
    python bench/experts.py --device cuda --dtype bfloat16 --tokens 262144 --width 1024 --inner 4096 --seconds 0.25
    python bench/experts.py --tokens 4096 --width 256 --inner 1024 --experts 8 64

A step is forward and backward, gradients of tokens and weights, without the optimizer, whose time grows with all
parameters. Steps of the layers take turns; the best of each counts. `dense` in each row has the active parameters of
that row: the choices times the width inside an expert. The process keeps its memory, as Regard's commands do. On a GPU
steps are captured as CUDA graphs, as in training; a layer that cannot be captured says so.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import regard
from regard.core.allocator import keep_memory
from regard.core.rows import Rows
from regard.layers.feedforward.base import FeedForward

LAYERS = {"switch": 1, "gshard": 2, "moe": 2, "choice": 2}


def spec(name: str, experts: int, inner: int) -> str:
    options = {"moe": ", choices=2", "gshard": ", threshold=0.0"}.get(name, "")
    return f"{name}(experts={experts}, inner={inner // LAYERS[name]}{options})"


def step(layer: FeedForward, x: Tensor, toward: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    rows = Rows.full(x)

    def work() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            out = layer.forward_packed(x, rows)
        goal = (out.y.float() * toward).sum()
        (goal if out.auxiliary_loss is None else goal + out.auxiliary_loss).backward()

    return work


def recorded(work: Callable[[], None], name: str) -> Callable[[], None]:
    """The same as a CUDA graph, if it can be captured."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            work()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"{name} is not recorded: {str(error).splitlines()[0]}", file=sys.stderr)
        return work
    return graph.replay


def best(steps: list[Callable[[], None]], seconds: float, device: torch.device) -> list[float]:
    """Milliseconds of each, in turns, after a first turn that does not count."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found, until = [float("inf")] * len(steps), 0.0
    for turn in itertools.count():
        if turn == 1:
            until = time.perf_counter() + seconds * len(steps)
        if turn > 1 and time.perf_counter() > until:
            return found
        for index, work in enumerate(steps):
            wait()
            began = time.perf_counter()
            work()
            wait()
            if turn:
                found[index] = min(found[index], 1e3 * (time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="layers to measure (default: all)"
    )
    parser.add_argument(
        "--experts", nargs="+", type=int, default=[8, 32, 128], help="numbers of experts (default: 8 32 128)"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per step (default: 16384)")
    parser.add_argument("--width", type=int, default=256, help="model width (default: 256)")
    parser.add_argument("--inner", type=int, default=1024, help="active feed-forward width (default: 1024)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of the products (default: float32)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per layer (default: 4)")
    arguments = parser.parse_args()
    keep_memory()
    torch.set_num_threads(arguments.threads)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    x = torch.randn(1, arguments.tokens, arguments.width, device=device, requires_grad=True)
    toward = torch.randn_like(x)
    print("| layer | experts | ms | dense, ms | ratio | dropped |\n|---|---|---|---|---|---|")
    for name in arguments.layers:
        for experts in arguments.experts:
            sizes = {"width": arguments.width, "inner": arguments.inner}
            with device:
                layer = regard.feedforward(spec(name, experts, arguments.inner), **sizes).train()
                dense = regard.feedforward("dense(bias=False)", **sizes).train()
            steps = [step(part, x, toward, dtype) for part in (layer, dense)]
            if device.type == "cuda":
                steps = [recorded(work, name) for work in steps]
            ours, plain = best(steps, arguments.seconds, device)
            dropped = float((layer.forward_packed(x, Rows.full(x)).statistics or {}).get("dropped", 0))
            print(
                f"| {name} | {experts} | {ours:.2f} | {plain:.2f} | {ours / plain:.2f} | {100 * dropped:.0f}% |",
                flush=True,
            )


if __name__ == "__main__":
    main()
