"""IMDb reviews byte by byte, up to 4,096 of them: one small classifier with each attention, under one budget.

    python bench/imdb.py --data FOLDER --out runs/imdb --jobs 6

FOLDER holds train.jsonl and test.jsonl (plain, .gz or .xz), 25,000 reviews each. Every row is trained by
recipe imdb with one word changed: equal updates over equal batches, so equal bytes. The checkpoint that is best
on 1,000 training reviews held out is asked the whole test set. Control characters, which are in 1,595 reviews, become
spaces first: Regard refuses them.
"""

import json
from pathlib import Path

import side

from regard.data.text import CONTROL, opened

CONFIG = "imdb"
SPECS = (
    "softmax",
    "local(window=64)",
    "longformer(window=64, globals=1)",
    "bigbird(block=32)",
    "linformer(rank=128, longest=4096)",
    "nystrom(landmarks=64)",
    "linear",
    "performer(features=64)",
    "reformer(chunk=64, rounds=1)",
    "luna(length=32)",
)
ROWS = {spec: ["--model.attention", spec] for spec in SPECS} | {
    "Perceiver, 64 latents": ["--model.preset", "perceiver", "--model.latents", "64"],
    "Funnel, 1+1+1 layers": ["--model.preset", "funnel", "--model.layers", "[1, 1, 1]"],
}


def prepare(data: Path, out: Path) -> dict[str, str]:
    """The reviews without control characters, in files of their own."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name in ("train", "test"):
        with opened(side.file(data, f"{name}.jsonl")) as file:
            reviews = [json.loads(line) for line in file]
        plain = [review | {"text": CONTROL.sub(" ", review["text"])} for review in reviews]
        paths[name] = str(out / f"{name}.jsonl")
        Path(paths[name]).write_text("".join(json.dumps(review) + "\n" for review in plain), encoding="utf-8")
    return paths


def main() -> None:
    parser = side.arguments(__doc__, ROWS)
    parser.add_argument("--steps", type=int, help="updates per row (default: those of the config)")
    parser.add_argument("--speed", action="store_true", help="measure the training speed too")
    given = parser.parse_args()
    rows = {name: ROWS[name] for name in given.only or ROWS}
    paths = prepare(given.data, given.out / "data")
    common = ["--config", CONFIG, "--data.text", paths["train"]]
    common += [] if given.steps is None else ["--training.steps", str(given.steps)]
    side.train("classify", rows, common, given.out, given.jobs, given.minutes)
    found = side.evaluate(list(rows), given.out, ["--data", paths["test"]], jobs=given.jobs)
    print("| attention | test accuracy | average precision | validation | parameters | steps | minutes |")
    print("|---|---|---|---|---|---|---|")
    for name, test in sorted(found.items(), key=lambda item: -item[1].get("accuracy", 0)):
        if "error" in test:
            print(f"| {name} | {test['error']} | | | | | |")
            continue
        run, log = side.facts(given.out, name), side.records(given.out, name)
        valid = max(part["accuracy"] for part in log if part["event"] == "evaluation")
        minutes = max(part.get("seconds", 0.0) for part in log) / 60
        numbers = f"{100 * test['accuracy']:.2f} | {test['average_precision']:.4f} | {valid:.2f}"
        print(f"| {name} | {numbers} | {run['parameters'] / 1e6:.2f}M | {run['steps']} | {minutes:.1f} |")
    if given.speed:
        print("\n| attention | reviews/s |\n|---|---|")
        for name, reviews in side.speed("classify", rows, common, given.out).items():
            print(f"| {name} | {reviews:,} |", flush=True)


if __name__ == "__main__":
    main()
