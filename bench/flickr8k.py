"""Flickr8k at 64 x 64: captions and retrieval by CoCa, beside the same model that sees no picture, and chance.

    python bench/flickr8k.py --data FOLDER --out runs/flickr8k --jobs 2

FOLDER holds train.webp and dev.webp, each one picture of tiles of 64 x 64, 100 in a row, and train.tsv.xz and
dev.tsv.xz: line t has an id and the five captions of tile t. There are 6,000 and 1,000 photographs. Both models are
trained by recipe flickr8k; "no picture" has black tiles in place of all photographs, so that it learns only what
captions are like. The checkpoint with the best CIDEr-D on dev is evaluated on dev, which is the split that is here.
With --jobs 2 it took 223 seconds on an H200 that had other trainings to do. --steps N trains for N steps, --pictures N
on N photographs, to try it out.

The figures do not compare with published ones: those are of photographs in full size, on the test split, and of models
over a convolutional network that was trained on ImageNet.
"""

import lzma
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import side
from PIL import Image

SIDE, ACROSS = 64, 100  # pixels of a tile, tiles in a row
PARTS = ("train", "dev")
ROWS: side.Rows = {"CoCa": [], "no picture": []}
DIRECTIONS = ("pictures", "captions")


def prepare(data: Path, out: Path, pictures: int | None = None) -> dict[str, str]:
    """The tiles of each part as an array, the same in black, and a TSV file of their captions."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {}
    for part in PARTS:
        tiles = np.asarray(Image.open(data / f"{part}.webp").convert("RGB"))
        images = tiles.reshape(-1, SIDE, ACROSS, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)
        with lzma.open(data / f"{part}.tsv.xz", "rt", encoding="utf-8") as file:
            captions = [line.rstrip("\n").split("\t")[1:] for line in file]
        captions = captions[:pictures]
        if len(images) < len(captions):
            raise SystemExit(f"{part}.tsv.xz has captions of {len(captions)} pictures, {part}.webp has {len(images)}")
        images = images[: len(captions)]
        paths |= {name: str(out / f"{name}.npz") for name in (part, f"{part}-black")}
        paths[f"{part}-captions"] = str(out / f"{part}.tsv")
        np.savez(paths[part], images=images)
        np.savez(paths[f"{part}-black"], images=np.zeros_like(images))
        rows = (f"{number}\t" + "\t".join(texts) + "\n" for number, texts in enumerate(captions))
        Path(paths[f"{part}-captions"]).write_text("".join(rows), encoding="utf-8")
    return paths


def flags(paths: dict[str, str], name: str, given: Namespace) -> list[str]:
    """What a row adds to the recipe."""
    black = "-black" if name == "no picture" else ""
    found = ["--data.captions", paths["train-captions"], "--data.valid_captions", paths["dev-captions"]]
    found += ["--data.images", paths[f"train{black}"], "--data.valid_images", paths[f"dev{black}"], *ROWS[name]]
    if given.steps is not None:
        found += ["--training.steps", str(given.steps), "--training.evaluate_every", str(given.steps)]
        found += ["--training.warmup", str(given.steps // 10), "--training.precision", given.precision]
    return found


def recalls(found: dict[str, Any], which: str = "retrieval") -> str:
    """Both directions: recall@1, 5 and 10 in percent, and the median rank."""
    cells = []
    for direction in DIRECTIONS:
        part = found[which][direction]
        shares = " / ".join(f"{100 * part[f'recall@{k}']:.1f}" for k in (1, 5, 10))
        cells += [shares, f"{part['median_rank']:.0f}"]
    return " | ".join(cells)


def table(rows: list[str], found: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    head = ["", "BLEU-4", "chrF", "CIDEr-D", "perplexity"]
    head += ["caption finds picture, recall@1 / 5 / 10", "median rank", "picture finds caption", "median rank"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in rows:
        one = found[name]
        if "error" in one:
            lines.append(f"| {name} | {one['error']} |" + " |" * (len(head) - 2))
            continue
        scores = f"{one['bleu']['value']:.2f} | {one['chrf']['value']:.2f} | {one['cider']['value']:.3f}"
        lines.append(f"| {name} | {scores} | {one['perplexity']:.2f} | {recalls(one)} |")
    best = next((one for one in found.values() if "error" not in one), None)
    if best is not None:
        lines.append(f"| chance | | | | | {recalls(best, 'chance')} |")
    return "\n".join(lines)


def main() -> None:
    parser = side.arguments(__doc__ or "", ROWS)
    parser.add_argument("--steps", type=int, help="training steps, instead of those of the recipe")
    parser.add_argument("--pictures", type=int, help="photographs of each part (default: all)")
    parser.add_argument("--precision", default="float32", help="training precision with --steps (default: float32)")
    given = parser.parse_args()
    paths, wanted = prepare(given.data, given.out / "data", given.pictures), given.only or list(ROWS)
    rows = {name: flags(paths, name, given) for name in wanted}
    side.train("captions", rows, ["--config", "flickr8k"], given.out, given.jobs, given.minutes)
    found = side.evaluate(wanted, given.out, ["--checkpoint", "best", "--beam", "5"])
    print(table(wanted, found))


if __name__ == "__main__":
    main()
