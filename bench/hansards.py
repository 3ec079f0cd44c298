"""Prepares the Canadian Hansards (English-French) for word alignment: one kind of text for training and gold links.

The gold sentences are split into words, and French contractions are opened ("du" is "de le", "l'" is "le"), while the
training text is raw and has no accents. Here both become lower-case words without accents.

    python bench/hansards.py --data FOLDER --out scratch/hansards

FOLDER holds hansards/train.{en,fr}.xz and alignments/enfr.src-tgt. The training commands are in docs/translate.md.
"""

import argparse
import lzma
import re
import unicodedata
from contextlib import ExitStack
from pathlib import Path

CONTRACTIONS = {"du": "de le", "des": "de les", "au": "a le", "aux": "a les"}
ENGLISH = {"can't": "cannot", "won't": "will not", "shan't": "shall not"}
TITLES = {"mr", "mrs", "ms", "m", "mm", "dr", "hon", "st", "no"}


def plain(text: str) -> str:
    """Lower case, no accents."""
    parts = unicodedata.normalize("NFKD", text.lower().replace("’", "'").replace("œ", "oe"))
    return "".join(letter for letter in parts if not unicodedata.combining(letter))


def split(text: str) -> list[str]:
    """Words and punctuation; the dot of a title stays with it, and numbers stay whole."""
    words = re.findall(r"\d+(?:[.,]\d+)*|[a-z]+(?:'[a-z]+)*'?|[^\sa-z\d]", text)
    found: list[str] = []
    for word in words:
        if word == "." and found and found[-1] in TITLES:
            found[-1] += "."
        else:
            found.append(word)
    return found


def french(text: str) -> str:
    words = []
    for word in split(plain(text)):
        # l'an, qu'elle, d'abord: the e that was dropped comes back
        *before, last = re.split(r"(?<=')", word)
        for part in before:
            words.append(part if part == "aujourd'" else "si" if part == "s'" and last == "il" else part[:-1] + "e")
        if last:
            words += CONTRACTIONS.get(last, last).split()
    return " ".join(words)


def english(text: str) -> str:
    words = []
    for word in split(plain(text)):
        word = ENGLISH.get(word, word)
        word = re.sub(r"n't$", " not", word)
        word = re.sub(r"(?<=[a-z])'(s|ll|re|ve|m|d)$", r" '\1", word)
        words += word.split()
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with hansards/ and alignments/")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.en, train.fr, test.en, test.fr")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sides = {"en": english, "fr": french}
    with ExitStack() as stack:
        raw = [
            stack.enter_context(lzma.open(arguments.data / f"hansards/train.{side}.xz", "rt", encoding="utf-8"))
            for side in sides
        ]
        files = [stack.enter_context(open(arguments.out / f"train.{side}", "w", encoding="utf-8")) for side in sides]
        kept = 0
        for pair in zip(*raw, strict=True):
            lines = [change(line) for change, line in zip(sides.values(), pair, strict=True)]
            if all(lines):
                kept += 1
                for file, line in zip(files, lines, strict=True):
                    file.write(line + "\n")
    # the gold sentences are words already: a word stays one word, so that its links stay right
    text = (arguments.data / "alignments/enfr.src-tgt").read_text(encoding="utf-8")
    pairs = [line.split("|||") for line in text.split("\n") if line]
    for side, column in (("en", 0), ("fr", 1)):
        lines = [" ".join(plain(word) for word in pair[column].split()) for pair in pairs]
        (arguments.out / f"test.{side}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{kept} pairs to train on, {len(pairs)} with gold links: {arguments.out}")


if __name__ == "__main__":
    main()
