"""Every model by its name: what it can be trained to predict, what it is made of, and its presets.

A model is an entry of MODELS. A model in somebody else's package is an entry point of the group `regard.models` whose
value is such an entry.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from regard import spec
from regard.core.model import Model as BuiltModel
from regard.core.options import Option, options
from regard.core.shape import Order
from regard.keywords import did_you_mean
from regard.models.bytenet import ByteNet, ByteNetConfig
from regard.models.config import ModelConfig
from regard.models.convolutional import Convolutional, ConvolutionalConfig
from regard.models.deep_recurrent import DeepRecurrent, DeepRecurrentConfig
from regard.models.feedback import Feedback, FeedbackConfig
from regard.models.funnel import Funnel, FunnelConfig
from regard.models.perceiver import Perceiver, PerceiverAR, PerceiverARConfig, PerceiverConfig
from regard.models.pooling import Classifier, ClassifierConfig
from regard.models.recurrent import Recurrent, RecurrentConfig
from regard.models.tokenlearner import TokenLearner, TokenLearnerConfig
from regard.models.transformer import Transformer
from regard.models.vision.coatnet import Coatnet, CoatnetConfig
from regard.models.vision.coca import Coca, CocaConfig
from regard.models.vision.convnet import Convnet, ConvnetConfig
from regard.models.vision.perceiver import ImagePerceiver, ImagePerceiverConfig
from regard.models.vision.presets import COATNET, COCA, CONVNET, IMAGE_PERCEIVER, IMAGE_TOKENLEARNER, SWIN, VIT
from regard.models.vision.swin import Swin, SwinConfig
from regard.models.vision.tokenlearner import ImageTokenLearner, ImageTokenLearnerConfig
from regard.models.vision.vit import Vit, VitConfig
from regard.plugins import Plugins

GROUP = "regard.models"
Predicts = Literal["translation", "next token", "hidden tokens", "class", "image class", "caption"]


class Form(NamedTuple):
    """A model as it is built to predict one thing."""

    config: type  # a dataclass whose fields are its options
    module: type[BuiltModel]
    presets: Mapping[str, Mapping[str, Any]]  # values over the defaults of the config, by the name of the preset
    fixed: Mapping[str, Any] = {}  # fields that make it predict this
    unused: tuple[str, ...] = ()  # fields that mean nothing here

    def options(self) -> dict[str, Option]:
        """What can be chosen of it."""
        return {name: option for name, option in options(self.config).items() if name not in self.unused}


@dataclass(frozen=True)
class ModelFacts:
    """What `regard list` says of a model. N is the length; costs are those of a training step with its default
    attention, and of what decoding keeps."""

    name: str
    paper: str
    link: str
    family: str
    time: Order
    memory: Order
    state: Order | None  # None: it does not decode


@dataclass(frozen=True)
class Model:
    """An entry of the registry."""

    facts: ModelFacts
    forms: Mapping[str, Form] = field(default_factory=dict)  # by what they predict, see Predicts

    @property
    def predicts(self) -> tuple[str, ...]:
        return tuple(self.forms)


def _sizes(width: int, heads: int, inner: int, layers: Any, **more: Any) -> dict[str, Any]:
    return {"width": width, "heads": heads, "inner": inner, "layers": layers, **more}


TINY = _sizes(128, 4, 256, 4)
PAPER = {"tiny": TINY, "base": {}, "big": {"width": 1024, "heads": 16, "inner": 4096, "dropout": 0.3}}
# Translators that learn in minutes on a CPU: twice the steps of `tiny` in the same time, and layers that bear a high
# learning rate from the start.
MINI = _sizes(128, 4, 256, 2, norm="pre")
_GPT = {
    "position": "learned",
    "norm": "pre",
    "feedforward": "dense(activation='gelu_tanh')",
    "bias": True,
    "scaled_embedding": False,
}
_MODERN = {
    "position": "rotary",
    "norm": "pre",
    "norm_kind": "rms",
    "feedforward": "dense(activation='silu', gated=True, bias=False)",
    "scaled_embedding": False,
    "dropout": 0.0,
}
GPT = {
    "gpt-nano": _GPT | _sizes(48, 3, 192, 3),
    "gpt2": _GPT | _sizes(768, 12, 3072, 12),
    "gpt2-medium": _GPT | _sizes(1024, 16, 4096, 24),
    "gpt2-large": _GPT | _sizes(1280, 20, 5120, 36),
    "gpt2-xl": _GPT | _sizes(1600, 25, 6400, 48),
    "modern": _MODERN | _sizes(256, 8, 688, 6, kv_heads=2),
    "smollm2-135m": _MODERN | _sizes(576, 9, 1536, 30, kv_heads=3, position="rotary(base=100000.0)"),
}
_BERT = {
    "position": "learned",
    "norm_epsilon": 1e-12,
    "feedforward": "dense(activation='gelu')",
    "bias": True,
    "scaled_embedding": False,
    "normed_embedding": True,
    "head": "transform",
    "head_bias": True,
}
BERT = {
    "bert-tiny": _BERT | _sizes(128, 2, 512, 2),
    "bert-mini": _BERT | _sizes(256, 4, 1024, 4),
    "bert-small": _BERT | _sizes(512, 8, 2048, 4),
    "bert": _BERT | _sizes(768, 12, 3072, 12),
    "bert-large": _BERT | _sizes(1024, 16, 4096, 24),
}
# With 10,000 shared tokens at width 128 (1.28 million), 3 million leave room for one layer of 256 or two of 192.
# One is taken: a second doubles the steps that wait for each other, and a head of 256 is the widest that kernels take.
RECURRENT = {"width": 128, "hidden": 256, "layers": 1, "dropout": 0.3}


# About as many parameters as `tiny` without the embeddings; then those of the authors' code, sizes as published.
_CONVS2S = {"width": 768, "out_width": 512, "tied": False}
CONVS2S = {
    "convs2s": {"width": 128, "hidden": 160, "layers": 4, "longest": 512, "dropout": 0.2},
    "convs2s-iwslt": {
        "width": 256,
        "blocks": ((256, 3),) * 4,
        "decoder_blocks": ((256, 3),) * 3,
        "tied": False,
    },
    "convs2s-base": {"width": 512, "out_width": 256, "blocks": ((512, 3),) * 20, "tied": False},
    "convs2s-en-ro": {"width": 512, "blocks": ((512, 3),) * 20, "tied": False},
    "convs2s-en-de": _CONVS2S | {"blocks": ((512, 3),) * 9 + ((1024, 3),) * 4 + ((2048, 1),) * 2},
    "convs2s-en-fr": _CONVS2S
    | {"blocks": ((512, 3),) * 6 + ((768, 3),) * 4 + ((1024, 3),) * 3 + ((2048, 1), (4096, 1)), "dropout": 0.1},
}


# Of about that size; then as NVIDIA trains it, and with the depth of Wu et al. 2016. Deep-Att likewise, with the depth
# of Zhou et al. 2016. The mixture has fewer layers.
GNMT = {
    "gnmt": {"width": 128, "layers": 4, "dropout": 0.2},
    "gnmt-4": {"width": 1024, "layers": 4, "tied": False},
    "gnmt-8": {"width": 1024, "layers": 8, "tied": False},
}
DEEP_ATT = {
    "deep-att": {"width": 80, "layers": 5, "decoder_layers": 4, "dropout": 0.2},
    "deep-att-16": {"width": 512, "layers": 9, "decoder_layers": 7, "tied": False},
}
MOE_LSTM = {
    "moe-lstm": {
        "width": 128,
        "layers": 3,
        "decoder_layers": 2,
        "residual_from": 2,
        "feedforward": "moe(experts=8, choices=2)",
        "inner": 256,
        "dropout": 0.2,
    },
}


# Of about that size; then as published for English to German, over characters.
BYTENET = {
    "bytenet": {"width": 96, "layers": 10},
    "bytenet-30": {"width": 800, "layers": 30, "tied": False},
}


# fields of configs that mean nothing where a model has no target, no classes, or nothing but classes
TARGET = ("decoder_layers", "decoder_attention", "cross_attention", "decoder_feedforward", "aligner")
POOLED = ("pooling", "seeds", "seed_layers")
UNPOOLED = ("tied", "decoder_layers", "query_residual")


def _both(config: type, module: type[BuiltModel], name: str, **sizes: Any) -> dict[str, Form]:
    """A model that reads a whole text, and predicts its hidden tokens or its class."""
    presets = {name: _sizes(128, 4, 256, **sizes)}
    return {
        "hidden tokens": Form(config, module, presets, unused=POOLED),
        "class": Form(config, module, presets, unused=UNPOOLED),
    }


def _recurrent(cell: str, paper: str, link: str) -> Model:
    facts = ModelFacts(cell, paper, link, "recurrent", Order("N^2", 2), Order("N^2", 2), Order("1", 0))
    presets = {cell: {"cell": cell, **RECURRENT}}
    return Model(facts, {"translation": Form(RecurrentConfig, Recurrent, presets, {"cell": cell})})


MODELS = (
    Model(
        ModelFacts(
            "transformer",
            "Vaswani et al. 2017, Attention Is All You Need",
            "arXiv 1706.03762",
            "attention",
            Order("N^2", 2),
            Order("N", 1),
            Order("N", 1),
        ),
        {
            "translation": Form(ModelConfig, Transformer, PAPER | {"mini": MINI}, {"kind": "encoder-decoder"}),
            "next token": Form(ModelConfig, Transformer, GPT, {"kind": "decoder"}, TARGET),
            "hidden tokens": Form(ModelConfig, Transformer, BERT, {"kind": "encoder"}, TARGET),
            "class": Form(ClassifierConfig, Classifier, PAPER, unused=UNPOOLED),
        },
    ),
    _recurrent(
        "lstm",
        "Luong et al. 2015, Effective Approaches to Attention-based Neural Machine Translation",
        "arXiv 1508.04025",
    ),
    _recurrent(
        "gru",
        "Bahdanau et al. 2015, Neural Machine Translation by Jointly Learning to Align and Translate",
        "arXiv 1409.0473",
    ),
    Model(
        ModelFacts(
            "gnmt",
            "Wu et al. 2016, Google's Neural Machine Translation System",
            "arXiv 1609.08144",
            "recurrent",
            Order("N^2", 2),
            Order("N^2", 2),
            Order("1", 0),
        ),
        {
            "translation": Form(
                DeepRecurrentConfig, DeepRecurrent, GNMT, {"connections": "residual"}, ("feedforward", "inner")
            )
        },
    ),
    Model(
        ModelFacts(
            "deep-att",
            "Zhou et al. 2016, Deep Recurrent Models with Fast-Forward Connections for Neural Machine Translation",
            "arXiv 1606.04199",
            "recurrent",
            Order("N^2", 2),
            Order("N^2", 2),
            Order("1", 0),
        ),
        {
            "translation": Form(
                DeepRecurrentConfig, DeepRecurrent, DEEP_ATT, {"connections": "fast-forward"}, ("feedforward", "inner")
            )
        },
    ),
    Model(
        ModelFacts(
            "moe-lstm",
            "Shazeer et al. 2017, Outrageously Large Neural Networks",
            "arXiv 1701.06538",
            "recurrent",
            Order("N^2", 2),
            Order("N^2", 2),
            Order("1", 0),
        ),
        {"translation": Form(DeepRecurrentConfig, DeepRecurrent, MOE_LSTM, {"connections": "residual"})},
    ),
    Model(
        ModelFacts(
            "bytenet",
            "Kalchbrenner et al. 2016, Neural Machine Translation in Linear Time",
            "arXiv 1610.10099",
            "convolutional",
            Order("N", 1),
            Order("N", 1),
            Order("1", 0),
        ),
        {"translation": Form(ByteNetConfig, ByteNet, BYTENET)},
    ),
    Model(
        ModelFacts(
            "convs2s",
            "Gehring et al. 2017, Convolutional Sequence to Sequence Learning",
            "arXiv 1705.03122",
            "convolutional",
            Order("N^2", 2),
            Order("N^2", 2),
            Order("1", 0),
        ),
        {"translation": Form(ConvolutionalConfig, Convolutional, CONVS2S)},
    ),
    Model(
        ModelFacts(
            "feedback",
            "Fan et al. 2020, Addressing Some Limitations of Transformers with Feedback Memory",
            "arXiv 2002.09402",
            "recurrent",
            Order("N^2", 2),
            Order("N^2", 2),
            Order("N", 1),
        ),
        {"next token": Form(FeedbackConfig, Feedback, {"feedback": TINY})},
    ),
    Model(
        ModelFacts(
            "perceiver",
            "Jaegle et al. 2021, Perceiver: General Perception with Iterative Attention; 2022, Perceiver IO",
            "arXiv 2107.14795",
            "latents",
            Order("N", 1),
            Order("N", 1),
            None,
        ),
        _both(PerceiverConfig, Perceiver, "perceiver", layers=4, latents=64)
        | {"image class": Form(ImagePerceiverConfig, ImagePerceiver, IMAGE_PERCEIVER)},
    ),
    Model(
        ModelFacts(
            "perceiver-ar",
            "Hawthorne et al. 2022, General-purpose, long-context autoregressive modeling with Perceiver AR",
            "arXiv 2202.07765",
            "latents",
            Order("N", 1),
            Order("N", 1),
            Order("N", 1),
        ),
        {"next token": Form(PerceiverARConfig, PerceiverAR, {"perceiver-ar": TINY | {"latents": 128}})},
    ),
    Model(
        ModelFacts(
            "funnel",
            "Dai et al. 2020, Funnel-Transformer: Filtering out Sequential Redundancy",
            "arXiv 2006.03236",
            "pooling",
            Order("N^2", 2),
            Order("N", 1),
            None,
        ),
        _both(FunnelConfig, Funnel, "funnel", layers=(2, 2, 2)),
    ),
    Model(
        ModelFacts(
            "tokenlearner",
            "Ryoo et al. 2021, TokenLearner: What Can 8 Learned Tokens Do for Images and Videos?",
            "arXiv 2106.11297",
            "pooling",
            Order("N^2", 2),
            Order("N", 1),
            None,
        ),
        _both(TokenLearnerConfig, TokenLearner, "tokenlearner", layers=4, tokens=8)
        | {"image class": Form(ImageTokenLearnerConfig, ImageTokenLearner, IMAGE_TOKENLEARNER)},
    ),
    Model(
        ModelFacts(
            "vit",
            "Dosovitskiy et al. 2021, An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
            "arXiv 2010.11929",
            "images",
            Order("N^2", 2),
            Order("N", 1),
            None,
        ),
        {"image class": Form(VitConfig, Vit, VIT)},
    ),
    Model(
        ModelFacts(
            "swin",
            "Liu et al. 2021, Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
            "arXiv 2103.14030",
            "images",
            Order("N", 1),
            Order("N", 1),
            None,
        ),
        {"image class": Form(SwinConfig, Swin, SWIN)},
    ),
    Model(
        ModelFacts(
            "coatnet",
            "Dai et al. 2021, CoAtNet: Marrying Convolution and Attention for All Data Sizes",
            "arXiv 2106.04803",
            "images",
            Order("N^2", 2),
            Order("N", 1),
            None,
        ),
        {"image class": Form(CoatnetConfig, Coatnet, COATNET)},
    ),
    Model(
        ModelFacts(
            "convnet",
            "He et al. 2016, Deep Residual Learning for Image Recognition",
            "arXiv 1512.03385",
            "images",
            Order("N", 1),
            Order("N", 1),
            None,
        ),
        {"image class": Form(ConvnetConfig, Convnet, CONVNET)},
    ),
    Model(
        ModelFacts(
            "coca",
            "Yu et al. 2022, CoCa: Contrastive Captioners are Image-Text Foundation Models",
            "arXiv 2205.01917",
            "images",
            Order("N^2", 2),
            Order("N", 1),
            Order("N", 1),
        ),
        {"caption": Form(CocaConfig, Coca, COCA)},
    ),
)


class Preset(NamedTuple):
    """A model with sizes, as it is built to predict one thing."""

    model: str
    form: Form
    values: dict[str, Any]  # fields of the config


def _check(name: str, value: Any) -> Model:
    """What an entry point must name."""
    if not isinstance(value, Model):
        raise ValueError(f"expected an entry of the registry, a {__name__}.Model, got {value!r}")
    if value.facts.name != name:
        raise ValueError(f"its facts name it {value.facts.name!r}, not {name!r}: both must agree")
    return value


PLUGINS = Plugins("model", GROUP, lambda: [model.facts.name for model in MODELS], _check)


@functools.cache
def entries() -> dict[str, Model]:
    """All models by name: those of other packages, which cannot take the names of ours, come last."""
    return {model.facts.name: model for model in MODELS} | PLUGINS.load_all()


def packages_of(config: Any) -> dict[str, dict[str, str]]:
    """The packages that a model of this config needs besides Regard, by kind and name."""
    found = spec.packages_of(config)
    for name, model in entries().items():
        own = any(form.config is type(config) for form in model.forms.values())
        if own and name not in {model.facts.name for model in MODELS}:
            found["model"] = {name: PLUGINS.package(name) or ""}
    return found


def find(name: str) -> Model:
    """A model by its name."""
    if name not in entries():
        hint = did_you_mean(name, list(entries()))
        raise ValueError(f"no model is called {name!r}{hint}; known: {', '.join(entries())}")
    return entries()[name]


def presets(predicts: str) -> dict[str, Preset]:
    """The presets of all models that can be trained to predict something."""
    return {
        name: Preset(model.facts.name, form, dict(form.fixed) | dict(values))
        for model in entries().values()
        if (form := model.forms.get(predicts)) is not None
        for name, values in form.presets.items()
    }


def model_options(name: str) -> dict[str, Option]:
    """The options of a model in all its forms."""
    found: dict[str, Option] = {}
    for form in find(name).forms.values():
        found = form.options() | found
    return found
