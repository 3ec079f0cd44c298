"""GGUF files of llama.cpp: the settings, the tokenizer and the tensors of a model in one file, read and dequantised by
the package gguf.

A file says which architecture it holds. Those of the Llama kind become a family of ours; a setting that would change
what is computed, and that ours do not have, is refused by its name. Rotary pairs of architecture `llama` are
interleaved in these files, and stay so.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from regard.core.shape import Shape
from regard.data.published import Published
from regard.interop.families.base import Family, Values
from regard.interop.families.llama import LLAMA, QWEN2, STRETCH
from regard.interop.huggingface import Model, assemble
from regard.interop.vocabularies import Pieces, from_pieces, prepend
from regard.spec import POSITIONS, parse

MAGIC = b"GGUF"
MOST_PARTS = 2**22  # numbers and strings of the metadata; 128,000 tokens with their merges are a million


class Architecture(NamedTuple):
    """An architecture of llama.cpp: the family that computes the same, and how its rotary pairs lie."""

    family: Family
    layout: str


ARCHITECTURES = {"llama": Architecture(LLAMA, "interleaved"), "qwen2": Architecture(QWEN2, "halves")}
# their names of tensors, and those of the families
TENSORS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
STRETCHED = "rope_freqs.weight"  # how much slower each rotary pair turns, as in Llama 3.1
# settings of an architecture that are read, or that do not change what is computed
READ = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.original_context_length",
)
# settings that may have these values only
NEUTRAL = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.finetuned": (False,),
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
}
# pre-tokenizers by their names in the files; None: that of GPT-2
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = {
    "gpt-2": None,
    "smollm": None,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "llama-bpe": LLAMA3_WORDS,
    "qwen2": LLAMA3_WORDS.replace("{1,3}", ""),
}
SINGLE_DIGITS = ("smollm",)
WHOLE_FIRST = ("llama3", "llama-v3", "llama-bpe")  # a word that is a token is not built from merges
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of token, as in SentencePiece
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}  # ours, theirs


class _Reader(gguf.GGUFReader):
    """The package's reader, which takes what lies behind the end of a file for empty and reads on for as long as the
    file asks for. This one stops."""

    parts = 0

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        self.parts += 1
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it needs {end:,} bytes and has {len(self.data):,}; was it copied or downloaded whole?")
        if self.parts > MOST_PARTS:
            raise ValueError(f"its metadata has more than {MOST_PARTS:,} parts")
        return super()._get(int(offset), dtype, int(count), override_order)


class GGUFFile:
    """The settings of a file, and its tensors by the names of Hugging Face. Each is dequantised on demand."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                start = file.read(len(MAGIC))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        if start != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it begins with {start!r}, expected {MAGIC!r}")
        try:
            self.reader = _Reader(path)
            self.values = {name: field.contents() for name, field in self.reader.fields.items()}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{path} cannot be read as GGUF (version 2 or 3): {reason}") from error
        if self.reader.endianess != gguf.GGUFEndian.LITTLE:
            raise ValueError(
                f"{path} is big-endian, expected little-endian: convert it with gguf-convert-endian of the package gguf"
            )
        if self.values.get("split.count", 1) != 1:
            raise ValueError(
                f"{path} is one of {self.values['split.count']} files that the model was split into: join them with "
                "llama-gguf-split --merge"
            )
        self.architecture: str = self.value("general.architecture", str)
        tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.stretched = tensors.pop(STRETCHED, None)
        self.files = {_theirs(name): tensor for name, tensor in tensors.items()}

    def value(self, name: str, kind: type, default: Any = None) -> Any:
        """A setting; ARCH stands for the name of the architecture. Refuses one of another type than `kind`, and a
        missing one without a default."""
        name = name if not name.startswith("ARCH.") else f"{self.architecture}.{name.removeprefix('ARCH.')}"
        value = self.values.get(name, default)
        if value is None:
            raise ValueError(f"{self.path} does not give {name}")
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            # 32 bits in the file: the shortest number that has them is the one that was meant
            return float(str(np.float32(value)))
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 0)):
            words = {str: "a text", int: "a number from 0", float: "a number", bool: "true or false", list: "a list"}
            raise ValueError(f"{self.path} gives {name} as {value!r:.60}, expected {words[kind]}")
        return value

    def listed(self, name: str, kind: type, count: int | None = None, default: Any = None) -> list[Any]:
        """A setting that is a list, of `count` values of one type."""
        values = self.value(name, list, default)
        if not all(isinstance(value, kind) for value in values) or count not in (None, len(values)):
            expected = f"{kind.__name__} values" if count is None else f"{count} {kind.__name__} values, one per token"
            raise ValueError(f"{self.path}: {name} must be a list of {expected}, got {values!r:.60}")
        return values

    def __getitem__(self, name: str) -> Tensor:
        return self.dequantise(self.files[name])

    def dequantise(self, tensor: gguf.ReaderTensor) -> Tensor:
        try:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{tensor.name!r} in {self.path} is of type {tensor.tensor_type.name}, which the package gguf does not "
                "dequantise"
            ) from error
        return torch.from_numpy(np.array(numbers, dtype=np.float32))


def _theirs(name: str) -> str:
    """The name of a tensor as the families have it; others stay."""
    place, _, kind = name.rpartition(".")
    if place in TENSORS:
        return f"{TENSORS[place]}.{kind}"
    block, _, layer = place.rpartition(".")
    if block.startswith("blk.") and layer in LAYER_TENSORS:
        return f"layers.{block.removeprefix('blk.')}.{LAYER_TENSORS[layer]}.{kind}"
    return name


def read(path: str | Path) -> tuple[Model, Published]:
    """The model of a file, and its tokenizer."""
    file = GGUFFile(Path(path))
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"{path} holds a model of architecture {file.architecture!r}, which is not known here: {known}"
        )
    family, layout = ARCHITECTURES[file.architecture]
    values = _settings(file)
    model = assemble(family, values, file)
    rotary = parse(model.config.position)
    position = str(dataclasses.replace(rotary, options=(*rotary.options, ("layout", layout))))
    kinds = Counter(tensor.tensor_type.name for tensor in file.files.values())
    stored = ", ".join(f"{count} as {kind}" for kind, count in kinds.most_common())
    notes = [*model.notes, f"tensors are stored {stored}; here they are float32"]
    if "tokenizer.chat_template" in file.values:
        notes.append("its chat template is not used: a prompt is plain text")
    model = model._replace(config=dataclasses.replace(model.config, position=position), notes=notes)
    return model, read_tokenizer(file, model.config.vocabulary)


def _settings(file: GGUFFile) -> Values:
    """The settings as a config.json has them."""
    own = [name for name in file.values if name.startswith(f"{file.architecture}.")]
    for name in own:
        short, value = name.removeprefix(f"{file.architecture}."), file.values[name]
        if short not in READ and value not in NEUTRAL.get(short, ()):
            raise ValueError(
                f"{file.path} has the setting {name} = {value!r:.60}, which is not known here: the model may compute "
                "something else, and is not imported"
            )
    heads, width = file.value("ARCH.attention.head_count", int), file.value("ARCH.embedding_length", int)
    D = file.value("ARCH.attention.key_length", int, width // max(heads, 1))
    for name in ("ARCH.attention.value_length", "ARCH.rope.dimension_count"):
        if file.value(name, int, D) != D:
            name = name.replace("ARCH", file.architecture)
            raise ValueError(f"{file.path}: {name} is {file.values[name]}, and a head has {D} channels: not known here")
    if "embed_tokens.weight" not in file.files:
        raise ValueError(f"{file.path} has no token_embd.weight: it holds no model")
    base = file.value("ARCH.rope.freq_base", float, 10000.0)
    return {
        "vocab_size": int(file.files["embed_tokens.weight"].shape[-1]),
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": file.value("ARCH.attention.head_count_kv", int, heads),
        "head_dim": D,
        "num_hidden_layers": file.value("ARCH.block_count", int),
        "intermediate_size": file.value("ARCH.feed_forward_length", int),
        "rms_norm_eps": file.value("ARCH.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": {"rope_theta": base} | _stretch(file, base, D),
        "max_position_embeddings": file.value("ARCH.context_length", int),
        "attention_bias": "layers.0.self_attn.o_proj.bias" in file.files,
        "mlp_bias": "layers.0.mlp.up_proj.bias" in file.files,
    }


def _stretch(file: GGUFFile, base: float, D: int) -> Values:
    """The settings of rotary pairs that turn slower, as in Llama 3.1. The file has the factors and not the settings:
    those of Llama are taken if they give these factors."""
    if file.stretched is None:
        return {}
    factors = file.dequantise(file.stretched).double().flatten()
    length = file.value("ARCH.rope.scaling.original_context_length", int, 8192)
    stretch = (float(factors.max()) if len(factors) else 1.0, 1.0, 4.0, float(length))
    shape = Shape.of(width=D, heads=1, role="causal")
    rates = [POSITIONS.build(f"rotary(base={base}{more})", shape).rates for more in ("", f", stretch={stretch}")]
    expected = (rates[0] / rates[1]).double()
    if expected.shape != factors.shape or not torch.allclose(expected, factors, rtol=1e-4):
        raise ValueError(
            f"{file.path}: {STRETCHED} has other factors than the rotary positions of Llama 3.1: not known"
        )
    return {"rope_type": "llama3"} | dict(zip(STRETCH, stretch, strict=True))


def read_tokenizer(file: GGUFFile, size: int) -> Published:
    """The tokenizer of a file: byte pairs of GPT-2's kind, or SentencePiece's."""
    kind = file.value("tokenizer.ggml.model", str)
    makers = {"gpt2": _byte_pairs, "llama": _pieces}
    if kind not in makers:
        raise ValueError(f"{file.path} has a tokenizer of kind {kind!r}, which is not known here: {', '.join(makers)}")
    names = file.listed("tokenizer.ggml.tokens", str)
    if len(set(names)) != len(names):
        double = Counter(names).most_common(1)[0][0]
        raise ValueError(f"{file.path}: the tokenizer has the token {double!r:.60} twice")
    kinds = file.listed("tokenizer.ggml.token_type", int, len(names), [NORMAL] * len(names))
    special: dict[str, int | None] = {}
    for ours, theirs in SPECIAL.items():
        id = file.values.get(f"tokenizer.ggml.{theirs}_token_id")
        special[ours] = None if id is None else file.value(f"tokenizer.ggml.{theirs}_token_id", int)
        if id is not None and special[ours] not in range(len(names)):
            raise ValueError(f"{file.path}: the {theirs} token has the id {id}, and there are {len(names)} tokens")
    try:
        library, begins = makers[kind](file, names, kinds)
        # a control token is never made from text; one that the user defined is found in it first
        library.add_special_tokens(
            [
                AddedToken(name, special=True, normalized=False)
                for name, kind in zip(names, kinds, strict=True)
                if kind == CONTROL
            ]
        )
        library.add_tokens(
            [
                AddedToken(name, normalized=False)
                for name, kind in zip(names, kinds, strict=True)
                if kind == USER_DEFINED
            ]
        )
        if special["bos"] is not None and file.value("tokenizer.ggml.add_bos_token", bool, begins):
            prepend(library, names[special["bos"]])
    except ValueError:
        raise
    except Exception as error:
        # the library raises plain Exception
        raise ValueError(f"{file.path}: the tokenizer is damaged: {error}") from error
    return Published(json.loads(library.to_str()), special, size)


def _byte_pairs(file: GGUFFile, names: Sequence[str], kinds: Sequence[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte pairs of GPT-2's kind, and whether a text begins with a special token unless the file says otherwise."""
    words = file.value("tokenizer.ggml.pre", str)
    if words not in WORDS:
        raise ValueError(
            f"{file.path} splits text into words by {words!r}, which is not known here; known: {', '.join(WORDS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in file.listed("tokenizer.ggml.merges", str)]
    if not all(len(merge) == 2 for merge in merges):
        raise ValueError(f"{file.path}: tokenizer.ggml.merges must hold two tokens each")
    vocabulary = {name: id for id, name in enumerate(names)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=words in WHOLE_FIRST))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words in SINGLE_DIGITS else []
    pattern = WORDS[words]
    if pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    return library, words in WHOLE_FIRST


def _pieces(file: GGUFFile, names: Sequence[str], kinds: Sequence[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte pairs of SentencePiece, whose texts begin with a special token unless the file says otherwise."""
    scores = file.listed("tokenizer.ggml.scores", float, len(names))
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    squeezes = file.value("tokenizer.ggml.remove_extra_whitespaces", bool, False)
    pieces = Pieces(list(names), scores, list(kinds), True, BYTE in kinds, b"", prefix, squeezes)
    return from_pieces(pieces), True
