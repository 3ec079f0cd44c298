"""Published architectures as settings of one Transformer: their config and ours, their tensors and ours.

A family says which of its settings are which of ours (`fields`), what all its models have in common (`always`), and
which of our parameters each of its tensors holds (`links`). Both directions follow from that. A model of ours is of a
family if its config goes there and comes back the same.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.limits import MOST, SIZES
from regard.core.rows import Rows
from regard.core.shape import Shape
from regard.models.transformer import ModelConfig
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, Registry, Spec, over_layers, parse

Tensors = dict[str, Tensor]
Values = dict[str, Any]


class Form(NamedTuple):
    """How one tensor of theirs holds those of ours."""

    read: Callable[[Tensor], tuple[Tensor, ...]]
    write: Callable[[tuple[Tensor, ...]], Tensor]


def _turned(tensor: Tensor) -> Tensor:
    return tensor.mT if tensor.dim() == 2 else tensor


PLAIN = Form(lambda tensor: (tensor,), lambda parts: parts[0])
TURNED = Form(lambda tensor: (_turned(tensor),), lambda parts: _turned(parts[0]))  # [in, out], as in GPT-2
THREE = Form(lambda tensor: _turned(tensor).chunk(3), lambda parts: _turned(torch.cat(parts)))  # q, k, v in one
ROW = Form(lambda tensor: (tensor[0],), lambda parts: parts[0][None])  # [1, V]


def behind(rows: int) -> Form:
    """A table whose first rows stand for nothing."""
    return Form(lambda tensor: (tensor[rows:],), lambda parts: F.pad(parts[0], (0, 0, rows, 0)))


class Link(NamedTuple):
    """A tensor of theirs, and the parameters of ours that it holds."""

    theirs: str
    ours: tuple[str, ...]
    form: Form = PLAIN


def link(theirs: str, *ours: str, form: Form = PLAIN, bias: bool = True) -> Iterator[Link]:
    """The weight of a layer, and its bias."""
    for name in ("weight", "bias") if bias else ("weight",):
        yield Link(f"{theirs}.{name}", tuple(f"{part}.{name}" for part in ours), form)


# theirs: ours; of two names for one, the first is written
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def dense(activation: str, **options: bool) -> str:
    """The spec of a feed-forward layer, by their name of its activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation is called {activation!r} here; known: {', '.join(ACTIVATIONS)}")
    return str(Spec("dense", options=(("activation", ACTIVATIONS[activation]), *options.items())))


def activation(config: ModelConfig) -> str:
    """Their name for the activation of ours."""
    ours = option(FEEDFORWARD, over_layers(config.feedforward, config.layers)[0], "activation")
    return next((theirs for theirs, name in ACTIVATIONS.items() if name == ours), "none")


def option(registry: Registry, spec: Spec | str, name: str) -> Any:
    """What an option of a spec is, said or left out; None where the spec has no such option."""
    spec = parse(spec)
    known = {option.name: option.default for option in registry.options(spec.name)}
    return (known | dict(spec.options)).get(name)


def longest(config: ModelConfig) -> int:
    return option(POSITIONS, config.position, "longest") or 0


@dataclass(frozen=True, kw_only=True)
class Family:
    """Abstract. `fields`: our name -> their name and its value where they leave it out."""

    name: str
    architecture: str
    task: str
    prefix: str  # of all their tensors but those of the head
    fields: dict[str, tuple[str, Any]]
    always: Values
    only: Values = field(default_factory=dict)  # their settings with one value that is ours too; left out, it is that
    spare: tuple[str, ...] = ()  # patterns of tensors that have no part in what is computed here

    def config(self, values: Values, names: set[str]) -> ModelConfig:
        """Ours, from their settings and the names of their tensors, as `links` gives them."""
        for name, value in self.only.items():
            if values.get(name) not in (value, None):
                raise ValueError(f"{self.name} with {name}={values[name]!r} is not known here, only {name}={value!r}")
        own = {ours: values.get(theirs, default) for ours, (theirs, default) in self.fields.items()}
        for ours, (theirs, _) in self.fields.items():
            if isinstance(own[ours], int) and own[ours] > SIZES.get(ours, MOST):
                raise ValueError(f"{theirs} must be at most {SIZES.get(ours, MOST):,}, got {own[ours]:,}")
        return ModelConfig(**own | self.always | self.derive(values, names))

    def values(self, config: ModelConfig, special: Values) -> Values:
        """Theirs, from ours; `special` are the ids of special tokens by their names."""
        own = {theirs: getattr(config, ours) for ours, (theirs, _) in self.fields.items()}
        values = {"model_type": self.name, "architectures": [self.architecture]} | own | self.only | special
        return values | self.express(config, values)

    def constants(self, config: ModelConfig, values: Values) -> Tensors:
        """Tensors that are computed and not learnt, and yet stand in their files."""
        return {}

    def derive(self, values: Values, names: set[str]) -> Values:
        """What of ours is not simply one of theirs."""
        raise NotImplementedError

    def express(self, config: ModelConfig, values: Values) -> Values:
        """The same the other way round."""
        raise NotImplementedError

    def aliases(self, config: ModelConfig) -> dict[str, str]:
        """Tensors that a file may do without, and those that are then the same."""
        return {}

    def links(self, config: ModelConfig, values: Values) -> Iterator[Link]:
        """All tensors of a model, those of the head by their whole name and the others without the prefix."""
        raise NotImplementedError


def output(theirs: str, config: ModelConfig) -> Iterator[Link]:
    """The output layer where it is not the embedding."""
    return iter(()) if config.tied else link(theirs, "output", bias=False)


class GPT2(Family):
    def derive(self, values, names):
        return {
            "inner": values.get("n_inner") or 4 * values["n_embd"],
            "position": f"learned(longest={values.get('n_positions', 1024)})",
            "feedforward": dense(values.get("activation_function", "gelu_new")),
        }

    def express(self, config, values):
        # Hugging Face takes the second name for the first
        lengths = dict.fromkeys(("n_positions", "max_position_embeddings"), longest(config))
        sizes = lengths | {"n_inner": config.inner, "activation_function": activation(config)}
        return sizes | {"embd_pdrop": config.dropout, "attn_pdrop": 0.0}

    def links(self, config, values):
        yield from link("wte", "decoder.embedding", bias=False)
        yield Link("wpe.weight", ("decoder.position.table",))
        for n in range(config.layers):
            theirs, ours = f"h.{n}", f"decoder.blocks.{n}"
            inputs = [f"{ours}.attention.project.{name}" for name in "qkv"]
            yield from link(f"{theirs}.ln_1", f"{ours}.norms.0")
            yield from link(f"{theirs}.attn.c_attn", *inputs, form=THREE)
            yield from link(f"{theirs}.attn.c_proj", f"{ours}.attention.output", form=TURNED)
            yield from link(f"{theirs}.ln_2", f"{ours}.norms.1")
            yield from link(f"{theirs}.mlp.c_fc", f"{ours}.feedforward.inner", form=TURNED)
            yield from link(f"{theirs}.mlp.c_proj", f"{ours}.feedforward.outer", form=TURNED)
        yield from link("ln_f", "decoder.norm")
        yield from output("lm_head", config)


@dataclass(frozen=True, kw_only=True)
class Encoder(Family):
    """BERT and those after it, which differ in names. Each dictionary is theirs -> ours."""

    activation: str
    positions_begin: Callable[[Values], int] = lambda values: 0  # rows before the first position
    embedding: dict[str, str]
    layer: dict[str, str]
    layers: str
    head: dict[str, str]
    head_bias: str
    decoder: str
    pooler: str | None = None

    def derive(self, values, names):
        has_head = self.head_bias in names
        if values.get("type_vocab_size") == 0:
            raise ValueError(f"{self.name} has at least one segment (here none)")
        if has_head and values.get(self.activation, "gelu") != "gelu":
            raise ValueError(f"{self.name} with {self.activation} other than 'gelu' has a head that is not known here")
        rows = values.get("max_position_embeddings", 512) - self.positions_begin(values)
        return {
            "head": "transform" if has_head else "none",
            "head_bias": has_head,
            "pooler": self.pooler is not None and f"{self.pooler}.weight" in names,
            "position": f"learned(longest={rows})",
            "feedforward": dense(values.get(self.activation, "gelu")),
        }

    def express(self, config, values):
        bare = self.architecture.replace("ForMaskedLM", "Model")
        return {
            "architectures": [bare if config.head == "none" else self.architecture],
            "max_position_embeddings": longest(config) + self.positions_begin(values),
            self.activation: activation(config),
        }

    def links(self, config, values):
        for theirs, ours in self.embedding.items():
            yield from link(f"embeddings.{theirs}", f"encoder.{ours}", bias=ours.endswith("norm"))
        table = behind(self.positions_begin(values))
        yield Link("embeddings.position_embeddings.weight", ("encoder.position.table",), table)
        for n in range(config.layers):
            for theirs, ours in self.layer.items():
                yield from link(f"{self.layers}.{n}.{theirs}", f"encoder.blocks.{n}.{ours}")
        if config.pooler:
            yield from link(self.pooler, "pooler")
        if config.head == "transform":
            for theirs, ours in self.head.items():
                yield from link(theirs, ours)
            for name in self._biases(config):
                yield Link(name, ("output.bias",))
            yield from output(self.decoder, config)

    def _biases(self, config: ModelConfig) -> list[str]:
        """Their names for the bias of the output layer. One that is not the embedding has a bias of its own, which is
        the one that counts and stands last; older versions tied the two."""
        names = [self.head_bias] if config.tied else [self.head_bias, f"{self.decoder}.bias"]
        return list(dict.fromkeys(names))

    def aliases(self, config):
        return {name: self.head_bias for name in self._biases(config)[1:]}


@dataclass(frozen=True, kw_only=True)
class Marian(Family):
    """Marian, with the norm after each sublayer, and Pegasus, with the norm before it."""

    parts: bool  # whether source and target may have a vocabulary each
    tables: bool  # whether the sinusoids stand in the file

    def constants(self, config, values):
        rows = torch.zeros(1, values["max_position_embeddings"], config.width)
        scheme = POSITIONS.build("sinusoidal(layout='halves')", Shape.of(width=config.width, heads=config.heads))
        table = scheme.add(rows, Rows.full(rows))[0]
        return {f"{name}.embed_positions.weight": table.clone() for name in ("encoder", "decoder") if self.tables}

    def derive(self, values, names):
        for name in ("attention_heads", "ffn_dim"):
            if values.get(f"encoder_{name}") != values.get(f"decoder_{name}"):
                raise ValueError(f"{self.name} with encoder_{name} unlike decoder_{name} is not known here")
        shared = not self.parts or values.get("share_encoder_decoder_embeddings", True)
        return {
            "decoder_layers": values["decoder_layers"],
            "target_vocabulary": None if shared else values.get("decoder_vocab_size") or values["vocab_size"],
            "feedforward": dense(values.get("activation_function", "gelu")),
        }

    def express(self, config, values):
        decoder_layers = config.layers if config.decoder_layers is None else config.decoder_layers
        vocabularies = {
            "share_encoder_decoder_embeddings": config.target_vocabulary is None,
            "decoder_vocab_size": config.target_vocabulary or config.vocabulary,
        }
        return (vocabularies if self.parts else {}) | {
            "is_encoder_decoder": True,
            "decoder_layers": decoder_layers,
            "decoder_attention_heads": config.heads,
            "decoder_ffn_dim": config.inner,
            "activation_function": activation(config),
            "attention_dropout": 0.0,
            "max_position_embeddings": values.get("max_position_embeddings", 512),
        }

    def links(self, config, values):
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
        yield from output("lm_head", config)


STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class Llama(Family):
    """Llama and those after it, which differ in biases and windows."""

    bias: bool | Literal["inputs"] | None = None  # None: as `attention_bias` says
    windows: bool = False  # takes sliding windows

    def derive(self, values, names):
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(
                f"{self.name} with rotary positions of type {kind!r} is not known here, only 'default' and 'llama3'"
            )
        base = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
        stretch = tuple(float(rope[name]) for name in STRETCH) if kind == "llama3" else None
        bias = bool(values.get("attention_bias")) if self.bias is None else self.bias
        specs = [f"local(window={window - 1})" if window else "softmax" for window in self._windows(values)]
        return {
            "position": f"rotary(base={base})" if stretch is None else f"rotary(base={base}, stretch={stretch})",
            "bias": bias,
            "feedforward": dense(values.get("hidden_act", "silu"), gated=True, bias=bool(values.get("mlp_bias"))),
            "attention": specs[0] if len(set(specs)) == 1 else specs,
            # a file without an output layer shares it, whatever its config says
            "tied": bool(values.get("tie_word_embeddings")) or "lm_head.weight" not in names,
        }

    def _windows(self, values: Values) -> list[int | None]:
        """How many tokens each layer sees; None: all."""
        layers, window = values["num_hidden_layers"], values.get("sliding_window")
        if not self.windows or not values.get("use_sliding_window", True):
            window = None
        first = values.get("max_window_layers", 0)
        kinds = values.get("layer_types") or ["sliding_attention" if n >= first else "" for n in range(layers)]
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def express(self, config, values):
        windows = [option(ATTENTION, spec, "window") for spec in over_layers(config.attention, config.layers)]
        window = next((window + 1 for window in windows if window), None)
        biases = option(FEEDFORWARD, over_layers(config.feedforward, config.layers)[0], "bias")
        rope = {"rope_type": "default", "rope_theta": option(POSITIONS, config.position, "base") or 1e4}
        stretch = option(POSITIONS, config.position, "stretch")
        if stretch is not None:
            rope |= {"rope_type": "llama3"} | dict(zip(STRETCH, stretch, strict=True))
        found = {
            "num_key_value_heads": config.kv_heads or config.heads,
            "head_dim": config.head_width or config.width // config.heads,
            "rope_parameters": rope,
            "hidden_act": activation(config),
            "tie_word_embeddings": config.tied,
            "max_position_embeddings": values.get("max_position_embeddings", 2048),
            "attention_dropout": 0.0,
        }
        if self.bias is None:
            found |= {"attention_bias": config.bias is True, "mlp_bias": bool(biases)}
        if self.windows:
            kinds = ["sliding_attention" if window else "full_attention" for window in windows]
            found |= {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": kinds}
        return found

    def links(self, config, values):
        yield from link("embed_tokens", "decoder.embedding", bias=False)
        inner = bool(values.get("mlp_bias"))
        for n in range(config.layers):
            theirs, ours = f"layers.{n}", f"decoder.blocks.{n}"
            for name in "qkv":
                there = f"{theirs}.self_attn.{name}_proj"
                yield from link(there, f"{ours}.attention.project.{name}", bias=config.bias is not False)
            yield from link(f"{theirs}.self_attn.o_proj", f"{ours}.attention.output", bias=config.bias is True)
            for place, own in {"gate": "gate", "up": "inner", "down": "outer"}.items():
                yield from link(f"{theirs}.mlp.{place}_proj", f"{ours}.feedforward.{own}", bias=inner)
            yield from link(f"{theirs}.input_layernorm", f"{ours}.norms.0", bias=False)
            yield from link(f"{theirs}.post_attention_layernorm", f"{ours}.norms.1", bias=False)
        yield from link("norm", "decoder.norm", bias=False)
        yield from output("lm_head", config)


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


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
BERT_ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
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
MARIAN_ONLY = {"tie_word_embeddings": True}
MARIAN_SPARE = (r"(encoder|decoder)\.embed_positions\.weight", r"(encoder|decoder)\.embed_tokens\.weight")
LLAMA_FIELDS = {
    "vocabulary": ("vocab_size", 32000),
    "width": ("hidden_size", 4096),
    "heads": ("num_attention_heads", 32),
    "kv_heads": ("num_key_value_heads", None),
    "head_width": ("head_dim", None),
    "layers": ("num_hidden_layers", 32),
    "inner": ("intermediate_size", 11008),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
}
LLAMA_ALWAYS = {"kind": "decoder", "norm": "pre", "norm_kind": "rms", "scaled_embedding": False, "dropout": 0.0}
LLAMA_SPARE = (r".*rotary_emb\.inv_freq",)

# where several would do, the first is taken
FAMILIES = (
    GPT2(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        task="language",
        prefix="transformer.",
        fields={
            "vocabulary": ("vocab_size", 50257),
            "width": ("n_embd", 768),
            "heads": ("n_head", 12),
            "layers": ("n_layer", 12),
            "norm_epsilon": ("layer_norm_epsilon", 1e-5),
            "dropout": ("resid_pdrop", 0.1),
            "tied": ("tie_word_embeddings", True),
        },
        always={"kind": "decoder", "norm": "pre", "bias": True, "scaled_embedding": False},
        only={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        spare=(r"h\.\d+\.attn\.(masked_)?bias",),
    ),
    Encoder(
        name="bert",
        architecture="BertForMaskedLM",
        task="masked",
        prefix="bert.",
        fields=BERT_FIELDS,
        always=BERT_ALWAYS,
        only=BERT_ONLY,
        spare=(r"cls\.seq_relationship\..*", r"cls\.predictions\.decoder\.bias", r"embeddings\.position_ids"),
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
    ),
    Encoder(
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
        spare=(r"embeddings\.position_ids",),
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
    ),
    Encoder(
        name="roberta",
        architecture="RobertaForMaskedLM",
        task="masked",
        prefix="roberta.",
        fields=BERT_FIELDS | {"vocabulary": ("vocab_size", 50265)},
        always=BERT_ALWAYS,
        only=BERT_ONLY,
        spare=(r"lm_head\.decoder\.bias", r"embeddings\.position_ids"),
        activation="hidden_act",
        # positions are counted on from the id of padding
        positions_begin=lambda values: _or(values.get("pad_token_id"), 1) + 1,
        embedding=BERT_EMBEDDING,
        layer=BERT_LAYER,
        layers="encoder.layer",
        head={"lm_head.dense": "transform.dense", "lm_head.layer_norm": "transform.norm"},
        head_bias="lm_head.bias",
        decoder="lm_head.decoder",
        pooler="pooler.dense",
    ),
    Marian(
        name="marian",
        architecture="MarianMTModel",
        task="translate",
        prefix="model.",
        fields=MARIAN_FIELDS,
        always=MARIAN_ALWAYS | {"norm": "post"},
        only=MARIAN_ONLY | {"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False},
        spare=MARIAN_SPARE,
        parts=True,
        tables=False,
    ),
    Marian(
        name="pegasus",
        architecture="PegasusForConditionalGeneration",
        task="translate",
        prefix="model.",
        fields=MARIAN_FIELDS,
        always=MARIAN_ALWAYS | {"norm": "pre"},
        only=MARIAN_ONLY,
        spare=MARIAN_SPARE,
        parts=False,
        tables=True,
    ),
    Llama(
        name="llama",
        architecture="LlamaForCausalLM",
        task="language",
        prefix="model.",
        fields=LLAMA_FIELDS,
        always=LLAMA_ALWAYS,
        spare=LLAMA_SPARE,
    ),
    Llama(
        name="mistral",
        architecture="MistralForCausalLM",
        task="language",
        prefix="model.",
        fields=LLAMA_FIELDS,
        always=LLAMA_ALWAYS,
        spare=LLAMA_SPARE,
        bias=False,
        windows=True,
    ),
    Llama(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        task="language",
        prefix="model.",
        fields=LLAMA_FIELDS,
        always=LLAMA_ALWAYS,
        spare=LLAMA_SPARE,
        bias="inputs",
        windows=True,
    ),
)


# which family a model of ours is of


def find(model_type: Any) -> Family:
    """The family of this `model_type`."""
    for family in FAMILIES:
        if family.name == model_type:
            return family
    raise ValueError(
        f"models of type {model_type!r} are not known here; known: {', '.join(family.name for family in FAMILIES)}"
    )


def choose(config: ModelConfig, special: Values, name: str | None = None) -> Family:
    """The family that a model of ours is of, or whether it is of the one named; else what keeps it from that."""
    candidates = FAMILIES if name is None else [find(name)]
    found = {family.name: differences(family, config, special) for family in candidates}
    # one of another kind is never near, however few settings it shares
    nearest = min(found, key=lambda name: (find(name).always["kind"] != config.kind, len(found[name])))
    if found[nearest]:
        differs = "; ".join(dict.fromkeys(found[nearest]))
        if name is not None:
            raise ValueError(f"{name} does not compute what this model computes; it differs in: {differs}")
        raise ValueError(
            f"no published family computes what this model computes; nearest is {nearest}, which differs in: {differs}"
        )
    return find(nearest)


def differences(family: Family, config: ModelConfig, special: Values) -> list[str]:
    """What a model of ours would have to be to be of a family, in words; none: it is."""
    ours = settled(config)
    try:
        values = family.values(config, special)
        names = {link.theirs for link in family.links(config, values)}
        theirs = settled(family.config(values, names))
    except ValueError as error:
        # what cannot be said there at all is farther than any setting
        return [str(error)] * len(ours)
    return [
        f"{name} {_shown(theirs[name])} (here {_shown(ours[name])})"
        for name in ours
        if not _covers(theirs[name], ours[name], name)
    ]


def settled(config: ModelConfig) -> Values:
    """All that decides what a model computes, with nothing left open: to be compared."""
    both = config.kind == "encoder-decoder"
    layers = config.layers if config.decoder_layers is None else config.decoder_layers
    feeds = config.feedforward if config.decoder_feedforward is None else config.decoder_feedforward
    attention = config.attention if config.decoder_attention is None else config.decoder_attention
    found = {item.name: getattr(config, item.name) for item in fields(config)}
    for name in ("dropout", "aligner"):
        del found[name]
    return found | {
        "kv_heads": config.kv_heads or config.heads,
        "head_width": config.head_width or config.width // config.heads,
        "final_norm": config.norm == "pre" if config.final_norm is None else config.final_norm,
        "position": filled(POSITIONS, config.position),
        "attention": [filled(ATTENTION, spec) for spec in over_layers(config.attention, config.layers)],
        "feedforward": [filled(FEEDFORWARD, spec) for spec in over_layers(config.feedforward, config.layers)],
        "decoder_layers": layers if both else None,
        "decoder_attention": [filled(ATTENTION, spec) for spec in over_layers(attention, layers)] if both else None,
        "decoder_feedforward": [filled(FEEDFORWARD, spec) for spec in over_layers(feeds, layers)] if both else None,
        "cross_attention": (
            [filled(ATTENTION, spec) for spec in over_layers(config.cross_attention, layers)] if both else None
        ),
    }


def filled(registry: Registry, spec: Spec | str) -> Spec:
    """A spec with the options it leaves out."""
    spec = parse(spec)
    known = {option.name: option.default for option in registry.options(spec.name)}
    return replace(spec, options=tuple(sorted((known | dict(spec.options)).items())))


def _covers(theirs: Any, ours: Any, name: str) -> bool:
    """Whether a setting of theirs can stand for ours: the same, or with biases that are then zero, or positions that
    are only laid out otherwise (`relaid`)."""
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return all(_covers(one, other, name) for one, other in zip(theirs, ours, strict=True))
    if isinstance(theirs, Spec) and isinstance(ours, Spec):
        one, other = dict(theirs.options), dict(ours.options)
        if name == "position" and "layout" in one and "layout" in other:
            other["layout"] = one["layout"]
        if "bias" in one and "bias" in other:
            other["bias"] |= one["bias"]
        return (theirs.name, theirs.parts, one) == (ours.name, ours.parts, other)
    if name in ("bias", "head_bias"):
        return theirs is True or theirs == ours or ours is False
    return theirs == ours


def _shown(value: Any) -> str:
    return ", ".join(dict.fromkeys(map(str, value))) if isinstance(value, list) else str(value)


# the same numbers in another order

CHANNELS = (
    (r"(encoder|decoder)\.embedding\.weight|output\.weight", 1),
    (r".*\.project\.\w+\.weight|.*\.feedforward\.(inner|gate)\.weight", 1),
    (r".*\.(attention|cross)\.output\.(weight|bias)|.*\.feedforward\.outer\.(weight|bias)", 0),
    (r".*norms?\.(\d+\.)?(weight|bias)", 0),
)


def relaid(config: ModelConfig, tensors: Tensors, layout: str) -> Tensors:
    """The parameters of the same model with its sinusoids or rotary pairs laid out otherwise. Sines and cosines stand
    in channels of the token vectors, whose order means nothing as long as all layers agree on it; rotary pairs in
    channels of queries and keys, likewise."""
    spec = parse(config.position)
    now = option(POSITIONS, spec, "layout")
    if now in (None, layout):
        return tensors
    width = config.width if spec.name == "sinusoidal" else config.head_width or config.width // config.heads
    order = torch.arange(width).view(-1, 2).mT.flatten() if layout == "halves" else torch.arange(width).view(2, -1)
    order = order.mT.flatten() if layout == "interleaved" else order
    found = {}
    for name, tensor in tensors.items():
        if spec.name == "sinusoidal":
            axis = next((axis for pattern, axis in CHANNELS if re.fullmatch(pattern, name)), None)
            found[name] = tensor if axis is None else tensor.index_select(axis, order)
        elif re.fullmatch(r".*\.attention\.project\.[qk]\.(weight|bias)", name):
            found[name] = tensor.unflatten(0, (-1, width)).index_select(1, order).flatten(0, 1)
        else:
            found[name] = tensor
    return found
