"""CoCa: one model that captions pictures and finds them, an image encoder and a text decoder in two halves.

Padding is met once, on token ids, as in the Transformer. Captions are decoded through `start` and `extend`; the
picture is the memory, computed once.
"""

import math
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows, unpack
from regard.core.shape import Shape
from regard.core.state import Out, Progress
from regard.layers.attention.base import Attention
from regard.layers.attention.checks import check_form
from regard.models.block import Block, gather_auxiliary, normalization
from regard.models.config import ModelConfig, Norm, Specs, check_config
from regard.models.modules import ModuleListOf
from regard.models.recording import Recorder, Recording, take_map
from regard.models.stack import Stack, forward_blocks, initial_states, link_layers
from regard.models.transformer import ModelState, pack_ids
from regard.models.vision.vit import Vit, VitConfig
from regard.spec import ATTENTION, over_layers

TEMPERATURE = 0.07  # of the contrastive loss before training: similarities are divided by it
LARGEST_SCALE = 100.0  # that similarities are multiplied by

MapPlace = Literal["patches", "cross", "pooler", "text", "decoder", "encoder"]


@config_dataclass
class CocaConfig:
    """The config of CoCa. `attention` is that of the image encoder, `decoder_attention` that of both halves of the
    text decoder; each takes a spec, or a list of specs that is repeated over the layers."""

    kind: Literal["coca"] = "coca"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 64000
    image: Annotated[tuple[int, int], "height and width of the pictures in pixels", Range(1, 2**16)] = (288, 288)
    channels: Annotated[int, "channels of the pictures: 3 for colours, 1 for grey", Range(1)] = 3
    patch: Annotated[int, "side of a patch in pixels", Range(1)] = 18
    width: Annotated[int, "model width (d_model)", Range(1)] = 768
    heads: Annotated[int, "heads of each attention", Range(1)] = 12
    kv_heads: Annotated[int | None, "key and value heads, fewer than heads to share them", Range(1)] = None
    inner: Annotated[int, "feed-forward width (d_ff)", Range(1)] = 3072
    layers: Annotated[int, "number of layers of the image encoder", Range(1)] = 12
    text_layers: Annotated[int, "number of decoder layers that see no picture", Range(1)] = 12
    decoder_layers: Annotated[int, "number of decoder layers that read the picture", Range(1)] = 12
    queries: Annotated[int, "learned queries that pool the picture for the captions", Range(1)] = 256
    pooling: Annotated[
        Literal["cascade", "parallel"],
        "the vector of a picture is pooled from the pooled queries (cascade, as in the paper), or from the patches",
    ] = "cascade"
    attention: Annotated[Specs, "spec of the image encoder's attention, or a list repeated over the layers"] = "softmax"
    decoder_attention: Annotated[Specs, "spec of the text decoder's self-attention, or a list"] = "softmax"
    cross_attention: Annotated[Specs, "spec of the attention from the words to the picture, or a list"] = "softmax"
    pooling_attention: Annotated[str, "spec of the attention that pools the picture"] = "softmax"
    position: Annotated[str, "spec of the positions of words, such as sinusoidal, rotary, alibi"] = "sinusoidal"
    image_position: Annotated[
        str, "spec of the positions of patches: learned, sinusoidal, fourier or rotary (of rows and columns), none"
    ] = "learned"
    norm: Norm = "pre"
    norm_epsilon: Annotated[float, "epsilon of the norms, added to the variance", Range(above=0)] = 1e-6
    feedforward: Annotated[
        Specs, "spec of the feed-forward layers, or a list repeated over them, such as \"dense(activation='gelu')\""
    ] = "dense(activation='gelu')"
    dropout: Annotated[float, "dropout of the embeddings and of what each sublayer adds", Range(0, below=1)] = 0.1
    drop_path: Annotated[
        float,
        "stochastic depth of the image encoder: the probability with which its last layer is left out of a picture in "
        "training; it rises linearly from 0 in the first",
        Range(0, below=1),
    ] = 0.0

    def __post_init__(self) -> None:
        if self.kind != "coca":
            raise ValueError(f"kind must be 'coca', got {self.kind!r}: other kinds have configs of their own")
        if not isinstance(self.image, tuple | list) or len(self.image) != 2:
            raise ValueError(f"image must be height and width in pixels, such as [64, 64], got {self.image!r}")
        # configs are frozen
        object.__setattr__(self, "image", tuple(self.image))
        check_config(self)

    def encoder(self) -> VitConfig:
        """The image encoder: without a class token, since the poolers read the patches."""
        names = {field.name for field in fields(VitConfig)} - {"kind", "pooling", "position"}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name in names}
        values: dict[str, Any] = {"classes": None, "pooling": "mean", "position": self.image_position} | own
        return VitConfig(**values)

    def layer(self) -> ModelConfig:
        """What a Block of the text decoder reads."""
        shared = {field.name for field in fields(ModelConfig)} - {"kind", "attention", "layers", "decoder_layers"}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name in shared}
        values: dict[str, Any] = {"kind": "decoder", "bias": True} | own
        return ModelConfig(**values)


class Reading(NamedTuple):
    """What one pass makes of pictures and their captions."""

    words: Hidden  # what the output layer reads
    pictures: Tensor  # [B, E] of length 1
    captions: Tensor  # [B, E] of length 1


class Pooler(nn.Module):
    """Learned queries Q [M, E] read a picture X [B, n, E]: LN(Multihead(LN(Q), LN(X), LN(X))), without a residual."""

    recomputes_alone = True  # as in Block

    def __init__(self, config: CocaConfig, queries: int):
        super().__init__()
        layer = config.layer()
        self.queries = nn.Parameter(torch.randn(queries, config.width))
        self.query_norm, self.memory_norm, self.norm = (normalization(layer) for _ in range(3))
        sizes = {"width": config.width, "heads": config.heads, "kv_heads": config.kv_heads}
        self.attention: Attention = ATTENTION.build(
            config.pooling_attention, Shape.of(role="cross", bias=True, **sizes)
        )
        self.attention.link_layers(None, False, False)

    def forward(self, memory: Memory) -> Out:
        """[B, n, E] -> [B, M, E]"""
        x, keys = self._inputs(memory)
        out = self.attention.forward_packed(x, Rows.full(x), memory=keys)
        return out._replace(y=self.norm(out.y), stream=None)

    def map(self, memory: Memory) -> Tensor:
        """How much of each vector of the memory goes into each query, [B, H, M, n]."""
        x, keys = self._inputs(memory)
        return self.attention.map(x, Rows.full(x), memory=keys)

    def _inputs(self, memory: Memory) -> tuple[Tensor, Memory]:
        x = self.query_norm(self.queries).expand(len(memory.x), -1, -1)
        return x, Memory(self.memory_norm(memory.x), memory.count)


class Coca(Model):
    """Yu et al. 2022, CoCa: Contrastive Captioners are Image-Text Foundation Models (arXiv 2205.01917).

    A ViT reads the patches X of a picture; M learned queries pool them to Z for the captions, and one query pools Z
    (pooling="parallel": X) to the vector v of the picture. The lower half of the decoder reads the words with causal
    attention and sees no picture. Behind the last word of each row it reads a learned [CLS], which sees every word and
    which no word sees; its output, under a norm, is the vector u of the caption. The upper half reads the words again,
    without [CLS], and attends to Z in each layer. Its output layer, which is not the embedding, predicts the next word.
    `read` gives all three in one pass. Training minimises

        -1/2 mean_i (log softmax_j(s v_i . u_j)_i + log softmax_j(s u_i . v_j)_i)
          -2 mean_t log p(y_t | y_<t, Z),

    with v and u of length 1 and s = exp(a) learned from 1 / 0.07 on, at most 100. Time n^2 of n patches, M n, T M and
    T^2 of T words; a state has the keys and values of the words.

    >>> model = Coca(CocaConfig(vocabulary=8000, image=(64, 64), patch=8, layers=4, text_layers=2, decoder_layers=2))
    >>> logits = model(images, tokens, keep=keep).logits
    >>> similarity = model.picture_vectors(images) @ model.caption_vectors(tokens, keep=keep).T
    """

    def __init__(self, config: CocaConfig):
        super().__init__()
        self.config: CocaConfig = config
        layer, below = config.layer(), config.text_layers
        count = below + config.decoder_layers
        specs, feeds = (over_layers(part, count) for part in (config.decoder_attention, config.feedforward))
        self.encoder = Vit(config.encoder())
        self.pooler, self.vector_pooler = Pooler(config, config.queries), Pooler(config, 1)
        # [CLS] is the last row of the embedding
        self.text = Stack(layer, config.vocabulary + 1, below, specs[:below], None, feeds[:below])
        # words go up as they are, [CLS] has a norm of its own
        self.text.norm = nn.Identity()
        crosses = over_layers(config.cross_attention, config.decoder_layers)
        self.decoder: ModuleListOf[Block] = ModuleListOf(
            Block(layer, spec, cross, "causal", feedforward=feed)
            for spec, cross, feed in zip(specs[below:], crosses, feeds[below:], strict=True)
        )
        link_layers(self.decoder)
        is_pre = config.norm == "pre"
        self.text_norm, self.norm = (normalization(layer) if is_pre else nn.Identity() for _ in range(2))
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        # a vector of one: processes that shard a model cannot divide a number
        self.log_scale = nn.Parameter(torch.tensor([-math.log(TEMPERATURE)]))
        self.register_load_state_dict_pre_hook(_widen_scale)

    def forward(self, images: Tensor, tokens: Tensor, *, keep: Tensor | None = None) -> Prediction:
        """Pictures [B, C, h, w] and ids [B, T] -> logits of the next word at each position."""
        x, loss, statistics = self.hidden(images, tokens, keep=keep)
        logits = self.output(x)
        return Prediction(logits if keep is None else unpack(logits, keep), loss, statistics)

    def hidden(self, images: Tensor, tokens: Tensor, *, keep: Tensor | None = None) -> Hidden:
        """`forward` before the output layer, with the real words of each row on the left."""
        packed, rows = self._pack(tokens, keep)
        check_pictures_match(images, tokens)
        encoded, read = self._encode_pictures(images), self.text(packed, rows)
        return self._decode_words(read.y, rows, encoded, {"text": read})

    def read(self, images: Tensor, tokens: Tensor, *, keep: Tensor | None = None) -> Reading:
        """What captions are predicted from, and the vectors of pictures and captions, in one pass."""
        packed, rows = self._pack(tokens, keep)
        check_pictures_match(images, tokens)
        encoded = self._encode_pictures(images)
        picture = self._pool_vector(encoded)
        read, caption = self._read_text(packed, rows)
        words = self._decode_words(read.y[:, :-1], rows, encoded, {"text": read, "vector_pooler": picture})
        return Reading(words, unit(picture.y[:, 0]), unit(caption))

    def scale(self) -> Tensor:
        """What similarities are multiplied by."""
        most = math.log(LARGEST_SCALE)
        # beyond the bound the value is cut and the gradient is not, so that training can lead back
        cut = self.log_scale + (self.log_scale.clamp(max=most) - self.log_scale).detach()
        return cut.exp()[0]

    def picture_vectors(self, images: Tensor) -> Tensor:
        """[B, E] of length 1: comparable with those of captions by their product."""
        return unit(self._pool_vector(self._encode_pictures(images)).y[:, 0])

    def caption_vectors(self, tokens: Tensor, *, keep: Tensor | None = None) -> Tensor:
        """[B, E] of length 1; no picture is needed."""
        return unit(self._read_text(*self._pack(tokens, keep))[1])

    def encode(self, images: Tensor) -> Memory:
        """What captions are decoded from: the M pooled vectors of each picture."""
        return Memory(self._encode_pictures(images).pooled.y, None)

    # the parts of a pass

    def _encode_pictures(self, images: Tensor) -> "_Encoded":
        x, loss, statistics = self.encoder.hidden(images)
        patches = Memory(x, None)
        return _Encoded(patches, Out(x, auxiliary_loss=loss, statistics=statistics), self.pooler(patches))

    def _pool_vector(self, encoded: "_Encoded") -> Out:
        cascade = self.config.pooling == "cascade"
        return self.vector_pooler(Memory(encoded.pooled.y, None) if cascade else encoded.patches)

    def _pack(self, tokens: Tensor, keep: Tensor | None) -> tuple[Tensor, Rows]:
        packed, rows = pack_ids(tokens, keep)
        last = self.config.vocabulary - 1
        is_checked = packed.device.type == "cpu" and packed.numel() and not torch.compiler.is_compiling()
        if is_checked and int(packed.max()) > last:
            wrong = int(packed.max())
            raise ValueError(
                f"token id {wrong} is not in the vocabulary, which has the ids 0 to {last}: was the text encoded by "
                "another tokenizer?"
            )
        return packed, rows

    def _read_text(self, packed: Tensor, rows: Rows) -> tuple[Out, Tensor]:
        """The lower half over words and [CLS], [B, T + 1, E], and what [CLS] becomes, [B, E]."""
        ids = F.pad(packed, (0, 1)).scatter(1, rows.count[:, None], self.config.vocabulary)
        out = self.text(ids, rows._replace(count=rows.count + 1, T=rows.T + 1))
        at = rows.count[:, None, None].expand(-1, 1, out.y.shape[2])
        return out, self.text_norm(out.y.gather(1, at)[:, 0])

    def _decode_words(self, x: Tensor, rows: Rows, encoded: "_Encoded", outs: dict[str, Out]) -> Hidden:
        """The upper half over words."""
        out = forward_blocks(self.decoder, x, rows, memory=Memory(encoded.pooled.y, None))
        outs = {"encoder": encoded.encoder, "pooler": encoded.pooled, **outs, "decoder": out}
        return Hidden(self.norm(out.y), *gather_auxiliary(outs))

    # decoding

    def start(self, batch: int, *, memory: Memory | None = None, capacity: int | None = None) -> ModelState:
        """The state before the first word. A memory of B pictures also serves k * B rows: beams."""
        if memory is None:
            raise ValueError("a captioner needs memory=model.encode(images)")
        if batch % len(memory.x):
            raise ValueError(f"a memory of {len(memory.x)} rows serves a multiple of them, not a batch of {batch}")
        weight = self.text.embedding.weight
        below = initial_states(self.text.blocks, batch, weight, capacity=capacity)
        above = initial_states(self.decoder, batch, weight, memory=memory, capacity=capacity)
        return ModelState((*below, *above), Progress.initial(batch, weight.device))

    def extend(self, tokens: Tensor, state: ModelState, *, keep: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """New ids [B, n] -> logits [B, n, V] and the next state; the old one is consumed. [CLS] is never read."""
        packed, rows = self._pack(tokens, keep)
        self._check_state(state, len(tokens))
        rows, below = state.progress.place(rows), self.config.text_layers
        read = self.text(packed, rows, states=state.blocks[:below])
        out = forward_blocks(self.decoder, read.y, rows, states=state.blocks[below:])
        logits = self.output(self.norm(out.y))
        after = ModelState((*read.state, *out.state), state.progress.advance(rows))
        return logits if keep is None else unpack(logits, keep), after

    def fixed_state(self, state: ModelState, capacity: int) -> ModelState:
        """As that of the Transformer: a state for steps that are captured as a CUDA graph."""
        pairs = zip(self._self_attentions(), state.blocks, strict=True)
        blocks = (kept._replace(attention=layer.fixed_state(kept.attention, capacity)) for layer, kept in pairs)
        return ModelState(tuple(blocks), state.progress.bounded(capacity))

    def max_words(self) -> int | None:
        """The number of words that it has positions for, beside [CLS], where it is bounded; bos is one of them."""
        parts = [module for part in (self.text, *self._self_attentions()) for module in part.modules()]
        bounds = [longest for part in parts if isinstance(longest := getattr(part, "longest", None), int)]
        return min(bounds) - 1 if bounds else None

    def _blocks(self) -> list[Block]:
        return [*self.text.blocks, *self.decoder]

    def _self_attentions(self) -> list[Attention]:
        return [block.attention for block in self._blocks() if block.attention is not None]

    def _check_state(self, state: Any, batch: int) -> None:
        """Refuses a state of another model, or of a different number of rows."""
        if not isinstance(state, ModelState) or len(state.blocks) != len(self._blocks()):
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        rows = len(state.progress.length)
        if rows != batch:
            raise ValueError(f"tokens have {batch} rows and the state {rows}: select rows to match")
        for layer, kept in zip(self._self_attentions(), state.blocks, strict=True):
            check_form(layer, kept.attention)

    # maps

    def maps(
        self,
        images: Tensor,
        tokens: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        place: MapPlace = "patches",
        recorder: Recorder = take_map,
    ) -> list[Tensor]:
        """What attends to what, [B, H, T, S] per layer. `place`:

        cross    from the words to the pooled queries, in each layer of the upper half
        patches  from the words to the patches: those maps times the mean over heads of the pooler's
        pooler   from the queries to the patches, one map
        text     among the words and [CLS], which is behind the last word of each row, in the lower half
        decoder  among the words, in the upper half
        encoder  among the patches
        """
        if place == "encoder":
            return self.encoder.maps(images, recorder=recorder)
        if place == "pooler":
            patches = self.encoder.encode(images)
            return [recorder(self.pooler, patches)]
        if tokens is None:
            raise ValueError(f"maps of the {place!r} attention need the ids of captions too")
        if place == "patches" and recorder is not take_map:
            raise ValueError("maps to the patches are products of two: a recorder takes those of 'cross' and 'pooler'")
        packed, rows = self._pack(tokens, keep)
        check_pictures_match(images, tokens)
        found = Recording("cross" if place in ("cross", "patches") else "self", recorder)
        if place == "text":
            ids = F.pad(packed, (0, 1)).scatter(1, rows.count[:, None], self.config.vocabulary)
            self.text(ids, rows._replace(count=rows.count + 1, T=rows.T + 1), maps=found)
            return found.results
        encoded = self._encode_pictures(images)
        x = self.text(packed, rows).y
        forward_blocks(self.decoder, x, rows, memory=Memory(encoded.pooled.y, None), maps=found)
        maps = [part if keep is None else unpack(part, keep[:, None], dim=2) for part in found.results]
        if place == "patches":
            return self._through_pooler(maps, encoded)
        layers = [block.attention if place == "decoder" else block.cross for block in self.decoder]
        return [
            unpack(part, keep[:, None, None], dim=3)
            if keep is not None and place == "decoder" and layer is not None and layer.facts.columns == "tokens"
            else part
            for layer, part in zip(layers, maps, strict=True)
        ]

    def _through_pooler(self, maps: list[Tensor], encoded: "_Encoded") -> list[Tensor]:
        """Maps to the pooled queries [B, H, T, M] as maps to the patches [B, H, T, n]."""
        layers = [self.pooler.attention, *(block.cross for block in self.decoder)]
        names = [layer.facts.name for layer in layers if layer is not None and layer.facts.columns != "tokens"]
        if names:
            raise ValueError(
                f"attention {names[0]!r} compresses its keys to slots, which are no patches: look at the maps of "
                "'cross' and 'pooler'"
            )
        pooled = self.pooler.map(encoded.patches).mean(1, keepdim=True)  # [B, 1, M, n]
        return [part @ pooled for part in maps]


def _widen_scale(model: Coca, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
    """The scale of the first runs was a number."""
    if (scale := state.get(f"{prefix}log_scale")) is not None:
        state[f"{prefix}log_scale"] = scale.view(1)


class _Encoded(NamedTuple):
    """Pictures, as patches and as what is pooled of them."""

    patches: Memory
    encoder: Out  # the auxiliary losses of its layers
    pooled: Out


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in float32 or better."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def check_pictures_match(images: Tensor, tokens: Tensor) -> None:
    """Refuses another number of pictures than of captions, which would broadcast."""
    if len(images) != len(tokens):
        raise ValueError(f"images has {len(images)} rows and tokens {len(tokens)}: give one caption for each picture")
