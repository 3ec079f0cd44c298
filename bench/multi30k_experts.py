"""One recipe, one word changed: Multi30k English to German with each feed-forward layer, trained side by side.

    python bench/multi30k_experts.py --data FOLDER --out runs/multi30k-experts --jobs 10

As bench/multi30k.py, whose data and recipe it takes. Every other layer of encoder and decoder is of the kind that a row
names, the others are dense; widths are such that a token meets as many parameters as in the dense model, within a few
in a hundred. Beside BLEU stand all parameters and the active ones, and of the last line of each log how many tokens
were dropped and how busy the busiest expert of any layer was, 1 being an even share. With --speed each row is trained
alone for two hundred steps.
"""

import json
from pathlib import Path

from multi30k import read_log, run_rows

from regard.training.display import experts

FEEDS = {
    "dense, seed 1": None,
    "dense, seed 2": None,
    "switch": "switch(experts=8)",
    "gshard": "gshard(experts=8, inner=128)",
    "stmoe": "stmoe(experts=8, inner=88)",
    "glam": "glam(experts=8, inner=88)",
    "moe": "moe(experts=8, choices=2, inner=128)",
    "choice, encoder": "choice(experts=8, capacity=1.0)",
    "productkey": "productkey(keys=64, heads=4, choices=32, key_width=64)",
    "scaling": "scaling(inner=2048, block=16, rank=14)",
}


def flags(name: str, spec: str | None) -> list[str]:
    if spec is None:
        return ["--training.seed", name[-1]]
    given = ["--model.feedforward", f"[dense, {spec}]"]
    return given + (["--model.decoder_feedforward", "dense"] if "encoder" in name else [])


def describe(folder: Path) -> list[str]:
    facts = json.loads((folder / "run.json").read_text())
    steps = [record for record in read_log(folder) if record["event"] == "step"]
    layers = steps[-1].get("layers", {})
    counts = [f"{facts[key] / 1e6:.2f}M" for key in ("parameters", "active")]
    return [*counts, str(steps[-1]["step"]), experts(layers).strip() or "-"]


if __name__ == "__main__":
    run_rows(
        {name: flags(name, spec) for name, spec in FEEDS.items()},
        ["feed-forward", "BLEU", "parameters", "active", "steps", "experts"],
        describe,
        __doc__,
    )
