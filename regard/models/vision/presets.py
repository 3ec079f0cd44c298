"""Sizes of image models as they were published, by the names of presets."""

from typing import Any


def _sizes(width: int, heads: int, inner: int, layers: int, **more: Any) -> dict[str, Any]:
    return {"width": width, "heads": heads, "inner": inner, "layers": layers, **more}


# Compact Transformers (arXiv 2104.05704): no biases in front of queries, keys and values
_COMPACT = {"bias": "output", "norm_epsilon": 1e-5}
_CCT = _COMPACT | {"stem": "convolution", "pooling": "sequence"}
VIT = {
    # learns in minutes on a CPU
    "vit-nano": _sizes(64, 4, 128, 4, patch=4, pooling="mean"),
    "vit-tiny": _sizes(192, 3, 768, 12, patch=16),
    "vit-tiny-4": _sizes(192, 3, 768, 12, patch=4),
    "vit-small": _sizes(384, 6, 1536, 12, patch=16),
    "vit-base": _sizes(768, 12, 3072, 12, patch=16),
    "vit-base-32": _sizes(768, 12, 3072, 12, patch=32),
    "vit-large": _sizes(1024, 16, 4096, 24, patch=16, dropout=0.1),
    "vit-huge": _sizes(1280, 16, 5120, 32, patch=14, dropout=0.1),
    "vit-lite": _COMPACT | _sizes(256, 4, 512, 6, patch=4),
    "cvt": _COMPACT | _sizes(256, 4, 512, 6, patch=4, pooling="sequence"),
    "cct-2": _CCT | _sizes(128, 2, 128, 2, stem_layers=2),
    "cct-6": _CCT | _sizes(256, 4, 512, 6, position="sinusoidal"),
    "cct-7": _CCT | _sizes(256, 4, 512, 7),
}
# CoCa (arXiv 2205.01917): the paper's are for pictures of 288 x 288
COCA = {
    # pictures of about 64 x 64
    "coca-small": _sizes(256, 8, 1024, 6, patch=8, text_layers=3, decoder_layers=3, queries=32, dropout=0.2),
    # learns in minutes on a CPU
    "coca-nano": _sizes(96, 4, 192, 3, patch=8, text_layers=1, decoder_layers=2, queries=16),
    "coca-base": _sizes(768, 12, 3072, 12, patch=18, text_layers=12, decoder_layers=12, queries=256),
    "coca-large": _sizes(1024, 16, 4096, 24, patch=18, text_layers=12, decoder_layers=12, queries=256),
    "coca-giant": _sizes(1408, 16, 6144, 40, patch=18, text_layers=18, decoder_layers=18, queries=256),
}


def _swin(width: int, heads: tuple[int, ...], layers: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"width": width, "heads": heads, "inner": 4 * width, "layers": layers, **more}


SWIN = {
    # for images of about 32 x 32 pixels
    "swin-nano": _swin(32, (2, 4, 8), (2, 2, 2), patch=2, window=4),
    "swin-tiny": _swin(96, (3, 6, 12, 24), (2, 2, 6, 2)),
    "swin-small": _swin(96, (3, 6, 12, 24), (2, 2, 18, 2)),
    "swin-base": _swin(128, (4, 8, 16, 32), (2, 2, 18, 2)),
    "swin-large": _swin(192, (6, 12, 24, 48), (2, 2, 18, 2)),
}


def _coatnet(stem: int, width: int, layers: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"stem_width": stem, "width": width, "inner": 4 * width, "layers": layers, **more}


COATNET = {
    # for images of about 32 x 32 pixels
    "coatnet-nano": _coatnet(24, 32, (1, 2, 2), convolutions=1, head_width=16),
    "coatnet-0": _coatnet(64, 96, (2, 3, 5, 2)),
    "coatnet-1": _coatnet(64, 96, (2, 6, 14, 2)),
    "coatnet-2": _coatnet(128, 128, (2, 6, 14, 2)),
    "coatnet-3": _coatnet(192, 192, (2, 6, 14, 2)),
    "coatnet-4": _coatnet(192, 192, (2, 12, 28, 2)),
}
# as large as vit-lite
IMAGE_PERCEIVER = {"perceiver": _sizes(256, 4, 512, 5, latents=32, patch=4)}
IMAGE_TOKENLEARNER = {"tokenlearner": _sizes(256, 4, 512, 6, tokens=8, patch=4)}
CONVNET = {"convnet": {"width": 64, "layers": (2, 2, 2)}, "resnet-20": {"width": 16, "layers": (3, 3, 3)}}
