"""TokenLearner: half-way through, a Transformer goes on with a few tokens that it has learnt to make of all.

Padding is met once, on token ids, as in the Transformer: a padded token goes into none of the learnt ones.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.base import Memory, Rows, masked_softmax, unpack
from regard.kernels.dropout import Dropout
from regard.models.pooling import Answer, EncoderConfig, at_least
from regard.models.transformer import Block, Prediction, Stack, _pack, second, settle, through
from regard.spec import over_layers


@dataclass(frozen=True)
class TokenLearnerConfig(EncoderConfig):
    """What such a model is made of. `attention` takes specs of role "self", repeated over all layers."""

    kind: Literal["tokenlearner"] = "tokenlearner"
    layers: int = 12  # in all
    learn_after: int | None = None  # layers before the tokens are learnt; None: half of them
    tokens: int = 8  # learnt tokens
    learner_inner: int = 64  # width inside what learns and what spreads them

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, layers=2, tokens=1, learner_inner=1)
        if not 1 <= self.before < self.layers:
            raise ValueError(
                f"learn_after must leave layers on both sides: 1 to {self.layers - 1} of {self.layers}, "
                f"got {self.learn_after}"
            )

    @property
    def before(self) -> int:
        return self.layers // 2 if self.learn_after is None else self.learn_after


class Scores(nn.Module):
    """One number of each token for each learnt one: MLP(LN(x)), [B, T, E] -> [B, T, S]."""

    def __init__(self, config: TokenLearnerConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.inner = nn.Linear(config.width, config.learner_inner)
        self.outer = nn.Linear(config.learner_inner, config.tokens)
        self.dropout = Dropout(config.dropout)
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(F.gelu(self.inner(self.norm(x)))))


class Learner(nn.Module):
    """z_s = sum_t softmax_t(MLP(LN(x))_ts) x_t: [B, T, E] -> [B, S, E], of the real tokens."""

    def __init__(self, config: TokenLearnerConfig):
        super().__init__()
        self.scores = Scores(config)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.map(x, rows).to(x.dtype) @ x

    def map(self, x: Tensor, rows: Rows) -> Tensor:
        """How much of each token goes into each learnt one, [B, S, T]."""
        real = rows.real()
        return masked_softmax(self.scores(x).mT, None if real is None else real[:, None])


class Fuser(nn.Module):
    """y_t = sum_s sigmoid(MLP(LN(x)))_ts u_s, u = LN(W LN(z)) with W [S, S] across the learnt tokens, zero at first."""

    def __init__(self, config: TokenLearnerConfig):
        super().__init__()
        self.before, self.after = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.across = nn.Linear(config.tokens, config.tokens)
        nn.init.zeros_(self.across.weight)
        nn.init.zeros_(self.across.bias)
        self.scores = Scores(config)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        u = self.after(self.across(self.before(z).mT).mT)
        return torch.sigmoid(self.scores(x)) @ u


class TokenLearner(nn.Module):
    """Ryoo et al. 2021 (arXiv 2106.11297), in the authors' version 1.1, which needs no grid of pixels.

    `learn_after` layers see all N tokens x. Then S tokens are learnt, each a mean of all with weights that they decide,

        z_s = sum_t softmax_t(MLP(LN(x))_ts) x_t,

    and the other layers see only those. With classes they are pooled. Without, TokenFuser gives them back to where the
    N tokens are, x + sum_s sigmoid(MLP(LN(x)))_s LN(W LN(z))_s, to predict each of them. Not causal: a learnt token
    knows the whole sequence. The learnt ones have no order, so that positions inside attention act before them only.
    Time N E R for R = learner_inner once, then S^2 a layer; memory N.

    >>> model = TokenLearner(TokenLearnerConfig(vocabulary=8000, tokens=8, classes=2))
    >>> logits = model(ids, keep=keep).logits
    """

    def __init__(self, config: TokenLearnerConfig):
        super().__init__()
        self.config = config
        specs, feeds = (over_layers(part, config.layers) for part in (config.attention, config.feedforward))
        before = config.before
        self.first = Stack(config.layer(), config.vocabulary, before, specs[:before], None, feeds[:before])
        # pre-norm layers are followed by one norm, behind the last of them
        self.first.norm = nn.Identity()
        self.learner = Learner(config)
        unplaced = config.layer(position="none")
        self.blocks = nn.ModuleList(
            Block(unplaced, spec, None, feedforward=feed)
            for spec, feed in zip(specs[before:], feeds[before:], strict=True)
        )
        settle(self.blocks)
        self.fuser = Fuser(config) if config.classes is None else None
        self.dropout = Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.answer = Answer(config, self.first.embedding, config.width)

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None) -> Prediction:
        """ids [B, T] -> logits [B, T, V], or [B, classes]"""
        packed, rows = _pack(tokens, keep)
        first = self.first(packed, rows)
        z = self.learner(first.y, rows)
        out = through(self.blocks, z, Rows.full(z))
        y, count = out.y, None
        if self.fuser is not None:
            y = first.y + self.dropout(self.fuser(y, first.y))
            count = None if keep is None else rows.count
        logits, pooled = self.answer(Memory(self.norm(y), count), keep)
        return Prediction(logits, *second({"first": first, "learnt": out, "pooling": pooled}))

    def map(self, tokens: Tensor, *, keep: Tensor | None = None) -> Tensor:
        """How much of each token goes into each learnt one, [B, S, T]."""
        packed, rows = _pack(tokens, keep)
        found = self.learner.map(self.first(packed, rows).y, rows)
        return found if keep is None else unpack(found, keep[:, None], dim=2)
