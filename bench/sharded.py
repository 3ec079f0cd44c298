"""Weights in shards (FSDP2) and recomputed activations beside plain training: speed, memory and losses.

    python bench/sharded.py                                   # one GPU, bfloat16
    torchrun --nproc-per-node=8 bench/sharded.py --width 2048 --folder /tmp/sharded     # one machine with eight
    python bench/sharded.py --device cpu --width 64 --layers 2 --length 64 --tokens 512 --precision float32

On one GPU sharding saves nothing; this shows what its hooks and copies cost. Recomputing (activation checkpointing)
saves memory on any number of them. Updates alone are measured: nothing is evaluated or saved. On a CPU the memory is
that of the process, which keeps what earlier variants took.
"""

import argparse
import gc
import os
import random
import tempfile
from pathlib import Path

import torch

from regard import tasks
from regard.config import parse
from regard.tasks.train import train
from regard.training import loop
from regard.training.display import Display
from regard.training.run import Run

VARIANTS = {
    "plain": ["--training.graphs", "false"],
    "plain, recomputed": ["--training.recompute", "true"],
    "sharded": ["--training.sharded", "true"],
    "sharded, recomputed": ["--training.sharded", "true", "--training.recompute", "true"],
    "plain, CUDA graphs": ["--training.graphs", "true"],
}


def write_text(path: Path, words: int = 100_000) -> Path:
    draw = random.Random(0)
    known = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    text = "\n".join(" ".join(draw.choices(known, k=12)) for _ in range(words // 12)) + "\n"
    # the processes of torchrun all write the same
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
    return path


def measure(given: argparse.Namespace, text: Path, out: Path, flags: list[str]) -> list[dict]:
    """The lines of the log about steps."""
    settings = {
        "data.text": text,
        "data.length": given.length,
        "data.vocabulary": 8000,
        "model.width": given.width,
        "model.inner": 4 * given.width,
        "model.heads": max(1, given.width // 64),
        "model.layers": given.layers,
        "model.dropout": 0,
        "training.tokens": given.tokens,
        "training.steps": given.steps,
        "training.log_every": 5,
        "training.precision": given.precision,
        "training.device": given.device,
        "training.tensorboard": "false",
        "out": out,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    task = tasks.find("language")
    if given.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train(task, parse(task.config, [*words, *flags], "regard", ""), Display(quiet=True))
    return [record for record in Run.open(out).records() if record["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, help="an empty folder that all processes see (default: a temporary one)")
    given = parser.parse_args()
    loop.Loop._evaluate_and_save = lambda self: None
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        print("| variant | tokens per second | memory, GiB | last loss |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        text = write_text(folder / "text.txt")
        for name, flags in VARIANTS.items():
            if "CUDA" in name and (given.device == "cpu" or "RANK" in os.environ):
                continue
            steps = measure(given, text, folder / name.replace(" ", "-"), flags)
            # the first lines wait for libraries
            speeds = sorted(record["tokens_per_second"] for record in steps[len(steps) // 2 :])
            memory = max(record["memory"] for record in steps) / 2**30
            row = f"| {name} | {speeds[len(speeds) // 2]:,} | {memory:.2f} | {steps[-1]['loss']:.4f} |"
            if is_main:
                print(row, flush=True)


if __name__ == "__main__":
    main()
