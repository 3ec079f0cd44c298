"""TokenLearner: half-way through, a Transformer replaces its tokens by a few learned ones.

Padding is met once, on token ids, as in the Transformer: a padded token goes into none of the learned ones.
"""

from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.numeric import masked_softmax
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows, unpack
from regard.core.state import Out
from regard.kernels.dropout import Dropout
from regard.models.block import Block, gather_auxiliary
from regard.models.modules import ModuleListOf
from regard.models.pooling import Answer, EncoderConfig
from regard.models.stack import Stack, forward_blocks, link_layers
from regard.models.transformer import pack_ids
from regard.spec import over_layers


@config_dataclass
class TokenLearnerConfig(EncoderConfig):
    """The config of a TokenLearner. `attention` takes specs of role "self", repeated over all layers."""

    kind: Literal["tokenlearner"] = "tokenlearner"
    layers: Annotated[int, "number of layers in all", Range(2)] = 12
    learn_after: Annotated[int | None, "layers before the tokens are learned (default: half of them)"] = None
    tokens: Annotated[int, "learned tokens", Range(1)] = 8
    learner_inner: Annotated[int, "hidden width of the MLPs that learn the tokens and give them back", Range(1)] = 64
    fuse: Annotated[
        Literal["layers", "end"] | None,
        "layers: every layer from the learner on learns tokens and gives them back; end: they are learned once, and "
        "given back behind the last layer where there are no classes (default: layers without classes, end with them)",
    ] = None
    version: Annotated[Literal["1.0", "1.1"], "version of the learner: convolutions, as in the paper, or an MLP"] = (
        "1.1"
    )
    grid: Annotated[int | None, "version 1.0: the number of tokens in a line of the image", Range(1)] = None
    earlier: ClassVar[dict[str, Any]] = {"fuse": "end"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fuse not in ("layers", "end", None):
            raise ValueError(f"fuse must be 'layers' or 'end' or None, got {self.fuse!r}")
        if (self.grid is None) == (self.version == "1.0"):
            if self.grid is None:
                raise ValueError("version '1.0' needs grid, the number of tokens in a line of the image")
            raise ValueError(f"grid is for version '1.0', got version {self.version!r}")
        if not 1 <= self.before < self.layers:
            raise ValueError(
                f"learn_after must leave layers on both sides: 1 to {self.layers - 1} of {self.layers}, "
                f"got {self.learn_after}"
            )

    @property
    def before(self) -> int:
        return self.layers // 2 if self.learn_after is None else self.learn_after

    @property
    def fuses(self) -> str:
        return self.fuse or ("layers" if self.classes is None else "end")


class LearnerConfig(Protocol):
    """What a config says of learned tokens, in a model of texts or of images."""

    @property
    def width(self) -> int: ...

    @property
    def dropout(self) -> float: ...

    @property
    def tokens(self) -> int: ...

    @property
    def learner_inner(self) -> int: ...

    @property
    def grid(self) -> int | None: ...


class Scores(nn.Module):
    """One score of each token for each learned one: MLP(LN(x)), [B, T, E] -> [B, T, S]."""

    def __init__(self, config: LearnerConfig):
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

    def __init__(self, config: LearnerConfig):
        super().__init__()
        self.scores = Scores(config)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.map(x, rows).to(x.dtype) @ x

    def map(self, x: Tensor, rows: Rows) -> Tensor:
        """How much of each token goes into each learned one, [B, S, T]."""
        real = rows.real()
        return masked_softmax(self.scores(x).mT, None if real is None else real[:, None])


class GridLearner(nn.Module):
    """z_s = sum_t sigmoid(C(LN(x)))_ts x_t, where C are four convolutions of 3 x 3 to S maps, with GELU between them
    and no biases, over tokens that lie in lines of `grid`; what is padded is zero to each of them."""

    def __init__(self, config: LearnerConfig):
        super().__init__()
        assert config.grid is not None, "version 1.0 needs a grid"
        self.grid = config.grid
        self.norm = nn.LayerNorm(config.width)
        widths = [config.width, *[config.tokens] * 3]
        self.kernels = nn.ParameterList(
            nn.init.xavier_uniform_(torch.empty(config.tokens, width, 3, 3)) for width in widths
        )

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.map(x, rows).to(x.dtype) @ x

    def map(self, x: Tensor, rows: Rows) -> Tensor:
        """How much of each token goes into each learned one, [B, S, T]."""
        real, T = rows.real(), x.shape[1]
        lines = -(-T // self.grid)
        there = torch.ones(1, T, device=x.device, dtype=torch.bool) if real is None else real
        there = F.pad(there, (0, lines * self.grid - T)).unflatten(1, (lines, self.grid))[:, None]
        maps = F.pad(self.norm(x).mT, (0, lines * self.grid - T)).unflatten(2, (lines, self.grid))
        for index, kernel in enumerate(self.kernels):
            maps = F.conv2d(torch.where(there, F.gelu(maps) if index else maps, 0), kernel.to(maps.dtype), padding=1)
        found = torch.sigmoid(maps).flatten(2)[..., :T]
        return found if real is None else torch.where(real[:, None], found, 0)


class Fuser(nn.Module):
    """y_t = sum_s sigmoid(MLP(LN(x)))_ts u_s, u = LN(W LN(z)) with W [S, S] across the S tokens, zero at first."""

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


class TokenLearner(Model):
    """Ryoo et al. 2021 (arXiv 2106.11297), by default in the authors' version 1.1, which needs no grid of pixels.

    `learn_after` layers see all N tokens x. Each layer after them sees S tokens that are learned from all, each a mean
    with weights that the tokens decide, and TokenFuser gives what the layer makes of them back to all,

        z_s = sum_t softmax_t(MLP(LN(x))_ts) x_t,    x <- x + sum_s sigmoid(MLP(LN(x)))_s LN(W LN(layer(z)))_s,

    as in the authors' EncoderModFuser (fuse="layers"). With classes the default is their EncoderMod (fuse="end"):
    tokens are learned once, the other layers see only those, and they are pooled; without classes, fuse="end" gives
    them back behind the last layer, which the authors do not. Version 1.0, the paper's, has z_s = sum_t
    sigmoid(C(LN(x)))_ts x_t with four convolutions C over the tokens as a `grid`. In the authors' code the GELU is the
    one by tanh, and scores have dropout as well.

    Not causal: a learned token knows the whole sequence. The learned ones have no order, so that positions inside
    attention act before them only. Time N E R for R = learner_inner, once or in each layer, and S^2 per layer; memory
    N.

    >>> model = TokenLearner(TokenLearnerConfig(vocabulary=8000, tokens=8, classes=2))
    >>> logits = model(ids, keep=keep).logits
    """

    def __init__(self, config: TokenLearnerConfig):
        super().__init__()
        self.config: TokenLearnerConfig = config
        specs, feeds = (over_layers(part, config.layers) for part in (config.attention, config.feedforward))
        before = config.before
        self.first = Stack(config.layer(), config.vocabulary, before, specs[:before], None, feeds[:before])
        # pre-norm layers are followed by one norm, behind the last of them
        self.first.norm = nn.Identity()
        unplaced = config.layer(position="none")
        self.blocks: ModuleListOf[Block] = ModuleListOf(
            Block(unplaced, spec, None, feedforward=feed)
            for spec, feed in zip(specs[before:], feeds[before:], strict=True)
        )
        link_layers(self.blocks)
        learner = Learner if config.version == "1.1" else GridLearner
        self.learner: Learner | GridLearner | None = None
        self.fuser: Fuser | None = None
        if config.fuses == "layers":
            self.learners: ModuleListOf[Learner | GridLearner] = ModuleListOf(learner(config) for _ in self.blocks)
            self.fusers: ModuleListOf[Fuser] = ModuleListOf(Fuser(config) for _ in self.blocks)
        else:
            self.learner = learner(config)
            self.fuser = Fuser(config) if config.classes is None else None
        self.dropout = Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.answer = Answer(config, self.first.embedding, config.width)

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None) -> Prediction:
        """ids [B, T] -> logits [B, T, V], or [B, classes]"""
        if self.config.classes is None:
            return self.answer.at_tokens(self.hidden(tokens, keep=keep), keep)
        y, outs, count = self._read(tokens, keep)
        logits, pooled = self.answer(Memory(y, None if keep is None else count))
        return Prediction(logits, *gather_auxiliary(outs | {"pooling": pooled}))

    @property
    def output(self) -> nn.Linear:
        """The output layer."""
        return self.answer.output

    def hidden(self, tokens: Tensor, *, keep: Tensor | None = None) -> Hidden:
        """What the output layer reads where there are no classes, with the real tokens of each row on the left."""
        self.answer.check_tokens()
        y, outs, _ = self._read(tokens, keep)
        return Hidden(y, *gather_auxiliary(outs))

    def _read(self, tokens: Tensor, keep: Tensor | None) -> tuple[Tensor, dict[str, Out], Tensor | None]:
        """What all layers make of the tokens, the auxiliary outputs, and how many vectors of a row are real."""
        packed, rows = pack_ids(tokens, keep)
        first = self.first(packed, rows)
        y, out, count = self._learned(first.y, rows)
        return self.norm(y), {"first": first, "learned": out}, count

    def _learned(self, x: Tensor, rows: Rows) -> tuple[Tensor, Out, Tensor | None]:
        """What the layers from the learner on make of x, the auxiliary outputs of the layers, and how many tokens of
        a row are real where it has its length again."""
        if self.learner is not None:
            z = self.learner(x, rows)
            out = forward_blocks(self.blocks, z, Rows.full(z))
            if self.fuser is None:
                return out.y, out, None
            return x + self.dropout(self.fuser(out.y, x)), out, rows.count
        outs = {}
        for index in range(len(self.blocks)):
            x, outs[str(index)] = self._fused(index, x, rows)
        return x, Out(x, None, None, *gather_auxiliary(outs)), rows.count

    def _fused(self, index: int, x: Tensor, rows: Rows) -> tuple[Tensor, Out]:
        """One layer that learns tokens, applies a block to them and gives them back."""
        z = self.learners[index](x, rows)
        out = self.blocks[index](z, Rows.full(z))
        return x + self.dropout(self.fusers[index](out.y, x)), out

    def map(self, tokens: Tensor, *, keep: Tensor | None = None, layer: int = 0) -> Tensor:
        """How much of each token goes into each learned one, [B, S, T]; of which layer that learns some."""
        learners = [self.learner] if self.learner is not None else self.learners
        if not 0 <= layer < len(learners):
            which = "0, the tokens are learned once" if len(learners) == 1 else f"0 to {len(learners) - 1}"
            raise ValueError(f"layer must be {which}, got {layer}")
        packed, rows = pack_ids(tokens, keep)
        x = self.first(packed, rows).y
        for index in range(layer):
            x, _ = self._fused(index, x, rows)
        found = learners[layer].map(x, rows)
        return found if keep is None else unpack(found, keep[:, None], dim=2)
