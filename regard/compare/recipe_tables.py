"""One recipe, one word changed: tables that train a recipe of `regard train` on the user's files, once for each row."""

import json
import math
from dataclasses import dataclass

from regard import recipes
from regard.compare.budget import Budget
from regard.compare.quality import QualityPlan, Variant

SHARES = {"smoke": 1 / 50, "small": 1 / 4, "paper": 1.0}  # of the updates or epochs of the recipe
SCALED_SETTINGS = ("warmup", "evaluate_every", "save_every")  # settings that shrink with the schedule


@dataclass(frozen=True)
class RecipeTable:
    """A recipe and the rows that change it."""

    task: str
    recipe: str
    rows: tuple[Variant, ...]
    data: str  # flags that a user gives
    head: str


def words(*specs: str) -> tuple[Variant, ...]:
    """Rows that differ in the attention."""
    return tuple(Variant(spec, ("--model.attention", spec)) for spec in specs)


def in_every_other_layer(spec: str) -> tuple[str, ...]:
    """Flags for a feed-forward layer between dense ones."""
    return "--model.feedforward", json.dumps(["dense", spec])


LINFORMER = "linformer(rank=16, longest=128)"
LSTM = ("--model.preset", "lstm", "--model.norm", "null", "--model.input_feeding", "false")
VIT = "--model.width 256 --model.heads 4 --model.inner 512 --model.layers 6 --model.patch 4"
MULTI30K = (
    *words("softmax", "additive", "local(window=8)", "linear", "performer", "rfa", "longformer(window=8, globals=1)"),
    Variant(
        f"{LINFORMER}, encoder and cross",
        (
            *("--model.attention", LINFORMER, "--model.cross_attention", LINFORMER),
            *("--model.decoder_attention", "softmax"),
        ),
    ),
    *words("heads(local(window=4), softmax, strided(stride=4), globals(tokens=1))"),
    Variant("LSTM without attention", (*LSTM, "--model.bottleneck", "true")),
    *(
        Variant(f"LSTM, {score}", (*LSTM, "--model.attention", score))
        for score in ("dot", "multiplicative", "multiplicative(scaled=False)", "additive")
    ),
)
PAIRS = (
    "--data.source train.en --data.target train.de --data.valid_source valid.en --data.valid_target valid.de "
    "--test.source test.2016.en --test.target test.2016.de"
)
CHOICE = "choice(experts=8, capacity=1.0)"
# widths such that a token uses as many parameters as in the dense model, within one in a hundred
EXPERTS = (
    Variant("dense", ("--model.feedforward", "dense")),
    *(
        Variant(spec, in_every_other_layer(spec))
        for spec in (
            "switch(experts=8)",
            "gshard(experts=8, inner=128)",
            "stmoe(experts=8, inner=88)",
            "glam(experts=8, inner=88)",
            "moe(experts=8, choices=2, inner=128)",
        )
    ),
    Variant(f"{CHOICE}, encoder", (*in_every_other_layer(CHOICE), "--model.decoder_feedforward", "dense")),
    *(
        Variant(spec, in_every_other_layer(spec))
        for spec in (
            "productkey(keys=64, heads=4, choices=32, key_width=64)",
            "scaling(inner=2048, block=16, rank=14)",
        )
    ),
)
WIKITEXT = words(
    "softmax",
    "local(window=32)",
    "strided(stride=16)",
    "sparse(pattern='fixed', stride=16, summary=4)",
    "heads(local(window=16), strided(stride=16), globals(tokens=4), softmax)",
    "['local(window=32)', softmax]",
    "linear",
    "efficient",
    "performer",
    "rfa",
    "synthesizer(longest=256)",
    "image(block=32, memory=32)",
)
IMDB = (
    *words(
        "softmax",
        "local(window=64)",
        "longformer(window=64, globals=1)",
        "bigbird(block=32)",
        "linformer(rank=128, longest=4096)",
        "nystrom(landmarks=64)",
        "linear",
        "performer(features=64)",
        "reformer(chunk=64, rounds=1)",
        "luna(length=32)",
    ),
    Variant("Perceiver, 64 latents", ("--model.preset", "perceiver", "--model.latents", "64")),
    Variant("Funnel, 1+1+1 layers", ("--model.preset", "funnel", "--model.layers", "[1, 1, 1]")),
)
CIFAR10 = (
    *words("softmax", "local(window=[2, 2])", "local(window=12)"),
    Variant("swin, windows of 4 x 4", ("--model.attention", "[swin(window=4), 'swin(window=4, shift=2)']")),
    *words(
        "axial",
        "image(block=[2, 2], memory=[2, 2])",
        "sparse(stride=8)",
        "linear",
        "performer",
        "efficient",
        "linformer(rank=16)",
        "nystrom(landmarks=16)",
        "luna(length=16)",
        "set(points=16)",
        "routing(clusters=4)",
        "synthesizer",
        "mixer",
        "fnet",
        "gmlp",
    ),
    Variant("Perceiver, 32 latents", ("--model.preset", "perceiver", *VIT.split(), "--model.latents", "32")),
    Variant("TokenLearner, 8 tokens", ("--model.preset", "tokenlearner", *VIT.split(), "--model.tokens", "8")),
    Variant("residual network without attention", ("--model.preset", "convnet", "--model.pooling", "null")),
)
TABLES = {
    "multi30k": RecipeTable(
        "translate",
        "multi30k",
        MULTI30K,
        PAIRS,
        "Multi30k, English to German, with each attention",
    ),
    "experts": RecipeTable(
        "translate",
        "multi30k",
        EXPERTS,
        PAIRS,
        "Multi30k, English to German, with each feed-forward layer at equal active parameters",
    ),
    "wikitext": RecipeTable(
        "language",
        "wikitext",
        WIKITEXT,
        "--data.text train.txt --data.valid valid.txt --test.text test.txt",
        "WikiText-2 by words, with each attention; the score is the loss, whose exponential is the perplexity",
    ),
    "imdb": RecipeTable(
        "classify",
        "imdb",
        IMDB,
        "--data.text train.jsonl --test.data test.jsonl",
        "IMDb reviews byte by byte, with each attention",
    ),
    "cifar10": RecipeTable(
        "images",
        "cifar10-vit",
        CIFAR10,
        "--data.images cifar-10-batches-bin --test.data cifar-10-batches-bin/test_batch.bin",
        "CIFAR-10 with each attention over the patches",
    ),
}


def plan(
    name: str, size: str, flags: tuple[str, ...], test: tuple[str, ...], budget: Budget | None = None
) -> QualityPlan | None:
    """The plan of a table; None where no files are given. `budget` is what a row gets, in place of that of the size."""
    table = TABLES[name]
    if not flags:
        return None
    training = recipes.find(table.recipe, table.task).settings("training")
    axis = "updates" if "steps" in training else "epochs"
    whole = training["steps" if axis == "updates" else "epochs"]
    if budget is not None and budget.axis != axis:
        raise ValueError(f"table {name!r} has a budget of {axis}, such as --budget {axis}={whole // 10}, got {budget}")
    share = SHARES[size] if budget is None else budget.amount / whole
    shrunk = [
        word
        for setting in SCALED_SETTINGS
        if setting in training and share != 1
        for word in (f"--training.{setting}", str(max(1, math.ceil(share * training[setting]))))
    ]
    return QualityPlan(
        table.task,
        rates=(training["learning_rate"],),
        axis=axis,
        amount=share * whole if budget is None else budget.amount,
        flags=("--config", table.recipe, *shrunk, *flags),
        test=test,
        variants=table.rows,
        title=table.head,
    )
