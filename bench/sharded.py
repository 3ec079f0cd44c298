"""Training with weights in shards (FSDP2) beside plain training, on one GPU: speed, memory and losses.

    python bench/sharded.py                                   # one GPU, bfloat16
    python bench/sharded.py --processes 8 --width 2048        # one machine with eight
    python bench/sharded.py --device cpu --width 64 --layers 2 --length 64 --tokens 512 --precision float32

On one GPU sharding saves nothing; this shows what its hooks and copies cost.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

VARIANTS = {
    "plain, CUDA graphs": ["--training.graphs", "true"],
    "plain": ["--training.graphs", "false"],
    "sharded": ["--training.sharded", "true", "--training.graphs", "false"],
}


def write_text(path: Path, words: int = 400_000) -> Path:
    draw = random.Random(0)
    known = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    path.write_text("\n".join(" ".join(draw.choices(known, k=12)) for _ in range(words // 12)) + "\n")
    return path


def train(given: argparse.Namespace, text: Path, out: Path, flags: list[str]) -> list[dict]:
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
        "training.evaluate_every": given.steps,
        "training.log_every": 5,
        "training.precision": given.precision,
        "training.device": given.device,
        "training.processes": given.processes,
        "training.tensorboard": "false",
        "out": out,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "regard", "train", "language", *words, *flags], check=True)
    records = (json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    print("| variant | tokens per second | memory, GiB | last loss |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder, "text.txt"))
        for name, flags in VARIANTS.items():
            if given.device == "cpu" and "CUDA" in name:
                continue
            steps = train(given, text, Path(folder, name.replace(" ", "-")), flags)
            # the first lines wait for libraries
            speeds = sorted(record["tokens_per_second"] for record in steps[len(steps) // 2 :])
            memory = max(record["memory"] for record in steps) / 2**30
            print(f"| {name} | {speeds[len(speeds) // 2]:,} | {memory:.2f} | {steps[-1]['loss']:.4f} |", flush=True)


if __name__ == "__main__":
    main()
