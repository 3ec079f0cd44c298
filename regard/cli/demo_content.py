"""What `regard demo` computes. PyTorch is imported here, and not by demo.py.

For the mechanisms nothing is trained: a word's vector counts its letters and groups of letters, and queries and keys
are those vectors unchanged, so words of similar spelling attend to one another: a map one can read.
"""

import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import regard
from regard import draw as pictures
from regard.layers.attention.projected import Projected
from regard.tasks.translate import DataConfig, TranslateConfig, TranslatorOptions
from regard.training.config import TrainingConfig
from regard.training.run import Run

SENTENCE = "she sells sea shells by the sea shore the shells she sells are sea shells for sure"
SPECS = (
    "softmax",
    "performer(features=2048)",
    "local(window=3)",
    "strided(stride=4)",
    "globals(tokens=2)",
    "longformer(window=2, globals=1)",
)
WIDTH = 64
SHARPNESS = 3.0  # the logit of a word with itself
MOST_WORDS = 40
SENTENCES = (
    "The meeting is on Monday, March 25, 2013.",
    "The book costs twenty-one euros.",
    "When Peter woke up, it was half past three.",
    "Can you lend me £91?",
)
ANYTHING = (
    "Where is the station?",
    "I don't know what you mean.",
    "Could you please open the window?",
    "My brother lives in Berlin and works as a teacher.",
    "What would you do if you were in my place?",
)
WHAT = (
    "What it shows: each row is a word that attends, each column a word it attends to. Nothing is trained yet: a "
    "word's vector counts its letters and letter groups, and the projections leave it unchanged, so words of similar "
    "spelling attend to one another, each mechanism within its pattern; performer estimates softmax with random "
    "features."
)


def words_of(sentence: str | None) -> list[str]:
    words = (SENTENCE if sentence is None else sentence).split()
    if not 2 <= len(words) <= MOST_WORDS:
        raise ValueError(f"the sentence must have 2 to {MOST_WORDS} words, got {len(words)}")
    return words


def run(words: list[str]) -> dict[str, np.ndarray]:
    """spec -> its map [T, T] of the words."""
    x = torch.stack([vector(word) for word in words])[None]
    maps = {}
    for spec in SPECS:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            layer = regard.attention(spec, width=WIDTH, heads=1, role="self")
            assert isinstance(layer, Projected), f"{spec} has no projections to set"
            set_to_identity(layer)
            maps[spec] = layer.weights(x)[0, 0].numpy()
    return maps


def vector(word: str) -> Tensor:
    """Letters and groups of up to three of them, hashed into [WIDTH], of length 1."""
    framed = f"<{word.lower()}>"
    counts = torch.zeros(WIDTH)
    for size in (1, 2, 3):
        for first in range(len(framed) - size + 1):
            code = zlib.crc32(framed[first : first + size].encode())
            counts[code % WIDTH] += 1 if code >> 16 & 1 else -1
    return counts / counts.norm()


def set_to_identity(layer: Projected) -> None:
    """Makes the projections multiples of the identity, such that a word's logit with itself is SHARPNESS."""
    length = (SHARPNESS / layer.scale) ** 0.5
    for name, kind in layer.inputs.items():
        projection = layer.project[name]
        assert isinstance(projection, nn.Linear)
        projection.weight.copy_(torch.eye(WIDTH) * (1 if kind == "value" else length))


def reading(words: list[str], part: np.ndarray) -> str:
    """A sentence that says which words the longest word attends to most, equal words taken together."""
    query = max(range(len(words)), key=lambda at: len(words[at]))
    shares: dict[str, float] = {}
    for word, weight in zip(words, part[query], strict=True):
        shares[word] = shares.get(word, 0) + float(weight)
    top = sorted(shares, key=lambda word: -shares[word])[:3]
    return f"{words[query]!r} attends to {', '.join(f'{word!r} {shares[word]:.2f}' for word in top)}"


def draw(words: list[str], maps: dict[str, np.ndarray], folder: Path) -> Path:
    """folder/attention.png"""
    title = "What each word attends to: one sentence, one head, mechanism by mechanism"
    note = (
        "Not trained: vectors of letters and letter groups, projections that leave them unchanged, "
        "so words of similar spelling attend to one another."
    )
    picture = pictures.words_picture(words, np.stack(list(maps.values())), list(maps), title, note)
    return pictures.save(picture, folder / "attention.png")


def small_translator(folder: Path) -> TranslateConfig:
    """Numbers, dates, times and amounts: learned in minutes on two cores, nearly without a mistake; no longer on any
    machine."""
    if (folder / "run.json").exists():
        with Run(folder).writing("regard demo"):
            shutil.rmtree(folder)  # of an earlier demo
    return TranslateConfig(
        out=str(folder),
        data=DataConfig(generated=40_000, held_out=500, vocabulary=1000),
        model=TranslatorOptions(layers=2, norm="pre", dropout=0.0, aligner=True),
        training=TrainingConfig(
            epochs=3.5,  # 1,000 steps
            minutes=10,  # at most: on a slow or busy machine it learns less, but ends
            tokens=2048,
            schedule="cosine",
            learning_rate=0.003,
            log_every=25,
            metric="exact",
            stop_at=98.5,
            keep=1,
            tensorboard=False,
            device="cpu",
        ),
    )
