"""Zero, one and few shots: the accuracy of a language model on SST-2 and two generated tasks, with 0 to 16 examples.

    python bench/shots.py --model runs/smollm2 --data FOLDER --out runs/shots
    python bench/shots.py --model runs/smollm2 --data FOLDER --out runs/shots --queries 50 --draws 3 --shots 0,1,4,16

FOLDER holds sst2/stsa.binary.train and .test, a label before each sentence: examples are drawn from the first, queries
from the second. "recall": five pairs of a letter and a digit, and one of the letters again: which digit? "groups": a
word that is an animal or a city, answered by A or B, so that only examples say which is which. For each task OUT gets
a task file that `regard prompt` reads, and the table has mean and standard deviation over draws of the examples, beside
chance: the share of the most frequent answer among the queries.
"""

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np
import side
import yaml

EXAMPLES = 256  # to draw shots from
ANIMALS = (
    "ant bear bee bird camel cat cow crow deer dog duck eagle elephant fish fox frog goat horse lion monkey mouse "
    "owl pig rabbit rat shark sheep snake spider tiger turtle whale wolf zebra"
)
CITIES = (
    "Amsterdam Athens Barcelona Berlin Boston Brussels Cairo Chicago Copenhagen Dallas Delhi Denver Dublin Geneva "
    "Houston Istanbul Lisbon London Madrid Miami Milan Moscow Munich Oslo Paris Prague Rome Seattle Stockholm Sydney "
    "Tokyo Toronto Vienna Warsaw"
)
Rows = list[dict[str, str]]


def sst2(data: Path, queries: int, draw: np.random.Generator) -> tuple[dict, Rows, Rows]:
    def rows(name: str, count: int) -> Rows:
        lines = (data / "sst2" / f"stsa.binary.{name}").read_text(encoding="utf-8").split("\n")
        chosen = draw.permutation([line for line in lines if line])[:count]
        return [{"text": line[2:], "label": ("negative", "positive")[int(line[0])]} for line in chosen]

    task = {"prompt": "Review: {text}\nSentiment:", "answer": " {label}", "choices": ["negative", "positive"]}
    return task, rows("train", EXAMPLES), rows("test", queries)


def recall(data: Path, queries: int, draw: np.random.Generator) -> tuple[dict, Rows, Rows]:
    def row() -> dict[str, str]:
        letters, digits = draw.permutation(list("ABCDEFGHJKLMNPRSTUVWXYZ"))[:5], draw.integers(0, 10, 5)
        asked = draw.integers(5)
        pairs = ", ".join(f"{letter} = {digit}" for letter, digit in zip(letters, digits, strict=True))
        return {"pairs": pairs, "key": str(letters[asked]), "label": str(digits[asked])}

    task = {"prompt": "{pairs}\n{key} =", "answer": " {label}", "score": "generation", "maximum": 3}
    task["stop"] = ["\n", ","]  # without an example nothing says that an answer is a line
    return task, [row() for _ in range(EXAMPLES)], [row() for _ in range(queries)]


def groups(data: Path, queries: int, draw: np.random.Generator) -> tuple[dict, Rows, Rows]:
    labels = {"A": ANIMALS, "B": CITIES}
    words = [{"word": word, "label": label} for label, listed in labels.items() for word in listed.split()]
    mixed = [words[place] for place in draw.permutation(len(words))]
    # no word is in a query and in an example
    examples, rest = mixed[:32], mixed[32:]
    return (
        {"prompt": "{word}:", "answer": " {label}", "choices": ["A", "B"], "separator": "\n"},
        examples,
        rest[:queries],
    )


TASKS = {"sst2": sst2, "recall": recall, "groups": groups}


def write(name: str, data: Path, out: Path, queries: int, seed: int) -> Path:
    """The task file, with its rows in files beside it."""
    task, examples, asked = TASKS[name](data, queries, np.random.default_rng(seed))
    for part, rows in (("examples", examples), ("queries", asked)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / f"{name}-{part}.jsonl").write_text(lines, encoding="utf-8")
        task[part] = f"{name}-{part}.jsonl"
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(task, sort_keys=False), encoding="utf-8")
    return path


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--model", required=True, help="run of language")
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the task files and the results")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="only these tasks")
    parser.add_argument("--shots", default="0,1,2,4,8,16", help="numbers of examples (default: 0,1,2,4,8,16)")
    parser.add_argument("--draws", type=int, default=10, help="draws of the examples (default: 10)")
    parser.add_argument("--queries", type=int, default=400, help="most queries of a task (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of queries and draws (default: 0)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    columns = given.shots.split(",")
    print(f"| task | queries | chance | {' | '.join(columns)} |")
    print(f"|---|---:|---:|{'---:|' * len(columns)}")
    for name in given.only:
        path = write(name, given.data, given.out, given.queries, given.seed)
        command = ["prompt", given.model, "--task", str(path), "--shots", given.shots, "--draws", str(given.draws)]
        said = subprocess.run(
            [*side.REGARD, *command, "--seed", str(given.seed), "--json"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        (given.out / f"{name}.json").write_text(said, encoding="utf-8")
        found, cells = json.loads(said), []
        for part in found["results"]:
            spread = f" ± {100 * part['spread']:.1f}" if len(part["draws"]) > 1 else ""
            cells.append(f"{100 * part['accuracy']:.1f}{spread}")
        print(f"| {name} | {found['queries']} | {100 * found['majority']:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
