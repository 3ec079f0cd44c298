"""Batches whose rows are too long for one process: each gets some tokens of every row."""

from typing import Any

from torch import Tensor, nn

from regard.core.sequence import Split


def check_splits(model: nn.Module) -> None:
    """Refuses models in which tokens meet other than in attention."""
    config: Any = model.config
    if getattr(config, "kind", None) != "decoder":
        raise ValueError(
            f"training.shares tokens is for models of kind 'decoder', got {getattr(config, 'kind', None)!r}: use "
            "training.shares rows"
        )
    for name in ("reversible", "short_convolution"):
        if getattr(config, name, None):
            raise ValueError(f"training.shares tokens does not go with model.{name}: leave one of them out")
    for part in model.modules():
        facts: Any = getattr(part, "facts", None)
        if getattr(facts, "training", "token") != "token":
            raise ValueError(
                f"training.shares tokens does not go with feedforward {facts.name!r}, whose tokens compete in the "
                "order of rows: use training.shares rows, or give it no capacity"
            )
        if hasattr(facts, "split_invariant") and not _can_split(part, facts):
            raise ValueError(
                f"attention {facts.name!r} cannot read rows whose tokens are spread over processes: use "
                "training.shares rows, or a mechanism that keeps tokens or sums while decoding, such as softmax, local "
                "or linear"
            )


def _can_split(part: nn.Module, facts: Any) -> bool:
    """Whether a layer of attention gives a part of a row the answers that the whole row has there."""
    # what puts other mechanisms together leaves it to them
    is_written = getattr(part, "can_split_rows", hasattr(part, "parts"))
    return is_written and facts.prefix_invariant and facts.split_invariant and not facts.auxiliary_loss


def split_tokens(batch: tuple[Tensor | None, ...], split: Split) -> Any:
    """The tokens of this process: of tensors [B, T] a part of each row, of [B] all."""
    fields = dict(zip(batch._fields, batch, strict=True))  # pyright: ignore[reportAttributeAccessIssue] # a named tuple
    tokens = fields.get("tokens")
    if tokens is None or "target" not in fields or fields.get("keep") is not None:
        raise ValueError("training.shares tokens is for rows of text without padding: use training.shares rows")
    T = tokens.shape[1]
    if T % split.size:
        raise ValueError(
            f"rows of {T} tokens cannot be shared evenly by {split.size} processes: choose a data.length that is a "
            "multiple of it, or use training.shares rows"
        )
    cut = slice(split.rank * T // split.size, (split.rank + 1) * T // split.size)
    make: Any = type(batch)
    return make(*(part if part is None or part.dim() == 1 else part[:, cut] for part in batch))
