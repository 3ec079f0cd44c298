"""The config of a Transformer. That of every other model is beside the model."""

from collections.abc import Sequence
from typing import Annotated, Literal

from regard.core.options import Range, check_options, config_dataclass
from regard.core.shape import Bias
from regard.spec import use_canonical_names

Specs = str | Sequence[str]
Norm = Annotated[
    Literal["post", "pre"],
    "position of the norm: post, after the residual as in the paper, or pre, before the sublayer",
]


def check_config(config: object, section: str = "") -> None:
    """Refuses a config with a value that its field does not take. Aliases in specs become the names they stand for, so
    that saved configs have one name for one thing."""
    check_options(config, section)
    use_canonical_names(config)


@config_dataclass
class ModelConfig:
    """The config of a Transformer. Attentions and feed-forward layers take a spec, or a list of specs that is repeated
    over the layers."""

    kind: Literal["encoder", "decoder", "encoder-decoder"] = "encoder-decoder"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    target_vocabulary: Annotated[int | None, "tokens of the target's own vocabulary (default: shared)", Range(1)] = None
    width: Annotated[int, "model width (d_model)", Range(1)] = 512
    heads: Annotated[int, "heads of each attention", Range(1)] = 8
    kv_heads: Annotated[int | None, "key and value heads, fewer than heads to share them", Range(1)] = None
    head_width: Annotated[int | None, "width of a head (default: width / heads)", Range(1)] = None
    inner: Annotated[int, "feed-forward width (d_ff)", Range(1)] = 2048
    layers: Annotated[int, "number of layers; of an encoder-decoder, in the encoder and in the decoder", Range(1)] = 6
    decoder_layers: Annotated[int | None, "number of decoder layers (default: layers)", Range(1)] = None
    attention: Annotated[Specs, "spec of the attention, or a list repeated over the layers"] = "softmax"
    decoder_attention: Annotated[Specs | None, "spec of the decoder's self-attention (default: as attention)"] = None
    cross_attention: Annotated[Specs, "spec of the attention from target to source"] = "softmax"
    position: Annotated[str, "spec of the positions, such as sinusoidal, rotary, alibi"] = "sinusoidal"
    norm: Norm = "post"
    norm_kind: Annotated[Literal["layer", "rms"], "kind of the norms: layer norm or RMSNorm"] = "layer"
    norm_epsilon: Annotated[float, "epsilon of the norms, added to the variance", Range(above=0)] = 1e-5
    final_norm: Annotated[bool | None, "a final norm after the last layer (default: where norm is pre)"] = None
    feedforward: Annotated[
        Specs, "spec of the feed-forward layers, or a list repeated over them, such as \"dense(activation='gelu')\""
    ] = "dense"
    decoder_feedforward: Annotated[
        Specs | None, "spec of the decoder's feed-forward layers (default: as feedforward)"
    ] = None
    short_convolution: Annotated[
        int,
        "tokens of a depthwise convolution before each self-attention, over the last tokens in a decoder and around "
        "each in an encoder; 0: none",
        Range(0),
    ] = 0
    reversible: Annotated[
        bool, "reversible layers, recomputed in the backward pass, so that depth costs no memory; with norm pre"
    ] = False
    bias: Annotated[
        Bias,
        "biases of the projections of attention; inputs: of queries, keys and values only; output: of the output only",
    ] = False
    scaled_embedding: Annotated[bool, "token embeddings times the square root of width, as in the paper"] = True
    normed_embedding: Annotated[bool, "a norm over the sum of token and position embeddings, as in BERT"] = False
    segments: Annotated[int, "number of segments, each with a learned embedding added to its tokens", Range(0)] = 0
    stems: Annotated[
        int, "stems per token, whose embeddings are added to its own: the beginnings of a word, see Tokenizer", Range(0)
    ] = 0
    dropout: Annotated[float, "dropout of the embeddings and of what each sublayer adds", Range(0, below=1)] = 0.1
    tied: Annotated[bool, "the output layer shares its weights with the token embedding"] = True
    head: Annotated[
        Literal["linear", "transform", "none"],
        "transform: a dense layer, GELU and a norm before the output layer, as in BERT; none: no logits",
    ] = "linear"
    head_bias: Annotated[bool, "a bias for each token, added to its logit"] = False
    pooler: Annotated[bool, "a pooler: a dense layer and tanh over the first token, as in BERT"] = False
    aligner: Annotated[bool, "an extra layer that learns word alignments beside the translation"] = False

    def __post_init__(self) -> None:
        check_config(self)
        if self.reversible and self.norm != "pre":
            raise ValueError(
                "reversible layers need norm='pre', got norm='post': a norm after the residual cannot be undone"
            )
        for names, kind in ((("segments", "stems", "pooler"), "encoder"), (("aligner",), "encoder-decoder")):
            for name in names:
                if getattr(self, name) and self.kind != kind:
                    raise ValueError(f"{name} is for kind {kind!r}, got kind {self.kind!r}")
        if self.target_vocabulary is not None and self.kind != "encoder-decoder":
            raise ValueError(f"target_vocabulary is for kind 'encoder-decoder', got kind {self.kind!r}")
        if self.head == "none" and (self.kind != "encoder" or self.head_bias):
            got = f"kind {self.kind!r}" if self.kind != "encoder" else "head_bias"
            raise ValueError(f"head 'none' is for an encoder that gives vectors and no logits, got {got}")
