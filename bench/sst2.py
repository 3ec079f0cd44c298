"""SST-2: a small Transformer from scratch, and one after masked-language pretraining on the same text or on more.

    python bench/sst2.py --data FOLDER --out runs/sst2 --jobs 4

FOLDER holds sst2/stsa.binary.train, .dev and .test (6,920, 872 and 1,821 sentences, a label before each),
sst2-glue/train.tsv.xz (67,349 phrases of the training sentences), imdb/train.jsonl.xz and imdb/test.jsonl.xz. All rows
are trained on these phrases and sentences, and evaluated on dev and test: by recipe sst2 from scratch, and
rows "masked first" by recipe sst2-tuned, over one run of recipe sst2-masked that saw the training text
without its labels; of both the average of the last checkpoints is evaluated. Rows "masked first on reviews" and "six
layers" need a GPU, and are omitted without one: six layers that saw the 50,000 labelled reviews of IMDb too, also
without their labels (recipe reviews-masked, then recipe reviews-tuned), and the same from scratch; of these
the checkpoint that is best on dev is evaluated. Runs of each kind are trained --jobs at a time.
"""

import json
import lzma
import re
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import side
import torch

LABELS = ("negative", "positive")
SEEDS = {f"seed {seed}": ["--training.seed", str(seed)] for seed in (1, 2, 3)}
SCRATCH = {f"from scratch, {name}": flags for name, flags in SEEDS.items()} | {
    "from scratch, words without stems": ["--data.tokenizer", "words"],
}
SIX_LAYERS = """
    --model.attention softmax --model.position rotary --model.layers 6 --model.width 384 --model.heads 6
    --model.inner 1536 --model.norm_epsilon 1e-5 --model.final_norm true --model.pooling mean --model.dropout 0.1
    --training.steps 2000 --training.schedule cosine --training.learning_rate 0.0003 --training.weight_decay 0.01
    --training.save_every 1000 --training.average 0 --training.precision bfloat16
"""
SCRATCH["from scratch, six layers"] = SIX_LAYERS.split()
SMALL, LARGE = "masked first", "masked first on reviews"
TUNED = {f"{body}, {name}": flags for body in (SMALL, LARGE) for name, flags in SEEDS.items()}
ON_GPU = (LARGE, "six layers")
MASKED_CONFIGS = {SMALL: "sst2-masked", LARGE: "reviews-masked"}
TUNED_CONFIGS = {SMALL: "sst2-tuned", LARGE: "reviews-tuned"}


def prepare(data: Path, out: Path, *, reviews: bool = True) -> dict[str, str]:
    """TSV files of texts and labels, the training text alone, and the reviews."""
    out.mkdir(parents=True, exist_ok=True)

    def plain(text: str) -> str:
        return parted(text.strip().replace("-lrb-", "(").replace("-rrb-", ")"))

    parts: dict[str, list[tuple[str, str]]] = {}
    for name in ("train", "dev", "test"):
        lines = (data / "sst2" / f"stsa.binary.{name}").read_text(encoding="utf-8").split("\n")
        parts[name] = [(plain(line[2:]), LABELS[int(line[0])]) for line in lines if line]
    asked = {text for name in ("dev", "test") for text, _ in parts[name]}
    with lzma.open(data / "sst2-glue" / "train.tsv.xz", "rt", encoding="utf-8") as file:
        rows = [line.split("\t") for line in file.read().split("\n")[1:] if line]
    # a phrase that happens to be a whole test sentence is not trained on
    phrases = [(plain(text), LABELS[int(label)]) for text, label in rows if plain(text) not in asked]
    parts["train"] = list(dict.fromkeys(phrases + parts["train"]))
    paths = {}
    for name, examples in parts.items():
        paths[name] = str(out / f"{name}.tsv")
        body = "".join(f"{text}\t{label}\n" for text, label in examples)
        Path(paths[name]).write_text("text\tlabel\n" + body, encoding="utf-8")
    for name in ("train", "dev"):
        texts = dict.fromkeys(text for text, _ in parts[name])
        paths[f"{name}-text"] = str(out / f"{name}.txt")
        Path(paths[f"{name}-text"]).write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    paths["reviews"] = str(out / "reviews.txt")
    with open(paths["reviews"], "w", encoding="utf-8") as written:
        for name in ("train", "test") if reviews else ():
            with lzma.open(data / "imdb" / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
                written.writelines(split(json.loads(line)["text"]) + "\n" for line in file)
    return paths


def parted(text: str) -> str:
    """The parts of words with hyphens are words."""
    return re.sub(r"(?<=\w)-(?=\w)", " - ", text)


def split(review: str) -> str:
    """Lower-case words and punctuation, with spaces between, about as in the treebank."""
    text = re.sub(r"<br />|[\x00-\x1f\x7f-\x9f]", " ", review.lower())
    text = re.sub(r"(\.{2,}|[^\w\s'-])", r" \1 ", text)
    text = re.sub(r"(?<!\w)'|'(?!\w)", " ' ", text)
    return parted(" ".join(re.sub(r"(n't|'(?:s|re|ve|ll|d|m))\b", r" \1", text).split()))


def train(task: str, rows: side.Rows, config: str, given: Namespace) -> None:
    side.train(task, rows, ["--config", config], given.out, given.jobs, given.minutes)


def main() -> None:
    given = side.arguments(__doc__, SCRATCH | TUNED).parse_args()
    wanted = given.only or [
        name for name in (*SCRATCH, *TUNED) if torch.cuda.is_available() or not any(need in name for need in ON_GPU)
    ]
    paths = prepare(given.data, given.out / "data", reviews=any(LARGE in name for name in wanted))
    labelled = ["--data.text", paths["train"], "--data.valid_text", paths["dev"]]
    scratch = {name: [*flags, *labelled] for name, flags in SCRATCH.items() if name in wanted}
    texts = {SMALL: [paths["train-text"]], LARGE: [paths["train-text"], paths["reviews"]]}
    bodies, tuned = {}, {}
    for body, files in texts.items():
        body_run = body.replace(" first", "")
        names = [name for name in TUNED if name in wanted and name.split(",")[0] == body]
        tuned[body] = {
            name: [*TUNED[name], "--init", str(given.out / side.slug(body_run)), *labelled] for name in names
        }
        text = ["--data.text", json.dumps(files), "--data.valid", paths["dev-text"]]
        bodies[body] = {body_run: text} if names else {}
    # neither waits for the other
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(train, "classify", scratch, "sst2", given)]
        jobs += [pool.submit(train, "masked", bodies[body], config, given) for body, config in MASKED_CONFIGS.items()]
        for job in jobs:
            job.result()
    for body, config in TUNED_CONFIGS.items():
        train("classify", tuned[body], config, given)
    rows = [*scratch, *tuned[SMALL], *tuned[LARGE]]
    dev, test = side.evaluate(rows, given.out, []), side.evaluate(rows, given.out, ["--data", paths["test"]])
    print("| | dev | test | test F1 | average precision | parameters |\n|---|---|---|---|---|---|")
    for name in rows:
        found = test[name]
        if "error" in found:
            print(f"| {name} | | {found['error']} | | | |")
            continue
        size = side.facts(given.out, name)["parameters"] / 1e6
        accuracies = f"{100 * dev[name]['accuracy']:.2f} | {100 * found['accuracy']:.2f}"
        f1, area = found["macro"]["f1"], found["average_precision"]
        print(f"| {name} | {accuracies} | {f1:.4f} | {area:.4f} | {size:.2f}M |")


if __name__ == "__main__":
    main()
