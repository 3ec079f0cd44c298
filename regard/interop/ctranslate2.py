"""CTranslate2 folders from translators, for its fast inference on CPUs and GPUs.

It takes the standard encoder-decoder: softmax attention, dense feed-forward layers without a gate, layer norms, and
positions that are added to the token vectors. The package `ctranslate2` must be installed: it writes the folder.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.rows import Rows
from regard.core.shape import Role, Shape
from regard.data.tokenizer import Tokenizer
from regard.interop.families.base import Tensors, option_value
from regard.interop.matching import full_settings
from regard.models.config import ModelConfig
from regard.spec import FEEDFORWARD, POSITIONS

# the stacks of a translator, and the role of their own attention
STACKS: tuple[tuple[str, Role], ...] = (("encoder", "self"), ("decoder", "causal"))
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}


def write(
    folder: Path, config: ModelConfig, tensors: Tensors, tokenizers: tuple[Tokenizer, Tokenizer], longest: int
) -> None:
    """Writes a folder. `longest` is the most tokens of a source; a translation may have 1.5 times as many, and 10."""
    try:
        from ctranslate2.specs import TransformerSpec, common_spec
    except ImportError as error:
        raise ValueError("exporting to CTranslate2 needs its package: pip install ctranslate2") from error
    _check(config)
    decoder_layers = config.layers if config.decoder_layers is None else config.decoder_layers
    feed, final = full_settings(config)["feedforward"][0], full_settings(config)["final_norm"]
    # Any: their classes declare what a converter fills in as None or a string
    spec: Any = TransformerSpec.from_config(
        (config.layers, decoder_layers),
        config.heads,
        pre_norm=config.norm == "pre",
        no_final_norm=not final,
        activation=getattr(common_spec.Activation, ACTIVATIONS[option_value(FEEDFORWARD, feed, "activation")]),
        layernorm_embedding=config.normed_embedding,
    )
    spec.config.layer_norm_epsilon = config.norm_epsilon
    positions = _positions(config, tensors, 2 * longest + 16)
    for name, side in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        part = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        tables = side.embeddings if isinstance(side.embeddings, list) else [side.embeddings]
        tables[0].weight = _numbers(part["embedding.weight"])
        side.scale_embeddings = config.scaled_embedding
        side.position_encodings.encodings = positions[name]
        if config.normed_embedding:
            _norm(side.layernorm_embedding, "embedding_norm", part)
        if final:
            _norm(side.layer_norm, "norm", part)
        for n, layer in enumerate(side.layer):
            _layer(layer, f"blocks.{n}", part)
    spec.decoder.projection.weight = _numbers(tensors["output.weight"])
    if "output.bias" in tensors:
        spec.decoder.projection.bias = _numbers(tensors["output.bias"])
    source, target = (_names(tokenizer) for tokenizer in tokenizers)
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    # CTranslate2 adds the end of the source itself
    spec.config.add_source_eos, spec.config.add_source_bos = True, False
    spec.config.unk_token = source[tokenizers[0].unk]
    spec.config.bos_token, spec.config.eos_token = target[tokenizers[1].bos], target[tokenizers[1].eos]
    spec.config.decoder_start_token = target[tokenizers[1].bos]
    spec.validate()
    spec.optimize()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def _check(config: ModelConfig) -> None:
    """Refuses what CTranslate2 does not compute."""
    settings = full_settings(config)
    specs = [*settings["attention"], *settings["decoder_attention"], *settings["cross_attention"]]
    feeds = [*settings["feedforward"], *settings["decoder_feedforward"]]
    supported = {
        "attention": {str(spec) for spec in specs} == {"softmax"},
        "feedforward": len({str(feed) for feed in feeds}) == 1
        and feeds[0].name == "dense"
        and not option_value(FEEDFORWARD, feeds[0], "gated"),
        "position": POSITIONS.find(settings["position"].name).facts.kind == "input",
        "reversible": not config.reversible,
        "short_convolution": not config.short_convolution,
        "norm_kind": config.norm_kind == "layer",
        "final_norm": config.norm == "pre" or not settings["final_norm"],
        "head": config.head == "linear",
        "kv_heads": settings["kv_heads"] == config.heads,
        "head_width": settings["head_width"] * config.heads == config.width,
    }
    for name, fits in supported.items():
        if not fits:
            raise ValueError(
                f"CTranslate2 takes the standard encoder-decoder (softmax attention, one dense feed-forward layer "
                f"without a gate, layer norms, positions added to the tokens); this model has another {name}: "
                f"{getattr(config, name)!r}"
            )


def _positions(config: ModelConfig, tensors: Tensors, count: int) -> dict[str, np.ndarray]:
    """What the position scheme adds, as a table [count, E]; a model with a table of its own gives that."""
    tables = {}
    for name, role in STACKS:
        if f"{name}.position.table" in tensors:
            tables[name] = _numbers(tensors[f"{name}.position.table"])
            continue
        scheme = POSITIONS.build(config.position, Shape.of(width=config.width, heads=config.heads, role=role))
        prefix = f"{name}.position."
        scheme.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        zeros = torch.zeros(1, min(count, getattr(scheme, "longest", count)), config.width)
        tables[name] = _numbers(scheme.add(zeros, Rows.full(zeros))[0])
    return tables


def _layer(layer: Any, name: str, tensors: Tensors) -> None:
    places = [("attention", layer.self_attention, [["q", "k", "v"]])]
    if f"{name}.cross.project.q.weight" in tensors:
        places.append(("cross", layer.attention, [["q"], ["k", "v"]]))
    for number, (ours, theirs, groups) in enumerate(places):
        inputs = [[f"{name}.{ours}.project.{part}" for part in group] for group in groups]
        for linear, parts in zip(theirs.linear, [*inputs, [f"{name}.{ours}.output"]], strict=True):
            _linear(linear, parts, tensors)
        _norm(theirs.layer_norm, f"{name}.norms.{number}", tensors)
    _linear(layer.ffn.linear_0, [f"{name}.feedforward.inner"], tensors)
    _linear(layer.ffn.linear_1, [f"{name}.feedforward.outer"], tensors)
    _norm(layer.ffn.layer_norm, f"{name}.norms.{len(places)}", tensors)


def _linear(theirs: Any, parts: list[str], tensors: Tensors) -> None:
    """Fills one layer of theirs from one of ours, or from several side by side. A missing bias is zero."""
    weights = [tensors[f"{part}.weight"] for part in parts]
    theirs.weight = _numbers(torch.cat(weights))
    pairs = zip(parts, weights, strict=True)
    theirs.bias = _numbers(torch.cat([tensors.get(f"{part}.bias", torch.zeros(len(weight))) for part, weight in pairs]))


def _norm(theirs: Any, name: str, tensors: Tensors) -> None:
    theirs.gamma, theirs.beta = _numbers(tensors[f"{name}.weight"]), _numbers(tensors[f"{name}.bias"])


def _numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().contiguous().numpy()


def _names(tokenizer: Tokenizer) -> list[str]:
    """The tokens by id. Where two have the same text, the later one has its id appended."""
    names = tokenizer.names(range(tokenizer.size))
    counts: Counter[str] = Counter()
    unique = []
    for id, name in enumerate(names):
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name}#{id}")
    return unique
