"""Table 2 of Attention Is All You Need at a scale of minutes: translators of its rows, trained on the user's pairs at
equal epochs and at equal counted operations, alone and as ensembles of the seeds.

ByteNet reads the same subwords as the others, not characters. GNMT and the mixture of experts have no reinforcement
learning. Deep-Att, whose unknown words are replaced through alignments, reads words, of which a small vocabulary leaves
some unknown; it is there where the pairs are subword units, which joined are words.
"""

from dataclasses import dataclass, replace

from regard.compare.quality import QualityPlan, Variant

# one grid for all; warm-up, clipping, label smoothing and precision too
RATES = (0.002, 0.005)
TRAINING = (
    *("--training.tokens", "8192", "--training.schedule", "cosine", "--training.label_smoothing", "0.1"),
    *("--training.weight_decay", "0.05", "--training.metric", "bleu", "--training.keep", "1"),
)
# a short training has no time to overfit, and none for evaluations before its end
SHORT = ("--model.dropout", "0.1", "--training.evaluate_every", "1000000")
LONG = ("--model.dropout", "0.3")
UNITS = ("--data.tokenizer", "units")
WORDS = ("--data.shared", "false", "--data.vocabulary", "4000")
EPOCHS = "--training.epochs"
ROWS = (
    Variant("ByteNet", ("--model.preset", "bytenet")),
    Variant("GNMT", ("--model.preset", "gnmt"), test=("--coverage", "0.2")),
    Variant("ConvS2S", ("--model.preset", "convs2s")),
    Variant("MoE-LSTM", ("--model.preset", "moe-lstm")),
    Variant("Transformer, tiny", ("--model.preset", "tiny", "--model.norm", "pre")),
    Variant(
        "Transformer, wide",
        ("--model.preset", "tiny", "--model.norm", "pre", "--model.width", "256", "--model.inner", "512"),
    ),
)
DEEP = "Deep-Att on words"
DEEP_ROWS = (
    Variant(DEEP, ("--model.preset", "deep-att", *WORDS), words=True),
    Variant(f"{DEEP}, unknown replaced", of=DEEP, test=("--replace-unknown",), words=True),
)


@dataclass(frozen=True)
class Amount:
    """How long a size trains, and the flags that suit it."""

    epochs: float
    flops: float  # about what the tiny Transformer counts in these epochs of Multi30k
    flags: tuple[str, ...]


AMOUNTS = {
    "smoke": Amount(1.0, 7.05e12, SHORT),
    "small": Amount(10.0, 7.05e13, SHORT),
    "paper": Amount(100.0, 7.05e14, LONG),
}


def variants(flags: tuple[str, ...]) -> tuple[Variant, ...]:
    """The rows, each also as an ensemble."""
    is_units = " ".join(UNITS) in " ".join(flags)
    rows = (*ROWS, *(DEEP_ROWS if is_units else ()))
    ensembles = [
        Variant(f"{row.name}, ensemble", of=row.of or row.name, test=row.test, ensemble=True, words=row.words)
        for row in rows
    ]
    return (*rows, *ensembles)


def plans(size: str, flags: tuple[str, ...], test: tuple[str, ...]) -> tuple[QualityPlan, ...]:
    """The two tables on the user's pairs; none where no pairs are given. `--training.epochs` among the flags takes
    the place of the size's number of epochs."""
    if not flags:
        return ()
    if not any(flag.startswith("--data.valid_source") for flag in flags):
        # else some pairs are held out, others for each seed, and an ensemble would have several vocabularies
        raise ValueError("table 'wmt' needs pairs to validate on, the same for all seeds: give --data.valid_source too")
    amount, flags = _amount(size, flags)
    return tuple(
        QualityPlan(
            "translate",
            rates=RATES,
            axis=axis,
            amount=given,
            flags=(*TRAINING, *amount.flags, *flags),
            test=test,
            variants=variants(flags),
            title=f"Table 2 at equal {what}",
        )
        for axis, given, what in (("epochs", amount.epochs, "epochs"), ("flops", amount.flops, "counted operations"))
    )


def _amount(size: str, flags: tuple[str, ...]) -> tuple[Amount, tuple[str, ...]]:
    """The amount of a size, with the epochs that the flags ask for, and the other flags."""
    # --name=value as well as --name value
    words = [word for flag in flags for word in (flag.split("=", 1) if flag.startswith(f"{EPOCHS}=") else (flag,))]
    if EPOCHS not in words:
        return AMOUNTS[size], flags
    at = words.index(EPOCHS)
    asked = words[at + 1 : at + 2]
    try:
        epochs = float(*asked)
    except ValueError:
        epochs = 0.0
    if not epochs > 0:
        raise ValueError(f"{EPOCHS} must be a number above 0, got {' '.join(asked) or 'nothing'}")
    return replace(AMOUNTS[size], epochs=epochs), (*words[:at], *words[at + 2 :])
