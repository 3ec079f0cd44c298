"""Tasks of the Long Range Arena as plans: each from scratch, and with half of the budget for self-pretraining."""

from dataclasses import dataclass

from regard.compare.quality import PRETRAININGS, QualityPlan

ATTENTIONS = (
    "softmax",
    "local",
    "linear",
    "reformer",
    "sparse",
    "sinkhorn",
    "linformer",
    "performer",
    "synthesizer",
    "longformer",
    "bigbird",
)


@dataclass(frozen=True)
class Size:
    """How long the sequences of a size are, and how long it trains."""

    updates: int
    listops: int
    side: int  # of the pictures of pathfinder
    paddles: int
    text: int
    costs: int  # length at which speed and memory are measured


SIZES = {
    "smoke": Size(600, 64, 16, 6, 256, 256),
    "small": Size(6_000, 512, 32, 14, 1024, 1024),
    "paper": Size(30_000, 2000, 32, 14, 4096, 2048),
}
FILES = ("--data.text", "--test.text", "--data.images")


def plans(size: str, flags: tuple[str, ...]) -> tuple[QualityPlan, ...]:
    """The tasks that can be run: text and pictures only where files are given."""
    sizes, given = SIZES[size], files(flags)
    long = f"listops-long(shortest={sizes.listops // 4})"
    asked = [
        ("ListOps", "listops" if size == "smoke" else long, sizes.listops),
        ("Path", f"pathfinder(side={sizes.side}, paddles={sizes.paddles})", 0),
    ]
    if "--data.text" in given:
        paths = f"train={given['--data.text']!r}, test={given['--test.text']!r}"
        asked.append(("Text", f"lra-text({paths})", sizes.text))
    if "--data.images" in given:
        asked.append(("Image", f"lra-image(images={given['--data.images']!r})", 0))
    titles = {"none": "from scratch", "self": "self-pretrained"}
    return tuple(
        QualityPlan(
            task,
            ATTENTIONS,
            length=length,
            amount=float(sizes.updates),
            pretrain=pretrain,
            title=f"{name}, {titles[pretrain]}",
        )
        for name, task, length in asked
        for pretrain in PRETRAININGS
    )


def files(flags: tuple[str, ...]) -> dict[str, str]:
    """The files of the flags; text needs its test set too."""
    given = dict(zip(flags[::2], flags[1::2], strict=False))
    unknown = [flag for flag in given if flag not in FILES]
    if unknown or len(flags) % 2:
        raise ValueError(f"table 'arena' takes {', '.join(FILES)}, each with a path, got {' '.join(flags)}")
    if ("--data.text" in given) != ("--test.text" in given):
        raise ValueError("text needs both --data.text and --test.text: labelled files to train on and to test on")
    return given
