"""The text that the bundled English encoder learned from.

    python bench/english.py --data FOLDER --out scratch/english
    regard train masked --config english --data.text scratch/english/train.txt.xz \\
        --data.valid scratch/english/valid.txt.xz --out runs/english
    regard compact runs/english --out english

FOLDER holds imdb/train.jsonl.xz (the training reviews, without their labels), sst2/stsa.binary.train (the training
sentences, without theirs), tatoeba/deu-eng.txt.xz and fra-eng.txt.xz (their English side) and wikitext2/train.txt.xz
(sentences without <unk>). Nothing of a test or dev set is read. Of each source a few texts are held out.
"""

import argparse
import json
import lzma
import random
import re
from pathlib import Path

HELD_OUT = {"reviews": 300, "sst": 150, "tatoeba": 600, "wiki": 150}


def reviews(data: Path) -> list[str]:
    with lzma.open(data / "imdb" / "train.jsonl.xz", "rt", encoding="utf-8") as file:
        texts = [re.sub(r"<br\s*/?>", " ", json.loads(line)["text"]) for line in file]
    return list(dict.fromkeys(" ".join(text.split()) for text in texts))


def sentences(data: Path) -> list[str]:
    lines = (data / "sst2" / "stsa.binary.train").read_text(encoding="utf-8").split("\n")
    return [line[2:].strip().replace("-lrb-", "(").replace("-rrb-", ")") for line in lines if line]


def everyday(data: Path) -> list[str]:
    found: dict[str, None] = {}
    for name in ("deu", "fra"):
        with lzma.open(data / "tatoeba" / f"{name}-eng.txt.xz", "rt", encoding="utf-8") as file:
            found |= dict.fromkeys(line.split("\t")[0].strip() for line in file)
    return [text for text in found if text]


def articles(data: Path) -> list[str]:
    found = []
    with lzma.open(data / "wikitext2" / "train.txt.xz", "rt", encoding="utf-8") as file:
        for line in map(str.strip, file):
            if line and not line.startswith("="):
                parts = re.split(r"(?<= \.) ", re.sub(r" @([-,.])@ ", r"\1", line))
                text = " ".join(part for part in parts if "<unk>" not in part)
                found += [text] if len(text) > 60 else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the sources")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.txt.xz and valid.txt.xz")
    given = parser.parse_args()
    draw, train, valid = random.Random(1), [], []
    sources = {"reviews": reviews, "sst": sentences, "tatoeba": everyday, "wiki": articles}
    for name, read in sources.items():
        texts = [re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text) for text in read(given.data)]
        draw.shuffle(texts)
        valid, train = valid + texts[: HELD_OUT[name]], train + texts[HELD_OUT[name] :]
        print(f"{name}: {len(texts):,} texts, {sum(map(len, texts)):,} characters")
    draw.shuffle(train)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, texts in (("train", train), ("valid", valid)):
        with lzma.open(given.out / f"{name}.txt.xz", "wt", encoding="utf-8") as file:
            file.writelines(text + "\n" for text in texts)


if __name__ == "__main__":
    main()
