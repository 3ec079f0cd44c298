"""llama2.c files: a model of the Llama family as float32 numbers after a header of seven integers, and its tokenizer.

The file holds nothing else that tells what it is, so its length must match the header exactly. Its rotary pairs are
interleaved.
"""

import json
import struct
from pathlib import Path

import numpy as np
import torch

from regard.data.published import Published
from regard.interop.families.base import Tensors
from regard.interop.huggingface import check_numbers, complete
from regard.interop.vocabularies import SPACE, Pieces, from_pieces, prepend
from regard.models.config import ModelConfig

HEADER = struct.Struct("<7i")
MOST = 2**24  # the largest size that a header may give
OTHERS = {b"ak42": "a later version of llama2.c"}
PICKLES = {b"PK\x03\x04": "a PyTorch checkpoint, which holds a pickle", b"\x80": "a pickle"}


def read(path: str | Path) -> tuple[ModelConfig, Tensors, int]:
    """The model of a .bin file, and the number of tokens it was trained to read."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    for start, name in OTHERS.items():
        if data.startswith(start) or data[:4] == start[::-1]:
            raise ValueError(f"{path} is {name}, not a model of llama2.c (version 0): it is not read")
    for start, name in PICKLES.items():
        if data.startswith(start):
            raise ValueError(
                f"{path} is {name}: it can run code when it is opened, and is not read; save its tensors by "
                "safetensors.torch.save_file, and import that file"
            )
    if len(data) < HEADER.size:
        raise ValueError(f"{path} is not a model of llama2.c: it has no header")
    E, inner, layers, H, G, V, length = HEADER.unpack_from(data)
    tied, V = V > 0, abs(V)
    sizes = {"width": E, "inner": inner, "layers": layers, "heads": H, "kv_heads": G, "vocabulary": V, "length": length}
    fits = all(0 < size < MOST for size in sizes.values()) and E % H == 0 and H % G == 0 and E // H % 2 == 0
    if not fits:
        raise ValueError(f"{path} is not a model of llama2.c: its header gives {sizes}")
    D = E // H
    N = "decoder.blocks.{}."
    # in the order of the file; the unnamed part is a table that older versions read
    parts = [
        ("decoder.embedding.weight", 1, (V, E)),
        (N + "norms.0.weight", layers, (E,)),
        (N + "attention.project.q.weight", layers, (H * D, E)),
        (N + "attention.project.k.weight", layers, (G * D, E)),
        (N + "attention.project.v.weight", layers, (G * D, E)),
        (N + "attention.output.weight", layers, (E, H * D)),
        (N + "norms.1.weight", layers, (E,)),
        (N + "feedforward.gate.weight", layers, (inner, E)),
        (N + "feedforward.outer.weight", layers, (E, inner)),
        (N + "feedforward.inner.weight", layers, (inner, E)),
        ("decoder.norm.weight", 1, (E,)),
        ("", 2, (length, D // 2)),
        *([] if tied else [("output.weight", 1, (V, E))]),
    ]
    expected = HEADER.size + 4 * sum(times * int(np.prod(shape)) for _, times, shape in parts)
    if len(data) != expected:
        raise ValueError(f"{path} is not a model of llama2.c: it has {len(data):,} bytes, its sizes give {expected:,}")
    tensors: Tensors = {}
    at = HEADER.size
    for name, times, shape in parts:
        for n in range(times):
            count = int(np.prod(shape))
            if name:
                numbers = np.frombuffer(data, "<f4", count, at).reshape(shape)
                tensors[name.format(n)] = torch.from_numpy(numbers.astype(np.float32))
                check_numbers(tensors[name.format(n)], f"{name.format(n)!r} in {path}")
            at += 4 * count
    config = ModelConfig(
        kind="decoder",
        vocabulary=V,
        width=E,
        heads=H,
        kv_heads=G,
        inner=inner,
        layers=layers,
        position="rotary(layout='interleaved')",
        norm="pre",
        norm_kind="rms",
        feedforward="dense(activation='silu', gated=True, bias=False)",
        scaled_embedding=False,
        dropout=0.0,
        tied=tied,
    )
    return config, complete(config, tensors), length


def read_tokenizer(path: str | Path, size: int) -> Published:
    """The tokenizer of a tok.bin file: for each token a score and its text. A text begins and ends with token 1."""
    path = Path(path)
    try:
        data = path.read_bytes()
        names, scores, at = [], [], 4
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            if length < 0 or at + 8 + length > len(data):
                raise ValueError("a token goes over the end")
            names.append(data[at + 8 : at + 8 + length].decode())
            scores.append(score)
            at += 8 + length
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a tokenizer of llama2.c: {error}") from error
    if len(names) != size:
        raise ValueError(f"{path} has {len(names)} tokens and the model {size}: they do not belong together")
    # unknown, beginning and end come first, then one token per byte
    kinds = [2, 3, 3] + [6 if name.startswith("<0x") and len(name) == 6 else 1 for name in names[3:]]
    spaced = [name.strip("\n") for name in names[:3]] + [name.replace(" ", SPACE) for name in names[3:]]
    pieces = Pieces(spaced, scores, kinds, True, 6 in kinds, b"", prefix=True, squeezes=False)
    content = json.loads(prepend(from_pieces(pieces), "<s>").to_str())
    return Published(content, {"unk": 0, "bos": 1, "eos": 1}, size)
