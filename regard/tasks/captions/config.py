"""The config of a captioner: its data, its model and its training."""

from dataclasses import field
from typing import Annotated, Literal

from regard.core.options import Range, check_options, config_dataclass
from regard.data.images.draws import AugmentConfig
from regard.tasks.options import ModelOptions, check_out, derived
from regard.training.config import TrainingConfig


@config_dataclass
class CaptionsData:
    """The data: pictures, their captions, and the tokenizer."""

    captions: Annotated[
        str | None,
        "training file of captions: .csv, .tsv or .jsonl, plain, .gz or .xz; each row has a picture and one or more "
        "captions, and a picture may have several rows",
    ] = None
    images: Annotated[
        str | None,
        "folder of the pictures, or an .npz file with an array `images`, whose pictures the captions name by their "
        "numbers from 0 (default: the folder of data.captions)",
    ] = None
    columns: Annotated[
        tuple[str | int, ...],
        "columns of the picture and of its captions: names, or numbers from 0 if a CSV or TSV file has no header",
    ] = ("image", "caption")
    valid_captions: Annotated[
        str | None, "validation file, in the form of data.captions (default: pictures are held out)"
    ] = None
    valid_images: Annotated[str | None, "their pictures, in the form of data.images"] = None
    held_out: Annotated[int, "pictures held out if there is no validation file, at most a tenth of all", Range(1)] = (
        1000
    )
    held_out_seed: Annotated[
        int | None,
        "seed by which pictures are held out, so that runs of different training.seed hold out the same (default: "
        "training.seed)",
        Range(0),
    ] = None
    skip_bad: Annotated[bool, "omit and count bad lines and pictures, instead of stopping at the first"] = False
    size: Annotated[
        int | tuple[int, int] | None,
        "height and width that pictures are brought to, or one number for a square (default: their own size if all "
        "have the same, up to 96; otherwise 64)",
        Range(1, 4096),
    ] = None
    tokenizer: Annotated[
        Literal["bpe", "words", "characters", "bytes"],
        "bpe: byte pairs learned from the captions; words: split at white space; characters; bytes",
    ] = "bpe"
    vocabulary: Annotated[
        int | None, "vocabulary size, at most (default: by the number of captions, 1,000 to 8,000)", Range(5)
    ] = None
    batch: Annotated[
        int | None,
        "pictures per batch, each with one of its captions; each has to be told from the others (default: 256, on a "
        "CPU 32)",
        Range(2),
    ] = None
    maximum_length: Annotated[int, "longest caption in tokens; longer ones are omitted and counted", Range(1)] = 64

    def __post_init__(self) -> None:
        check_options(self, "data.")
        if len(self.columns) < 2:
            raise ValueError(
                f"data.columns must be that of the picture and one or more of captions, got {list(self.columns)}"
            )
        if self.valid_images is not None and self.valid_captions is None:
            raise ValueError("data.valid_images needs data.valid_captions, their captions: give both")

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@derived
class CaptionerOptions(ModelOptions):
    """The model: a preset, and changes to it; options that are not given are those of the preset."""

    predicts = "caption"
    default = "coca-small"
    preset: Annotated[
        str | None,
        "coca-small (for pictures of about 64 x 64), coca-nano (for minutes on a CPU), coca-base or coca-large (as "
        "published, for 288 x 288) (default: coca-nano on a CPU, coca-small on a GPU)",
    ] = None


@config_dataclass
class CaptionsConfig:
    """A captioner: its data, its model and its training."""

    out: Annotated[str, "run folder to write: config, tokenizer, checkpoints and log"] = "runs/captions"
    captioning: Annotated[float, "weight of the loss of the words", Range(0)] = 2.0
    contrastive: Annotated[float, "weight of the loss of pictures and captions that find each other", Range(0)] = 1.0
    data: CaptionsData = field(default_factory=CaptionsData)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: CaptionerOptions = field(default_factory=CaptionerOptions)
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(metric="cider", weight_decay=0.05))

    def __post_init__(self) -> None:
        check_out(self)
        check_options(self)
        if self.training.tokens is not None:
            raise ValueError(
                f"training.tokens {self.training.tokens} is for texts: give data.batch, the number of pictures per "
                "batch"
            )
        if not self.captioning + self.contrastive:
            raise ValueError("captioning and contrastive are both 0: there is nothing to train for")
        if self.augment.mixup or self.augment.cutmix:
            raise ValueError("augment.mixup and augment.cutmix mix classes, and captions cannot be mixed: leave them 0")
