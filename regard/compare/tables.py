"""Named tables: each is a set of plans, a head, what papers published, and what no plan here fills, with the command
that does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from regard.compare import arena as lra
from regard.compare import recipe_tables
from regard.compare import scaling as ladder
from regard.compare import wmt as table_2
from regard.compare.budget import Budget
from regard.compare.plan import CostPlan
from regard.compare.published import ARENA, MAD, TABLE_1, WMT, PublishedTable
from regard.compare.quality import QualityPlan, Variant
from regard.spec import ATTENTION

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
MQAR_ROWS = ("softmax", "linear", "local(window=8)", "recurrent(cell='gru')", "convolution(kernel=4)")
MAD_ROWS = (*MQAR_ROWS, "heads(local(window=8), softmax)")


@dataclass(frozen=True)
class Table:
    """A named table."""

    name: str
    head: str
    costs: CostPlan | None = None
    quality: tuple[QualityPlan, ...] = ()
    published: tuple[PublishedTable, ...] = ()
    complexity: tuple[tuple[str, str], ...] = ()  # specs and roles of counted rows
    commands: tuple[tuple[str, str], ...] = ()  # what is not run by this table, and how it is
    notes: tuple[str, ...] = field(default=())
    picture: str = ""  # what is drawn of the scores; empty: learning curves


def build(
    name: str,
    size: str = "smoke",
    *flags: str,
    budget: Budget | None = None,
    widths: Sequence[int] = (),
    plans: Sequence[QualityPlan] | None = None,
) -> Table:
    """A table by its name; `flags` say where its data is: those of `regard train`, and with `--test.` before them those
    of `regard evaluate`. `budget` is in place of that of the size, of the same kind, and so are `widths`, for a table
    by width. With `plans`, those that a folder keeps of it, no file is read."""
    if name not in TABLES:
        raise ValueError(f"no table {name!r}; known: {', '.join(TABLES)}")
    if size not in SIZES:
        raise ValueError(f"no size {size!r}; known: {', '.join(SIZES)}")
    if widths and name != "mqar":
        raise ValueError(f"table {name!r} has widths of its own: --width is for --table mqar")
    if name in recipe_tables.TABLES:
        return recipe_table(name, size, *flags, budget=budget)
    if flags and name not in WITH_DATA:
        raise ValueError(f"table {name!r} generates its data, and takes no {flags[0]}; {', '.join(WITH_DATA)} take it")
    if name == "mqar":
        table = mqar(size, widths)
    else:
        table = TABLES[name](size, *flags) if name != "arena" else arena(size, *flags, kept=plans)
    if budget is None:
        return table
    if other := [plan.axis for plan in table.quality if plan.axis != budget.axis]:
        raise ValueError(f"table {name!r} has a budget of {other[0]}, such as --budget {other[0]}=100, got {budget}")
    return replace(table, quality=tuple(replace(plan, amount=budget.amount) for plan in table.quality))


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
        notes=(
            "Work is that of a forward pass with its projections, the larger of operations and elements written.",
            "Dilated convolutions have no row: log_k n layers between two tokens need a dilation that grows from layer "
            "to layer (1, k, k^2 ...), as in ByteNet. With one dilation above 1 in all layers, some tokens never meet.",
        ),
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


def mqar(size: str, widths: Sequence[int] = ()) -> Table:
    """Figure 2 of Zoology: at paper size its vocabulary, lengths, widths and updates; at small size its widths, with a
    vocabulary and two heads of which softmax learns it in about a thousand updates. `widths` are in place of those of
    the size."""
    widths = widths or ((16, 32, 64, 128) if size == "smoke" else (64, 128, 256, 512))
    vocabulary = {"smoke": 64, "small": 128, "paper": 8192}[size]
    settings = {"smoke": ((32, 4),), "small": ((64, 8),), "paper": ((64, 4), (128, 8), (256, 16))}[size]
    updates, batch = {"smoke": (2400, 32), "small": (2400, 128), "paper": (12_500, 512)}[size]
    plans = tuple(
        QualityPlan(
            f"mqar(pairs={pairs}, vocabulary={vocabulary}, filler=False)",
            MQAR_ROWS,
            length=length,
            batch=batch,
            width=width,
            heads=2 if size == "small" else 1,
            amount=float(updates),
            title=f"mqar of {pairs} pairs in {length} tokens, width {width}",
        )
        for length, pairs in settings
        for width in widths
    )
    return Table(
        "mqar",
        "Multi-query associative recall by width, as in Figure 2 of Zoology",
        quality=plans,
        notes=(
            "Zoology (Arora et al. 2023, arXiv 2312.04927, recalled): attention has 1.0 at any width, the others rise.",
            "Unlike there, every layer has a feed-forward layer, whose width makes the parameters equal, and all rows "
            "have positions.",
        ),
        picture="widths",
    )


def state(size: str) -> Table:
    plan = _quality("recall", size, 600)
    return Table(
        "state",
        "Recall against the bytes that decoding keeps",
        costs=CostPlan(specs=ROWS, lengths=(64,), width=plan.width, heads=plan.heads),
        quality=(plan,),
        picture="state",
    )


def mad(size: str) -> Table:
    tasks = ("mad-recall", "mad-fuzzy", "mad-noisy", "mad-selective", "mad-compress", "mad-memorize")
    width = 64 if size == "smoke" else 128
    return Table(
        "mad",
        "The six tasks of MAD, base settings; memorize tests parameters and is in no mean over attentions",
        quality=tuple(_quality(task, size, 600, specs=MAD_ROWS, width=width) for task in tasks),
        published=(MAD,),
        notes=("Published means are over many difficulties; here each task has its base setting.",),
    )


def tasks(size: str) -> Table:
    """What each attention learns, and models that change the length or read what is above them."""
    others = (
        Variant("Feedback", kind="feedback", role="causal"),
        Variant("Perceiver AR, 64 latents", kind="perceiver-ar", options={"latents": 64}, role="causal"),
        Variant("Perceiver, 64 latents", kind="perceiver", options={"latents": 64}, role="self"),
        Variant("Funnel, 1+1 layers", kind="funnel", options={"layers": (1, 1), "decoder_layers": 1}, role="self"),
        Variant("TokenLearner, 32 tokens", kind="tokenlearner", options={"tokens": 32}, role="self"),
    )
    lengths = {"copy": 128, "reverse": 128, "recall": 64, "listops": 64}
    more = {"specs": tuple(ATTENTION.names()), "variants": others, "rates": (0.003,), "seeds": 1}
    return Table(
        "tasks",
        "Copy, reverse, recall and ListOps with every attention, at one learning rate",
        quality=tuple(_quality(task, size, 600, length=length, **more) for task, length in lengths.items()),
        notes=("One seed at one rate: what a row cannot do is seen, an order is not. --seeds 3 has more.",),
    )


def survey(size: str) -> Table:
    length = 512 if size == "smoke" else 4096
    return Table(
        "survey",
        'Cost of the mechanisms of "Efficient Transformers: A Survey"; regard list --survey has the counted exponents',
        costs=CostPlan(lengths=(length,), minutes=20.0),
    )


def arena(size: str, *flags: str, kept: Sequence[QualityPlan] | None = None) -> Table:
    given, sizes = lra.files(flags), lra.SIZES[size]
    plans = lra.plans(size, flags) if kept is None else tuple(kept)
    text = "regard compare --table arena --data.text train.jsonl --test.text test.jsonl"
    image = "regard compare --table arena --data.images cifar-10-batches-bin"
    open_tasks = [
        (name, command)
        for name, flag, command in (("Text", "--data.text", text), ("Image", "--data.images", image))
        if flag not in given
    ]
    return Table(
        "arena",
        "Score against speed and memory on tasks of the Long Range Arena, from scratch and self-pretrained",
        costs=CostPlan(
            specs=lra.attentions(sizes.costs),
            role="self",
            lengths=(sizes.costs,),
            # with one row a GPU is not busy, and all mechanisms take the same time
            batch=1 if size == "smoke" else 32,
            width=sizes.width,
            heads=lra.HEADS,
        ),
        quality=plans,
        published=(ARENA,),
        commands=(*open_tasks, ("Retrieval", "absent: its data is not generated")),
        notes=(
            "Scores from scratch alone rank nothing: self-pretraining often adds more than what the rows differ in.",
            "No mean is formed over tasks that were not run. The pictures of Path are drawn by our own rules with the "
            "settings of the Long Range Arena; models here are small, with one size for all rows.",
        ),
        picture="bubbles",
    )


def wmt(size: str, *flags: str) -> Table:
    data = "--data.source train.en --data.target train.de --data.valid_source valid.en --data.valid_target valid.de"
    command = (
        f"regard compare --table wmt --size small --device cuda {data} --test.source test.en --test.target test.de"
    )
    plans = table_2.plans(size, *split_test(flags))
    return Table(
        "wmt",
        "Table 2 at our scale: translators at equal epochs and at equal counted operations",
        quality=plans,
        published=(WMT,),
        commands=() if plans else (("all rows, on pairs of yours", command),),
        notes=(
            "Published FLOPs are hours x GPUs x rated speed, ours are counted, and the data is another: never compare "
            "them row by row.",
            "Device seconds are those of a training with its evaluations; with several jobs on a device they share it.",
        ),
    )


def scaling(size: str, *flags: str) -> Table:
    plans = ladder.plans(size, flags)
    text = "regard compare --table scaling --size small --device cuda --data.text TEXT"
    prompt = "regard prompt OUT/runs/KEY --task task.yaml --shots 0,1,2,4,8"
    return Table(
        "scaling",
        "Loss against parameters, data and counted operations",
        quality=plans,
        commands=(*(() if plans else (("all sizes, on a text of yours", text),)), ("shots against size", prompt)),
        notes=(
            f"No exponent is given for fewer than {ladder.MIN_SIZES} sizes, or if R^2 is below {ladder.MIN_R2}; "
            f"runs of {ladder.MAX_EPOCHS} epochs or more are not on a curve.",
            "Learning rates are swept at the two smallest sizes, and move with the root of the width from there.",
            "Few models of these sizes answer natural questions above chance; --table mqar has recall by width.",
        ),
        picture="scaling",
    )


def recipe_table(name: str, size: str, *flags: str, budget: Budget | None = None) -> Table:
    """One recipe of `regard train`, one word changed."""
    known = recipe_tables.TABLES[name]
    plan = recipe_tables.plan(name, size, *split_test(flags), budget)
    command = f"regard compare --table {name} --size paper --device cuda --jobs 4 --exclusive {known.data}"
    return Table(
        name,
        f"{known.head}: recipe {known.recipe}, one word changed; parameters as each model has them",
        quality=() if plan is None else (plan,),
        commands=(("all rows, on your files", command),) if plan is None else (),
        notes=(
            "All rows have the optimizer and the learning rate of the recipe, which was made with the row "
            f"{known.rows[0].name}: neither was tuned for another.",
            "Speed is that of training steps with augmentation, without evaluations, where one row trained at a time.",
        ),
    )


TABLES: dict[str, Callable[..., Table]] = {
    "complexity": complexity,
    "tasks": tasks,
    "recall": recall,
    "mqar": mqar,
    "state": state,
    "mad": mad,
    "survey": survey,
    "arena": arena,
    "wmt": wmt,
    "scaling": scaling,
}
# tables that take flags for their data
WITH_DATA: dict[str, Callable[..., Table]] = {"wmt": wmt, "arena": arena, "scaling": scaling}
WITH_DATA |= {name: partial(recipe_table, name) for name in recipe_tables.TABLES}
TABLES |= {name: WITH_DATA[name] for name in recipe_tables.TABLES}


def split_test(flags: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags of `regard train`, and those of `regard evaluate`, which are written with `--test.` before them."""
    train: list[str] = []
    test: list[str] = []
    is_test = False
    for word in flags:
        if word.startswith("--"):
            is_test = word.startswith("--test.")
        (test if is_test else train).append(f"--{word.removeprefix('--test.')}" if word.startswith("--test.") else word)
    return tuple(train), tuple(test)
