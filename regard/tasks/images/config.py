"""The config of a classifier of images: its data, what is done to them in training, its model and its training."""

from dataclasses import field
from typing import Annotated

from regard.core.options import Range, check_options, config_dataclass
from regard.data.images.draws import AugmentConfig
from regard.tasks.options import ModelOptions, check_out, derived
from regard.training.config import TrainingConfig

SIDES = Range(1, 4096)


@config_dataclass
class ImageData:
    """The data: images and their classes."""

    images: Annotated[
        str | None,
        "training images: a folder with a folder for each class; a .csv or .tsv file of paths and labels; an .npz or "
        "idx file (MNIST); .bin files of CIFAR, or the folder with them",
    ] = None
    valid_images: Annotated[str | None, "validation images, in one of these forms (default: images are held out)"] = (
        None
    )
    columns: Annotated[
        tuple[str | int, str | int],
        "columns of path and label in a .csv or .tsv file: names, or numbers from 0 if it has no header",
    ] = ("path", "label")
    held_out: Annotated[
        int,
        "images held out if there are no validation images, at most a tenth of all, of each class its share",
        Range(1),
    ] = 5000
    held_out_seed: Annotated[
        int | None,
        "seed by which images are held out, so that runs of different training.seed hold out the same (default: "
        "training.seed)",
        Range(0),
    ] = None
    size: Annotated[
        int | tuple[int, int] | None,
        "height and width that images are brought to, or one number for a square (default: their own size if all have "
        "the same, up to 96; otherwise 64; with init that of the run)",
        SIDES,
    ] = None
    channels: Annotated[
        int | None,
        "1 for grey, 3 for colour (default: grey if all images are grey; with init that of the run)",
        Range(1, 3),
    ] = None
    batch: Annotated[int | None, "images per batch (default: 512 on a GPU, 64 on a CPU)", Range(1)] = None
    skip_bad: Annotated[bool, "omit and count broken images, instead of stopping at the first"] = False

    def __post_init__(self) -> None:
        check_options(self, "data.")
        if self.channels == 2:
            raise ValueError("data.channels must be 1 for grey or 3 for colour, got 2")
        if len(self.columns) != 2:
            raise ValueError(f"data.columns must be two, of path and label, got {list(self.columns)}")

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@derived
class ImageOptions(ModelOptions):
    """The model: a preset, and changes to it; options that are not given are those of the preset. With init, only
    dropout and drop_path can change: the rest comes from that run."""

    predicts = "image class"
    default = "vit-nano"
    preset: Annotated[
        str | None, "name of the model and its sizes (default: vit-nano, with patches that give at most 64 tokens)"
    ] = None


@config_dataclass
class ImagesConfig:
    """A classifier of images: its data, augmentation, model and training."""

    out: Annotated[str, "run folder to write: config, checkpoints and log"] = "runs/images"
    init: Annotated[
        str | None,
        "run of images whose weights to begin with; cifar10: the classifier bundled with Regard. Its output layer is "
        "replaced if the classes differ, its table of positions resized if the size differs",
    ] = None
    data: ImageData = field(default_factory=ImageData)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ImageOptions = field(default_factory=ImageOptions)
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.05, metric="accuracy", keep=1
        )
    )

    def __post_init__(self) -> None:
        check_out(self)
        if self.training.tokens is not None:
            raise ValueError(
                f"training.tokens {self.training.tokens} is for texts: give data.batch, the number of images per batch"
            )
        ends = self.training.steps is not None or self.training.epochs is not None
        if self.augment.unmixed_end and not (ends and self.training.minutes is None):
            raise ValueError(
                f"augment.unmixed_end {self.augment.unmixed_end:g} is a share of the training: give training.steps or "
                "training.epochs, not minutes, so that its end is known"
            )
