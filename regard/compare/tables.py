"""Named tables: each is a set of plans, a head, what papers published, and what no plan here fills, with the command
that does."""

from dataclasses import dataclass, field
from typing import Any

from regard.compare.plan import CostPlan
from regard.compare.published import ARENA, MAD, TABLE_1, WMT, PublishedTable
from regard.compare.quality import QualityPlan

SIZES = ("smoke", "small", "paper")
# the rows of tables about what is learned
ROWS = (
    "softmax",
    "linear",
    "performer(features=64)",
    "local(window=8)",
    "heads(local(window=8), softmax)",
    "recurrent(cell='gru')",
    "convolution(kernel=4)",
)
ATTENTIONS = ("softmax", "local", "linear", "reformer", "sparse", "sinkhorn", "linformer", "performer", "synthesizer")


@dataclass(frozen=True)
class Table:
    """A table that has a name."""

    name: str
    head: str
    costs: CostPlan | None = None
    quality: tuple[QualityPlan, ...] = ()
    published: tuple[PublishedTable, ...] = ()
    complexity: tuple[tuple[str, str], ...] = ()  # specs and roles of counted rows
    commands: tuple[tuple[str, str], ...] = ()  # what is not run by this table, and how it is
    notes: tuple[str, ...] = field(default=())


def build(name: str, size: str = "smoke") -> Table:
    """A table by its name."""
    if name not in TABLES:
        raise ValueError(f"no table {name!r}; known: {', '.join(TABLES)}")
    if size not in SIZES:
        raise ValueError(f"no size {size!r}; known: {', '.join(SIZES)}")
    return TABLES[name](size)


def _quality(task: str, size: str, updates: int, **more: Any) -> QualityPlan:
    """A plan of a size: smoke is for a CPU, the others take more updates, and a GPU where there is one."""
    factor = {"smoke": 1, "small": 10, "paper": 50}[size]
    return QualityPlan(task=task, specs=more.pop("specs", ROWS), amount=float(updates * factor), **more)


def complexity(size: str) -> Table:
    rows = ("softmax", "local(window=16)", "linear", "recurrent(cell='gru')", "recurrent(cell='lstm')")
    convolutions = ("convolution(kernel=3)",)
    lengths = {"smoke": (512, 1024), "small": (512, 2048, 8192), "paper": (512, 1024, 2048, 4096, 8192, 16384)}[size]
    return Table(
        "complexity",
        "Work, sequential operations and path between tokens, counted; time, measured",
        costs=CostPlan(specs=(*rows, *convolutions), lengths=lengths, minutes=30.0),
        published=(TABLE_1,),
        complexity=tuple((spec, "causal") for spec in (*rows, *convolutions)),
        notes=("Work is that of a forward pass with its projections, the larger of operations and elements written.",),
    )


def recall(size: str) -> Table:
    return Table(
        "recall",
        "What is recalled and tracked, at equal parameters and updates",
        quality=(
            _quality("recall", size, 600),
            _quality("mqar(pairs=4, vocabulary=64)", size, 800, length=32),
            _quality("word(group='S3')", size, 600, batch=64),
        ),
        notes=("local(window=8) sees 9 tokens per layer, and cannot learn what stands farther back.",),
    )


def state(size: str) -> Table:
    plan = _quality("recall", size, 600)
    return Table(
        "state",
        "Recall against the bytes that decoding keeps",
        costs=CostPlan(specs=ROWS, lengths=(64,), width=plan.width, heads=plan.heads),
        quality=(plan,),
    )


def mad(size: str) -> Table:
    tasks = ("mad-recall", "mad-fuzzy", "mad-noisy", "mad-selective", "mad-compress", "mad-memorize")
    return Table(
        "mad",
        "The six tasks of MAD, base settings; memorize tests parameters and is in no mean over attentions",
        quality=tuple(_quality(task, size, 600, width=64 if size == "smoke" else 128) for task in tasks),
        published=(MAD,),
        notes=("Published means are over many difficulties; here each task has its base setting.",),
    )


def survey(size: str) -> Table:
    length = 512 if size == "smoke" else 4096
    return Table(
        "survey",
        'Cost of the mechanisms of "Efficient Transformers: A Survey"; regard list --survey has the counted exponents',
        costs=CostPlan(lengths=(length,), minutes=20.0),
    )


def arena(size: str) -> Table:
    length = {"smoke": 64, "small": 512, "paper": 2000}[size]
    task = "listops" if size == "smoke" else f"listops-long(shortest={length // 4})"
    text = "regard compare SPEC ... --task classify --data.text TRAIN --data.tokenizer bytes --data.length 1024"
    image = "regard compare SPEC ... --task images --data.images FOLDER"
    return Table(
        "arena",
        "Score against speed and memory on tasks of the Long Range Arena; no ranking from scratch alone",
        costs=CostPlan(specs=ATTENTIONS, role="self", lengths=(length,), width=128, heads=4),
        quality=(_quality(task, size, 600, specs=ATTENTIONS, length=length),),
        published=(ARENA,),
        commands=(("Text", text), ("Image", image), ("Path and Retrieval", "absent: no generator or data here")),
        notes=(
            "ListOps only, unless the other tasks are run by their commands; no mean is formed over tasks not run.",
        ),
    )


def wmt(size: str) -> Table:
    data = "--data.source a.en --data.target a.de"
    return Table(
        "wmt",
        "Table 2 at our scale: translators at equal epochs and at equal counted operations",
        published=(WMT,),
        commands=(
            ("ByteNet", f"regard train translate {data} --model.preset bytenet"),
            ("GNMT", f"regard train translate {data} --model.preset gnmt"),
            ("ConvS2S", f"regard train translate {data} --model.preset convs2s"),
            ("MoE", f"regard train translate {data} --model.preset moe-lstm"),
            ("Transformer, tiny", f"regard train translate {data} --model.preset tiny"),
            ("any attention", f"regard compare SPEC ... --task translate {data} --budget minutes=10"),
        ),
        notes=("Published FLOPs are hours x GPUs x rated speed: never compare them with counted ones.",),
    )


def scaling(size: str) -> Table:
    text = "--task language --data.text TEXT --budget updates=2000"
    ladder = [(width, f"regard compare softmax linear {text} --model.width {width}") for width in (64, 128, 256, 512)]
    return Table(
        "scaling",
        "Loss against parameters, data and counted operations",
        commands=tuple((f"width {width}", command) for width, command in ladder),
        notes=("No exponent is fitted to fewer than four sizes.",),
    )


TABLES = {
    "complexity": complexity,
    "recall": recall,
    "state": state,
    "mad": mad,
    "survey": survey,
    "arena": arena,
    "wmt": wmt,
    "scaling": scaling,
}
