"""The task of captions: pictures in, captions out, and both as vectors that find each other."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.core.model import Model
from regard.data.batches import Ragged, drawing, to_device
from regard.data.images.augment import augment
from regard.data.images.batches import ImageBatches
from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig
from regard.spec import parse
from regard.tasks import base
from regard.tasks.captions import page
from regard.tasks.captions.captioner import FILE, Captioner
from regard.tasks.captions.config import CaptionsConfig
from regard.tasks.captions.corpus import Corpus, read_corpus
from regard.tasks.captions.evaluation import evaluate
from regard.tasks.captions.verbs import ABOUT, EXAMPLES
from regard.tasks.images.corpus import pixel_statistics
from regard.tasks.images.task import choose_patch, few_tokens, fits
from regard.tasks.load import pick_device
from regard.tasks.opened import OpenedImages
from regard.training.loss import Loss, caption_loss

SAMPLES = 2  # shown at each evaluation
BATCH = {"cpu": 32, "cuda": 256}  # pictures
PATCH = 8  # side of the patches of both presets that are chosen


class CaptionBatch(NamedTuple):
    """Pictures by their numbers, a caption of each padded on the right, and what was drawn for each picture."""

    pixels: Tensor | None  # uint8 [B, C, h, w]; None: they are on the device already
    tokens: Tensor  # [B, T], starts with bos
    target: Tensor  # [B, T], ends in eos
    keep: Tensor | None
    draws: Tensor  # [B, P]
    indices: Tensor  # [B], which pictures

    def to(self, device: torch.device | str) -> "CaptionBatch":
        return to_device(self, device)


class Pair(NamedTuple):
    """Pictures as the model takes them, and their captions."""

    images: Tensor
    tokens: Tensor
    target: Tensor
    keep: Tensor | None


class CaptionBatches:
    """Every picture once per epoch with one of its captions, drawn anew for each epoch. So no other caption of the
    same picture is in a batch, where it would count as wrong."""

    def __init__(
        self, images: ImageBatches, captions: list[list[list[int]]], *, special: tuple[int, int], multiple: int
    ):
        """`captions` are the ids of those of each picture; `special` begin and end a caption."""
        self.images, self.special, self.multiple = images, special, multiple
        self.captions = Ragged([ids for rows in captions for ids in rows])
        self.counts = np.array([len(rows) for rows in captions])
        self.firsts = np.cumsum(self.counts) - self.counts

    def __len__(self) -> int:
        return len(self.images)

    def count(self, epoch: int) -> int:
        return self.images.count(epoch)

    def get(self, epoch: int, index: int) -> CaptionBatch:
        pixels, _, draws, indices = self.images.get(epoch, index)
        rows = indices.numpy()
        uniform = drawing(self.images.seed, epoch, index, 2).random(len(rows))
        chosen = self.firsts[rows] + np.floor(uniform * self.counts[rows]).astype(np.int64)
        begin, end = self.special
        target, keep = self.captions.padded(chosen, last=end, multiple=self.multiple)
        tokens, _ = self.captions.padded(chosen, first=begin, multiple=self.multiple)
        return CaptionBatch(pixels, tokens, target, keep, draws, indices)


class Task(base.Task):
    """Pictures in, captions out."""

    name = "captions"
    about, examples = ABOUT, EXAMPLES
    use = "caption with: regard caption {run} picture.jpg"
    config = CaptionsConfig
    predicts = "caption"
    metrics = ("cider", "bleu", "chrf", "recall@1", "loss")
    data_unit = "lines or pictures"
    trains_on = ("captions",)
    data_files, test_files = ("captions", "images", "valid_captions", "valid_images"), ("data", "images")
    epochs = 60

    @classmethod
    def read_data(cls, config: CaptionsConfig) -> Corpus:
        return read_corpus(config.data, config.training.seed)

    @classmethod
    def complete_config(cls, config: CaptionsConfig, data: Corpus) -> tuple[CaptionsConfig, list[str]]:
        """Vocabulary by the number of captions, preset by the machine, patches by the size of the pictures."""
        options, model, chosen = config.data, config.model, []
        on_cpu = pick_device(config.training.device, config.training.precision).type == "cpu"
        if options.vocabulary is None:
            options = dataclasses.replace(options, vocabulary=vocabulary(data.facts["captions"]))
            chosen.append(f"data.vocabulary {options.vocabulary:,}")
        if model.preset is None:
            model = dataclasses.replace(model, preset="coca-nano" if on_cpu else "coca-small")
            chosen.append(f"model.preset {model.preset}")
            if model.patch is None and any(side % PATCH for side in data.train.size):
                patch = choose_patch(data.train.size)
                model = dataclasses.replace(model, patch=patch)
                chosen.append(f"model.patch {patch}{few_tokens(data.train.size, patch)}")
        note = f"chosen for {data.facts['captions']:,} captions on a {'CPU' if on_cpu else 'GPU'}: {', '.join(chosen)}"
        return dataclasses.replace(config, data=options, model=model), [note] if chosen else []

    @classmethod
    def choose_batch_size(cls, config: CaptionsConfig, device: str) -> tuple[CaptionsConfig, str | None]:
        if config.data.batch is not None:
            return config, None
        batch = BATCH.get(device, BATCH["cuda"])
        note = f"data.batch {batch}, chosen for a {'CPU' if device == 'cpu' else 'GPU'}"
        return dataclasses.replace(config, data=dataclasses.replace(config.data, batch=batch)), note

    @classmethod
    def train_tokenizers(cls, data: Corpus, config: CaptionsConfig) -> dict[str, Tokenizer]:
        lines = [text for texts in data.train.captions for text in texts]
        return {FILE: Tokenizer.train(lines, config.data.vocabulary or vocabulary(len(lines)), config.data.tokenizer)}

    @classmethod
    def model_config(cls, config: CaptionsConfig, tokenizers: dict[str, Tokenizer], data: Corpus) -> Any:
        sizes = {"image": data.train.size, "channels": data.train.channels, "vocabulary": tokenizers[FILE].size}
        found = config.model.resolve(**sizes)
        spec = parse(found.position)
        if spec in (parse("learned"), parse("fourier")):
            # bos, the words and [CLS]: positions that no caption reaches would keep their random vectors
            found = dataclasses.replace(found, position=f"{spec.name}(longest={config.data.maximum_length + 2})")
        return found

    def __init__(self, config: CaptionsConfig, data: Corpus, tokenizers: dict[str, Tokenizer], model: Model):
        tokenizer, training = tokenizers[FILE], config.training
        self.model, self.valid, self.beam = model, data.valid, training.beam
        self.weights = {"captioning": config.captioning, "contrastive": config.contrastive}
        captioner: Any = model
        limit = captioner.max_words()
        self.most = config.data.maximum_length if limit is None else min(config.data.maximum_length, limit - 1)
        ids, kept, self.dropped = encode_captions(tokenizer, data.train.captions, self.most)
        if not kept:
            raise ValueError(f"no caption has at most {self.most} tokens: raise data.maximum_length")
        train, longest = data.train.take(np.array(kept)), max(len(row) for rows in ids for row in rows)
        pixels = torch.from_numpy(train.pixels)
        mean, deviation = pixel_statistics(pixels)
        self.captioner = Captioner(model, tokenizer, longest, mean, deviation)
        device = self.captioner.device
        self.names = train.names
        self.pixels = pixels.to(device) if fits(pixels, device) else None
        images = ImageBatches(
            pixels,
            torch.arange(len(pixels)),
            config.augment,
            size=config.data.batch or BATCH["cpu"],
            seed=training.seed,
            carries=self.pixels is None,
        )
        self.augment, self.batch = images.draw.config, images.size
        # few shapes, so that few CUDA graphs are captured
        multiple = 8 if training.graphs and device.type == "cuda" else 1
        self.batches = CaptionBatches(images, ids, special=(tokenizer.bos, tokenizer.eos), multiple=multiple)
        self.captions = sum(map(len, ids))

    def prepare(self, batch: CaptionBatch) -> Pair:
        pixels = batch.pixels
        if pixels is None:
            assert self.pixels is not None, "a batch without pixels names pictures that are on the device"
            pixels = self.pixels[batch.indices]
        images = augment(pixels, batch.draws, self.augment, self.captioner.mean, self.captioner.deviation)
        return Pair(images, batch.tokens, batch.target, batch.keep)

    def loss(self, batch: Pair, label_smoothing: float) -> Loss:
        return caption_loss(self.model, batch, label_smoothing, **self.weights)

    def count_tokens(self, batch: CaptionBatch) -> int:
        return batch.target.numel() if batch.keep is None else int(batch.keep.sum())

    def describe_rows(self, rows: list[int]) -> tuple[str, list[int]]:
        return f"pictures (from 0, the first is {self.names[0]})", rows

    def evaluate(self, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        decoding = DecodingConfig(beam=self.beam)
        found = evaluate(self.captioner, self.valid.pixels, self.valid.captions, decoding, check=check)
        recall = 100 * (found.retrieval.pictures.at[1] + found.retrieval.captions.at[1]) / 2
        scores = {name: score.value for name, score in found.scores.items()}
        samples = [
            {"picture": name, "reference": texts[0], "caption": ours}
            for name, texts, ours in zip(
                self.valid.names, self.valid.captions, found.hypotheses[:SAMPLES], strict=False
            )
        ]
        perplexity = math.exp(min(found.loss, 50.0))
        return {"loss": found.loss, "perplexity": perplexity, **scores, "recall@1": recall}, samples

    @classmethod
    def open_for_page(cls, folder: str | Path, device: str) -> OpenedImages:
        return page.open_run(folder, device)

    def facts(self) -> dict[str, Any]:
        captioner = self.captioner
        return {
            "longest": captioner.longest,
            "mean": captioner.mean.tolist(),
            "deviation": captioner.deviation.tolist(),
        }

    def files(self) -> dict[str, str]:
        pairs = zip(self.valid.names, self.valid.captions, strict=True)
        lines = (json.dumps({"image": name, "caption": texts}, ensure_ascii=False) for name, texts in pairs)
        return {"valid.jsonl": "".join(line + "\n" for line in lines), **page.kept_files(self.valid)}

    def notes(self) -> list[str]:
        omitted = [f"omitted {self.dropped} captions of more than {self.most} tokens"] * bool(self.dropped)
        height, width = self.captioner.size
        return [
            *omitted,
            f"{len(self.batches):,} pictures of {height} x {width} with {self.captions:,} captions, "
            f"{self.batch} per batch, {len(self.valid.names):,} to validate on; augmentation: "
            f"{self.augment.describe()}; vocabulary {self.captioner.tokenizer.size:,}",
        ]


def encode_captions(
    tokenizer: Tokenizer, captions: list[list[str]], longest: int
) -> tuple[list[list[list[int]]], list[int], int]:
    """The ids of the captions of each picture that has one of at most `longest` tokens, the numbers of these pictures,
    and how many captions are longer."""
    flat = iter(tokenizer.encode_batch([text for texts in captions for text in texts]))
    rows = [[next(flat) for _ in texts] for texts in captions]
    short = [[ids for ids in part if len(ids) <= longest] for part in rows]
    dropped = sum(map(len, rows)) - sum(map(len, short))
    kept = [number for number, part in enumerate(short) if part]
    return [short[number] for number in kept], kept, dropped


def vocabulary(captions: int) -> int:
    """The vocabulary size for a number of captions, 4,000 for 30,000: few would show each token too seldom."""
    return min(8000, max(1000, 500 * round(8 * (captions / 30_000) ** 0.5)))
