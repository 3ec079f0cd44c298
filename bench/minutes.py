"""What a budget of minutes buys: BLEU of `regard train translate --training.minutes N` with no other flag but the data,
beside that of the settings which were the defaults before there was a budget, stopped after as many minutes.

    python bench/minutes.py --pairs deu-eng.txt.xz --out runs/minutes --minutes 10 --threads 2

The pairs are a file of tabs, English and German first, such as those of Tatoeba at manythings.org. 30,000 of them are
trained on; BLEU is that of 1,000 others, none of whose sources is among the 30,000. The minutes count from the start of
the command: reading, learning the vocabulary, evaluations and checkpoints are part of them.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from regard.data.text import opened, read_sentences

BEFORE = [
    *("--model.preset", "tiny", "--data.vocabulary", "8000", "--training.steps", "10000", "--training.tokens", "4096"),
    *("--training.schedule", "paper", "--training.learning_rate", "1.0", "--training.warmup", "4000"),
    *("--training.evaluate_every", "500"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", required=True, help="file with source, tab, target in each line")
    parser.add_argument("--out", required=True, help="folder for the runs")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--count", type=int, default=30_000, help="pairs to train on")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("budget", "before"), help="which of the two to train (default: both)")
    given = parser.parse_args()
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = split(given.pairs, given.count, folder)
    common = ["--data.source", str(train), "--training.threads", str(given.threads)]
    if given.only != "before":
        flags = [*common, "--training.minutes", str(given.minutes)]
        report("budget", *timed("budget", flags, folder / "budget", None), folder / "budget", test)
    if given.only != "budget":
        report(
            "before", *timed("before", [*common, *BEFORE], folder / "before", given.minutes), folder / "before", test
        )


def split(pairs: str, count: int, folder: Path) -> tuple[Path, Path]:
    """Two files of pairs, drawn in an order that is always the same."""
    with opened(pairs) as stream:
        lines = [line.split("\t")[:2] for line in read_sentences(stream, name=pairs)]
    random.Random(0).shuffle(lines)
    test: dict[str, str] = {}
    for source, target in lines:
        if len(test) == 1000:
            break
        test.setdefault(source, target)
    train = [pair for pair in lines if pair[0] not in test][:count]
    files = folder / "train.tsv", folder / "test.tsv"
    for path, part in zip(files, (train, test.items()), strict=True):
        path.write_text("".join(f"{source}\t{target}\n" for source, target in part), encoding="utf-8")
    return files


def timed(name: str, flags: list[str], out: Path, minutes: float | None) -> tuple[float, list[str]]:
    """Trains, and stops after a number of minutes as `kill` does, which saves. Returns the minutes it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "regard", "train", "translate", *flags, "--out", str(out)]
    with open(out.with_suffix(".log"), "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            process.wait(None if minutes is None else 60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
    took = (time.monotonic() - began) / 60
    if process.returncode not in (0, 128 + signal.SIGTERM):
        sys.exit(f"{name}: ended with {process.returncode}, see {out.with_suffix('.log')}")
    said = out.with_suffix(".log").read_text(encoding="utf-8").splitlines()
    return took, [line for line in said if line.startswith(("chosen", "plan"))]


def report(name: str, took: float, said: list[str], out: Path, test: Path) -> None:
    which = [] if name == "budget" else ["--checkpoint", "last"]
    command = [sys.executable, "-m", "regard", "evaluate", str(out), "--source", str(test), "--json", *which]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    steps = max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))
    for line in said:
        print(f"  {line}")
    scores = f"BLEU {found['bleu']['value']:.1f}, chrF {found['chrf']['value']:.1f}, loss {found['loss']:.3f}"
    print(f"{name}: {took:.1f} minutes, {steps:,} steps, {scores}", flush=True)


if __name__ == "__main__":
    main()
