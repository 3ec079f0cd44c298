"""Tasks of the Long Range Arena as plans: each from scratch, and with half of the budget for self-pretraining."""

from dataclasses import dataclass, replace

from regard.compare.quality import PRETRAININGS, QualityPlan

# those of the Long Range Arena
ATTENTIONS = (
    "softmax",
    "local",
    "linear",
    "reformer",
    "sparse(pattern='fixed', stride={stride}, summary=8)",
    "sinkhorn",
    # a table of its own for each position: a higher rank would have more parameters than the whole model
    "linformer(rank=32, longest={longest})",
    "performer",
    "synthesizer",
    "longformer",
    "bigbird",
)


@dataclass(frozen=True)
class Size:
    """The lengths of the sequences, the model, and the updates on each task of one size."""

    updates: dict[str, int]
    listops: int
    side: int  # of the pictures of pathfinder
    paddles: int
    text: int
    costs: int  # length at which speed and memory are measured
    width: int
    inner: int


SIZES = {
    "smoke": Size({"ListOps": 600, "Path": 600, "Text": 600, "Image": 600}, 64, 16, 6, 256, 256, 64, 128),
    # of CIFAR-10 about two epochs, of IMDb four
    "small": Size({"ListOps": 3_000, "Path": 2_000, "Text": 3_000, "Image": 3_000}, 512, 32, 14, 1024, 1024, 128, 512),
    # near those of the Long Range Arena
    "paper": Size(
        {"ListOps": 5_000, "Path": 60_000, "Text": 20_000, "Image": 35_000}, 2000, 32, 14, 4096, 2048, 128, 512
    ),
}
HEADS = 4
FILES = ("--data.text", "--test.text", "--data.images")


def plans(size: str, flags: tuple[str, ...]) -> tuple[QualityPlan, ...]:
    """The tasks that can be run: text and pictures only where files are given."""
    sizes, paths_of = SIZES[size], files(flags)
    long = f"listops-long(shortest={sizes.listops // 4})"
    tasks = [
        ("ListOps", "listops" if size == "smoke" else long, sizes.listops),
        ("Path", f"pathfinder(side={sizes.side}, paddles={sizes.paddles})", 0),
    ]
    if "--data.text" in paths_of:
        paths = f"train={paths_of['--data.text']!r}, test={paths_of['--test.text']!r}"
        tasks.append(("Text", f"lra-text({paths})", sizes.text))
    if "--data.images" in paths_of:
        tasks.append(("Image", f"lra-image(images={paths_of['--data.images']!r})", 0))
    titles = {"none": "from scratch", "self": "self-pretrained"}
    plans_of_tasks = [
        QualityPlan(
            task,
            length=length,
            width=sizes.width,
            heads=HEADS,
            inner=sizes.inner,
            amount=float(sizes.updates[name]),
            pretrain=pretrain,
            title=f"{name}, {titles[pretrain]}",
        )
        for name, task, length in tasks
        for pretrain in PRETRAININGS
    ]
    return tuple(replace(plan, specs=attentions(plan.tokens)) for plan in plans_of_tasks)


def attentions(length: int) -> tuple[str, ...]:
    """The rows at a length, which some of them must know."""
    return tuple(spec.format(longest=length, stride=min(128, max(8, length // 8))) for spec in ATTENTIONS)


def files(flags: tuple[str, ...]) -> dict[str, str]:
    """The path of each flag; text needs its test set too."""
    paths_of = dict(zip(flags[::2], flags[1::2], strict=False))
    unknown = [flag for flag in paths_of if flag not in FILES]
    if unknown or len(flags) % 2:
        raise ValueError(f"table 'arena' takes {', '.join(FILES)}, each with a path, got {' '.join(flags)}")
    if ("--data.text" in paths_of) != ("--test.text" in paths_of):
        raise ValueError("text needs both --data.text and --test.text: labelled files to train on and to test on")
    return paths_of
