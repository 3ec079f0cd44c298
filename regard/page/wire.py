"""Replies as bytes: a JSON header, then plain arrays, each aligned to 8 bytes so that the page reads them in place.

u32 length of the header | header, padded with spaces | array | array | ...
"""

import json
import struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

DTYPES = {"float32": "<f4", "int32": "<i4", "uint8": "u1", "int8": "i1"}


class Reply(NamedTuple):
    """The answer to a question."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray] = {}

    @property
    def size(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + 4096


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A tensor as float32 on the host."""
    return tensor.detach().to(torch.float32).cpu().numpy()


def encode(reply: Reply, *, by_planes: bool = False) -> bytes:
    """`by_planes`: of an array of 32-bit numbers the first bytes of all numbers stand before the second ones, and so
    on. Exponents are much alike, and compress well where they stand together."""
    places, body = [], []
    for name, array in reply.arrays.items():
        places.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape)})
        raw = np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name]).tobytes()
        if by_planes and array.itemsize == 4:
            raw = np.frombuffer(raw, np.uint8).reshape(-1, 4).T.tobytes()
        body.append(raw + bytes(-len(raw) % 8))
    header = json.dumps({"meta": reply.meta, "arrays": places}, ensure_ascii=False, allow_nan=False).encode()
    header += b" " * (-(len(header) + 4) % 8)
    return b"".join([struct.pack("<I", len(header)), header, *body])


def decode(raw: bytes) -> Reply:
    """The inverse of `encode`, for tests and for clients in Python."""
    (length,) = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + length])
    at, arrays = 4 + length, {}
    for place in header["arrays"]:
        dtype = np.dtype(DTYPES[place["dtype"]])
        count = int(np.prod(place["shape"]))
        arrays[place["name"]] = np.frombuffer(raw, dtype, count, at).reshape(place["shape"])
        at += count * dtype.itemsize + -(count * dtype.itemsize) % 8
    return Reply(header["meta"], arrays)
