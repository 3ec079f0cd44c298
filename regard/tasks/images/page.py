"""What the page shows of a classifier of images."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.tasks.images.classifier import UNSURE, ImageClassifier
from regard.tasks.images.corpus import Labelled
from regard.tasks.opened import OpenedImages, Sample
from regard.tasks.samples import FILE, choose_samples, read_samples, write_samples
from regard.training.run import Run


def open_run(folder: str | Path, device: str) -> OpenedImages:
    """Opens a run folder."""
    classifier = ImageClassifier.load(folder, device=device)
    return opened(classifier, read_samples(Run.open(folder), classifier.size, classifier.channels))


def opened(classifier: ImageClassifier, samples: tuple[Sample, ...] = ()) -> OpenedImages:
    """What the page shows of a classifier."""

    def predict(pixels: Tensor) -> Tensor:
        return torch.from_numpy(classifier.probabilities(pixels.cpu()))

    return OpenedImages(
        "images",
        classifier.model,
        classifier.size,
        classifier.channels,
        classifier.normalise,
        predict,
        tuple(classifier.labels),
        UNSURE,
        samples,
    )


def kept_files(valid: Labelled, labels: Sequence[str]) -> dict[str, str]:
    """What a run keeps to be shown with: some of its validation images, of as many classes as there are."""
    numbers = [int(number) for number in valid.labels]
    some = [Sample(valid.pixels[at].numpy(), labels[numbers[at]]) for at in choose_samples(numbers)]
    return {FILE: write_samples(some)}
