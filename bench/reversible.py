"""What depth costs in memory and time: ordinary and reversible layers, by their number.

    python bench/reversible.py
    python bench/reversible.py --attention reformer --device cuda --layers 2 8 32 --length 4096

A training step of an encoder: bytes that the forward pass leaves for the backward pass, the peak of the whole
step (weights and their gradients are not counted), and time. On the CPU every allocation of PyTorch is counted; on a
GPU the figures come from its allocator.
"""

import argparse
import os
import time

# the profiler tells of itself otherwise
os.environ.setdefault("KINETO_LOG_LEVEL", "9")

import torch

from regard.models.config import ModelConfig
from regard.models.transformer import Transformer


def measure(layers: int, reversible: bool, arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes held, bytes at the peak, seconds."""
    torch.manual_seed(0)
    sizes = {"width": arguments.width, "heads": 8, "inner": 4 * arguments.width, "layers": layers}
    sizes |= {"vocabulary": 256, "attention": arguments.attention}
    model = Transformer(ModelConfig(kind="encoder", norm="pre", reversible=reversible, **sizes)).to(arguments.device)
    tokens = torch.randint(256, (arguments.batch, arguments.length), device=arguments.device)
    # gradients exist before, so that the step allocates none
    step(model, tokens)
    seconds = min(timed(model, tokens) for _ in range(arguments.repeats))
    counted = on_gpu if arguments.device.startswith("cuda") else on_cpu
    return counted(model, tokens) | {"seconds": seconds}


def step(model: Transformer, tokens: torch.Tensor) -> None:
    model(tokens).logits.square().mean().backward()


def timed(model: Transformer, tokens: torch.Tensor) -> float:
    began = time.perf_counter()
    step(model, tokens)
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def on_gpu(model: Transformer, tokens: torch.Tensor) -> dict[str, float]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = model(tokens).logits.square().mean()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return {"held": held, "peak": torch.cuda.max_memory_allocated() - before}


def on_cpu(model: Transformer, tokens: torch.Tensor) -> dict[str, float]:
    with allocations() as forward:
        loss = model(tokens).logits.square().mean()
    with allocations() as backward:
        loss.backward()
    forward, backward = (sums(part) for part in (forward, backward))
    return {"held": forward[-1], "peak": max(max(forward), forward[-1] + max(backward))}


def allocations() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def sums(profile: torch.profiler.profile) -> list[int]:
    """The bytes allocated since the start, after each allocation or release."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now, found = 0, [0]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        found.append(now)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of layers (default: 2 4 8 16)")
    add("--attention", default="softmax", metavar="SPEC", help="spec of the attention (default: softmax)")
    add("--width", type=int, default=256, help="model width (default: 256)")
    add("--length", type=int, default=512, help="tokens (default: 512)")
    add("--batch", type=int, default=4, help="rows (default: 4)")
    add("--repeats", type=int, default=3, help="steps of which the fastest counts (default: 3)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    arguments = parser.parse_args()
    print("| layers | held, MiB | reversible | peak, MiB | reversible | time, reversible / ordinary |")
    print("|---:|---:|---:|---:|---:|---:|")
    for layers in arguments.layers:
        plain, pair = (measure(layers, reversible, arguments) for reversible in (False, True))
        cells = [f"{part[name] / 2**20:.1f}" for name in ("held", "peak") for part in (plain, pair)]
        print(f"| {layers} | {' | '.join(cells)} | {pair['seconds'] / plain['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
