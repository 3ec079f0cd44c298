"""What each attention costs a language model that exists: perplexity of WikiText-2 with its attention exchanged.

    python bench/swapped.py --model runs/smollm2 --data FOLDER --out runs/swapped --characters 32000
    python bench/swapped.py --model model.gguf --data FOLDER --out runs/swapped --tune 100 --jobs 4

--model is a run of language or a GGUF file; the rows are for one with rotary positions, whose heads and key/value heads
divide by three. FOLDER holds train.txt, valid.txt and test.txt (plain, .gz or .xz). Every row is `regard swap` of the
model and its perplexity on the test text, in rows of --length tokens, as it is ("before"); with --tune also after that
number of updates on the training text, the same for every row. Row "softmax" is the model itself: what tuning gives it
is no merit of an attention. Results are in OUT, and what is there is not
measured again; the weights of tuned rows are removed when they are measured.
"""

import json
import lzma
import shutil
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import side

NO_POSITIONS = ["--position", "none"]
SPECS = (
    "softmax",
    "local(window=63)",
    "longformer(window=59, globals=4)",
    "local(window=255)",
    "longformer(window=251, globals=4)",
    "[local(window=63), softmax]",
    "heads(local(window=63), local(window=63), softmax)",
    "heads(local(window=63), strided(stride=16), globals(tokens=4))",
    "sparse(pattern='fixed', stride=32, summary=4)",
    "strided(stride=16)",
    "performer(features=256)",
    "rfa(features=128)",
    "[softmax, performer(features=256)]",
)
ROWS: side.Rows = {spec: ["--attention", spec] for spec in SPECS}
for word in ("softmax", "linear", "efficient"):
    ROWS[f"{word}, no positions"] = ["--attention", word, *NO_POSITIONS]


def main() -> None:
    parser = side.arguments(__doc__, ROWS)
    parser.add_argument("--model", type=Path, required=True, help="run of language, or a GGUF file")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row (default: 1024)")
    parser.add_argument("--characters", type=int, help="only this many characters of the test text, in whole lines")
    parser.add_argument("--tune", type=int, help="updates of training for each row (default: none)")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per update of the tuning (default: 16384)")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="of the tuning (default: 2e-4)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names = given.only or list(ROWS)
    results = Results(given.out / f"results-{given.length}-{given.characters or 'whole'}.json")
    model, text = opened(given), cut(given)
    flags = ["--text", str(text), "--length", str(given.length)]
    until = time.monotonic() + 60 * given.minutes
    for first in range(0, len(names), given.jobs):
        rows = names[first : first + given.jobs]
        if missing := [name for name in rows if "before" not in results.of(name)]:
            exchange(model, given.out, missing)
            for name, found in side.evaluate(missing, given.out, flags, given.jobs).items():
                results.add(name, "before", found)
        if given.tune is not None and (missing := [name for name in rows if "after" not in results.of(name)]):
            done, tuned = tune(given, model, missing, (until - time.monotonic()) / 60), given.out / "tuned"
            for name, found in side.evaluate(done, tuned, flags, given.jobs).items():
                steps = {} if "error" in found else {"trained": side.facts(tuned, name)["steps"] * given.tokens}
                results.add(name, "after", found | steps)
                shutil.rmtree(tuned / side.slug(name) / "checkpoints", ignore_errors=True)
        results.show(rows, header=first == 0)


class Results:
    """What was measured: rows by name, each with its stages "before" and "after"."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, dict[str, dict]] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, name: str) -> dict[str, dict]:
        return self.rows.get(name, {})

    def add(self, name: str, stage: str, found: dict) -> None:
        self.rows.setdefault(name, {})[stage] = found
        # a row that failed is tried again the next time
        kept = {
            row: {key: value for key, value in stages.items() if "error" not in value}
            for row, stages in self.rows.items()
        }
        self.path.write_text(json.dumps(kept, indent=2) + "\n")

    def show(self, names: list[str], *, header: bool) -> None:
        if header:
            print("| attention | before | after tuning | tokens trained on |\n|---|---:|---:|---:|")
        for name in names:
            before, after = (self.of(name).get(stage, {}) for stage in ("before", "after"))
            shown = [
                part.get("error") or (f"{part['perplexity']:.2f}" if part else "not run") for part in (before, after)
            ]
            trained = f"{after['trained'] / 1e6:.1f}M" if "trained" in after else ""
            print(f"| `{name}` | {' | '.join(shown)} | {trained} |", flush=True)


def opened(given: Namespace) -> Path:
    """The run of the model."""
    if given.model.is_dir():
        return given.model
    run = given.out / "model"
    if not (run / "run.json").exists():
        subprocess.run([*side.REGARD, "import", str(given.model), "--out", str(run)], check=True)
    return run


def exchange(model: Path, out: Path, names: list[str]) -> None:
    """The runs of rows, made side by side. A row that cannot be made has no run, and its evaluation says so."""
    folders = {name: out / side.slug(name) for name in names}
    made = [
        subprocess.Popen([*side.REGARD, "swap", str(model), *ROWS[name], "--out", str(folder)], env=side.alone())
        for name, folder in folders.items()
        if not (folder / "run.json").exists()
    ]
    for process in made:
        process.wait()


def cut(given: Namespace) -> Path:
    """The test text, or its beginning."""
    whole = Path(side.file(given.data, "test.txt"))
    if given.characters is None:
        return whole
    with lzma.open(whole, "rt", encoding="utf-8") if whole.suffix == ".xz" else whole.open(encoding="utf-8") as file:
        text = file.read(given.characters)
    part = given.out / f"test-{given.characters}.txt"
    part.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    return part


def tune(given: Namespace, model: Path, names: list[str], minutes: float) -> list[str]:
    """Trains rows for as long as there is time, and returns those that are done."""
    exchange(model, given.out, names)
    common = ["--data.text", side.file(given.data, "train.txt"), "--data.valid", side.file(given.data, "valid.txt")]
    common += ["--data.length", str(given.length), "--training.keep", "1"]
    for setting in ("steps", "evaluate_every", "save_every"):
        common += [f"--training.{setting}", str(given.tune)]
    common += ["--training.warmup", str(given.tune // 10)]
    common += ["--training.tokens", str(given.tokens), "--training.learning_rate", str(given.learning_rate)]
    common += ["--training.tensorboard", "false"]
    if _has_gpu():
        common += ["--training.precision", "bfloat16"]
    rows = {name: ["--init", str(given.out / side.slug(name))] for name in names}
    return side.train("language", rows, common, given.out / "tuned", given.jobs, minutes)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
