"""Classifiers of few texts, with no flag but the data, compared with TF-IDF and logistic regression.

    python bench/small_texts.py --data FOLDER --out runs/small --jobs 7

FOLDER holds sst2/stsa.binary.train, .dev and .test, and imdb/train.jsonl.xz and test.jsonl.xz. A set is some of the
training texts, drawn by the seed: sst-6920 (all), sst-2000, sst-500, with the 872 sentences of dev to validate on;
imdb-5000, imdb-1000 and imdb-25000 (all), of which Regard holds out a tenth, at most 1,000. Each run gets two cores of
its own (--cores says which) and nothing but

    regard train classify --data.text SET [--data.valid_text DEV] --training.seed SEED --out RUN

and is then evaluated on all test texts. The baseline learns from the same texts and chooses its C on the same
validation texts. The table has the mean over the seeds; seconds are of training, on the two cores.
"""

import argparse
import json
import lzma
import os
import queue
import random
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SETS = ("imdb-5000", "imdb-1000", "sst-6920", "sst-2000", "sst-500", "imdb-25000")
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")  # reviews hold some, which Regard refuses


def read(data: Path, kind: str, part: str) -> list[tuple[str, str]]:
    if kind == "sst":
        lines = (data / "sst2" / f"stsa.binary.{part}").read_text(encoding="utf-8").split("\n")
        texts = [(line[2:].strip().replace("-lrb-", "(").replace("-rrb-", ")"), line[0]) for line in lines if line]
        return [(text, {"0": "negative", "1": "positive"}[label]) for text, label in texts]
    with lzma.open(data / "imdb" / f"{part}.jsonl.xz", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [(CONTROL.sub(" ", one["text"]), ("negative", "positive")[int(one["label"])]) for one in records]


def write(path: Path, examples: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in examples))
    return path


def prepare(data: Path, out: Path, sets: list[str], seeds: list[int]) -> None:
    """One file per set and seed, and the validation and test files."""
    out.mkdir(parents=True, exist_ok=True)
    for kind in {name.split("-")[0] for name in sets}:
        parts = {part: read(data, kind, part) for part in ("train", "test", *(["dev"] if kind == "sst" else []))}
        for part in parts.keys() - {"train"}:
            write(out / f"{kind}-{part}.jsonl", parts[part])
        for name in (name for name in sets if name.startswith(kind)):
            for seed in seeds:
                some = random.Random(seed).sample(parts["train"], int(name.split("-")[1]))
                write(out / f"{name}-{seed}.jsonl", some)


def regard(arguments: list[str], cores: str | None, log: Path) -> str:
    command = [*(["taskset", "-c", cores] if cores else []), sys.executable, "-m", "regard", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    with open(log, "a") as file:
        file.write(" ".join(command) + "\n" + done.stderr + "\n")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def one(given: argparse.Namespace, name: str, seed: int, cores: "queue.Queue[str | None]") -> dict:
    texts, run = given.out / "data", given.out / f"{name}-{seed}"
    kind, own, result = name.split("-")[0], cores.get(), {"set": name, "seed": seed}
    log = given.out / f"{name}-{seed}.log"
    try:
        if "train" in given.stages:
            valid = ["--data.valid_text", str(texts / "sst-dev.jsonl")] if kind == "sst" else []
            began = time.monotonic()
            flags = ["--data.text", str(texts / f"{name}-{seed}.jsonl"), *valid, "--training.seed", str(seed)]
            regard(["train", "classify", *flags, *given.flags, "--out", str(run)], own, log)
            result["seconds"] = round(time.monotonic() - began, 1)
        if "evaluate" in given.stages:
            asked = ["evaluate", str(run), "--data", str(texts / f"{kind}-test.jsonl"), "--json"]
            baseline = ["--baseline"] if "baseline" in given.stages else []
            found = json.loads(regard([*asked, *baseline, "--device", given.device], own, log))
            result["accuracy"] = 100 * found["accuracy"]
            if baseline:
                result["baseline"] = 100 * found["baseline"]["accuracy"]
    except Exception as error:
        result["error"] = str(error)
    finally:
        cores.put(own)
    with open(given.out / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    return result


def table(results: list[dict]) -> str:
    lines = ["| set | Regard | seeds | baseline | gap | seconds |", "|---|---:|---|---:|---:|---:|"]
    for name in dict.fromkeys(result["set"] for result in results):
        rows = sorted((r for r in results if r["set"] == name and "accuracy" in r), key=lambda r: r["seed"])
        if not rows:
            continue
        mean = statistics.mean(row["accuracy"] for row in rows)
        known = [row["baseline"] for row in rows if "baseline" in row]
        baseline, gap = (f"{(b := statistics.mean(known)):.2f}", f"{mean - b:+.2f}") if known else ("", "")
        seconds = max((row["seconds"] for row in rows if "seconds" in row), default=0)
        each = ", ".join(f"{row['accuracy']:.2f}" for row in rows)
        lines.append(f"| {name} | {mean:.2f} | {each} | {baseline} | {gap} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2/ and imdb/")
    parser.add_argument("--out", type=Path, required=True, help="folder for texts, runs and results.jsonl")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, help="sets of texts (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds (default: 1 2 3)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--cores", nargs="+", help="two cores per job, such as 0,1 2,3 (default: in order)")
    parser.add_argument(
        "--stages", nargs="+", default=["train", "evaluate", "baseline"], help="stages to run (default: all)"
    )
    parser.add_argument("--device", default="cpu", help="device of the evaluation (default: cpu)")
    given, given.flags = parser.parse_known_args()
    prepare(given.data, given.out / "data", given.sets, given.seeds)
    cores: queue.Queue[str | None] = queue.Queue()
    for job in range(given.jobs):
        cores.put(given.cores[job] if given.cores else f"{2 * job},{2 * job + 1}" if given.jobs > 1 else None)
    todo = [(name, seed) for name in given.sets for seed in (given.seeds if name != "imdb-25000" else given.seeds[:1])]
    with ThreadPoolExecutor(given.jobs) as pool:
        jobs = [pool.submit(one, given, name, seed, cores) for name, seed in todo]
        results = [job.result() for job in jobs]
    for result in results:
        if "error" in result:
            print(f"{result['set']}, seed {result['seed']}: {result['error']}", file=sys.stderr)
    print(table(results))


if __name__ == "__main__":
    main()
