"""One recipe, one word changed: Multi30k English to German with each feed-forward layer, trained side by side.

    python bench/multi30k_experts.py --data FOLDER --out runs/multi30k-experts --jobs 10

FOLDER holds train, valid and test.2016 in .en and .de, as BPE units (plain, .gz or .xz). Every row is trained by recipe
multi30k and scored on test2016: tokenised BLEU, beam 5, the average of the last ten checkpoints.

Every other layer of encoder and decoder is of the kind that a row names, the others are dense; widths are such that a
token meets as many parameters as in the dense model, within one in a hundred. The table has BLEU, all parameters and
the active ones, and from the last line of each log the share of dropped choices and the load of the busiest expert of
any layer, 1 being an even share. Speed is that of rows which share one GPU; --speed measures each alone afterwards.
"""

import json
from pathlib import Path
from statistics import median

import side

from regard.training.display import describe_experts

FEEDS = {
    "dense, seed 1": [],
    "dense, seed 2": ["--training.seed", "2"],
    "switch": "switch(experts=8)",
    "gshard": "gshard(experts=8, inner=128)",
    "stmoe": "stmoe(experts=8, inner=88)",
    "glam": "glam(experts=8, inner=88)",
    "moe": "moe(experts=8, choices=2, inner=128)",
    "choice in the encoder": "choice(experts=8, capacity=1.0)",
    "productkey": "productkey(keys=64, heads=4, choices=32, key_width=64)",
    "scaling": "scaling(inner=2048, block=16, rank=14)",
}
ROWS = {
    name: feed if isinstance(feed, list) else ["--model.feedforward", json.dumps(["dense", feed])]
    for name, feed in FEEDS.items()
}
ROWS["choice in the encoder"] += ["--model.decoder_feedforward", "dense"]


def flags(data: Path, steps: int | None) -> list[str]:
    names = {"source": "train.en", "target": "train.de", "valid_source": "valid.en", "valid_target": "valid.de"}
    given = [part for key, name in names.items() for part in (f"--data.{key}", side.file(data, name))]
    if steps is None:
        return ["--config", "multi30k", *given]
    shares = {"steps": 1, "warmup": 6, "evaluate_every": 2, "save_every": 36}  # as in the config
    short = [part for key, share in shares.items() for part in (f"--training.{key}", str(steps // share))]
    return ["--config", "multi30k", *given, *short]


def main() -> None:
    parser = side.arguments(__doc__, ROWS)
    parser.add_argument("--steps", type=int, help="updates per row (default: those of the config)")
    parser.add_argument("--speed", action="store_true", help="measure the training speed too")
    given = parser.parse_args()
    rows = {name: ROWS[name] for name in given.only or ROWS}
    common = flags(given.data, given.steps)
    side.train("translate", rows, common, given.out, given.jobs, given.minutes)
    test = {"source": side.file(given.data, "test.2016.en"), "target": side.file(given.data, "test.2016.de")}
    asked = [part for name, path in test.items() for part in (f"--{name}", path)]
    titles = ("feed-forward", "BLEU", "parameters", "active", "steps", "target tokens/s", "experts")
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name, found in side.evaluate(list(rows), given.out, [*asked, "--beam", "5"]).items():
        if "error" in found:
            print(f"| {name} | {found['error']} {'|' * (len(titles) - 1)}")
            continue
        run, log = side.facts(given.out, name), side.records(given.out, name)
        steps = [record for record in log if record["event"] == "step"]
        counts = " | ".join(f"{run[key] / 1e6:.2f}M" for key in ("parameters", "active"))
        tokens = f"{median(record['tokens_per_second'] for record in steps):,.0f}"
        told = describe_experts(steps[-1].get("layers", {})).strip() or "-"
        print(f"| {name} | {found['bleu']['value']:.2f} | {counts} | {run['steps']} | {tokens} | {told} |")
    if given.speed:
        print("\n| feed-forward | target tokens/s |\n|---|---|")
        for name, tokens in side.speed("translate", rows, common, given.out).items():
            print(f"| {name} | {tokens:,} |", flush=True)


if __name__ == "__main__":
    main()
