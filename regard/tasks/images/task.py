"""The task of images: pixels in, labels out."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import models
from regard.core.model import Model
from regard.data.images.augment import augment, smoothed, soft_targets
from regard.data.images.batches import ImageBatch, ImageBatches
from regard.data.tokenizer import Tokenizer
from regard.metrics.classification import macro_f1, top_accuracy
from regard.tasks import base, load
from regard.tasks.classify.classifier import mean_loss
from regard.tasks.images import page
from regard.tasks.images.classifier import ImageClassifier, read_statistics
from regard.tasks.images.config import ImagesConfig
from regard.tasks.images.corpus import Corpus, read_corpus
from regard.tasks.images.verbs import ABOUT, BUNDLED, EXAMPLES
from regard.tasks.load import Parts, load_weights, read_parts
from regard.tasks.opened import OpenedImages
from regard.training.loss import Loss
from regard.training.run import Run

SAMPLES = 3  # shown at each evaluation
BATCH = {"cpu": 64, "cuda": 512}  # images
RESIDENT = 0.5  # share of the free memory of a GPU that training images may take
TOKENS = 64  # most patches of an image, where the preset is not chosen
FEW = 16  # patches below which an image is said to have few
FREE = ("dropout", "drop_path")  # options of a model that may change with --init


class Augmented(NamedTuple):
    """Images as a model takes them, mixed and normalised, and how much of each class is in each."""

    images: Tensor  # [B, C, h, w]
    targets: Tensor  # [B, K]


class Task(base.Task):
    """Images in, labels out."""

    name = "images"
    about, examples = ABOUT, EXAMPLES
    use = "classify with: regard classify {run} picture.jpg"
    config = ImagesConfig
    predicts = "image class"
    metrics = ("accuracy", "top5", "f1", "loss")
    speed_unit = "images"
    data_unit = "images"
    trains_on = ("images",)
    data_files, test_files = ("images", "valid_images"), ("data",)
    epochs = 30

    @classmethod
    def read_data(cls, config: ImagesConfig) -> Corpus:
        data = config.data
        if config.init is not None and (data.size is None or data.channels is None):
            found = _trained(config.init).config
            size = data.size if data.size is not None else tuple(found.image)
            data = dataclasses.replace(data, size=size, channels=data.channels or found.channels)
        return read_corpus(data, config.training.seed)

    @classmethod
    def complete_config(cls, config: ImagesConfig, data: Corpus) -> tuple[ImagesConfig, list[str]]:
        height, width = data.size
        options = dataclasses.replace(config.data, size=data.size, channels=data.channels)
        resolved = config.augment.resolved(data.size, data.channels)
        model, notes = config.model, []
        if config.init is None and model.preset is None and model.patch is None:
            patch = choose_patch(data.size)
            model = dataclasses.replace(model, patch=patch)
            notes.append(f"model.patch {patch}, chosen for images of {height} x {width}{few_tokens(data.size, patch)}")
        return dataclasses.replace(config, data=options, augment=resolved, model=model), notes

    @classmethod
    def choose_batch_size(cls, config: ImagesConfig, device: str) -> tuple[ImagesConfig, str | None]:
        if config.data.batch is not None:
            return config, None
        batch = BATCH.get(device, BATCH["cuda"])
        note = f"data.batch {batch}, chosen for a {'CPU' if device == 'cpu' else 'GPU'}"
        return dataclasses.replace(config, data=dataclasses.replace(config.data, batch=batch)), note

    @classmethod
    def init_folder(cls, config: ImagesConfig) -> str | None:
        return None if config.init is None else init_folder(config.init)

    @classmethod
    def train_tokenizers(cls, data: Corpus, config: ImagesConfig) -> dict[str, Tokenizer]:
        return {}

    @classmethod
    def model_config(cls, config: ImagesConfig, tokenizers: dict[str, Tokenizer], data: Corpus) -> Any:
        sizes = {"image": data.size, "channels": data.channels, "classes": len(data.classes)}
        if config.init is None:
            return config.model.resolve(**sizes)
        found, changes = _trained(config.init).config, config.model.changes_of_trained(*FREE)
        if found.channels != data.channels:
            raise ValueError(
                f"--init {config.init} takes images of {found.channels} channels, data.channels is {data.channels}: "
                "leave data.channels out"
            )
        return dataclasses.replace(found, **sizes, **changes)

    @classmethod
    def build_model(cls, config: ImagesConfig, model_config: Any) -> Model:
        model = models.build(model_config)
        if config.init is None:
            return model
        run = Run.open(init_folder(config.init))
        source: Any = models.build(_trained(config.init).config)
        load_weights(source, run)
        if tuple(source.config.image) != tuple(model_config.image):
            if not hasattr(source, "resize"):
                raise ValueError(
                    f"--init {config.init}: a model of kind {source.config.kind!r} takes images of one size, "
                    f"{source.config.image[0]} x {source.config.image[1]}: give it as data.size"
                )
            source = source.resize(tuple(model_config.image))
        own = model.state_dict()
        # what belongs to the classes begins anew where their number differs
        fitting = {name: part for name, part in source.state_dict().items() if part.shape == own[name].shape}
        model.load_state_dict(own | fitting)
        return model

    def __init__(self, config: ImagesConfig, data: Corpus, tokenizers: dict[str, Tokenizer], model: Model):
        self.model, self.valid, self.origin = model, data.valid, config.data.images
        mean, deviation = data.mean, data.deviation
        if config.init is not None:
            # the weights expect pixels as they were trained on
            parts = _trained(config.init)
            mean, deviation = read_statistics(parts.facts, parts.config.channels, f"{config.init}/run.json")
            fit_classes(model, parts.facts.get("labels") or [], data.classes)
        self.statistics = {"mean": list(mean), "deviation": list(deviation)}
        self.classifier = ImageClassifier(model, data.classes, mean, deviation)
        device = self.classifier.device
        resident = fits(data.train.pixels, device)
        self.pixels = data.train.pixels.to(device) if resident else None
        training = config.training
        self.batches = ImageBatches(
            data.train.pixels,
            data.train.labels,
            config.augment,
            size=config.data.batch or BATCH["cpu"],
            seed=training.seed,
            unmixed_from=None,
            carries=not resident,
        )
        self.augment = self.batches.draw.config
        if config.augment.unmixed_end:
            count = self.batches.count(0)
            batches = training.steps * training.accumulate if training.steps else (training.epochs or 0) * count
            self.batches.unmixed_from = math.floor((1 - config.augment.unmixed_end) * batches)

    def prepare(self, batch: ImageBatch) -> Augmented:
        pixels = batch.pixels
        if pixels is None:
            assert self.pixels is not None, "a batch without pixels names images that are on the device"
            pixels = self.pixels[batch.indices]
        images = augment(pixels, batch.draws, self.augment, self.classifier.mean, self.classifier.deviation)
        return Augmented(images, soft_targets(batch.labels, batch.draws, len(self.classifier.labels)))

    def loss(self, batch: Augmented, label_smoothing: float) -> Loss:
        logits, auxiliary_loss, statistics = self.model(batch.images)
        surprise = -torch.log_softmax(logits.float(), 1)
        count = torch.full((), len(batch.targets), device=logits.device)

        def total(smoothing: float) -> Tensor:
            return (smoothed(batch.targets, smoothing) * surprise).sum()

        return Loss(total(label_smoothing), total(0.0).detach(), count, auxiliary_loss, statistics)

    def count_tokens(self, batch: ImageBatch) -> int:
        return len(batch.labels)

    def describe_rows(self, rows: list[int]) -> tuple[str, list[int]]:
        return f"training images of {self.origin}", rows

    def evaluate(self, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        truth = self.valid.labels.numpy()
        probabilities = self.classifier.probabilities(self.valid.pixels, check=check)
        metrics = {
            "loss": mean_loss(truth, probabilities),
            "accuracy": 100 * top_accuracy(truth, probabilities, 1),
            "top5": 100 * top_accuracy(truth, probabilities, 5),
            "f1": 100 * macro_f1(truth, probabilities),
        }
        labels = self.classifier.labels
        samples = [
            {"image": self.valid.names[row], "label": labels[truth[row]], "answer": str(answer)}
            for row, answer in enumerate(map(self.classifier.answer, probabilities[:SAMPLES]))
        ]
        return metrics, samples

    @classmethod
    def open_for_page(cls, folder: str | Path, device: str) -> OpenedImages:
        return page.open_run(folder, device)

    def files(self) -> dict[str, str]:
        return page.kept_files(self.valid, self.classifier.labels)

    def facts(self) -> dict[str, Any]:
        return {"labels": self.classifier.labels, **self.statistics}

    def notes(self) -> list[str]:
        height, width = self.classifier.size
        colours = "grey" if self.classifier.channels == 1 else "colour"
        resident = self.pixels is not None or self.classifier.device.type == "cpu"
        return [
            *([] if resident else ["the training images do not fit into the memory of the GPU: batches carry them"]),
            f"augmentation: {self.augment.describe()}",
            f"{len(self.batches):,} {colours} images of {height} x {width}, {len(self.valid.names):,} to validate on; "
            f"{len(self.classifier.labels)} classes",
        ]


def choose_patch(size: tuple[int, int]) -> int:
    """The smallest patch of at least 2 x 2 that divides both sides and gives at most 64 tokens; where none does, the
    largest divisor."""
    both = math.gcd(*size)
    sides = [side for side in range(1, both + 1) if both % side == 0]
    few = [side for side in sides if side > 1 and size[0] * size[1] <= TOKENS * side * side]
    return few[0] if few else sides[-1]


def few_tokens(size: tuple[int, int], patch: int) -> str:
    """What to say where the sides of images have too few divisors for patches that a model can learn much from."""
    count, others = size[0] * size[1] // patch**2, [max(round(side / 8), 1) * 8 for side in size]
    if count >= FEW or min(size) < 8:
        return ""
    return f": {count} {'token' if count == 1 else 'tokens'}, which is little; data.size {others} would give more"


def fit_classes(model: Model, trained: list[str], classes: list[str]) -> None:
    """Gives the output layer, whose weights are those of another run, the order of `classes`, if that run has the same
    ones; where it has others, the layer begins anew. Of another number of classes, it has begun anew already."""
    if len(trained) != len(classes) or trained == classes:
        return
    state, fresh = model.state_dict(), models.build(model.config).state_dict()
    with torch.device("meta"):
        more = models.build(dataclasses.replace(model.config, classes=len(classes) + 1)).state_dict()
    rows = [trained.index(name) for name in classes] if set(trained) == set(classes) else None
    for name, part in state.items():
        if part.shape != more[name].shape:
            part.copy_(fresh[name] if rows is None else part[rows].clone())


def fits(pixels: Tensor, device: torch.device) -> bool:
    """Whether training images may stay on a device."""
    return device.type != "cuda" or pixels.nbytes <= RESIDENT * torch.cuda.mem_get_info(device)[0]


def init_folder(init: str) -> str:
    """The run folder that --init names."""
    return str(load.BUNDLED / BUNDLED) if init == BUNDLED else init


def _trained(init: str) -> Parts:
    """Reads what is known of the run that --init names."""
    parts = read_parts(Run.open(init_folder(init)))
    if parts.facts.get("task") != Task.name:
        raise ValueError(f"--init {init} is a run of {parts.facts.get('task')!r}, expected 'images'")
    return parts
