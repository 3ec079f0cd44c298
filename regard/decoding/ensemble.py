"""Several models as one: at every step their probabilities are averaged."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.core.model import Model, Prediction

Mean = Literal["arithmetic", "geometric"]


class EnsembleState(NamedTuple):
    """The state of each model."""

    states: tuple[Any, ...]

    def select(self, rows: Tensor) -> "EnsembleState":
        return EnsembleState(tuple(state.select(rows) for state in self.states))

    def reorder(self, rows: Tensor) -> "EnsembleState":
        return EnsembleState(tuple(state.reorder(rows) for state in self.states))


class Ensemble(Model):
    """Models of any kinds with one vocabulary, such as a Transformer, a ConvS2S and an LSTM. The probability of a token
    is the mean over the models, p = (p_1 + ... + p_M) / M, or with mean="geometric" their geometric mean, normalized.
    One beam, one set of hypotheses: all models read what was chosen together. It costs what all of them cost.

    >>> [[best]] = regard.decoding.decode(Ensemble([one, another]).eval(), source[:1])
    """

    def __init__(self, models: Sequence[Model], mean: Mean = "arithmetic"):
        super().__init__()
        if not models:
            raise ValueError("an ensemble needs at least one model")
        if mean not in ("arithmetic", "geometric"):
            raise ValueError(f"mean must be 'arithmetic' or 'geometric', got {mean!r}")
        self.mean: Mean = mean
        self.config = models[0].config
        self.models = nn.ModuleList(models)
        # a module list does not say what models can do
        self.members: tuple[Any, ...] = tuple(models)

    def forward(self, *inputs: Tensor, **options: Any) -> Prediction:
        """What each model takes -> the mean as logits."""
        return Prediction(average([model(*inputs, **options).logits for model in self.members], self.mean), None)

    def encode(self, source: Tensor, *, keep: Tensor | None = None) -> tuple[Any, ...]:
        """The memory of each model."""
        return tuple(model.encode(source, keep=keep) for model in self.members)

    def start(self, batch: int, *, memory: tuple[Any, ...], capacity: int | None = None) -> EnsembleState:
        """The states before the first token."""
        pairs = zip(self.members, memory, strict=True)
        return EnsembleState(tuple(model.start(batch, memory=part, capacity=capacity) for model, part in pairs))

    def extend(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        """New ids [B, n] -> the mean as logits [B, n, V], and the next state."""
        made = [model.extend(tokens, part) for model, part in zip(self.members, state.states, strict=True)]
        logits = average([logits for logits, _ in made], self.mean)
        return logits, EnsembleState(tuple(after for _, after in made))

    def extend_with_attention(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState, Tensor]:
        """`extend`, and what the models that have attention read on average, [B, S]."""
        made, weights = [], []
        for model, part in zip(self.members, state.states, strict=True):
            if not hasattr(model, "extend_with_attention"):
                made.append(model.extend(tokens, part))
                continue
            logits, after, read = model.extend_with_attention(tokens, part)
            made.append((logits, after))
            weights.append(read)
        if not weights:
            raise ValueError("no model of the ensemble has attention to its source: leave coverage at 0")
        logits = average([logits for logits, _ in made], self.mean)
        return logits, EnsembleState(tuple(after for _, after in made)), torch.stack(weights).mean(0)

    def maps(self, source: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
        """One map [B, 1, T, S], the mean over the models: of an aligner, or of the last layer but one."""
        found = []
        for model in self.members:
            place = {} if getattr(model, "aligner", None) is None else {"place": "aligner"}
            layers = model.maps(source, target, **place, **options)
            found.append(layers[max(len(layers) - 2, 0)].mean(1, keepdim=True))
        return [torch.stack(found).mean(0)]


def average(logits: Sequence[Tensor], mean: Mean = "arithmetic") -> Tensor:
    """Logits [..., V] of several models as those of their mean. One model, or equal ones, give what they gave, to the
    last bit: of the first model only what the others change is changed."""
    if len(logits) == 1:
        return logits[0]
    sizes = {part.shape[-1] for part in logits}
    if len(sizes) > 1:
        raise ValueError(f"models of an ensemble need one vocabulary, got sizes {', '.join(map(str, sorted(sizes)))}")
    wide = torch.promote_types(logits[0].dtype, torch.float32)
    logs = [part.log_softmax(-1, dtype=wide) for part in logits]
    first = logits[0].to(wide)
    if mean == "geometric":
        # a token that one model forbids is forbidden
        moved = sum(part - logs[0] for part in logs[1:]) / len(logs)
        forbidden = torch.stack([part == -torch.inf for part in logs]).any(0)
        return torch.where(forbidden, -torch.inf, first + moved)
    # where the first forbids a token, what the others say of it stands on the scale of the first's logits
    allowed = logs[0] > -torch.inf
    base = torch.where(allowed, first, first.logsumexp(-1, keepdim=True))
    moved = torch.stack([part - torch.where(allowed, logs[0], 0) for part in logs])
    top = moved.amax(0).clamp(min=torch.finfo(wide).min)
    return base + top + (moved - top).exp().mean(0).log()
