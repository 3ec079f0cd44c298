"""Projects the throughput of training on several GPUs from FLOPs and bytes; no time is measured.

    python bench/scaling.py
    python bench/scaling.py --parameters 1.5e9 --tokens 524288 --flops 989e12 --used 0.45 --link 50e9
    torchrun --nproc-per-node=2 bench/scaling.py --count --folder /tmp/counted     # the formulas beside what is counted

The formulas and their assumptions are in docs/scale.md. `--count` trains a small decoder for one update on the CPU,
and counts the operations and the bytes that the processes hand to each other.
"""

import argparse
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from sharded import write_text
from torch.utils._python_dispatch import TorchDispatchMode

from regard import tasks
from regard.config import parse
from regard.core.tally import Tally, tensors_of
from regard.tasks.train import train
from regard.training import loop
from regard.training.display import Display

LAYERS, WIDTH, LENGTH, TOKENS = 4, 256, 128, 1024  # of the decoder that is counted
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
}


class Projection(NamedTuple):
    """A step on several GPUs."""

    gpus: int
    compute: float  # seconds
    communication: float  # seconds
    step: float  # seconds
    tokens_per_second: float
    utilization: float  # model FLOPs utilization: 6 N T / (step * GPUs * peak)


def project(
    parameters: float, tokens: float, gpus: int, *, flops: float, used: float, link: float, sharded: bool = False
) -> Projection:
    """A step of a model of so many parameters on so many tokens, of all GPUs together. `flops` are those of a GPU per
    second, of which it uses the share `used` alone; `link` is the bandwidth of the slowest link in bytes per second."""
    work = 6 * parameters * tokens
    compute = work / (gpus * flops * used)
    # data parallel: all-reduce of float32 gradients; sharded: bfloat16 weights twice, float32 gradients once
    moved = (2 * 2 + 4 if sharded else 2 * 4) * parameters * (gpus - 1) / gpus
    communication = moved / link
    step = compute / 3 + max(2 / 3 * compute, communication)
    return Projection(gpus, compute, communication, step, tokens / step, work / (step * gpus * flops))


class Bytes(TorchDispatchMode):
    """Bytes of the whole tensors of each collective operation."""

    def __init__(self):
        super().__init__()
        self.sizes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition("::")[2].partition(".")[0]
        if function.namespace == "c10d" and name in COLLECTIVES:
            # before a reduce-scatter and behind an all-gather a tensor is whole
            whole = args[1] if name == "_reduce_scatter_base_" else args[0]
            parts = tensors_of(tuple(whole) if isinstance(whole, list | tuple) else whole)
            self.sizes[COLLECTIVES[name]] += sum(part.numel() * part.element_size() for part in parts)
        return function(*args, **(kwargs or {}))


class Counted(NamedTuple):
    """An update of a small decoder, as counted and by the formulas."""

    sharded: bool
    operations: float  # of all processes
    formula: float  # 6 N T + 12 layers width length T
    bytes_per_parameter: dict[str, float]  # by collective operation, of whole tensors


def count(folder: Path) -> list[Counted]:
    """Counts an update, plain and sharded. Every process of torchrun calls it."""
    folder.mkdir(exist_ok=True)
    settings = {
        "data.text": write_text(folder / "text.txt", words=5_000),
        "data.length": LENGTH,
        "data.tokenizer": "characters",
        "model.width": WIDTH,
        "model.inner": 4 * WIDTH,
        "model.heads": 4,
        "model.layers": LAYERS,
        "training.tokens": TOKENS,
        "training.steps": 1,
        "training.warmup": 1,
        "training.device": "cpu",
        "training.tensorboard": "false",
    }
    compute, task, counted = loop.Loop._accumulate_gradients, tasks.find("language"), []
    for sharded in (False, True):

        def count_gradients(self: loop.Loop, batches: list[Any], tokens: int, sharded: bool = sharded) -> Any:
            with Bytes() as moved, Tally() as tally:
                made = compute(self, batches, tokens)
            parameters = sum(part.numel() for part in self.task.model.parameters())
            formula = (6 * parameters + 12 * LAYERS * WIDTH * LENGTH) * tokens
            sizes = {name: size / parameters for name, size in moved.sizes.items()}
            counted.append(Counted(sharded, tally.flops * dist.get_world_size(), formula, sizes))
            return made

        loop.Loop._accumulate_gradients = count_gradients
        loop.Loop._evaluate_and_save = lambda self: None
        out = folder / f"sharded-{sharded}"
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        config = parse(task.config, [*words, "--training.sharded", str(sharded), "--out", str(out)], "regard", "")
        train(task, config, Display(quiet=True))
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.5e9)
    parser.add_argument("--tokens", type=float, default=524288, help="tokens per update of all GPUs together")
    parser.add_argument("--flops", type=float, default=989e12, help="dense bfloat16 operations per second of a GPU")
    parser.add_argument("--used", type=float, default=0.45, help="share of them that one GPU alone uses")
    parser.add_argument("--link", type=float, default=50e9, help="bytes per second through the slowest link")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    parser.add_argument("--sharded", action="store_true", help="FSDP in place of data parallel")
    parser.add_argument("--count", action="store_true", help="count an update of a small decoder, under torchrun")
    parser.add_argument("--folder", type=Path, help="count: an empty folder that all processes see")
    given = parser.parse_args()
    if given.count:
        if "RANK" not in os.environ or given.folder is None:
            parser.error("--count needs torchrun and --folder")
        for counted in count(given.folder):
            sizes = ", ".join(f"{name} {size:.3f}" for name, size in counted.bytes_per_parameter.items())
            if os.environ["RANK"] == "0":
                kind = "sharded" if counted.sharded else "data parallel"
                print(f"{kind}: {counted.operations:.4g} operations, by the formula {counted.formula:.4g}")
                print(f"  bytes per parameter: {sizes}")
        return
    print("| GPUs | compute | communication | step | tokens per second | MFU |\n|---|---|---|---|---|---|")
    for gpus in given.gpus:
        options = {"flops": given.flops, "used": given.used, "link": given.link, "sharded": given.sharded}
        found = project(given.parameters, given.tokens, gpus, **options)
        print(
            f"| {found.gpus} | {found.compute:.3f} s | {found.communication:.3f} s | {found.step:.3f} s | "
            f"{found.tokens_per_second:,.0f} | {100 * found.utilization:.1f} % |"
        )


if __name__ == "__main__":
    main()
