"""BERT, DistilBERT and RoBERTa: encoders that differ in names."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from regard.interop.families.base import (
    Family,
    Link,
    Values,
    dense_spec,
    link,
    link_output,
    published_activation,
    skip_rows,
    table_length,
)
from regard.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class EncoderFamily(Family):
    """BERT and its successors. Each dictionary is theirs -> ours."""

    activation: str
    position_offset: Callable[[Values], int] = lambda values: 0  # rows of their table before position 0
    embedding: dict[str, str]
    layer: dict[str, str]
    layers: str
    head: dict[str, str]
    head_bias: str
    decoder: str
    pooler: str | None = None

    def our_settings(self, values: Values, names: set[str]) -> Values:
        has_head = self.head_bias in names
        if values.get("type_vocab_size") == 0:
            raise ValueError(f"{self.name} needs at least one segment, got type_vocab_size=0")
        if has_head and values.get(self.activation, "gelu") != "gelu":
            got = values[self.activation]
            raise ValueError(
                f"{self.name} with {self.activation}={got!r} has a head that is not known here, only 'gelu'"
            )
        rows = values.get("max_position_embeddings", 512) - self.position_offset(values)
        return {
            "head": "transform" if has_head else "none",
            "head_bias": has_head,
            "pooler": self.pooler is not None and f"{self.pooler}.weight" in names,
            "position": f"learned(longest={rows})",
            "feedforward": dense_spec(values.get(self.activation, "gelu")),
        }

    def their_settings(self, config: ModelConfig, values: Values) -> Values:
        bare = self.architecture.replace("ForMaskedLM", "Model")
        return {
            "architectures": [bare if config.head == "none" else self.architecture],
            "max_position_embeddings": table_length(config) + self.position_offset(values),
            self.activation: published_activation(config),
        }

    def links(self, config: ModelConfig, values: Values) -> Iterator[Link]:
        for theirs, ours in self.embedding.items():
            yield from link(f"embeddings.{theirs}", f"encoder.{ours}", bias=ours.endswith("norm"))
        table = skip_rows(self.position_offset(values))
        yield Link("embeddings.position_embeddings.weight", ("encoder.position.table",), table)
        for n in range(config.layers):
            for theirs, ours in self.layer.items():
                yield from link(f"{self.layers}.{n}.{theirs}", f"encoder.blocks.{n}.{ours}")
        if config.pooler and self.pooler is not None:
            yield from link(self.pooler, "pooler")
        if config.head == "transform":
            for theirs, ours in self.head.items():
                yield from link(theirs, ours)
            for name in self._biases(config):
                yield Link(name, ("output.bias",))
            yield from link_output(self.decoder, config)

    def _biases(self, config: ModelConfig) -> list[str]:
        """Their names for the bias of the output layer. An output layer that is not tied has a bias of its own, listed
        last, which is the one that counts. Older versions tied the two biases."""
        names = [self.head_bias] if config.tied else [self.head_bias, f"{self.decoder}.bias"]
        return list(dict.fromkeys(names))

    def aliases(self, config: ModelConfig) -> dict[str, str]:
        return {name: self.head_bias for name in self._biases(config)[1:]}


def _after_padding(values: Values) -> int:
    """RoBERTa counts positions from the id of padding on."""
    padding = values.get("pad_token_id")
    return (1 if padding is None else padding) + 1


BERT_FIELDS = {
    "vocabulary": ("vocab_size", 30522),
    "width": ("hidden_size", 768),
    "heads": ("num_attention_heads", 12),
    "layers": ("num_hidden_layers", 12),
    "inner": ("intermediate_size", 3072),
    "norm_epsilon": ("layer_norm_eps", 1e-12),
    "segments": ("type_vocab_size", 2),
    "dropout": ("hidden_dropout_prob", 0.1),
    "tied": ("tie_word_embeddings", True),
}
BERT_ALWAYS = {"kind": "encoder", "norm": "post", "bias": True, "scaled_embedding": False, "normed_embedding": True}
BERT_REQUIRED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
BERT_EMBEDDING = {
    "word_embeddings": "embedding",
    "token_type_embeddings": "segments",
    "LayerNorm": "embedding_norm",
}
BERT_LAYER = {
    "attention.self.query": "attention.project.q",
    "attention.self.key": "attention.project.k",
    "attention.self.value": "attention.project.v",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "norms.0",
    "intermediate.dense": "feedforward.inner",
    "output.dense": "feedforward.outer",
    "output.LayerNorm": "norms.1",
}

BERT = EncoderFamily(
    name="bert",
    architecture="BertForMaskedLM",
    task="masked",
    prefix="bert.",
    fields=BERT_FIELDS,
    always=BERT_ALWAYS,
    required=BERT_REQUIRED,
    unused=(r"cls\.seq_relationship\..*", r"cls\.predictions\.decoder\.bias", r"embeddings\.position_ids"),
    activation="hidden_act",
    embedding=BERT_EMBEDDING,
    layer=BERT_LAYER,
    layers="encoder.layer",
    head={
        "cls.predictions.transform.dense": "transform.dense",
        "cls.predictions.transform.LayerNorm": "transform.norm",
    },
    head_bias="cls.predictions.bias",
    decoder="cls.predictions.decoder",
    pooler="pooler.dense",
)


DISTILBERT = EncoderFamily(
    name="distilbert",
    architecture="DistilBertForMaskedLM",
    task="masked",
    prefix="distilbert.",
    fields={
        "vocabulary": ("vocab_size", 30522),
        "width": ("dim", 768),
        "heads": ("n_heads", 12),
        "layers": ("n_layers", 6),
        "inner": ("hidden_dim", 3072),
        "dropout": ("dropout", 0.1),
        "tied": ("tie_word_embeddings", True),
    },
    always=BERT_ALWAYS | {"norm_epsilon": 1e-12},
    unused=(r"embeddings\.position_ids",),
    activation="activation",
    embedding={"word_embeddings": "embedding", "LayerNorm": "embedding_norm"},
    layer={
        "attention.q_lin": "attention.project.q",
        "attention.k_lin": "attention.project.k",
        "attention.v_lin": "attention.project.v",
        "attention.out_lin": "attention.output",
        "sa_layer_norm": "norms.0",
        "ffn.lin1": "feedforward.inner",
        "ffn.lin2": "feedforward.outer",
        "output_layer_norm": "norms.1",
    },
    layers="transformer.layer",
    head={"vocab_transform": "transform.dense", "vocab_layer_norm": "transform.norm"},
    head_bias="vocab_projector.bias",
    decoder="vocab_projector",
)


ROBERTA = EncoderFamily(
    name="roberta",
    architecture="RobertaForMaskedLM",
    task="masked",
    prefix="roberta.",
    fields=BERT_FIELDS | {"vocabulary": ("vocab_size", 50265)},
    always=BERT_ALWAYS,
    required=BERT_REQUIRED,
    unused=(r"lm_head\.decoder\.bias", r"embeddings\.position_ids"),
    activation="hidden_act",
    position_offset=_after_padding,
    embedding=BERT_EMBEDDING,
    layer=BERT_LAYER,
    layers="encoder.layer",
    head={"lm_head.dense": "transform.dense", "lm_head.layer_norm": "transform.norm"},
    head_bias="lm_head.bias",
    decoder="lm_head.decoder",
    pooler="pooler.dense",
)
