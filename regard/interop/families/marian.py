"""Marian and Pegasus: encoder-decoders with sinusoids."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from regard.core.rows import Rows
from regard.core.shape import Shape
from regard.interop.families.base import (
    ROW,
    Family,
    Link,
    Tensors,
    Values,
    dense_spec,
    link,
    link_output,
    published_activation,
)
from regard.models.config import ModelConfig
from regard.spec import POSITIONS


@dataclass(frozen=True, kw_only=True)
class MarianFamily(Family):
    """Marian (norms after each sublayer) and Pegasus (norms before it)."""

    two_vocabularies: bool  # source and target may have one each
    stores_sinusoids: bool  # their file holds the table of positions

    def constants(self, config: ModelConfig, values: Values) -> Tensors:
        if not self.stores_sinusoids:
            return {}
        zeros = torch.zeros(1, values["max_position_embeddings"], config.width)
        scheme = POSITIONS.build("sinusoidal(layout='halves')", Shape.of(width=config.width, heads=config.heads))
        table = scheme.add(zeros, Rows.full(zeros))[0]
        return {f"{name}.embed_positions.weight": table.clone() for name in ("encoder", "decoder")}

    def our_settings(self, values: Values, names: set[str]) -> Values:
        for name in ("attention_heads", "ffn_dim"):
            if values.get(f"encoder_{name}") != values.get(f"decoder_{name}"):
                raise ValueError(f"{self.name} with encoder_{name} unlike decoder_{name} is not known here")
        shared = not self.two_vocabularies or values.get("share_encoder_decoder_embeddings", True)
        return {
            "decoder_layers": values["decoder_layers"],
            "target_vocabulary": None if shared else values.get("decoder_vocab_size") or values["vocab_size"],
            "feedforward": dense_spec(values.get("activation_function", "gelu")),
        }

    def their_settings(self, config: ModelConfig, values: Values) -> Values:
        decoder_layers = config.layers if config.decoder_layers is None else config.decoder_layers
        vocabularies = {
            "share_encoder_decoder_embeddings": config.target_vocabulary is None,
            "decoder_vocab_size": config.target_vocabulary or config.vocabulary,
        }
        return (vocabularies if self.two_vocabularies else {}) | {
            "is_encoder_decoder": True,
            "decoder_layers": decoder_layers,
            "decoder_attention_heads": config.heads,
            "decoder_ffn_dim": config.inner,
            "activation_function": published_activation(config),
            "attention_dropout": 0.0,
            "max_position_embeddings": values.get("max_position_embeddings", 512),
        }

    def links(self, config: ModelConfig, values: Values) -> Iterator[Link]:
        shared = config.target_vocabulary is None
        names = {"encoder": config.layers, "decoder": values["decoder_layers"]}
        tables = {"shared": "encoder"} if shared else {f"{name}.embed_tokens": name for name in names}
        for theirs, ours in tables.items():
            yield from link(theirs, f"{ours}.embedding", bias=False)
        for stack, layers in names.items():
            attentions = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if stack == "decoder" else {})
            for n in range(layers):
                theirs, ours = f"{stack}.layers.{n}", f"{stack}.blocks.{n}"
                for k, (place, own) in enumerate(attentions.items()):
                    for name in "qkv":
                        yield from link(f"{theirs}.{place}.{name}_proj", f"{ours}.{own}.project.{name}")
                    yield from link(f"{theirs}.{place}.out_proj", f"{ours}.{own}.output")
                    yield from link(f"{theirs}.{place}_layer_norm", f"{ours}.norms.{k}")
                yield from link(f"{theirs}.fc1", f"{ours}.feedforward.inner")
                yield from link(f"{theirs}.fc2", f"{ours}.feedforward.outer")
                yield from link(f"{theirs}.final_layer_norm", f"{ours}.norms.{len(attentions)}")
            if config.norm == "pre":
                yield from link(f"{stack}.layer_norm", f"{stack}.norm")
        yield Link("final_logits_bias", ("output.bias",), ROW)
        yield from link_output("lm_head", config)


MARIAN_FIELDS = {
    "vocabulary": ("vocab_size", 58101),
    "width": ("d_model", 1024),
    "heads": ("encoder_attention_heads", 16),
    "layers": ("encoder_layers", 12),
    "inner": ("encoder_ffn_dim", 4096),
    "dropout": ("dropout", 0.1),
    "scaled_embedding": ("scale_embedding", False),
}
MARIAN_ALWAYS = {
    "kind": "encoder-decoder",
    "bias": True,
    "head_bias": True,
    "position": "sinusoidal(layout='halves')",
}
MARIAN_REQUIRED = {"tie_word_embeddings": True}
MARIAN_UNUSED = (r"(encoder|decoder)\.embed_positions\.weight", r"(encoder|decoder)\.embed_tokens\.weight")

MARIAN = MarianFamily(
    name="marian",
    architecture="MarianMTModel",
    task="translate",
    prefix="model.",
    fields=MARIAN_FIELDS,
    always=MARIAN_ALWAYS | {"norm": "post"},
    required=MARIAN_REQUIRED | {"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False},
    unused=MARIAN_UNUSED,
    two_vocabularies=True,
    stores_sinusoids=False,
)


PEGASUS = MarianFamily(
    name="pegasus",
    architecture="PegasusForConditionalGeneration",
    task="translate",
    prefix="model.",
    fields=MARIAN_FIELDS,
    always=MARIAN_ALWAYS | {"norm": "pre"},
    required=MARIAN_REQUIRED,
    unused=MARIAN_UNUSED,
    two_vocabularies=False,
    stores_sinusoids=True,
)
