"""From a sequence of any length to a few vectors, and what a model makes of them: classes.

Also what the models that change the length have in common: a config, and the layer that answers.
"""

import math
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.numeric import masked_softmax
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows, blank, pack_memory, unpack
from regard.core.state import Out
from regard.models.block import Block, gather_auxiliary
from regard.models.config import ModelConfig, Norm, Specs, check_config
from regard.models.modules import ModuleListOf
from regard.models.stack import forward_blocks, link_layers
from regard.models.transformer import Transformer, pack_ids

How = Literal["pma", "mean", "root", "max", "mean_max", "sequence", "first", "last"]
POOLING = (
    "what is read: pma (learned seeds attend to all tokens), their mean, max, mean_max (both), root (their sum over "
    "the root of their number), sequence (their mean with learned weights), the first or the last"
)


@config_dataclass
class EncoderConfig:
    """What the models share that read a whole sequence and change its length. With `classes` a model answers with
    their logits, [B, classes], from the vectors that `pooling` leaves; without, with logits of the vocabulary at every
    token, [B, T, V]."""

    kind: str = ""
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    classes: Annotated[int | None, "number of classes", Range(2)] = None
    width: Annotated[int, "model width (d_model)", Range(1)] = 512
    heads: Annotated[int, "heads of each attention", Range(1)] = 8
    kv_heads: Annotated[int | None, "key and value heads, fewer than heads to share them", Range(1)] = None
    inner: Annotated[int, "feed-forward width (d_ff)", Range(1)] = 2048
    attention: Annotated[Specs, "spec of the attention, or a list repeated over the layers"] = "softmax"
    position: Annotated[str, "spec of the positions, such as sinusoidal, rotary, alibi"] = "sinusoidal"
    norm: Norm = "pre"
    norm_epsilon: Annotated[float, "epsilon of the norms, added to the variance", Range(above=0)] = 1e-5
    feedforward: Annotated[
        Specs, "spec of the feed-forward layers, or a list repeated over them, such as \"dense(activation='gelu')\""
    ] = "dense(activation='gelu')"
    bias: Annotated[bool, "biases of the projections of attention"] = True
    dropout: Annotated[float, "dropout of the embeddings and of what each sublayer adds", Range(0, below=1)] = 0.1
    tied: Annotated[bool, "without classes: the output layer shares its weights with the token embedding"] = True
    pooling: Annotated[How, POOLING] = "mean"
    seeds: Annotated[int, "pma: number of vectors that it leaves", Range(1)] = 1
    seed_layers: Annotated[int, "pma: layers of self-attention among these vectors", Range(0)] = 0
    earlier: ClassVar[dict[str, Any]] = {}  # fields that a saved run may not name, and what they were then

    def __post_init__(self) -> None:
        expected = type(self).__dataclass_fields__["kind"].default
        if self.kind != expected:
            raise ValueError(f"kind must be {expected!r}, got {self.kind!r}: other kinds have configs of their own")
        check_config(self)
        if self.pooling != "pma" and (self.seeds > 1 or self.seed_layers):
            raise ValueError(f"seeds and seed_layers are for pooling 'pma', got pooling {self.pooling!r}")

    def layer(self, **changes: Any) -> ModelConfig:
        """What a Block reads, perhaps of another width."""
        return layer_config(self, **changes)


def layer_config(config: Any, **changes: Any) -> ModelConfig:
    """What a Block reads of the config of a model: the fields that have the same names there."""
    shared = {field.name for field in fields(ModelConfig)} - {"kind", "layers", "decoder_layers", "cross_attention"}
    own = {field.name: getattr(config, field.name) for field in fields(config) if field.name in shared}
    values: dict[str, Any] = {"kind": "encoder"} | own | changes
    return ModelConfig(**values)


class Pooling(nn.Module):
    """[B, T, E] -> [B, k, E], of the real tokens.

    "mean" is their mean, "root" their sum over the root of their number, which does not shrink with the length, "max"
    the largest of each number, "mean_max" the two side by side (k = 2), "first" and "last" the first and the last of
    them (k = 1), zeros where there is none. "sequence" is the pooling of Hassani et al. 2021 (Compact Transformers,
    arXiv 2104.05704), a mean with weights softmax_t(w . z_t + b). "pma" is pooling by multihead attention of Lee et al.
    2019 (Set Transformer, arXiv 1810.00825): k learned seeds S [k, E] read the sequence Z,

        PMA_k(Z) = MAB(S, rFF(Z)),    MAB(S, Y) = LN(A + rFF(A)),    A = LN(S + Multihead(S, Y, Y)),

    where rFF(Z) = ReLU(Z W + b) and MAB is a layer of the Transformer without self-attention; with norm="pre" its norms
    stand before the sublayers. `layers` of self-attention among the k vectors may follow (the paper's SAB). Where there
    is no token, the seeds read nothing. The authors' code differs from their paper: it has no rFF before the attention
    and one layer in place of the second, adds what is read to the projected queries, divides the logits by the root of
    the whole width, and has norms only if asked to. Time N k, memory N.

    >>> pool = Pooling(ModelConfig(kind="encoder", width=64, heads=4, inner=128), "pma", seeds=4)
    >>> vectors = pool(x, keep=keep)
    """

    def __init__(
        self,
        config: ModelConfig,
        how: How = "pma",
        *,
        seeds: int = 1,
        layers: int = 0,
        attention: str = "softmax",
    ):
        super().__init__()
        if how not in get_args(How):
            raise ValueError(f"pooling must be one of {', '.join(get_args(How))}, got {how!r}")
        if how != "pma" and (seeds != 1 or layers):
            raise ValueError(f"seeds and layers are for pooling 'pma'; {how!r} leaves one vector as it is")
        if seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {seeds}")
        self.how, self.seeds = how, 2 if how == "mean_max" else seeds
        self.blocks: ModuleListOf[Block] = ModuleListOf()
        self.score: nn.Linear | None = None
        if how == "sequence":
            self.score = nn.Linear(config.width, 1)
            nn.init.xavier_uniform_(self.score.weight)
            nn.init.zeros_(self.score.bias)
        if how == "pma":
            self.seed = nn.Parameter(nn.init.xavier_uniform_(torch.empty(seeds, config.width)))
            self.feed = nn.Linear(config.width, config.width)
            nn.init.xavier_uniform_(self.feed.weight)
            nn.init.zeros_(self.feed.bias)
            unplaced = replace(config, position="none")
            self.blocks.append(Block(unplaced, None, attention))
            self.blocks.extend(Block(unplaced, "softmax", None) for _ in range(layers))
            link_layers(self.blocks)

    def forward(self, x: Tensor, *, keep: Tensor | None = None) -> Tensor:
        if x.dim() != 3 or not x.is_floating_point():
            raise ValueError(f"x must be vectors [batch, tokens, width], got {x.dtype} {list(x.shape)}")
        if keep is not None and (keep.dtype != torch.bool or keep.shape != x.shape[:2]):
            expected = list(x.shape[:2])
            raise ValueError(f"keep must be boolean {expected}, True = real token, got {keep.dtype} {list(keep.shape)}")
        return self.forward_packed(pack_memory(x, keep)).y

    def forward_packed(self, memory: Memory) -> Out:
        """The same of rows that are real from the left."""
        x, count = memory.x, memory.count
        if self.how == "pma":
            seeds = self.seed.expand(x.shape[0], -1, -1)
            rows = Rows.full(seeds)
            first = self.blocks[0](seeds, rows, memory=Memory(torch.relu(self.feed(x)), count))
            others = forward_blocks(self.blocks[1:], first.y, rows)
            loss, statistics = gather_auxiliary({"seeds": first, "others": others})
            return Out(others.y, None, None, loss, statistics)
        if not x.shape[1]:
            return Out(x.new_zeros(len(x), self.seeds, x.shape[2]))
        if self.score is not None:
            real = None if count is None else torch.arange(x.shape[1], device=x.device) < count[:, None]
            weights = masked_softmax(self.score(x).mT, None if real is None else real[:, None])
            return Out(weights.to(x.dtype) @ (x if real is None else blank(x, real)))
        if self.how == "first":
            return Out(x[:, :1] if count is None else blank(x[:, :1], count[:, None] > 0))
        if self.how == "last":
            if count is None:
                return Out(x[:, -1:])
            at = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[2])
            return Out(blank(x.gather(1, at), count[:, None] > 0))
        parts = {"mean_max": ("mean", "max")}.get(self.how, (self.how,))
        return Out(torch.cat([_pooled(x, count, part) for part in parts], 1))


def _pooled(x: Tensor, count: Tensor | None, how: str) -> Tensor:
    """The mean, max or root of the first `count` vectors of each row (None: of all), [B, 1, E]."""
    if count is None:
        size = 1.0 if how == "max" else x.shape[1] if how == "mean" else math.sqrt(x.shape[1])
        return x.amax(1, keepdim=True) if how == "max" else x.sum(1, keepdim=True) / size
    real = torch.arange(x.shape[1], device=x.device) < count[:, None]
    if how == "max":
        return blank(x.masked_fill(~real[..., None], -torch.inf).amax(1, keepdim=True), count[:, None] > 0)
    size = count.clamp(min=1)[:, None, None].to(x.dtype)
    return blank(x, real).sum(1, keepdim=True) / (size if how == "mean" else size.sqrt())


class PooledConfig(Protocol):
    """What a config says of its classes, of a model of texts or of images."""

    @property
    def classes(self) -> int | None: ...

    @property
    def pooling(self) -> How: ...

    @property
    def seeds(self) -> int: ...

    @property
    def seed_layers(self) -> int: ...

    @property
    def norm(self) -> Literal["post", "pre"]: ...

    def layer(self, **changes: Any) -> ModelConfig: ...


class Answer(nn.Module):
    """From the vectors of the last layer to logits: of the classes, or at every token of the vocabulary."""

    def __init__(self, config: PooledConfig, embedding: nn.Embedding | None, width: int):
        """`embedding`: that of the tokens; None where there are none, and the model has classes."""
        super().__init__()
        self.pooling: Pooling | None = None
        if config.classes is None:
            assert isinstance(config, EncoderConfig), "without classes a model predicts tokens"
            assert embedding is not None, "a model that predicts tokens reads tokens"
            self.output = nn.Linear(width, config.vocabulary, bias=False)
            if config.tied:
                self.output.weight = embedding.weight
            return
        layer = config.layer(width=width)
        self.pooling = Pooling(layer, config.pooling, seeds=config.seeds, layers=config.seed_layers)
        self.norm = nn.LayerNorm(width) if config.norm == "pre" and config.pooling == "pma" else nn.Identity()
        # each of its vectors has a meaning of its own
        self.output = nn.Linear(self.pooling.seeds * width, config.classes)

    def forward(self, memory: Memory) -> tuple[Tensor, Out]:
        """Rows that are real from the left -> [B, classes], and the auxiliary outputs of the pooling."""
        if self.pooling is None:
            raise ValueError("this model predicts tokens and no classes: build it with classes")
        pooled = self.pooling.forward_packed(memory)
        return self.output(self.norm(pooled.y).flatten(1)), pooled

    def at_tokens(self, hidden: Hidden, keep: Tensor | None) -> Prediction:
        """Logits [B, T, V] at the places that `keep` names."""
        logits = self.output(hidden.x)
        return Prediction(logits if keep is None else unpack(logits, keep), *hidden[1:])

    def check_tokens(self) -> None:
        """Refuses to predict tokens with a model that has classes."""
        if self.pooling is not None:
            raise ValueError("this model predicts classes and no tokens: build it with classes=None")


@config_dataclass
class ClassifierConfig(EncoderConfig):
    """An encoder of the Transformer and a pooling; or, causal, a decoder that is best read at its last token. Post-norm
    layers, ReLU and position="none" make it a Set Transformer, with attention="set" for its induced attention."""

    kind: Literal["classifier"] = "classifier"
    classes: Annotated[int | None, "number of classes", Range(2)] = 2
    layers: Annotated[int, "number of layers", Range(1)] = 6
    causal: Annotated[bool, "causal attention: a token sees only those before it, as in a decoder"] = False
    scaled_embedding: Annotated[bool, "token embeddings times the square root of width, as in the paper"] = True
    final_norm: Annotated[bool | None, "a final norm after the last layer (default: where norm is pre)"] = None
    short_convolution: Annotated[
        int, "tokens of a depthwise convolution before each self-attention, see ModelConfig; 0: none", Range(0)
    ] = 0
    reversible: Annotated[
        bool, "reversible layers, recomputed in the backward pass, so that depth costs no memory; with norm pre"
    ] = False
    stems: Annotated[int, "stems per token, see ModelConfig", Range(0)] = 0
    # the layers of a model that is trained already; None: as the other fields say
    body: ModelConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocabulary", "width") if self.body is not None else ():
            if getattr(self.body, name) != getattr(self, name):
                both = getattr(self, name), getattr(self.body, name)
                raise ValueError(f"{name} must be that of the body, got {both[0]} and {both[1]}")
        if self.classes is None:
            raise ValueError("a classifier needs classes; for logits at every token build ModelConfig(kind='encoder')")


class Classifier(Model):
    """Token ids in, logits of classes out.

    >>> model = Classifier(ClassifierConfig(vocabulary=20, classes=10, attention="set(points=16)", pooling="pma"))
    >>> logits = model(tokens, keep=keep).logits
    """

    def __init__(self, config: ClassifierConfig):
        super().__init__()
        self.config: ClassifierConfig = config
        kind = "decoder" if config.causal else "encoder"
        body = Transformer(config.body or config.layer(kind=kind, layers=config.layers))
        self.stack = body.last_stack
        self.answer = Answer(config, self.stack.embedding, config.width)

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None) -> Prediction:
        """ids [B, T] -> logits [B, classes]"""
        packed, rows = pack_ids(tokens, keep)
        out = self.stack(packed, rows)
        logits, pooled = self.answer(Memory(out.y, None if keep is None else rows.count))
        return Prediction(logits, *gather_auxiliary({"encoder": out, "pooling": pooled}))
