"""One recipe, one word changed: Multi30k English to German with each attention, trained side by side.

    python bench/multi30k.py --data FOLDER --out runs/multi30k --jobs 8

FOLDER holds train, valid and test.2016 in .en and .de, as BPE units (plain, .gz or .xz). Every row is trained by
configs/multi30k.yaml and scored on test2016: tokenised BLEU, beam 5, the average of the last ten checkpoints. Training
speed is measured afterwards, one row at a time, with --speed. Finished runs are not trained again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CONFIG = Path(__file__).parent.parent / "configs" / "multi30k.yaml"
LINFORMER = "linformer(rank=16, longest=128)"
RECURRENT = ["--model.preset", "lstm", "--model.norm", "null", "--model.input_feeding", "false"]
ROWS = {
    "softmax, seed 1": [],
    "softmax, seed 2": ["--training.seed", "2"],
    "softmax, seed 3": ["--training.seed", "3"],
    "additive": ["--model.attention", "additive"],
    "local(window=8)": ["--model.attention", "local(window=8)"],
    "linear": ["--model.attention", "linear"],
    "performer": ["--model.attention", "performer"],
    "rfa": ["--model.attention", "rfa"],
    "longformer(window=8, globals=1)": ["--model.attention", "longformer(window=8, globals=1)"],
    f"{LINFORMER}, encoder and cross": [
        *("--model.attention", LINFORMER, "--model.cross_attention", LINFORMER),
        *("--model.decoder_attention", "softmax"),
    ],
    "heads(local(window=4), softmax, strided(stride=4), globals(tokens=1))": [
        *("--model.attention", "heads(local(window=4), softmax, strided(stride=4), globals(tokens=1))"),
    ],
    "LSTM without attention": [*RECURRENT, "--model.bottleneck", "true"],
    "LSTM, dot": [*RECURRENT, "--model.attention", "dot"],
    "LSTM, multiplicative": [*RECURRENT, "--model.attention", "multiplicative"],
    "LSTM, additive": [*RECURRENT, "--model.attention", "additive"],
}
REGARD = [sys.executable, "-m", "regard"]


def file(folder: Path, name: str) -> str:
    found = [path for suffix in ("", ".gz", ".xz") if (path := folder / f"{name}{suffix}").exists()]
    if not found:
        raise SystemExit(f"{folder} has no {name}, {name}.gz or {name}.xz")
    return str(found[0])


def flags(data: Path) -> list[str]:
    names = {"source": "train.en", "target": "train.de", "valid_source": "valid.en", "valid_target": "valid.de"}
    given = [part for key, name in names.items() for part in (f"--data.{key}", file(data, name))]
    return ["--config", str(CONFIG), *given]


def train(rows: dict[str, list[str]], data: Path, out: Path, jobs: int, minutes: float) -> None:
    """As many at a time as there are jobs; whoever is not done in time is stopped, and goes on the next time."""
    waiting, running, until = list(rows), {}, time.monotonic() + 60 * minutes
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < until:
            name = waiting.pop(0)
            folder = out / slug(name)
            again = (folder / "run.json").exists()
            command = (
                ["resume", str(folder)]
                if again
                else ["train", "translate", *flags(data), "--out", str(folder), *rows[name]]
            )
            with open(out / f"{slug(name)}.log", "a") as log:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                running[name] = subprocess.Popen([*REGARD, *command], stdout=log, stderr=log, env=environment)
        time.sleep(0.5)
        for name, job in list(running.items()):
            if job.poll() is not None:
                print(f"{name}: exit {job.returncode}", file=sys.stderr, flush=True)
                del running[name]
        if time.monotonic() > until:
            waiting.clear()
            for job in running.values():
                job.send_signal(signal.SIGTERM)
            until += 30


def score(
    rows: dict[str, list[str]], data: Path, out: Path, titles: list[str], describe: Callable[[Path], list[str]]
) -> None:
    """The table, with what each run reached."""
    pairs = ["--source", file(data, "test.2016.en"), "--target", file(data, "test.2016.de"), "--beam", "5", "--json"]
    jobs = {
        name: subprocess.Popen(
            [*REGARD, "evaluate", str(out / slug(name)), *pairs],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for name in rows
    }
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name, job in jobs.items():
        found, errors = job.communicate()
        if job.returncode:
            print(f"| {name} | {errors.strip().splitlines()[-1]} {'|' * (len(titles) - 1)}")
            continue
        bleu = f"{json.loads(found)['bleu']['value']:.2f}"
        print(f"| {' | '.join([name, bleu, *describe(out / slug(name))])} |")


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def describe(folder: Path) -> list[str]:
    """Parameters and steps of a run."""
    facts = json.loads((folder / "run.json").read_text())
    return [f"{facts['parameters'] / 1e6:.2f}M", str(max(record["step"] for record in read_log(folder)))]


def speed(rows: dict[str, list[str]], data: Path, out: Path, title: str) -> None:
    """Tokens a second, alone, in the second hundred of two hundred steps."""
    print(f"\n| {title} | target tokens/s |\n|---|---|")
    for name in rows:
        folder = out / f"speed-{slug(name)}"
        few = ["--training.steps", "200", "--training.evaluate_every", "1000", "--training.save_every", "1000"]
        few += ["--training.log_every", "100", "--training.average", "0", "--data.valid_source", file(data, "valid.en")]
        command = ["train", "translate", *flags(data), "--out", str(folder), *rows[name], *few]
        subprocess.run([*REGARD, *command], check=True, capture_output=True)
        records = read_log(folder)
        print(
            f"| {name} | {[part for part in records if part['event'] == 'step'][-1]['tokens_per_second']:,} |",
            flush=True,
        )


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def run_rows(rows: dict[str, list[str]], titles: list[str], describe: Callable[[Path], list[str]], about: str) -> None:
    """The program: trains rows, which are flags by name, and prints the table; `describe` fills it behind BLEU."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the BPE text")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="rows trained at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop all after so long; run again to go on")
    parser.add_argument("--only", nargs="+", choices=rows, metavar="ROW", help="only these rows")
    parser.add_argument("--speed", action="store_true", help="measure the training speed too")
    parser.add_argument("--flags", default="", help="more flags of 'regard train', such as --training.steps 10")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    more = arguments.flags.split()
    rows = {name: given + more for name, given in rows.items() if name in (arguments.only or rows)}
    train(rows, arguments.data, arguments.out, arguments.jobs, arguments.minutes)
    score(rows, arguments.data, arguments.out, titles, describe)
    if arguments.speed:
        speed(rows, arguments.data, arguments.out, titles[0])


if __name__ == "__main__":
    run_rows(ROWS, ["attention", "BLEU", "parameters", "steps"], describe, __doc__)
