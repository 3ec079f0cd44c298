"""Film reviews made up of a few words, and small classification runs on them."""

from pathlib import Path

import numpy as np

from regard.tasks.classify import ClassifierOptions, ClassifyConfig, LabelledData, Task
from regard.tasks.train import train
from regard.training import loop
from regard.training.config import TrainingConfig
from regard.training.display import Display

GOOD, BAD = ("fine", "great", "lovely", "superb"), ("awful", "dull", "poor", "weak")
SMALL = {"width": 16, "heads": 2, "inner": 32, "dropout": 0.1}
QUICK = {"steps": 12, "tokens": 100, "evaluate_every": 5, "save_every": 3, "log_every": 1, "warmup": 4, "keep": 3}


def reviews(count: int = 120) -> list[tuple[str, str]]:
    draw = np.random.default_rng(0)
    texts = []
    for _ in range(count):
        good = bool(draw.integers(2))
        words = draw.choice(["a", "film", "the", "story", "and", "."], draw.integers(1, 7)).tolist()
        words.insert(int(draw.integers(len(words) + 1)), str(draw.choice(GOOD if good else BAD)))
        texts.append((" ".join(words), "good" if good else "bad"))
    return texts


def write(path: Path, examples=None) -> Path:
    rows = reviews() if examples is None else examples
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    return path


def config(folder: Path, name: str = "run", *, data: dict | None = None, model: dict | None = None, **others):
    file = folder / "reviews.tsv"
    if not file.exists():
        write(file)
    init = others.pop("init", None)
    training = {"tensorboard": False, "metric": "accuracy", "schedule": "cosine", **others}
    return ClassifyConfig(
        out=str(folder / name),
        init=init,
        data=LabelledData(**{"text": str(file), "tokenizer": "words"} | (data or {})),
        model=ClassifierOptions(**(SMALL | {"layers": 1} if init is None else {}) | (model or {})),
        training=TrainingConfig(**QUICK | training),
    )


def finish(settings: ClassifyConfig) -> loop.State:
    return train(Task, settings, Display(quiet=True))
