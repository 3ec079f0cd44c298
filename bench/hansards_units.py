"""Prepares the Canadian Hansards (English-French) for translation: a seeded subset in subword units, held-out pairs.

The text becomes lower-case words without accents, then units of one BPE model for both languages, trained on the pairs
to train on. A unit that ends in @@ is joined to the next. No English sentence of the validation and test pairs is among
those to train on.

    python bench/hansards_units.py --data FOLDER --out scratch/hansards-units

FOLDER holds hansards/train.{en,fr}.xz. `regard compare --table wmt` trains on the result, see docs/compare.md.
"""

import argparse
import lzma
import random
from pathlib import Path

from hansards import plain, split
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SIDES = ("en", "fr")
END = "</w>"

Pair = tuple[str, str]


def read(folder: Path) -> list[Pair]:
    """Every pair as words."""
    sides = []
    for side in SIDES:
        with lzma.open(folder / f"hansards/train.{side}.xz", "rt", encoding="utf-8") as file:
            sides.append([" ".join(split(plain(line))) for line in file])
    return [pair for pair in zip(*sides, strict=True) if all(pair)]


def draw(pairs: list[Pair], sizes: dict[str, int], seed: int) -> dict[str, list[Pair]]:
    """Pairs of each split. The held-out ones have different English sentences, and none that is trained on."""
    order = random.Random(seed).sample(pairs, len(pairs))
    different = list({english: (english, french) for english, french in order}.items())
    found: dict[str, list[Pair]] = {}
    for name in ("valid", "test"):
        found[name] = [pair for _, pair in different[: sizes[name]]]
        different = different[sizes[name] :]
    held = {english for part in found.values() for english, _ in part}
    return {"train": [pair for pair in order if pair[0] not in held][: sizes["train"]], **found}


def units(splits: dict[str, list[Pair]], vocabulary: int) -> dict[str, list[Pair]]:
    """The same in units of one BPE model."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, end_of_word_suffix=END, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator((line for pair in splits["train"] for line in pair), trainer)

    def cut(lines: list[str]) -> list[str]:
        found = (encoded.tokens for encoded in tokenizer.encode_batch(lines))
        return [" ".join(x.removesuffix(END) if x.endswith(END) else f"{x}@@" for x in tokens) for tokens in found]

    return {
        name: list(zip(*(cut([pair[side] for pair in part]) for side in (0, 1)), strict=True))
        for name, part in splits.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with hansards/")
    parser.add_argument("--out", type=Path, required=True, help="folder for train, valid and test of .en.xz and .fr.xz")
    parser.add_argument("--pairs", type=int, default=100_000, help="number of pairs to train on (default: 100000)")
    parser.add_argument("--valid", type=int, default=500, help="number of pairs to validate on (default: 500)")
    parser.add_argument("--test", type=int, default=1000, help="number of pairs to test on (default: 1000)")
    parser.add_argument("--vocabulary", type=int, default=8000, help="number of units (default: 8000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: 1)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sizes = {"train": arguments.pairs, "valid": arguments.valid, "test": arguments.test}
    pairs = read(arguments.data)
    found = units(draw(pairs, sizes, arguments.seed), arguments.vocabulary)
    for name, part in found.items():
        for at, side in enumerate(SIDES):
            text = "".join(pair[at] + "\n" for pair in part)
            (arguments.out / f"{name}.{side}.xz").write_bytes(lzma.compress(text.encode()))
    counts = ", ".join(f"{len(part):,} to {name}" for name, part in found.items())
    print(f"{counts}, of {len(pairs):,} pairs: {arguments.out}")


if __name__ == "__main__":
    main()
