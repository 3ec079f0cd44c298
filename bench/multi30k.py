"""One recipe, one word changed: Multi30k English to German with each attention, trained side by side.

    python bench/multi30k.py --data FOLDER --out runs/multi30k --jobs 8
    python bench/multi30k.py --data FOLDER --speed-only --workers 12 --json speed.json

FOLDER holds train, valid and test.2016 in .en and .de, as BPE units (plain, .gz or .xz). Every row is trained by
recipe multi30k and scored on test2016: tokenised BLEU, beam 5, the average of the last ten checkpoints. --steps
makes the same schedule shorter for all. Speed is that of rows which share one GPU; --speed measures each alone
afterwards. Finished runs are not trained again. --speed-only trains no row to its end: it measures one after the other
in one process, over a few batches that are replayed as CUDA graphs on a GPU.
"""

from pathlib import Path
from statistics import median

import side
import speed

CONFIG = "multi30k"
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
    "LSTM, multiplicative(scaled=False)": [*RECURRENT, "--model.attention", "multiplicative(scaled=False)"],
    "LSTM, additive": [*RECURRENT, "--model.attention", "additive"],
}


def flags(data: Path, steps: int | None) -> list[str]:
    names = {"source": "train.en", "target": "train.de", "valid_source": "valid.en", "valid_target": "valid.de"}
    given = [part for key, name in names.items() for part in (f"--data.{key}", side.file(data, name))]
    if steps is None:
        return ["--config", CONFIG, *given]
    shares = {"steps": 1, "warmup": 6, "evaluate_every": 2, "save_every": 36}  # as in the config
    short = [part for key, share in shares.items() for part in (f"--training.{key}", str(steps // share))]
    return ["--config", CONFIG, *given, *short]


def main() -> None:
    parser = side.arguments(__doc__, ROWS, out=False)
    parser.add_argument("--steps", type=int, help="updates per row (default: those of the config)")
    parser.add_argument("--speed", action="store_true", help="measure the training speed too")
    parser.add_argument("--speed-only", action="store_true", help="only measure the training speed, in one process")
    parser.add_argument("--rounds", type=int, default=8, help="--speed-only: rounds over the batches (default: 8)")
    parser.add_argument("--workers", type=int, default=0, help="--speed-only: processes that compile kernels first")
    parser.add_argument("--json", type=Path, help="--speed-only: file to write the speeds to")
    given = parser.parse_args()
    rows = {name: ROWS[name] for name in given.only or ROWS}
    common = flags(given.data, given.steps)
    if given.speed_only:
        # the seed makes no difference
        rows = {name: row for name, row in rows.items() if "--training.seed" not in row}
        speed.measure("translate", rows, common, rounds=given.rounds, workers=given.workers, path=given.json)
        return
    if given.out is None:
        parser.error("--out is needed to train")
    side.train("translate", rows, common, given.out, given.jobs, given.minutes)
    test = {"source": side.file(given.data, "test.2016.en"), "target": side.file(given.data, "test.2016.de")}
    asked = [part for name, path in test.items() for part in (f"--{name}", path)]
    print("| attention | BLEU | parameters | steps | target tokens/s |\n|---|---|---|---|---|")
    for name, found in side.evaluate(list(rows), given.out, [*asked, "--beam", "5"]).items():
        if "error" in found:
            print(f"| {name} | {found['error']} | | | |")
            continue
        run = side.facts(given.out, name)
        speeds = [record["tokens_per_second"] for record in side.records(given.out, name) if record["event"] == "step"]
        sizes = f"{found['bleu']['value']:.2f} | {run['parameters'] / 1e6:.2f}M | {run['steps']}"
        print(f"| {name} | {sizes} | {median(speeds):,.0f} |")
    if given.speed:
        print("\n| attention | target tokens/s |\n|---|---|")
        for name, tokens in side.speed("translate", rows, common, given.out).items():
            print(f"| {name} | {tokens:,} |", flush=True)


if __name__ == "__main__":
    main()
